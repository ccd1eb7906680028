"""State dicts of an optimizer: its own, other libraries', and weights in full precision."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from . import components, full_precision, parameters, shards, transfer
from .groups import ParameterGroups
from .options import strategy_for
from .state_dict import (
    Expected,
    check_state_dict,
    restore_components,
    unpack_words,
    with_later_options,
)


class SavedGroups(ParameterGroups):
    """Groups of parameters that are saved and loaded, converted from and to others."""

    def state_dict(self) -> dict[str, Any]:
        """As in torch.optim, with every component in its own dtype.

        Extra bits, packed in memory, are integers of the shape of their parameter here, so that
        they can be loaded into another memory layout, and by other ranks.
        """

        self.check_groups()
        if self.fused is not None:
            self.fused.check_saved()
        for group in self.param_groups:
            for p in group["params"]:
                strategy = strategy_for(group["precision"], p.dtype)
                if strategy.words_name and self.state.get(p):
                    # The words follow the parameter's layout, in which they are unpacked.
                    self._held(strategy, p)

        # Before the user's hooks, which may give the dict any form.
        def convert(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
            unpack_words(self.param_groups, state_dict)

        handle = self.register_state_dict_post_hook(convert, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of the same strategy; every component keeps its own dtype.

        ``torch.optim.Optimizer`` casts floating-point state to the parameter's dtype, which would
        round master weights and FP32 moments; here they come back as they were saved.

        Raises:
            ValueError: Another optimizer saved it, or its groups, precision or a tensor's shape or
                dtype do not fit; nothing was changed. :meth:`import_state_dict` converts it.
        """
        self._load(state_dict, convert=False)

    def import_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of another precision or library, with moments and step counts kept.

        Of ``AdamW``, ``Adam`` and ``SGD`` of torch.optim, torchao, bitsandbytes and torch-optimi,
        and of subulp's in any precision. Moments are rounded to nearest to what the groups'
        precisions hold. What is kept beside a parameter is carried over to where it still has the
        value that was saved: load the model first. ``precision`` and ``arithmetic`` stay this
        optimizer's, and so do, of another library, ``nonfinite`` and ``seed``.

        Args:
            state_dict: What the other optimizer's ``state_dict()`` gave.

        Raises:
            ValueError: Another algorithm saved it, an option has no counterpart (AMSGrad, another
                kind of weight decay), or its groups or a tensor's shape do not fit; nothing was
                changed.
        """
        self.check_bare()
        self._load(state_dict, convert=True)

    def export_state_dict(self) -> dict[str, Any]:
        """A state dict for the class of the same name in ``torch.optim``.

        Moments in FP32, rebuilt from all components; torch rounds them to the parameter's dtype.
        Weights are not part of it: see :meth:`full_precision_state_dict`.
        """
        self.check_groups()
        return transfer.exported(self.param_groups, self.state, self._expected())

    def _expected(self) -> Expected:
        return Expected(
            type(self).__name__,
            self._options(),
            self._check_all_options,
            self._states,
            self._states_of,
            self._states_join,
            self._decoupled,
        )

    def _load(self, state_dict: dict[str, Any], *, convert: bool) -> None:
        final: dict[str, Any] = {}
        values: transfer.Values = []
        expected = self._expected()

        def check(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            state_dict = with_later_options(state_dict)
            if convert:
                state_dict, found = transfer.converted(expected, self.param_groups, state_dict)
                values.extend(found)
            check_state_dict(expected, self.param_groups, state_dict)
            final.update(state_dict)
            return state_dict

        @torch.inference_mode(False)
        @torch.no_grad()
        def restore(_: torch.optim.Optimizer) -> None:
            restore_components(self.param_groups, self.state, final)
            for p, value in values:
                shards.local(p).detach().copy_(value)
            torch.autograd.graph.increment_version([p for p, _ in values])
            self._stored = [group["precision"] for group in self.param_groups]
            self._note_orders()
            if self.fused is not None:
                self.fused.loaded()

        # The check comes after the user's pre-hooks, which may change the dict; the components are
        # restored before the user's post-hooks.
        before = self.register_load_state_dict_pre_hook(check)
        after = self.register_load_state_dict_post_hook(restore, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def full_precision_state_dict(self, model: nn.Module) -> OrderedDict[str, Tensor]:
        """The model's state dict with FP32 weights rebuilt from all components.

        Args:
            model: Some or all of its parameters are this optimizer's; others are cast to FP32.

        Returns:
            Names as in ``model.state_dict()``; floating-point parameters in FP32, buffers as they
            are. The tensors are copies.
        """
        self.check_groups()
        places = parameters.places(self.param_groups)

        def value(p: Tensor) -> Tensor:
            return self._wide_value(self.param_groups[places[id(p)].group], p)

        return full_precision.state_dict(model, places, value)

    def load_full_precision_state_dict(
        self, model: nn.Module, state_dict: Mapping[str, Tensor]
    ) -> None:
        """Load wide weights into a narrow model, filling all components of its parameters.

        Moments and step counters are kept. What the components can hold comes back unchanged from
        :meth:`full_precision_state_dict`.

        Args:
            model: Some or all of its parameters are this optimizer's; others are rounded to
                nearest.
            state_dict: Names as in ``model.state_dict()``, values of any float dtype.

        Raises:
            ValueError: Names or shapes differ, or a value is no tensor of real numbers; nothing was
                changed.
        """
        self.check_groups()
        places = parameters.places(self.param_groups)

        def store(p: Tensor, wide: Tensor) -> None:
            place = places[id(p)]
            group = self.param_groups[place.group]
            strategy = strategy_for(group["precision"], p.dtype)
            components.store_wide(
                strategy,
                shards.local(p),
                self._state_of(group, strategy, p),
                shards.placed_like(p, wide),
                seed=group["seed"],
                stream=place.stream,
                region=shards.region_of(p),
            )
            torch.autograd.graph.increment_version((p,))

        full_precision.load_state_dict(model, state_dict, places, store)
