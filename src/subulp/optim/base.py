"""The step of an optimizer as ``torch.optim`` knows one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import wraps
from itertools import chain
from operator import itemgetter
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..ops import capture
from ..ops.all_finite import are_finite
from ..ops.graph_breaks import between_graphs
from ..ops.step import repeat, storage
from ..ops.step.counters import Counters
from ..ops.step.job import StepJob
from ..ops.step.repeat import Repeated
from ..ops.step.scales import largest
from . import capturable, loss_scaling, parameters, shards
from .components import beside, in_layout_of, storage_view
from .parameters import Bucket, Buckets
from .pending import Pending, Prepared
from .saved import SavedGroups
from .torch_guard import are_there_others

_LATE_HOOK = (
    "a hook of register_step_pre_hook, and a step fused into the backward pass: it would be called "
    "after the step that it is for. Set options before the backward pass; change gradients in "
    "hooks of parameters, or by fuse_backward(reduce=)"
)

_OPTIONS = "arithmetic", "maximize", "seed"
"""Options of a group that every fused op takes as they are."""

_options = itemgetter(*_OPTIONS)

_SLICE = 1 << 18
"""Elements of a tensor that plain PyTorch works on at a time: its temporaries stay in a cache."""

Role = Callable[[str | None], list[Tensor]]
"""The state tensors of a name, one for each parameter of a bucket; empty if there is none."""


class Optimizer(SavedGroups):
    """Base of subulp's optimizers; see :class:`AdamW` for the arguments they share.

    A step can also be taken bucket by bucket, as the fused backward pass does::

        optimizer.begin_step()
        for bucket in buckets:
            optimizer.step_bucket(bucket)
        optimizer.end_step()
    """

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
                reach the parameters, because these are no longer the model's; or a CUDA graph is
                being captured that cannot hold the step.
            ValueError: A gradient is sparse or has a dtype that is no format of subulp; nothing was
                updated.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if capture.is_under_way(self._device):
            scaled = hasattr(self, "grad_scale")
            capturable.check_capture(self.param_groups, self.state, self.observers, scaled=scaled)
        if self._is_dry_run():
            self._create_states()
            if self.fused is not None:
                # Zeros, given by hand; zero_grad() leaves gradients to the backward pass.
                super().zero_grad()
        elif self.fused is None:
            self._take_step()
        else:
            if hasattr(self, "grad_scale"):
                self.fused.check_scaled()
            self.check_hooks()
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
        # A rank may hold but zeros of gradients that are not zero. Only the ranks of a parameter's
        # mesh take this step.
        if sharded := [p for p in params if shards.is_sharded(p)]:
            mine = torch.full((len(sharded),), float(moves), device=self._device)
            moves = bool(shards.reduced(sharded, mine, "max").any())
        return bool(grads) and not moves

    def _create_states(self) -> None:
        """Create all states, as they are before the first step."""
        self.check_groups()
        for bucket in parameters.buckets_of(self.param_groups):
            for p in bucket.params:
                self._state_of(bucket.group, bucket.strategy, p)

    def register_step_pre_hook(self, hook: Any) -> RemovableHandle:
        """As in torch.optim; not while fused, when the step has been taken by then.

        Raises:
            RuntimeError: The step is fused.
        """
        if self.fused is not None:
            raise RuntimeError(_LATE_HOOK)
        return super().register_step_pre_hook(hook)

    def check_hooks(self) -> None:
        """Raise RuntimeError if hooks wait for a step to begin, this one's or all optimizers'."""
        if self._optimizer_step_pre_hooks or are_there_others():
            raise RuntimeError(_LATE_HOOK)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch.optim; while fused, the backward pass frees gradients and this does nothing.

        Args:
            set_to_none: Free gradients instead of filling them with zeros (default: ``True``).
        """
        if self.fused is None:
            super().zero_grad(set_to_none)

    def _take_step(self) -> None:
        with capturable.nothing_new(self.state, self._device):
            self.check_groups()
            buckets = parameters.buckets_of(self.param_groups)
            if buckets:
                self._known.found_gradients()
            else:
                self._created.clear()
                self._known.check_used(self.param_groups, self.state)
            self.begin_step()
            found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
            found, scale = loss_scaling.read(found_inf, scale)
            if found_inf is None:
                if not self._gradients_admit(buckets):
                    return
            elif found:
                # A gradient scaler has checked all gradients, and skips steps on purpose.
                self.skip_step()
                return
            # All of it is checked before any of it is touched.
            pending = self._prepare(buckets)
            if scale is not None:
                # Prepared again with unscaled gradients, and as new as before.
                self._forget_created()
        if scale is None:
            for bucket, ready in zip(buckets, pending, strict=True):
                self.step_bucket(bucket, ready)
        else:
            for bucket in buckets:
                for part in loss_scaling.unscaled(bucket, scale):
                    self.step_bucket(part)
        self.end_step()

    def _prepare(self, buckets: Iterable[Bucket]) -> list[Prepared]:
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
            self._forget_created()
            raise

    def _forget_created(self) -> None:
        """Take back the states that the step being prepared has created."""
        for p, name in self._created:
            del self.state[p][name]
        self._created.clear()

    def _pending(self, bucket: Bucket) -> Prepared:
        device, device_counts = bucket.params[0].device, bucket.group["capturable"]
        # Observers read the whole of a job; what is of several ranks or passes is asked anew.
        special = self.observers or device_counts or bucket.sharded or bucket.folded
        special = special or self._lie_otherwise(bucket)
        repeatable = device.type == "cpu" and not special
        if repeatable and (found := self._repeated(bucket)) is not None:
            return found
        arguments = self._arguments(bucket)
        counters = None
        if device_counts:
            # By the step itself.
            arguments["held"] = self._graphs
        else:
            counters = Counters(arguments["steps"], device, draws=bucket.strategy.stochastic)
            arguments["steps"] = counters.after
        job = self._make_job(**arguments)
        parameters.check_separate(bucket, job.grads)
        # Unless a tensor is laid out otherwise than it is stored.
        if repeatable and job.params is bucket.params:
            fast, slow, slow_low = self._roles
            names = fast, slow, bucket.strategy.extra_name, slow_low
            columns = _columns([self.state[p] for p in bucket.params])
            repeat.remember(self._key(bucket), self._op, job, columns, names, self._given(bucket))
        return Pending(self._op, bucket, job, counters)

    def _repeated(self, bucket: Bucket) -> Repeated | None:
        """The step of a bucket, if one like it has been prepared before."""
        states = list(map(self.state.__getitem__, bucket.params))
        try:
            columns = {name: list(map(itemgetter(name), states)) for name in states[0]}
        except KeyError:
            return None
        lr = float(bucket.group["lr"])
        return repeat.repeated(
            self._key(bucket),
            self._op,
            bucket.params,
            bucket.grads,
            columns,
            self._given(bucket),
            lr,
        )

    def _key(self, bucket: Bucket) -> tuple[Any, ...]:
        return type(self), id(bucket.params[0]), len(bucket.params)

    def _given(self, bucket: Bucket) -> object:
        """What a job depends on beside tensors and the learning rate."""
        group = bucket.group
        return _options(group), self._numbers(group), bucket.strategy, bucket.streams

    def begin_step(self) -> None:
        """Tell the observers that a step begins."""
        for observer in self.observers:
            observer.begin_step()

    def step_bucket(self, bucket: Bucket, pending: Prepared | None = None) -> None:
        """Update the parameters of a bucket; whether its gradients are finite is not checked.

        Args:
            bucket: The parameters and their gradients.
            pending: Their step, if it has been prepared (default: ``None``).
        """
        if pending is None or (self.observers and isinstance(pending, Repeated)):
            # Also if somebody has begun to observe since it was prepared.
            (pending,) = self._prepare([bucket])
        for observer in self.observers:
            assert isinstance(pending, Pending), "what is observed has a job"
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

    def update(self, bucket: Bucket, pending: Prepared | None = None) -> None:
        """The arithmetic of :meth:`step_bucket`; no observer is told."""
        (pending or self._prepare([bucket])[0]).take()

    def _gradients_admit(self, buckets: Buckets) -> bool:
        """Apply the groups' ``nonfinite`` policies before anything is updated, all ranks alike.

        The host waits for a GPU's answer, once: nothing is launched that might have to be undone.
        """
        if all(group["nonfinite"] == "propagate" for group in self.param_groups):
            return True
        guarded = [b for b in buckets if b.group["nonfinite"] != "propagate"]
        flags = [are_finite(b.grads) for b in guarded]
        if len({flag.device for flag in flags}) == 1 < len(flags):
            flags = torch.stack(flags).tolist()
        found = [b for b, finite in zip(guarded, flags, strict=True) if not finite]
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
    #: Names of the states that the job calls ``fast``, ``slow`` and ``slow_lows``.
    _roles: ClassVar[tuple[str | None, str, str]]

    def _arguments(self, bucket: Bucket) -> dict[str, Any]:
        raise NotImplementedError

    def _numbers(self, group: dict[str, Any]) -> dict[str, float]:
        """The arguments of a fused op that are a group's options, but for those of all ops."""
        raise NotImplementedError

    def _common_arguments(self, bucket: Bucket) -> tuple[dict[str, Any], Role]:
        """What every fused op takes, in storage order, and the states of a name."""
        group, strategy = bucket.group, bucket.strategy
        if group["capturable"]:
            capturable.check_bucket(bucket, fused=self.fused is not None)
        params, grads = bucket.parts, bucket.grads
        columns = _columns([self.state[p] for p in bucket.params])
        in_order = self._are_in_order(group, params, grads, columns)
        in_order = in_order and not self._lie_otherwise(bucket)
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

        steps = capturable.counters(bucket, self.state, columns["step"])
        if group["capturable"]:
            capturable.check_counters(steps)
        common = {
            "params": params if in_order else [storage_view(p.detach(), p) for p in params],
            "grads": grads,
            "extras": role(strategy.extra_name),
            "amaxes": role("gradient_amax"),
            "steps": steps,
            "lr": group["lr"],
            "precision": strategy.name,
            "streams": bucket.streams,
            "offsets": [0] * len(params),
        }
        common |= self._numbers(group)
        common |= {name: group[name] for name in _OPTIONS}
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
        # A counter is one number, which has one layout.
        laid_out = (column for name, column in columns.items() if name != "step")
        return all(map(Tensor.is_contiguous, chain(params, grads, *laid_out)))

    def _lie_otherwise(self, bucket: Bucket) -> bool:
        """Whether packed words of a parameter may lie otherwise than all others do."""
        return bool(self._orders) and any(p in self._orders for p in bucket.params)

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
        job.settle_counts()
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
        job.settle_counts()
        coupled = decay and job.weight_decay != 0.0 and not job.decoupled
        for i, p in enumerate(pending.bucket.params):
            theta = None
            if coupled:
                extra = job.role(job.extras, i)
                theta = storage.decode_parameter(job.strategy, job.params[i], extra)
            if not shadows.get(p):
                # States that are wide already are no copies.
                shadows[p] = [m.clone() for m in storage.decode_moments(job, i)]
            self._move(job, i, shadows[p], theta)

    def _move(self, job: StepJob, i: int, moments: list[Tensor], theta: Tensor | None) -> None:
        """Move shadows on in place, slice by slice: whole temporaries cost more than the sums."""
        flat = [torch.split(t.view(-1), _SLICE) for t in (job.grads[i], *moments)]
        decayed = [None] * len(flat[0]) if theta is None else torch.split(theta.view(-1), _SLICE)
        own = slice(i, i + 1)
        for (grad, *before), part in zip(zip(*flat, strict=True), decayed, strict=True):
            one = replace(job, params=job.params[own], grads=[grad], scalars=job.scalars[own])
            for m, after in zip(before, self._moved_moments(one, 0, before, part), strict=True):
                m.copy_(after)

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


def _columns(states: list[dict[str, Tensor]]) -> dict[str, list[Tensor]]:
    """What this rank holds of the states of several parameters, by name.

    Returns:
        A tensor for each parameter; nothing if they have states of different names.
    """
    names = states[0].keys()
    for name, value in chain.from_iterable(state.items() for state in states):
        if not isinstance(value, Tensor):
            raise ValueError(
                f"a parameter's state has {name!r}, of type {type(value).__name__}, which is not "
                "the optimizer's: keep it elsewhere; nothing was updated"
            )
    if any(state.keys() != names for state in states):
        return {}
    return {name: list(shards.parts([state[name] for state in states])) for name in names}


def _forgetting_scale(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step, with its hooks, that leaves nothing of a gradient scaler behind when it fails.

    A scaler takes its attributes away after a step that succeeded; the next may have none.
    """

    @wraps(step)
    def forgetting(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        try:
            return step(self, *args, **kwargs)
        except BaseException:
            for name in ("grad_scale", "found_inf"):
                vars(self).pop(name, None)
            raise

    return forgetting


# If traced, a step would be one opaque op in a graph that guards on every tensor, is recompiled for
# every new learning rate, and copies what the op mutates unless the compiler can prove that it need
# not. Torch's hooks, which it puts around a step that has none, stay out of the graph too: Dynamo
# warns of their profiler.
Optimizer.step = between_graphs(  # type: ignore[method-assign,assignment]
    _forgetting_scale(torch.optim.Optimizer.profile_hook_step(Optimizer.step))
)
Optimizer.step.hooked = True  # type: ignore[attr-defined]
