"""The optimizer as ``torch.optim`` knows one, over parameters that are stored in components."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, cast, overload

import torch
from torch import Tensor, nn

from ..numerics import random_bits
from ..ops.all_finite import are_finite
from ..ops.graph_breaks import between_graphs
from ..ops.step import storage
from ..ops.step.job import StepJob, largest
from ..ops.strategy import Strategy
from . import (
    choices,
    components,
    full_precision,
    loss_scaling,
    options,
    parameters,
    shards,
    transfer,
)
from .changes import Known
from .components import States, beside, follow_layout, in_layout_of, new_state, storage_view
from .observers import FusedStep, StepObserver
from .options import Precision, parse_precision, strategy_for
from .parameters import Bucket, Buckets, Params
from .pending import Pending
from .state_dict import Expected, check_state_dict, restore_components, unpack_words
from .torch_optimizer import TorchOptimizer

Role = Callable[[str | None], list[Tensor]]
"""The state tensors of a name, one for each parameter of a bucket; empty if there is none."""


class Optimizer(TorchOptimizer):
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
    #: State tensors of the size of the parameter.
    _states: ClassVar[States]
    #: Weight decay is apart from the gradient.
    _decoupled: ClassVar[bool] = False

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
        self._regions = shards.Regions()
        self._known = Known()
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
            self._check_group(group)
        except Exception:
            self.param_groups.pop()
            raise
        self._stored.append(group["precision"])
        self._known.add(group)
        self._agree_on_seed()

    def _agree_on_seed(self) -> None:
        """Take rank 0's default seed, once random bits are to be drawn from it."""
        if self._seed_is_agreed or not any(map(options.is_random, self.param_groups)):
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
        self._known.check(self.param_groups, self.state)
        self._check_options_of_groups()
        precisions = [group["precision"] for group in self.param_groups]
        if precisions != self._stored:
            self._convert(lossy=False)

    def _check_options_of_groups(self) -> None:
        for group in self.param_groups:
            group["precision"] = parse_precision(group["precision"])
            self._check_all_options(group)

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
            self._agree_on_seed()
            self._convert(lossy=True)
        except Exception:
            for each, old in zip(self.param_groups, before, strict=True):
                each["precision"] = old
            raise

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
        self._agree_on_seed()

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
        self._created = []
        self._regions = shards.Regions()
        self._seed_is_agreed = True
        self._known = Known(self.param_groups)
        self._stored = state.get("_stored", [group["precision"] for group in self.param_groups])
        for group in self.param_groups:
            for key in self._options():
                group.setdefault(key, self.defaults[key])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_stored": self._stored}

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
            fresh = components.shown(p, new_state(strategy, shards.local(p), states))
            fresh = {n: v for n, v in fresh.items() if n not in state}
            state.update(fresh)
            self._created.extend((p, name) for name in fresh)
        return self._held(strategy, p)

    def _held(self, strategy: Strategy, p: Tensor) -> dict[str, Tensor]:
        """What this rank holds of the state that a parameter has, in the parameter's layout."""
        state = cast("dict[str, Tensor]", self.state[p])
        if not shards.is_sharded(p):
            follow_layout(strategy, state, p)
            return state
        held = {name: shards.local(value) for name, value in state.items()}
        before = dict(held)
        follow_layout(strategy, held, shards.local(p))
        moved = {name: value for name, value in held.items() if value is not before[name]}
        state.update(components.shown(p, moved))
        return held

    # ------------------------------------------------------------------------------ the step

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether ``torch.amp.GradScaler`` leaves unscaling to :meth:`step`."""
        return loss_scaling.is_asked_by_scaler(sys._getframe(1))

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take a step; while fused, check that the backward passes have taken one.

        A step with learning rates of zero and gradients of zero only creates the states, if there
        are none: this is how ``torch.distributed.checkpoint`` prepares an optimizer.

        Args:
            closure: Reevaluates the model and returns the loss; while fused, its backward pass is
                the step (default: ``None``).

        Raises:
            FloatingPointError: A gradient is not finite and ``nonfinite="raise"``; nothing was
                updated.
            RuntimeError: The backend cannot run, and nothing was updated; or the step is fused, and
                a gradient scaler calls this that was not passed as ``scaler=``, or the backward
                passes since the last call are not the ``accumulate=`` of one step, or they did not
                reach the parameters, because these are no longer the model's.
            ValueError: A gradient is sparse or has a dtype that is no format of subulp; nothing was
                updated.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._is_dry_run():
            self._create_states()
        elif self.fused is None:
            self._take_step()
        else:
            if hasattr(self, "grad_scale"):
                self.fused.check_scaled()
            self.fused.check_step()
        return loss

    def _is_dry_run(self) -> bool:
        """Whether a step is but there to create the states, as a distributed checkpoint takes one.

        ``torch.distributed.checkpoint.state_dict`` steps with a learning rate of zero and gradients
        of zero before it reads or loads the states of an optimizer that has none.
        """
        if self.state or any(float(group["lr"]) != 0.0 for group in self.param_groups):
            return False
        params = [p for g in self.param_groups for p in g["params"]]
        grads = [p.grad for p in params if p.grad is not None]
        moves = any(bool(shards.local(g).to(torch.float32).any()) for g in grads)
        if any(map(shards.is_sharded, params)):
            # A rank may hold but zeros of gradients that are not zero.
            moves = shards.highest(int(moves), self._device) > 0
        return bool(grads) and not moves

    def _create_states(self) -> None:
        """Create all states, as they are before the first step."""
        self.check_groups()
        for bucket in parameters.buckets_of(self.param_groups):
            for p in bucket.params:
                self._state_of(bucket.group, bucket.strategy, p)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch.optim; while fused, the backward pass frees gradients and this does nothing.

        Args:
            set_to_none: Free gradients instead of filling them with zeros (default: ``True``).
        """
        if self.fused is None:
            super().zero_grad(set_to_none)

    def _take_step(self) -> None:
        self.check_groups()
        buckets = parameters.buckets_of(self.param_groups)
        if buckets:
            self._known.found_gradients()
        else:
            self._created.clear()
            self._known.check_used(self.param_groups, self.state)
        self.begin_step()
        if not self._admits(buckets):
            return
        # All of it is checked before any of it is touched.
        pending = self._prepare(buckets)
        scale = getattr(self, "grad_scale", None)
        if scale is None:
            for bucket, ready in zip(buckets, pending, strict=True):
                self.step_bucket(bucket, ready)
        else:
            for bucket in buckets:
                for part in loss_scaling.unscaled(bucket, scale):
                    self.step_bucket(part)
        self.end_step()

    def _prepare(self, buckets: Iterable[Bucket]) -> list[Pending]:
        """The steps of buckets, all of them checked, none of them taken."""
        self._created.clear()
        try:
            pending = [self._pending(bucket) for bucket in buckets]
            if len(pending) > 1:
                # A kernel looks at its own tensors alone: all of them, before any of them is run.
                for each in pending:
                    each.check_memory()
            return pending
        except Exception:
            for p, name in self._created:
                del self.state[p][name]
            raise

    def _pending(self, bucket: Bucket) -> Pending:
        arguments = self._arguments(bucket)
        steps, amaxes = arguments["steps"], arguments["amaxes"]
        # In one piece: of two hundred tensors, one by one takes longer than their step.
        arguments["steps"] = torch.stack(steps) + 1.0
        arguments["amaxes"] = after = [amax.clone() for amax in amaxes]
        job = self._make_job(**arguments)
        return Pending(self._op, bucket, job, steps, list(zip(amaxes, after, strict=True)))

    def begin_step(self) -> None:
        """Tell the observers that a step begins."""
        for observer in self.observers:
            observer.begin_step()

    def step_bucket(self, bucket: Bucket, pending: Pending | None = None) -> None:
        """Update the parameters of a bucket; whether its gradients are finite is not checked.

        Args:
            bucket: The parameters and their gradients.
            pending: Their step, if it has been prepared (default: ``None``).
        """
        pending = pending or self._prepare([bucket])[0]
        for observer in self.observers:
            observer.begin_update(pending)
        self.update(bucket, pending)
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

    def update(self, bucket: Bucket, pending: Pending | None = None) -> None:
        """The arithmetic of :meth:`step_bucket`; no observer is told."""
        (pending or self._prepare([bucket])[0]).take()

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
        """Apply the groups' ``nonfinite`` policies before anything is updated, all ranks alike."""
        if all(group["nonfinite"] == "propagate" for group in self.param_groups):
            return True
        guarded = [b for b in buckets if b.group["nonfinite"] != "propagate"]
        found = [b for b in guarded if not bool(are_finite(b.grads))]
        bad = [b for b in found if b.group["nonfinite"] == "raise"]
        worst = shards.highest(2 if bad else 1 if found else 0, self._device)
        for bucket in bad:
            pairs = zip(bucket.params, bucket.grads, strict=True)
            first = next(p for p, grad in pairs if not bool(are_finite([grad])))
            raise parameters.nonfinite_error(self.param_groups, first)
        if worst == 2:
            raise parameters.nonfinite_elsewhere()
        if worst == 1:
            self.skip_step()
        return worst == 0

    @property
    def _device(self) -> torch.device:
        return next((p.device for g in self.param_groups for p in g["params"]), torch.device("cpu"))

    #: Name of the fused op, and its job, which takes ``_arguments``.
    _op: ClassVar[str]
    _make_job: Callable[..., StepJob]

    def _arguments(self, bucket: Bucket) -> dict[str, Any]:
        raise NotImplementedError

    def _common_arguments(self, bucket: Bucket) -> tuple[dict[str, Any], Role]:
        """What every fused op takes, in storage order, and the states of a name."""
        group, strategy = bucket.group, bucket.strategy
        params, grads = bucket.parts, bucket.grads
        columns = _columns([self.state[p] for p in bucket.params])
        in_order = self._are_in_order(group, params, grads, columns)
        if not in_order:
            # Their names may still differ: a state that an option does without may be left over.
            states = [self._state_of(group, strategy, p) for p in bucket.params]
            columns = {name: [s[name] for s in states if name in s] for name in states[0]}
            pairs = zip(params, grads, strict=True)
            grads = [storage_view(in_layout_of(grad, p), p) for p, grad in pairs]

        def role(name: str | None) -> list[Tensor]:
            if name is None or name not in columns:
                return []
            stored = columns[name]
            if in_order:
                return stored
            return [beside(value, p) for value, p in zip(stored, params, strict=True)]

        common = {
            "params": params if in_order else [storage_view(p.detach(), p) for p in params],
            "grads": grads,
            "extras": role(strategy.extra_name),
            "amaxes": role("gradient_amax"),
            "steps": columns["step"],
            "lr": group["lr"],
            "precision": strategy.name,
            "arithmetic": group["arithmetic"],
            "maximize": group["maximize"],
            "seed": group["seed"],
            "streams": bucket.streams,
            "offsets": [0] * len(params),
        }
        if bucket.sharded:
            common |= self._shard_arguments(bucket, grads)
        return common, role

    def _shard_arguments(self, bucket: Bucket, grads: list[Tensor]) -> dict[str, Any]:
        """Where the parts of DTensors lie, and what concerns the whole of each."""
        arguments: dict[str, Any] = {}
        if bucket.strategy.stochastic:
            pairs = zip(bucket.params, bucket.parts, strict=True)
            regions = [self._regions.of(p, part) for p, part in pairs]
            arguments["offsets"] = [region.offset for region in regions]
            if any(region.run for region in regions):
                arguments["runs"] = [number for region in regions for number in region.runs]
        if "gradient_amax" in self.state[bucket.params[0]]:
            amaxes = largest(grads)
            arguments["gradient_amaxes"] = shards.reduced(bucket.params, amaxes, "max")
        return arguments

    def _are_in_order(
        self,
        group: dict[str, Any],
        params: Sequence[Tensor],
        grads: list[Tensor],
        columns: dict[str, list[Tensor]],
    ) -> bool:
        """Whether no state has to be created, and no tensor to be laid out like another."""
        names = {"step", *(name for name, _ in self._states_of(group))}
        if not names <= columns.keys():
            return False
        return all(map(Tensor.is_contiguous, chain(params, grads, *columns.values())))

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped by ``nonfinite="skip"`` or a gradient scaler."""
        return max((int(g["skipped_steps"]) for g in self.param_groups), default=0)

    # ------------------------------------------------------------------------- diagnostics

    @torch.no_grad()
    def intended_updates(
        self, pending: Pending, shadows: dict[Tensor, list[Tensor]] | None = None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """What a step would do if nothing were rounded away; the optimizer's own stay as they are.

        Args:
            pending: The step.
            shadows: FP32 moments of each parameter that no step has rounded: the update is computed
                from them, and they are moved on. A parameter that is missing is given its stored
                ones. ``None`` computes it from what is stored (default: ``None``).

        Yields:
            ``(parameter, wide value, intended update)``; the last two FP32, in storage order, of a
            DTensor what this rank holds.
        """
        job = pending.job
        for i, p in enumerate(pending.bucket.params):
            theta = storage.decode_parameter(job.strategy, job.params[i], job.role(job.extras, i))
            moments = shadows and shadows.get(p)
            if not moments:
                moments = storage.decode_moments(job, i)
            update, moved = self._reference_update(job, i, theta, moments)
            if shadows is not None:
                shadows[p] = moved
            yield p, theta, -update

    @torch.no_grad()
    def move_shadows(
        self, pending: Pending, shadows: dict[Tensor, list[Tensor]], *, decay: bool
    ) -> None:
        """Let gradients enter the shadows of :meth:`intended_updates`, without their update.

        Args:
            pending: The step, or what is folded before it; not taken yet.
            shadows: Moved on.
            decay: Whether coupled weight decay is part of these gradients; once a step it is.
        """
        job = pending.job
        coupled = decay and job.weight_decay != 0.0 and not job.decoupled
        for i, p in enumerate(pending.bucket.params):
            theta = None
            if coupled:
                extra = job.role(job.extras, i)
                theta = storage.decode_parameter(job.strategy, job.params[i], extra)
            moments = shadows.get(p) or storage.decode_moments(job, i)
            shadows[p] = self._moved_moments(job, i, moments, theta)

    def _moved_moments(
        self, job: StepJob, i: int, moments: list[Tensor], theta: Tensor | None
    ) -> list[Tensor]:
        """The moments after a step from the wide ones before it; ``theta`` has a decay."""
        raise NotImplementedError

    def _reference_update(
        self, job: StepJob, i: int, theta: Tensor, moments: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """What a step subtracts, and the moments after it, from the wide ones before it."""
        raise NotImplementedError

    def stored_value(self, p: Tensor) -> Tensor:
        """What this rank holds of :meth:`wide_value`, as :meth:`intended_updates` yields values."""
        self.check_groups()
        return storage_view(self._wide_part(self._group_of(p), p), shards.local(p))

    def wide_value(self, p: Tensor) -> Tensor:
        """The FP32 value that the stored components of a parameter stand for together.

        Returns:
            FP32 tensor of its shape, a DTensor if it is one; for ``"fp32"`` and ``"master"`` it may
            be the stored one.
        """
        self.check_groups()
        return self._wide_value(self._group_of(p), p)

    def _wide_value(self, group: dict[str, Any], p: Tensor) -> Tensor:
        return shards.part_of(p, self._wide_part(group, p))

    def _wide_part(self, group: dict[str, Any], p: Tensor) -> Tensor:
        strategy = strategy_for(group["precision"], p.dtype)
        held = self._held(strategy, p) if self.state.get(p) else None
        return components.wide_value(strategy, shards.local(p), held)

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

    # -------------------------------------------------------------------------- state dicts

    def state_dict(self) -> dict[str, Any]:
        """As in torch.optim, with every component in its own dtype.

        Extra bits, packed in memory, are integers of the shape of their parameter here, so that
        they can be loaded into another memory layout, and by other ranks.
        """

        self.check_groups()

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
            self._decoupled,
        )

    def _load(self, state_dict: dict[str, Any], *, convert: bool) -> None:
        final: dict[str, Any] = {}
        values: transfer.Values = []
        expected = self._expected()

        def check(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            if convert:
                state_dict, found = transfer.converted(expected, self.param_groups, state_dict)
                values.extend(found)
            check_state_dict(expected, self.param_groups, state_dict)
            final.update(state_dict)
            return state_dict

        @torch.no_grad()
        def restore(_: torch.optim.Optimizer) -> None:
            restore_components(self.param_groups, self.state, final)
            for p, value in values:
                shards.local(p).detach().copy_(value)
            torch.autograd.graph.increment_version([p for p, _ in values])
            self._stored = [group["precision"] for group in self.param_groups]

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


def _columns(states: list[dict[str, Tensor]]) -> dict[str, list[Tensor]]:
    """What this rank holds of the states of several parameters, by name.

    Returns:
        A tensor for each parameter; nothing if they have states of different names.
    """
    names = states[0].keys()
    if any(state.keys() != names for state in states):
        return {}
    return {name: list(shards.parts([state[name] for state in states])) for name in names}


# If traced, a step would be one opaque op in a graph that guards on every tensor, is recompiled for
# every new learning rate, and copies what the op mutates unless the compiler can prove that it need
# not. Torch's hooks, which it puts around a step that has none, stay out of the graph too: Dynamo
# warns of their profiler.
Optimizer.step = between_graphs(torch.optim.Optimizer.profile_hook_step(Optimizer.step))  # type: ignore[method-assign,assignment]
Optimizer.step.hooked = True  # type: ignore[attr-defined]
