"""The optimizer as ``torch.optim`` knows one, over parameters that are stored in components."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, cast, overload

import torch
from torch import Tensor, nn

from ..numerics import random_bits
from ..ops import all_finite
from ..ops.graph_breaks import between_graphs
from ..ops.step import storage
from ..ops.step.job import StepJob
from ..ops.strategy import Strategy
from . import components, full_precision, loss_scaling, options, parameters
from .components import States, beside, follow_layout, in_layout_of, new_state, storage_view
from .observers import FusedStep, StepObserver
from .options import parse_precision, strategy_for
from .parameters import Bucket, Buckets, Params
from .state_dict import Expected, check_state_dict, restore_components, use_row_major_words

Role = Callable[[str | None], list[Tensor]]
"""The state tensors of a name, one for each parameter of a bucket; empty if there is none."""


class Optimizer(torch.optim.Optimizer):
    """Base of subulp's optimizers; see :class:`AdamW` for the arguments they share.

    A step can also be taken bucket by bucket, as the fused backward pass does::

        optimizer.begin_step()
        for bucket in buckets:
            optimizer.step_bucket(bucket)
        optimizer.end_step()

    Attributes:
        fused: The handle that steps the parameters in the backward pass instead of :meth:`step`, or
            ``None``; neither pickled nor copied.
        observers: Called at every step; neither pickled nor copied.
    """

    fused: FusedStep | None = None
    observers: tuple[StepObserver, ...] = ()
    #: torch.amp.GradScaler leaves unscaling to :meth:`step`, see loss_scaling.py.
    _step_supports_amp_scaling: ClassVar[bool] = True
    #: State tensors of the size of the parameter.
    _states: ClassVar[States]

    def __init__(self, params: Params, defaults: dict[str, Any]) -> None:
        defaults["precision"] = parse_precision(defaults["precision"])
        if defaults["seed"] is None:
            defaults["seed"] = random_bits.fold_seed(torch.initial_seed())
        self._check_all_options(defaults)
        defaults["skipped_steps"] = 0
        super().__init__(cast(Any, params), defaults)

    # ------------------------------------------------------------------------------ groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; it may have options of its own, ``precision`` included.

        Raises:
            ValueError: An option is out of range, or a parameter cannot have the group's precision:
                its dtype, layout, or a complex or sparse value.
            RuntimeError: The step is fused into the backward pass.
        """
        if self.fused is not None:
            raise RuntimeError(
                "add_param_group while the step is fused into the backward pass: remove the "
                "handle, add the group, and fuse again"
            )
        if "precision" in param_group:
            param_group["precision"] = parse_precision(param_group["precision"])
        if param_group.get("seed", 0) is None:
            param_group["seed"] = self.defaults["seed"]
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group)
        except Exception:
            self.param_groups.pop()
            raise

    def _check_group(self, group: dict[str, Any]) -> None:
        self._check_all_options(group)
        parameters.check_parameters(group)

    def _check_all_options(self, group: dict[str, Any]) -> None:
        self._check_options(group)
        options.check_shared(group)

    def _check_options(self, options: dict[str, Any]) -> None:
        raise NotImplementedError

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for key in self._options():
                group.setdefault(key, self.defaults[key])

    def _options(self) -> set[str]:
        # torch.optim adds an option of its own to defaults when it restores an optimizer.
        return set(self.defaults) - {"differentiable"}

    def _states_of(self, group: dict[str, Any]) -> States:
        return self._states

    def _state_of(self, group: dict[str, Any], strategy: Strategy, p: Tensor) -> dict[str, Tensor]:
        state = cast("dict[str, Tensor]", self.state[p])
        states = self._states_of(group)
        # A state may join later: schedulers raise SGD's momentum from zero.
        if not state or any(name not in state for name, _ in states):
            state.update({**new_state(strategy, p, states), **state})
        follow_layout(strategy, state, p)
        return state

    # ------------------------------------------------------------------------------ the step

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take a step; while fused, do nothing: the backward pass has stepped already.

        Args:
            closure: Reevaluates the model and returns the loss; while fused, its backward pass is
                the step (default: ``None``).

        Raises:
            FloatingPointError: A gradient is not finite and ``nonfinite="raise"``; nothing was
                updated.
            RuntimeError: The backend cannot run, and nothing was updated; or a gradient scaler
                calls this while the step is fused without ``scaler=``.
            ValueError: A gradient is sparse or has a dtype that is no format of subulp; nothing was
                updated.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.fused is None:
            self._step_between_graphs()
        elif hasattr(self, "grad_scale"):
            self.fused.check_scaled()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch.optim; while fused, the backward pass frees gradients and this does nothing.

        Args:
            set_to_none: Free gradients instead of filling them with zeros (default: ``True``).
        """
        if self.fused is None:
            super().zero_grad(set_to_none)

    # If traced, a step would be one opaque op in a graph that guards on every tensor, is recompiled
    # for every new learning rate, and copies what the op mutates unless the compiler can prove that
    # it need not.
    @between_graphs
    def _step_between_graphs(self) -> None:
        buckets = parameters.buckets_of(self.param_groups)
        self.begin_step()
        if not self._admits(buckets):
            return
        scale = getattr(self, "grad_scale", None)
        for bucket in buckets:
            for part in loss_scaling.unscaled(bucket, scale):
                self.step_bucket(part)
        self.end_step()

    def begin_step(self) -> None:
        """Tell the observers that a step begins."""
        for observer in self.observers:
            observer.begin_step()

    def step_bucket(self, bucket: Bucket) -> None:
        """Update the parameters of a bucket; whether its gradients are finite is not checked."""
        for observer in self.observers:
            observer.begin_update(bucket)
        self.update(bucket)
        for observer in self.observers:
            observer.end_update(bucket)

    def end_step(self) -> None:
        """Tell the observers and the schedulers that the step is complete."""
        for observer in self.observers:
            observer.end_step()
        # Without it, schedulers warn that they were called before the first step.
        self._opt_called = True

    def skip_step(self) -> None:
        """Count a skipped step."""
        # One group's policy skips the whole step, so every group counts it.
        for group in self.param_groups:
            group["skipped_steps"] += 1

    def update(self, bucket: Bucket) -> None:
        """The arithmetic of :meth:`step_bucket`; no observer is told."""
        arguments = self._arguments(bucket)
        amaxes = arguments["amaxes"]
        saved = [amax.clone() for amax in amaxes]
        torch._foreach_add_(arguments["steps"], 1.0)
        try:
            self._run_step(**arguments)
        except Exception:
            # A backend that cannot run fails before it touches a parameter: so do the counters.
            torch._foreach_add_(arguments["steps"], -1.0)
            for amax, before in zip(amaxes, saved, strict=True):
                amax.copy_(before)
            raise
        # A backward pass that still needs an old value must notice.
        torch.autograd.graph.increment_version(bucket.params)

    def _admits(self, buckets: Buckets) -> bool:
        """Whether the step may be taken; asked before anything is updated."""
        found_inf = getattr(self, "found_inf", None)
        if found_inf is None:
            return self._gradients_admit(buckets)
        # A gradient scaler has checked all gradients, and skips steps on purpose.
        if found_inf:
            self.skip_step()
        return not found_inf

    def _gradients_admit(self, buckets: Buckets) -> bool:
        """Apply the groups' ``nonfinite`` policies before anything is updated."""
        guarded = [b for b in buckets if b.group["nonfinite"] != "propagate"]
        found = [b for b in guarded if not bool(all_finite(b.grads))]
        if not found:
            return True
        for bucket in found:
            if bucket.group["nonfinite"] != "raise":
                continue
            pairs = zip(bucket.params, bucket.grads, strict=True)
            bad = next(p for p, grad in pairs if not bool(all_finite([grad])))
            raise parameters.nonfinite_error(self.param_groups, bad)
        self.skip_step()
        return False

    #: The fused step, and its job for diagnostics; both take ``_arguments``.
    _run_step: Callable[..., None]
    _make_job: Callable[..., StepJob]

    def _arguments(self, bucket: Bucket) -> dict[str, Any]:
        raise NotImplementedError

    def _common_arguments(self, bucket: Bucket) -> tuple[dict[str, Any], Role]:
        """What every fused op takes, in storage order, and the states of a name."""
        group, strategy, params = bucket.group, bucket.strategy, bucket.params
        states = [self._state_of(group, strategy, p) for p in params]

        def role(name: str | None) -> list[Tensor]:
            if name is None or name not in states[0]:
                return []
            return [beside(s[name], p) for s, p in zip(states, params, strict=True)]

        common = {
            "params": [storage_view(p.detach(), p) for p in params],
            "grads": [
                storage_view(in_layout_of(grad, p), p)
                for p, grad in zip(params, bucket.grads, strict=True)
            ],
            "extras": role(strategy.extra_name),
            "amaxes": role("gradient_amax"),
            "steps": [s["step"] for s in states],
            "lr": group["lr"],
            "precision": strategy.name,
            "arithmetic": group["arithmetic"],
            "maximize": group["maximize"],
            "seed": group["seed"],
            "streams": bucket.streams,
            "offsets": [0] * len(params),
        }
        return common, role

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped by ``nonfinite="skip"`` or a gradient scaler."""
        return max((int(g["skipped_steps"]) for g in self.param_groups), default=0)

    # ------------------------------------------------------------------------- diagnostics

    @torch.no_grad()
    def intended_updates(self, bucket: Bucket) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """What the next step would do if nothing were rounded away; changes nothing.

        Args:
            bucket: Parameters and the gradients that they will step with.

        Yields:
            ``(parameter, wide value, intended update)``; the last two FP32, in storage order.
        """
        arguments = self._arguments(bucket)
        arguments["steps"] = [step + 1 for step in arguments["steps"]]
        arguments["amaxes"] = [amax.clone() for amax in arguments["amaxes"]]
        arguments["arithmetic"] = "wide"
        job = self._make_job(**arguments)
        for i, p in enumerate(bucket.params):
            theta = storage.decode_parameter(job.strategy, job.params[i], job.role(job.extras, i))
            yield p, theta, -self._reference_update(job, i, theta)

    def _reference_update(self, job: StepJob, i: int, theta: Tensor) -> Tensor:
        raise NotImplementedError

    def stored_value(self, p: Tensor) -> Tensor:
        """:meth:`wide_value` in storage order, as :meth:`intended_updates` yields values."""
        return storage_view(self.wide_value(p), p)

    def wide_value(self, p: Tensor) -> Tensor:
        """The FP32 value that the stored components of a parameter stand for together.

        Returns:
            FP32 tensor of its shape; for ``"fp32"`` and ``"master"`` it may be the stored one.
        """
        return self._wide_value(self._group_of(p), p)

    def _wide_value(self, group: dict[str, Any], p: Tensor) -> Tensor:
        strategy, state = strategy_for(group["precision"], p.dtype), self.state.get(p)
        if state:
            follow_layout(strategy, state, p)
        return components.wide_value(strategy, p, state)

    def bytes_per_parameter(self) -> dict[str, float]:
        """Bytes of elementwise storage per parameter, from the live tensors (Collage, Table 2).

        Gradients and states that do not exist yet count with the size that they will have. Step
        counters and the like, one number a tensor, do not count.

        Returns:
            Bytes by tensor name (``"parameter"``, ``"gradient"``, ``"exp_avg"``, ...) and
            ``"total"``, averaged over all parameters.
        """

        def states(group: dict[str, Any], p: Tensor) -> dict[str, Any]:
            strategy = strategy_for(group["precision"], p.dtype)
            return self.state.get(p) or new_state(
                strategy, p.detach().to("meta"), self._states_of(group)
            )

        return components.bytes_per_parameter(
            (p, states(group, p)) for group in self.param_groups for p in group["params"]
        )

    # -------------------------------------------------------------------------- state dicts

    def state_dict(self) -> dict[str, Any]:
        """As in torch.optim, with every component in its own dtype.

        Packed extra bits are in the row-major order of their parameter, whatever its memory layout,
        so they can be loaded into another one.
        """

        # Before the user's hooks, which may give the dict any form.
        def convert(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
            use_row_major_words(self.param_groups, state_dict)

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
                dtype do not fit; nothing was changed.
        """
        final: dict[str, Any] = {}
        expected = Expected(
            type(self).__name__,
            self._options(),
            self._check_all_options,
            self._states,
            self._states_of,
        )

        def check(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
            check_state_dict(expected, self.param_groups, state_dict)
            final.update(state_dict)

        def restore(_: torch.optim.Optimizer) -> None:
            restore_components(self.param_groups, self.state, final)

        # The check comes after the user's pre-hooks, which may change the dict; the components are
        # restored before the user's post-hooks.
        before = self.register_load_state_dict_pre_hook(check)
        after = self.register_load_state_dict_post_hook(restore, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def _group_of(self, p: Tensor) -> dict[str, Any]:
        for group in self.param_groups:
            if any(q is p for q in group["params"]):
                return group
        raise ValueError(f"a parameter of shape {tuple(p.shape)} is not in this optimizer")

    def full_precision_state_dict(self, model: nn.Module) -> OrderedDict[str, Tensor]:
        """The model's state dict with FP32 weights rebuilt from all components.

        Args:
            model: Some or all of its parameters are this optimizer's; others are cast to FP32.

        Returns:
            Names as in ``model.state_dict()``; floating-point parameters in FP32, buffers as they
            are. The tensors are copies.
        """
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
        places = parameters.places(self.param_groups)

        def store(p: Tensor, wide: Tensor) -> None:
            place = places[id(p)]
            group = self.param_groups[place.group]
            strategy = strategy_for(group["precision"], p.dtype)
            state = self._state_of(group, strategy, p)
            components.store_wide(strategy, p, state, wide, seed=group["seed"], stream=place.stream)

        full_precision.load_state_dict(model, state_dict, places, store)
