"""The optimizer step inside the backward pass: gradients are never all alive.

"Memory Efficient Mixed Precision Optimizers", section 3.2, and also what its section 4.1 gives up:
global-norm clipping, at the price of a second backward pass, and accumulation, at that of a buffer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.utils.hooks import RemovableHandle

from ...ops.look_ahead import looking_ahead
from .. import loss_scaling, shards
from ..base import Optimizer
from ..loss_scaling import ScalerLink
from ..parameters import Buckets, nonfinite_elsewhere, nonfinite_error, places
from . import fsdp, outside
from .accumulation import Accumulator
from .clipping import Clipping, each_scaled, scaled
from .kept import KeptGradients, leaves_of, may_nest
from .look_ahead import LookAhead, statistics_kept
from .reduction import Reduction

# Small gradients wait to be stepped together: in the middle of a backward pass a call takes a third
# of a millisecond, because its code is no longer in the caches. Stepping as many parameters as fit
# here takes less. The limit is fixed, because what waits is alive beside the next gradient, which
# may be the largest.
WAITING_BYTES = 1024 * 1024

_Roots = tuple[Sequence[Tensor], Sequence[Tensor | None] | None]
"""Losses, and the gradients to start from."""


class FusedBackward:
    """Handle of :func:`subulp.optim.fuse_backward`.

    Attributes:
        total_norm: Global norm before clipping, at the last step with ``max_norm``; else ``None``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        clipping: Clipping,
        accumulator: Accumulator,
        scaler: ScalerLink | None,
        reduction: Reduction | None,
        keep_bytes: int,
    ) -> None:
        self.total_norm: Tensor | None = None
        # Since the last optimizer.step(): backward passes, and the steps that they took.
        self._passes = self._steps = 0
        self._model, self._optimizer = model, optimizer
        self._sharded_by_fsdp = fsdp.is_in(model)
        self._clipping, self._accumulator = clipping, accumulator
        self._scaler, self._reduction = scaler, reduction
        # The current step: what its gradients are multiplied by, and the pass that looks ahead.
        self._factor: float | None = None
        self._coefficient: Tensor | None = None
        self._ahead: LookAhead | None = None
        self._keep_bytes = keep_bytes
        self._kept = KeptGradients(keep_bytes)
        self._inside = False
        self._pauses = 0
        # What autograd calls at the end of the user's own backward pass, if one is running.
        self._at_end: ReferenceType[Callable[[], None]] | None = None
        self._completed: set[int] = set()
        # Parameters that a pass of an accumulation was done with before it failed: each takes one
        # gradient of a pass, also where the pass is run again.
        self._done: set[int] = set()
        # Gradients that wait to be looked at, in passes where they do, and others for a step.
        self._plain = False
        self._arrived: list[tuple[Tensor, Tensor]] = []
        self._arrived_bytes = 0
        self._waiting = Buckets()
        self._places = places(optimizer.param_groups)
        self._listed = [id(p) for g in optimizer.param_groups for p in g["params"]]
        ours = {id(p) for p in model.parameters()}
        self._params = [p for g in optimizer.param_groups for p in g["params"] if id(p) in ours]
        self._has_sharded = any(map(shards.is_sharded, self._params))
        self._has_fp8 = any(p.dtype.itemsize == 1 for p in self._params)
        stepped = {id(p) for p in self._params}
        self._links = [
            (place, name, each)
            for module in model.modules()
            for place in (module._parameters, module._modules)
            for name, each in place.items()
        ]
        self._norm_order: list[Tensor] = [p for p in model.parameters() if id(p) in stepped]
        self._others = [p for p in model.parameters() if id(p) not in stepped]
        accumulator.check(self._params)
        self._check_policies()
        if keep_bytes and not (clipping.max_norm or scaler or self._guarding):
            raise ValueError(
                f"keep_bytes={keep_bytes} cannot apply: one pass is enough without max_norm, "
                "scaler, and nonfinite='raise' or 'skip'"
            )
        optimizer.fused = self
        self._hooks = [_hook(p, self._complete) for p in self._params]
        outside.watch(self)

    # ------------------------------------------------------------------------------ use

    def backward(
        self,
        loss: Tensor | Sequence[Tensor],
        gradient: Tensor | Sequence[Tensor | None] | None = None,
        *,
        retain_graph: bool = False,
        last: bool | None = None,
    ) -> None:
        """``loss.backward()``, run twice where all gradients must be seen before any steps.

        Args:
            loss: The loss; several are differentiated in one pass, as by
                ``torch.autograd.backward``.
            gradient: The gradient to start from, for a loss that is not a scalar; one for each of
                several losses (default: ``None``).
            retain_graph: Keep the graph for another backward pass (default: ``False``).
            last: Whether this pass completes a step, for accumulations that are shorter than
                ``accumulate=``, as an epoch's last one may be; ``None``: the one that
                ``accumulate=`` says (default: ``None``).

        Raises:
            FloatingPointError: A gradient is not finite and its group's policy is ``"raise"``;
                nothing was updated.
            RuntimeError: The handle was removed, or ``scaler.update()`` was not called since the
                last step, or a parameter is no longer the model's or the optimizer's, or has a
                gradient already; nothing was updated.
            ValueError: ``loss`` is an empty sequence, or ``last=False`` in a pass that completes
                ``accumulate=``.
        """
        if self._optimizer.fused is not self:
            raise RuntimeError("the handle was removed: fuse again, or call loss.backward()")
        self._check_model()
        accumulator = self._accumulator
        if last is False and accumulator.done >= accumulator.passes - 1:
            raise ValueError(
                f"last=False in pass {accumulator.done + 1} of accumulate={accumulator.passes}: "
                "pass the largest number of passes as accumulate="
            )
        accumulator.ends = last
        try:
            self._backward(loss, gradient, retain_graph)
        finally:
            accumulator.ends = None

    def _backward(
        self,
        loss: Tensor | Sequence[Tensor],
        gradient: Tensor | Sequence[Tensor | None] | None,
        retain_graph: bool,
    ) -> None:
        losses = (loss,) if isinstance(loss, Tensor) else tuple(loss)
        if not losses:
            raise ValueError("loss is an empty sequence: pass at least one")
        roots = losses, (gradient,) if isinstance(gradient, Tensor) else gradient
        if not (self._accumulator.last and self._looks_ahead):
            self._run(roots, retain_graph=retain_graph)
            return
        if self._scaling is not None:
            self._factor = self._scaling.factor()
        try:
            if self._look_ahead(roots):
                self._run(roots, retain_graph=retain_graph)
        finally:
            self._factor = self._coefficient = None
            self._kept = KeptGradients(self._keep_bytes)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Backward passes in the block step nothing, and their gradients here are dropped.

        For a loss that goes through this model to train another one, as a generator's goes through
        the discriminator::

            with discriminator_handle.paused():
                loss(discriminator(generator(z))).backward()

        Raises:
            RuntimeError: A backward pass of this model is running.
        """
        if self._inside and not self._failed():
            raise RuntimeError("paused() inside a backward pass: enter it before the pass begins")
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    @property
    def norm_order(self) -> list[Tensor]:
        """The parameters in the order in which their norms enter the global one.

        It decides the last bit, and is at first that of ``model.parameters()``, which
        ``clip_grad_norm_`` is usually given; any other order of them may be set.
        """
        return list(self._norm_order)

    @norm_order.setter
    def norm_order(self, order: Sequence[Tensor]) -> None:
        if len(order) != len(self._params) or set(map(id, order)) != set(map(id, self._params)):
            raise ValueError("norm_order is not an order of the parameters that step here")
        self._norm_order = list(order)

    def gradient_bytes(self, p: Tensor) -> int:
        """Bytes that a parameter's gradient takes between backward passes."""
        return self._accumulator.buffer_bytes(p)

    def remove(self) -> None:
        """Let ``optimizer.step()`` step again; an unfinished accumulation is left in ``.grad``.

        With ``accumulate_in="adam-moments"`` it is left in the moments.
        """
        if self._optimizer.fused is not self:
            return
        for hook in self._hooks:
            hook.remove()
        self._drop_waiting()
        self._accumulator.release(self._params)
        self._optimizer.fused = None
        outside.leave(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()

    def check_scaled(self) -> None:
        """Raise RuntimeError unless the handle was given the scaler that calls ``step()``."""
        if self._scaling is None:
            raise RuntimeError(
                "a gradient scaler and an optimizer whose step is fused: the backward pass has "
                "stepped with scaled gradients. Pass scaler= to fuse_backward"
            )

    def check_saved(self) -> None:
        """Raise RuntimeError if the moments hold a part of a step, which nobody could complete."""
        if self._accumulator.done and not self._accumulator.revocable:
            raise RuntimeError(
                f"state_dict() after {self._accumulator.done} of "
                f"accumulate={self._accumulator.passes} backward passes, whose gradients are in "
                "the moments already: save after a step, or accumulate in 'param', 'fp32' or "
                "'expansion'"
            )

    def loaded(self) -> None:
        """The optimizer has loaded moments, which hold no part of a step."""
        if not self._accumulator.revocable:
            self._accumulator.reset()
            self._done.clear()

    def check_step(self) -> None:
        """Raise RuntimeError unless the passes since the last ``step()`` took one step, or none."""
        self._check_model()
        self._check_untaken()
        done, promised = self._accumulator.done, self._accumulator.passes
        if done:
            raise RuntimeError(
                f"optimizer.step() after {done} of accumulate={promised} backward passes: nothing "
                "has stepped. Pass the number of passes as accumulate=, or call "
                "handle.backward(loss, last=True) in the last one of a shorter accumulation"
            )
        passes, steps = self._passes, self._steps
        self._passes = self._steps = 0
        if steps > 1:
            raise RuntimeError(
                f"optimizer.step() after {passes} backward passes, which have taken {steps} steps, "
                f"one every accumulate={promised}: pass accumulate={passes} to fuse_backward, or "
                "leave optimizer.step() out"
            )

    def _check_untaken(self) -> None:
        """Raise RuntimeError if a parameter has a gradient, to which a pass would add its own."""
        for p in self._params:
            if p.grad is not None:
                raise RuntimeError(
                    f"a parameter of shape {tuple(p.shape)} has a gradient that no fused step has "
                    "taken: it was given by hand, or left by a pass that failed in somebody's "
                    "hook, and has to be set to None; or the parameter was changed by model.to() "
                    "since. Then remove the handle, and fuse again"
                )

    # ------------------------------------------------------------------------------- outside

    def owns(self, p: Tensor) -> bool:
        """Whether a parameter steps in backward passes here."""
        return id(p) in self._places

    def clipped_norm(
        self, parameters: list[Tensor], max_norm: float, norm_type: float
    ) -> Tensor | None:
        """The norm before clipping, if the last pass has stepped with gradients clipped so."""
        ours = {id(p) for p in self._params if p.requires_grad}
        same = (self._clipping.max_norm, self._clipping.norm_type) == (max_norm, norm_type)
        whole = ours == {id(p) for p in parameters if p.requires_grad}
        stepped = self._steps > 0 and self._accumulator.done == 0
        if not (same and whole and stepped) or self.total_norm is None:
            return None
        return self.total_norm.clone()

    def clips_by_value(self, clip_value: float) -> bool:
        """Whether every gradient is clipped just like this."""
        return self._clipping.value == clip_value

    @property
    def clips(self) -> tuple[float | None, float | None]:
        """``max_norm`` and ``clip_value``."""
        return self._clipping.max_norm, self._clipping.value

    @property
    def accumulating(self) -> bool:
        """Whether a step has had some of its backward passes, and not all."""
        return self._accumulator.done > 0

    def clipping_advice(self, max_norm: float) -> str:
        """What to pass in order to clip by a norm."""
        own = self._clipping.max_norm
        if own is None:
            return f"Pass max_norm={max_norm} to fuse_backward"
        return (
            f"The fused step clips all of its parameters together by max_norm={own}: clip those "
            "by the same norm, or leave this out; the norm is handle.total_norm"
        )

    def _check_model(self) -> None:
        """Raise RuntimeError if parameters have been replaced since the step was fused."""
        if self._sharded_by_fsdp:
            # FSDP2 puts whole parameters into the modules and back.
            return
        # At every pass; to go through the modules of a deep model takes ten times as long.
        if all(place.get(name) is each for place, name, each in self._links):
            return
        there = {id(p) for p in self._model.parameters()}
        gone = sum(id(p) not in there for p in self._params)
        if gone:
            raise RuntimeError(
                f"{gone} of the {len(self._params)} parameters that step in the backward pass are "
                "no longer the model's: fully_shard, model.to() or the like has replaced them. "
                "Do that first, then make the optimizer, then fuse"
            )

    # --------------------------------------------------------------------------- passes

    @property
    def _scaling(self) -> ScalerLink | None:
        return self._scaler if self._scaler is not None and self._scaler.active else None

    @property
    def _guarding(self) -> bool:
        return any(g["nonfinite"] != "propagate" for g in self._optimizer.param_groups)

    @property
    def _looks_ahead(self) -> bool:
        """Whether all gradients must be seen before the first step."""
        return self._clipping.max_norm is not None or self._scaling is not None or self._guarding

    def _check_policies(self) -> None:
        if self._guarding and not self._accumulator.revocable:
            raise ValueError(
                "nonfinite='raise' and 'skip' are not available with accumulate_in='adam-moments': "
                "the moments cannot give a gradient back; use nonfinite='propagate'"
            )

    def _run(self, roots: _Roots, *, retain_graph: bool) -> None:
        """One backward pass that was called from here."""
        if self._pauses:
            raise RuntimeError(
                "handle.backward() while the handle is paused: leave the block first"
            )
        self._check_reduced()
        if self._inside and self._failed():
            self._abandon()
            self._drop_gradients()
        self._check_untaken()
        self._begin(None)
        try:
            if self._ahead is None:
                self._kept.backward(*roots, retain_graph=retain_graph)
            else:
                with looking_ahead(), statistics_kept(self._model):
                    self._run_ahead(roots)
            self._check_reduced()
            self._end()
        except BaseException:
            self._abandon()
            self._drop_gradients()
            raise
        finally:
            self._inside = False

    def _follow_groups(self) -> None:
        """Take note of groups that were put in another order.

        Raises:
            RuntimeError: Parameters were added or taken away.
        """
        now = [p for group in self._optimizer.param_groups for p in group["params"]]
        if list(map(id, now)) == self._listed:
            return
        if sorted(map(id, now)) != sorted(self._listed):
            raise RuntimeError(
                "parameters were added to the optimizer's groups, or taken away, while its step is "
                "fused: remove the handle first, and fuse again"
            )
        self._listed = list(map(id, now))
        self._places = places(self._optimizer.param_groups)

    def _check_reduced(self) -> None:
        """Raise RuntimeError if FSDP2 holds gradients back that a pass must see."""
        if not self._sharded_by_fsdp or not (self._accumulator.passes > 1 or self._looks_ahead):
            return
        if fsdp.has_unreduced_gradients(self._model):
            raise RuntimeError(
                "set_requires_gradient_sync(False) has left gradients unreduced, which neither "
                "accumulate= nor a pass that looks ahead (max_norm, scaler, or nonfinite='raise' "
                "or 'skip') can see; nothing was updated. Leave synchronisation on and pass "
                "accumulate=, or accumulate with set_requires_gradient_sync alone. A pass in "
                "handle.paused() with synchronisation on drops them"
            )
        if self._looks_ahead and fsdp.has_partly_reduced_gradients(self._model):
            raise RuntimeError(
                "set_requires_all_reduce(False) has left gradients reduced over some ranks "
                "only, which a pass that looks ahead (max_norm, scaler, or nonfinite='raise' or "
                "'skip') would take twice; nothing was updated. Leave the reduction on and pass "
                "accumulate=. A pass in handle.paused() with the reduction on drops them"
            )

    def _run_ahead(self, roots: _Roots) -> None:
        """The first of two passes. Other leaves have their gradients from the second one alone."""
        losses, _ = roots
        # What FSDP2 shards are not the leaves of the graph.
        if not (self._sharded_by_fsdp or may_nest(losses)):
            if inputs := [p for p in self._params if p.requires_grad]:
                torch.autograd.backward(*roots, retain_graph=True, inputs=inputs)
            return
        ours = {id(p) for p in self._params}
        others = [p for p in (*self._others, *leaves_of(losses)) if id(p) not in ours]
        gradients = {p: p.grad for p in others}
        try:
            for p in others:
                p.grad = None
            torch.autograd.backward(*roots, retain_graph=True)
        finally:
            for p, grad in gradients.items():
                p.grad = grad

    def _abandon(self) -> None:
        """Leave a pass that failed; what it did not step is still accumulated."""
        self._drop_waiting()
        if not self._accumulator.last:
            self._done |= self._completed
        self._inside = False

    def _drop_waiting(self) -> None:
        self._plain, self._arrived, self._arrived_bytes = False, [], 0
        self._waiting.clear()

    def _drop_gradients(self) -> None:
        """Free gradients of a pass that failed before it came to take them."""
        for p in self._params:
            p.grad = None

    def _failed(self) -> bool:
        """Whether the pass that seems to be running is one of the user's that has failed.

        Nobody tells when a plain ``loss.backward()`` raises; but autograd then lets go of what it
        was to call at the end.
        """
        return self._at_end is not None and self._at_end() is None

    def _enter_plain_backward(self) -> None:
        """Called at the first gradient of a ``loss.backward()`` that the user called."""
        self._optimizer.check_groups()
        if self._looks_ahead:
            raise RuntimeError(
                "this optimizer must see all gradients before the first step (max_norm, scaler, or "
                "nonfinite='raise' or 'skip'): call handle.backward(loss), not loss.backward()"
            )
        if _is_nested():
            raise RuntimeError(
                "a backward pass inside the backward pass, as reentrant checkpointing and other "
                "functions of their own run one, whose end cannot be seen from here: call "
                "handle.backward(loss), or use checkpoint(..., use_reentrant=False)"
            )
        if self._sharded_by_fsdp and self._accumulator.passes > 1:
            raise RuntimeError(
                "accumulate= with fully_shard: call handle.backward(loss), which counts passes "
                "that reduce no gradients too, not loss.backward(); or accumulate with "
                "set_requires_gradient_sync(False) and without accumulate="
            )

        def finish() -> None:
            try:
                self._end()
            except BaseException:
                self._abandon()
                raise
            self._inside = False

        torch.autograd.Variable._execution_engine.queue_callback(finish)
        self._begin(ref(finish))

    def _begin(self, finish: ReferenceType[Callable[[], None]] | None) -> None:
        self._optimizer.check_groups()
        self._follow_groups()
        self._check_policies()
        self._completed.clear()
        self._inside, self._at_end = True, finish
        if not self._accumulator.last:
            return
        # What waits for a step in a wider dtype must not wait to be looked at before.
        widens = self._factor is not None or (self._has_fp8 and self._clipping.active)
        special = widens or self._done or self._reduction or self._has_sharded
        self._plain = self._accumulator.passes == 1 and not special
        if self._plain:
            self._completed.update(self._kept.ids())
        if self._reduction is not None:
            waited_for = (p for p in reversed(self._params) if p not in self._kept)
            self._reduction.begin([p for p in waited_for if p.requires_grad])
        # With two passes, the step begins with the first; a pass that failed has begun it already.
        if (self._ahead is not None or not self._looks_ahead) and not self._done:
            self._optimizer.begin_step()

    def _complete(self, p: Tensor) -> None:
        """Called by autograd when a parameter's gradient of this pass is complete."""
        try:
            grad, end = p.grad, self._at_end
            if (
                not self._plain
                or type(grad) is not Tensor
                or grad.layout != torch.strided
                or (end is not None and end() is None)
                or id(p) in self._completed
                or torch.is_grad_enabled()
            ):
                self._take_gradient(p)
                return
            self._completed.add(id(p))
            p.grad = None
            self._arrive(p, grad)
        except BaseException:
            # The next pass would add its own to it.
            p.grad = None
            raise

    # Between two operations of a backward pass nothing of Python is in the caches: what a gradient
    # meets is looked up in a loop, with others.
    def _arrive(self, p: Tensor, grad: Tensor) -> None:
        self._arrived.append((p, grad))
        self._arrived_bytes += grad.nbytes
        if self._arrived_bytes + self._waiting.nbytes >= WAITING_BYTES:
            self._look_at_arrived()

    def _look_at_arrived(self) -> None:
        if not self._arrived:
            return
        params, arrived = map(list, zip(*self._arrived, strict=True))
        self._arrived, self._arrived_bytes = [], 0
        if self._ahead is not None:
            self._ahead.see_all(params, arrived)
            return
        grads = self._clipping.each_alone(params, arrived)
        del arrived
        if self._coefficient is not None:
            grads = each_scaled(grads, self._coefficient)
        groups, places = self._optimizer.param_groups, [self._places[id(p)] for p in params]
        if len({place.group for place in places}) == 1:
            self._waiting.add_all(groups[places[0].group], places, params, grads)
        else:
            for place, p, grad in zip(places, params, grads, strict=True):
                self._waiting.add(groups[place.group], place, p, grad)
        # What has stepped is not kept.
        del grads
        while self._waiting and self._waiting.nbytes >= WAITING_BYTES:
            # The smaller buckets go on waiting.
            self._step_largest()

    def _take_gradient(self, p: Tensor) -> None:
        # Autograd runs hooks with gradients enabled only under create_graph.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward(create_graph=True) while the step is fused: the weights change during "
                "the pass, so it cannot be differentiated again; remove the handle for this"
            )
        # Without a gradient the pass has not reached it: a function gave none, or it was cut off.
        if self._pauses or p in self._kept or p.grad is None:
            p.grad = None
            return
        if self._inside and self._failed():
            self._abandon()
        if not self._inside:
            self._enter_plain_backward()
        if id(p) in self._completed:
            raise RuntimeError(
                f"a parameter of shape {tuple(p.shape)} received gradients twice in one backward "
                "pass. With reentrant checkpointing of a shared parameter, use checkpoint(..., "
                "use_reentrant=False)"
            )
        self._completed.add(id(p))
        if id(p) in self._done:
            p.grad = None
        elif self._accumulator.last:
            self._finish(p)
        else:
            self._accumulator.add(p)

    @torch.no_grad()
    def _end(self) -> None:
        if self._accumulator.last:
            self._finish_untouched()
        if self._ahead is None:
            # What FSDP2 leaves unreduced, a later pass steps.
            stepped = not self._sharded_by_fsdp or bool(self._completed)
            for p, grad in self._kept.take():
                stepped = True
                (self._arrive if self._plain else self._wait)(p, grad)
        self._look_at_arrived()
        self._plain = False
        if self._ahead is not None:
            return
        while self._waiting:
            self._step_largest()
        self._done.clear()
        if self._accumulator.last:
            self._optimizer.end_step()
        self._count(stepped=stepped)
        self._accumulator.advance()

    def _count(self, *, stepped: bool = True) -> None:
        self._passes += 1
        self._steps += stepped and self._accumulator.last

    def _step_largest(self) -> None:
        bucket = self._waiting.pop_largest()
        self._optimizer.step_bucket(bucket)
        if self._accumulator.passes > 1:
            for p in bucket.params:
                self._accumulator.free(p)
                self._done.add(id(p))

    def _finish_untouched(self) -> None:
        """Step parameters that only an earlier pass, or another rank, has reached."""
        for p in self._params:
            if id(p) in self._completed or p in self._kept:
                continue
            if self._accumulator.holds(p):
                self._finish(p)
        if self._reduction is not None:
            for q, grad in self._reduction.rest(self._accumulator.zero):
                self._take(q, grad)

    def _finish(self, p: Tensor) -> None:
        """Called when this rank has the whole gradient that a parameter steps with."""
        total = self._accumulator.total(p)
        if self._reduction is None:
            self._take(p, total)
            return
        for q, grad in self._reduction.complete(p, total):
            self._take(q, grad)

    def _take(self, p: Tensor, grad: Tensor) -> None:
        if self._ahead is not None:
            self._ahead.see(p, grad)
        else:
            self._wait(p, grad)

    # ------------------------------------------------------------------------- stepping

    def _wait(self, p: Tensor, grad: Tensor) -> None:
        if self._factor is not None:
            grad = loss_scaling.unscale(grad, self._factor)
        grad = self._clipping.alone(p, grad)
        if self._coefficient is not None:
            grad = scaled(grad, self._coefficient)
        place, folded = self._places[id(p)], self._accumulator.folded(p)
        self._waiting.add(self._group_of(p), place, p, grad, folded=folded)
        if self._waiting.nbytes >= WAITING_BYTES:
            # The smaller buckets go on waiting.
            self._step_largest()

    def _group_of(self, p: Tensor) -> dict[str, Any]:
        return self._optimizer.param_groups[self._places[id(p)].group]

    # -------------------------------------------------------------------- looking ahead

    def _look_ahead(self, roots: _Roots) -> bool:
        """Run the pass without stepping; return whether the step may follow."""
        kept = KeptGradients(self._keep_bytes)
        self._ahead = LookAhead(self._clipping, self._factor, self._is_guarded, kept)
        try:
            self._run(roots, retain_graph=True)
            bad, clip = self._ahead.nonfinite(), self._ahead.coefficient(self._norm_order)
        finally:
            self._ahead = None
        worst = self._worst(bad)
        if self._scaling is not None:
            self._scaling.report(finite=worst == 0)
        if worst:
            if worst == 1:
                self._count()
            else:
                # No call of step() follows: neither of this pass nor of the accumulation's before.
                self._passes -= self._accumulator.done
            self._accumulator.reset()
            self._leave_out(bad, worst)
            return False
        if clip is not None:
            self.total_norm, self._coefficient = clip
        self._kept = kept
        return True

    def _is_guarded(self, p: Tensor) -> bool:
        return self._scaling is not None or self._group_of(p)["nonfinite"] != "propagate"

    def _worst(self, bad: Sequence[Tensor]) -> int:
        """What the gradients that are not finite do: 0 nothing, 1 skip the step, 2 raise.

        All ranks do alike.
        """
        if self._scaling is None and not self._guarding:
            return 0
        # A scaler provokes overflows on purpose: no error.
        raises = self._scaling is None and any(
            self._group_of(p)["nonfinite"] == "raise" for p in bad
        )
        device = self._params[0].device if self._params else torch.device("cpu")
        return shards.highest(2 if raises else 1 if bad else 0, device)

    def _leave_out(self, bad: Sequence[Tensor], worst: int) -> None:
        """Raise if a gradient's group has the policy ``"raise"``; else count a skipped step."""
        if worst == 1:
            self._optimizer.skip_step()
            return
        for p in bad:
            if self._group_of(p)["nonfinite"] == "raise":
                raise nonfinite_error(self._optimizer.param_groups, p)
        raise nonfinite_elsewhere()


def _hook(p: Tensor, call: Callable[[Tensor], None]) -> RemovableHandle:
    """Hook a parameter even if it is frozen now; autograd hooks only what requires a gradient."""
    trains = p.requires_grad
    p.requires_grad_(True)
    handle: RemovableHandle = p.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]
    p.requires_grad_(trains)
    return handle


def _is_nested() -> bool:
    """Whether the backward pass that is running was called by a function of another one's."""
    frame, passes, begins = sys._getframe(), 0, graph._engine_run_backward.__code__
    while frame.f_back is not None:
        frame = frame.f_back
        passes += frame.f_code is begins
    return passes > 1
