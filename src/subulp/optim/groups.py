"""The parameters of an optimizer by groups: their options, and what is kept beside them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from ..numerics import random_bits
from ..ops import capture
from ..ops.strategy import Strategy
from . import choices, components, options, parameters, shards
from .changes import Known
from .components import States, follow_layout, new_state, storage_view
from .observers import FusedStep, StepObserver
from .options import Precision, parse_precision, strategy_for
from .parameters import Params
from .torch_optimizer import TorchOptimizer


class ParameterGroups(TorchOptimizer):
    """Groups of parameters that are stored in components.

    Attributes:
        fused: The handle that steps the parameters in the backward pass instead of ``step()``, or
            ``None``; neither pickled nor copied.
        observers: Called at every step; neither pickled nor copied.
    """

    fused: FusedStep | None = None
    observers: tuple[StepObserver, ...] = ()
    #: State tensors of the size of the parameter.
    _states: ClassVar[States]
    #: They may be missing until a step has a use for them.
    _states_join: ClassVar[bool] = False
    #: Weight decay is apart from the gradient.
    _decoupled: ClassVar[bool] = False
    #: Options of torch.optim's that have no counterpart here, and their defaults.
    _torch_options: ClassVar[Mapping[str, object]] = {}

    def __init__(self, params: Params, defaults: dict[str, Any]) -> None:
        defaults["precision"] = choices.parse_choice(defaults["precision"])
        # Ranks that round alike must draw alike: their own seeds count until one draws.
        self._seed_is_agreed = defaults["seed"] is not None
        if defaults["seed"] is None:
            defaults["seed"] = random_bits.fold_seed(torch.initial_seed())
        self._check_all_options(defaults)
        defaults["skipped_steps"] = 0
        # The precision that each group's components are stored in.
        self._stored: list[str] = []
        # States that the step being prepared has created: a parameter and a state's name.
        self._created: list[tuple[Tensor, str]] = []
        self._graphs = capture.Held()
        self._regions = shards.Regions()
        self._known = Known()
        # Strides that packed words lie in, where these are not row-major.
        self._orders: dict[Tensor, tuple[int, ...]] = {}
        super().__init__(cast(Any, params), defaults)

    # ------------------------------------------------------------------------------ groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; it may have options of its own, ``precision`` included.

        If that chooses by name or function, a group for each precision is added.

        Raises:
            ValueError: An option is out of range, or a parameter cannot have the group's precision:
                its dtype, layout, or a complex or sparse value; or a DTensor is not reduced, or
                placed in an unknown way.
            TypeError: A parameter wraps others, and is no DTensor.
            RuntimeError: The step is fused into the backward pass.
        """
        if self.fused is not None:
            raise RuntimeError(
                "add_param_group while the step is fused into the backward pass: remove the "
                "handle, add the group, and fuse again"
            )
        if not isinstance(param_group, dict) or "params" not in param_group:
            # torch's own error.
            super().add_param_group(param_group)
        choice = choices.parse_choice(param_group.get("precision", self.defaults["precision"]))
        if param_group.get("seed", 0) is None:
            param_group["seed"] = self.defaults["seed"]
        if isinstance(choice, str):
            param_group["precision"] = choice
            self._add_group(param_group)
            return
        parts, count = choices.split(param_group, choice), len(self.param_groups)
        try:
            for part in parts:
                self._add_group(part)
        except Exception:
            del self.param_groups[count:], self._stored[count:]
            self._known.keep(count)
            raise

    def _add_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            parameters.check_names(self.param_groups)
            self._check_group(group)
        except Exception:
            self.param_groups.pop()
            raise
        self._stored.append(group["precision"])
        self._known.add(group)
        # Those before it have been looked at.
        self._agree_on_seed([group])

    def _agree_on_seed(self, groups: Sequence[dict[str, Any]]) -> None:
        """Take rank 0's default seed, once random bits of some groups are to be drawn from it."""
        if self._seed_is_agreed or not any(map(options.is_random, groups)):
            return
        before = self.defaults["seed"]
        self.defaults["seed"] = agreed = shards.agreed_seed(before)
        for group in self.param_groups:
            # A group's own seed is the user's.
            if group["seed"] == before:
                group["seed"] = agreed
        self._seed_is_agreed = True

    def check_groups(self) -> None:
        """Check all options as they are now, and store components in a precision set meanwhile.

        Raises:
            ValueError: An option is out of range, or a group's new precision cannot hold what is
                stored; nothing was changed.
            RuntimeError: Parameters have been converted, moved or exchanged meanwhile.
        """
        if len(self.param_groups) != len(self._stored):
            raise RuntimeError(
                f"the optimizer has {len(self.param_groups)} groups, and {len(self._stored)} were "
                "added: param_groups was changed by hand; nothing was updated. Add groups with "
                "add_param_group, and freeze what is to stay with requires_grad_(False)"
            )
        self._known.check(self.param_groups, self.state)
        self._check_options_of_groups()
        precisions = [group["precision"] for group in self.param_groups]
        if precisions != self._stored:
            self._convert(lossy=False)

    def _check_options_of_groups(self) -> None:
        options = self._options()
        for i, group in enumerate(self.param_groups):
            if not options <= group.keys():
                raise ValueError(
                    f"group {i} has no {sorted(options - group.keys())}: what add_param_group had "
                    "put there was removed by hand; nothing was updated. Set it again"
                )
            group["precision"] = parse_precision(group["precision"])
            self._check_all_options(group)

    def check_bare(self) -> None:
        """Raise ValueError if this is a framework's wrapper that passes for one of our optimizers.

        Lightning's and Fabric's become subclasses of what they wrap: what is set on them reaches
        nobody.
        """
        if isinstance(vars(self).get("_optimizer"), torch.optim.Optimizer):
            raise ValueError(
                f"the optimizer is a {type(self).__name__}, a wrapper around the one that steps: "
                "pass what is inside, its attribute .optimizer"
            )

    @torch.no_grad()
    def change_precision(self, precision: Precision, group: int | None = None) -> None:
        """Store parameters in another precision, with moments and step counts kept.

        What a narrower precision cannot hold is rounded to nearest. Setting a group's
        ``"precision"`` does the same at the next step, where nothing is lost.

        Args:
            precision: See :class:`AdamW`; a name, or one for each dtype.
            group: Number of the group to change (default: ``None``, all).

        Raises:
            ValueError: A parameter cannot have it, or there is no such group; nothing was changed.
        """
        self.check_bare()
        self.check_groups()
        count = len(self.param_groups)
        if group is not None and not 0 <= group < count:
            raise ValueError(f"group={group} is out of range: there are {count}, from 0")
        chosen = self.param_groups if group is None else [self.param_groups[group]]
        before = [each["precision"] for each in self.param_groups]
        name = parse_precision(precision)
        for each in chosen:
            each["precision"] = name
        try:
            self._check_options_of_groups()
            # Before ranks draw the bits that round extra bits.
            self._agree_on_seed(self.param_groups)
            self._convert(lossy=True)
        except Exception:
            for each, old in zip(self.param_groups, before, strict=True):
                each["precision"] = old
            raise

    # What is made here outlives an evaluation's inference mode, and is stepped after it.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _convert(self, *, lossy: bool) -> None:
        conversions = []
        places = parameters.places(self.param_groups)
        for i, (group, before) in enumerate(zip(self.param_groups, self._stored, strict=True)):
            parameters.check_parameters(group)
            for p in group["params"]:
                old, new = (strategy_for(name, p.dtype) for name in (before, group["precision"]))
                if not self.state.get(p) or old == new:
                    continue
                if capture.is_under_way(p.device):
                    raise capture.not_ready("the precision of a group was changed")
                held = self._held(old, p)
                value, state, exact = components.converted(
                    old,
                    new,
                    shards.local(p),
                    held,
                    self._states,
                    seed=group["seed"],
                    stream=places[id(p)].stream,
                    region=shards.region_of(p),
                )
                if not (exact or lossy):
                    raise ValueError(
                        f"group {i}: precision was changed from {before!r} to "
                        f"{group['precision']!r}, which cannot hold all that is stored; nothing "
                        "was changed. Set it back, or round to what it can hold with "
                        f"optimizer.change_precision({group['precision']!r}, group={i})"
                    )
                conversions.append((p, value, state))
        for p, value, state in conversions:
            shards.local(p).detach().copy_(value)
            torch.autograd.graph.increment_version((p,))
            self.state[p] = components.shown(p, state)
        self._stored = [group["precision"] for group in self.param_groups]
        self._note_orders()
        self._agree_on_seed(self.param_groups)

    def _check_group(self, group: dict[str, Any]) -> None:
        self._check_all_options(group)
        parameters.check_parameters(group)

    def _check_all_options(self, group: dict[str, Any]) -> None:
        self._check_options(group)
        options.check_shared(group)
        own = {name: group[name] for name in self._torch_options if name in group}
        options.check_torch_options(type(self).__name__, self._torch_options, own)

    def _check_options(self, options: dict[str, Any]) -> None:
        raise NotImplementedError

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._created = []
        self._graphs = capture.Held()
        # Older ones have no such option.
        self.defaults.setdefault("capturable", False)
        self._regions = shards.Regions()
        self._seed_is_agreed = True
        self._known = Known(self.param_groups)
        self._orders = state.get("_orders", {})
        self._stored = state.get("_stored", [group["precision"] for group in self.param_groups])
        for group in self.param_groups:
            for key in self._options():
                group.setdefault(key, self.defaults[key])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_stored": self._stored, "_orders": self._orders}

    def _options(self) -> set[str]:
        # torch.optim adds an option of its own to defaults when it restores an optimizer.
        return set(self.defaults) - {"differentiable"}

    def _states_of(self, group: dict[str, Any]) -> States:
        return self._states

    def _state_of(self, group: dict[str, Any], strategy: Strategy, p: Tensor) -> dict[str, Tensor]:
        """What this rank holds of a parameter's state, in the parameter's layout."""
        state = cast("dict[str, Tensor]", self.state[p])
        states = self._states_of(group)
        # A state may join later: schedulers raise SGD's momentum from zero.
        if not state or any(name not in state for name, _ in states):
            if capture.is_under_way(p.device):
                raise capture.not_ready("a parameter has no states yet")
            if state:
                # Before there is another state, which says nothing of how the words lie.
                self._held(strategy, p)
            # States outlive an evaluation's inference mode, and can be stepped after it.
            with torch.inference_mode(False), torch.no_grad():
                fresh = components.shown(p, new_state(strategy, shards.local(p), states))
            fresh = {n: v for n, v in fresh.items() if n not in state}
            state.update(fresh)
            self._created.extend((p, name) for name in fresh)
        return self._held(strategy, p)

    def _held(self, strategy: Strategy, p: Tensor) -> dict[str, Tensor]:
        """What this rank holds of the state that a parameter has, in the parameter's layout."""
        state = cast("dict[str, Tensor]", self.state[p])
        if not shards.is_sharded(p):
            self._follow_layout(strategy, state, p, p)
            return state
        held = {name: shards.local(value) for name, value in state.items()}
        before = dict(held)
        self._follow_layout(strategy, held, p, shards.local(p))
        moved = {name: value for name, value in held.items() if value is not before[name]}
        state.update(components.shown(p, moved))
        return held

    def _follow_layout(
        self, strategy: Strategy, held: dict[str, Tensor], p: Tensor, part: Tensor
    ) -> None:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return self._follow_layout(strategy, held, p, part)
        words = strategy.words_name
        if words in held and held.keys() <= {words, *components.SCALAR_STATES}:
            # No other state tells how the parameter lay when they were packed.
            before = torch.empty(part.shape, device="meta")
            if p in self._orders:
                before = before.as_strided(part.shape, self._orders[p])
            held[words] = components.repack(held[words], strategy.tail_width, before, part)
        else:
            follow_layout(strategy, held, part)
        if words is not None:
            self._note_order(p, part)

    def _note_orders(self) -> None:
        """Remember how all packed words lie, which is as their parameters do."""
        self._orders.clear()
        for group in self.param_groups:
            for p in group["params"]:
                if self.state.get(p) and strategy_for(group["precision"], p.dtype).words_name:
                    self._note_order(p, shards.local(p))

    def _note_order(self, p: Tensor, part: Tensor) -> None:
        if part.is_contiguous():
            self._orders.pop(p, None)
        else:
            self._orders[p] = part.stride()

    # ------------------------------------------------------------------------------ values

    def stored_value(self, group: dict[str, Any], p: Tensor) -> Tensor:
        """What this rank holds of a parameter's value, laid out as :meth:`intended_updates` yields
        values: FP32, or in FP64 the sum of two components, which FP32 may not have.

        In a step, which has checked the options of the parameter's group.
        """
        return storage_view(self._wide_part(group, p, exact=True), shards.local(p))

    def wide_value(self, p: Tensor) -> Tensor:
        """The FP32 value that the stored components of a parameter stand for together.

        Returns:
            FP32 tensor of its shape, a DTensor if it is one; for ``"fp32"`` and ``"master"`` it may
            be the stored one.
        """
        return next(self.wide_values([p]))

    def wide_values(self, params: Iterable[Tensor]) -> Iterator[Tensor]:
        """:meth:`wide_value` of one parameter after another; all options are checked once.

        Args:
            params: The parameters.

        Raises:
            ValueError: A parameter is not in this optimizer, or an option is out of range.
        """
        self.check_groups()
        groups = {id(p): group for group in self.param_groups for p in group["params"]}
        for p in params:
            if id(p) not in groups:
                raise ValueError(f"a parameter of shape {tuple(p.shape)} is not in this optimizer")
            yield self._wide_value(groups[id(p)], p)

    def _wide_value(self, group: dict[str, Any], p: Tensor) -> Tensor:
        return shards.part_of(p, self._wide_part(group, p))

    def _wide_part(self, group: dict[str, Any], p: Tensor, *, exact: bool = False) -> Tensor:
        strategy = strategy_for(group["precision"], p.dtype)
        held = self._held(strategy, p) if self.state.get(p) else None
        return components.wide_value(strategy, shards.local(p), held, exact=exact)

    def bytes_per_parameter(self) -> dict[str, float]:
        """Bytes of elementwise storage per parameter, from the live tensors (Collage, Table 2).

        Gradients and states that do not exist yet count with the size that they will have; while
        the step is fused, a gradient counts if it is accumulated. Step counters and the like, one
        number a tensor, do not count.

        Returns:
            Bytes by tensor name (``"parameter"``, ``"gradient"``, ``"exp_avg"``, ...) and
            ``"total"``, averaged over all parameters.
        """

        self.check_groups()

        def states(group: dict[str, Any], p: Tensor) -> dict[str, Any]:
            strategy = strategy_for(group["precision"], p.dtype)
            if self.state.get(p):
                return self._held(strategy, p)
            return new_state(strategy, shards.local(p).detach().to("meta"), self._states_of(group))

        gradient = components.gradient_bytes if self.fused is None else self.fused.gradient_bytes
        return components.bytes_per_parameter(
            (p, gradient(p), states(group, p))
            for group in self.param_groups
            for p in group["params"]
        )
