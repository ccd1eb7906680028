"""The optimizer step inside the backward pass: gradients are never all alive.

"Memory Efficient Mixed Precision Optimizers", section 3.2, without what it gives up (section 4.1):
global-norm clipping takes a second backward pass and no gradient memory, accumulation one buffer.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from ..ops import all_finite
from .accumulation import AccumulateIn, Accumulator
from .base import Optimizer

_Mode = Literal["step", "norm"]

# Small gradients wait for company, so that a hundred biases are not a hundred calls.
_WAITING_BYTES = 64 * 1024


def fuse_backward(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    clip_value: float | None = None,
    accumulate: int = 1,
    accumulate_in: AccumulateIn = "param",
) -> FusedBackward:
    """Step each parameter as soon as its gradient is complete, and free the gradient.

    Bit-identical to ``backward(); clip; step(); zero_grad()`` for every optimizer and precision.
    Small gradients wait for each other, 64 KiB of them at most, and are stepped together.

    A parameter's value changes while the pass still runs. Autograd notices an operation that needs
    the old value later and raises its usual error about in-place modification.

    Args:
        model: Module whose parameters the optimizer steps; others keep their gradients.
        optimizer: One of :mod:`subulp.optim`. Its ``step()`` and ``zero_grad()`` do nothing until
            :meth:`FusedBackward.remove`; schedulers and changed group options count from the next
            backward pass on.
        max_norm: Clip the global norm of all gradients, as ``clip_grad_norm_`` does. It must be
            known before the first step, so :meth:`FusedBackward.backward` runs the backward pass
            twice: once for the norm, each gradient freed at once, and once to step.
        norm_type: Which norm (default: 2).
        clip_value: Clamp each gradient element to ``[-clip_value, clip_value]``; costs nothing.
        accumulate: Backward passes to a step; gradients add up in one buffer a parameter
            (default: 1).
        accumulate_in: Format of that buffer: ``"param"`` (as without fusion), ``"fp32"``, or
            ``"expansion"``, two components of the parameter's dtype, for 16-bit parameters
            (default: ``"param"``).

    Returns:
        A handle; also a context manager that removes itself.

    Raises:
        ValueError: An argument is out of range, two contradict each other, or the optimizer is not
            subulp's, fused already, or has none of the model's parameters.
    """
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"optimizer is {type(optimizer).__name__}: only optimizers of subulp.optim can step "
            "one parameter at a time"
        )
    if optimizer._fused:
        raise ValueError("the optimizer is fused already: remove its handle first")
    for name, value in (("max_norm", max_norm), ("clip_value", clip_value)):
        if value is not None and not value > 0:
            raise ValueError(f"{name}={value} is out of range: use a positive number or None")
    if max_norm is not None and clip_value is not None:
        raise ValueError(
            f"max_norm={max_norm} and clip_value={clip_value} are both set: clip one way"
        )
    if accumulate < 1:
        raise ValueError(f"accumulate={accumulate} is out of range: use 1 or more backward passes")
    if accumulate_in not in get_args(AccumulateIn):
        raise ValueError(
            f"accumulate_in={accumulate_in!r} is unknown: use 'param', 'fp32' or 'expansion'"
        )
    mine = {id(p) for g in optimizer.param_groups for p in g["params"]}
    if not any(id(p) in mine for p in model.parameters()):
        raise ValueError(
            "the optimizer has none of the model's parameters: fuse the pair that trains"
        )
    return FusedBackward(
        model, optimizer, max_norm, norm_type, clip_value, Accumulator(accumulate, accumulate_in)
    )


class FusedBackward:
    """Handle of :func:`fuse_backward`.

    Attributes:
        total_norm: Norm before clipping at the last step, with ``max_norm``; else ``None``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        max_norm: float | None,
        norm_type: float,
        clip_value: float | None,
        accumulator: Accumulator,
    ) -> None:
        self.total_norm: Tensor | None = None
        self._optimizer = optimizer
        self._max_norm, self._norm_type, self._clip_value = max_norm, norm_type, clip_value
        self._accumulator = accumulator
        self._mode: _Mode = "step"
        self._inside = False
        self._completed: set[int] = set()
        self._coefficient: Tensor | None = None
        self._norms: dict[int, Tensor] = {}
        self._nonfinite: list[Tensor] = []
        self._places: dict[int, tuple[dict[str, Any], int, int]] = {}
        self._waiting: list[tuple[Tensor, Tensor]] = []
        ours = {id(p) for p in model.parameters()}
        pairs = [(g, i, p) for g in optimizer.param_groups for i, p in enumerate(g["params"])]
        self._params = [p for _, _, p in pairs if id(p) in ours]
        for stream, (group, i, p) in enumerate(pairs):
            self._places[id(p)] = (group, i, stream)
        accumulator.check(self._params)
        optimizer._fused = True
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._complete)
            for p in self._params
            if p.requires_grad
        ]

    # ------------------------------------------------------------------------------ use

    def backward(self, loss: Tensor, gradient: Tensor | None = None) -> None:
        """``loss.backward()``, twice where the norm or a policy needs to see all gradients first.

        Args:
            loss: What to differentiate.
            gradient: Its own gradient, if it is not a scalar (default: ``None``).

        Raises:
            FloatingPointError: A gradient is not finite and its group's policy is ``"raise"``;
                nothing was updated.
        """
        if not (self._two_passes and self._accumulator.last):
            self._run(loss, gradient, "step")
            return
        self._norms, self._nonfinite = {}, []
        self._run(loss, gradient, "norm", retain_graph=True)
        if self._nonfinite:
            self._accumulator.reset()
            self._leave_out()
            return
        if self._max_norm is not None:
            self._coefficient = self._clip_coefficient(self._max_norm)
        try:
            self._run(loss, gradient, "step")
        finally:
            self._coefficient = None

    def remove(self) -> None:
        """Give stepping back to ``optimizer.step()``; half an accumulation stays in ``.grad``."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._accumulator.release(self._params)
        self._optimizer._fused = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()

    # --------------------------------------------------------------------------- passes

    @property
    def _two_passes(self) -> bool:
        policies = {g["nonfinite"] for g in self._optimizer.param_groups}
        return self._max_norm is not None or policies != {"propagate"}

    def _run(
        self, loss: Tensor, gradient: Tensor | None, mode: _Mode, *, retain_graph: bool = False
    ) -> None:
        self._mode = mode
        self._begin()
        try:
            loss.backward(gradient, retain_graph=retain_graph)  # type: ignore[no-untyped-call]
            self._end()
        except BaseException:
            self._waiting.clear()
            raise
        finally:
            self._inside = False
            self._mode = "step"

    def _begin(self) -> None:
        self._inside = True
        self._completed.clear()

    def _enter_plain_backward(self) -> None:
        """The first gradient of a ``loss.backward()`` that the user called."""
        if self._two_passes:
            raise RuntimeError(
                "this optimizer must see all gradients before the first step (max_norm, or "
                "nonfinite='raise' or 'skip'): call handle.backward(loss), not loss.backward()"
            )
        if _inside_reentrant_checkpoint():
            raise RuntimeError(
                "reentrant checkpointing runs backward passes inside the backward pass, whose end "
                "cannot be seen from here: call handle.backward(loss), or use checkpoint(..., "
                "use_reentrant=False)"
            )
        self._begin()

        def finish() -> None:
            self._end()
            self._inside = False

        torch.autograd.Variable._execution_engine.queue_callback(finish)

    @torch.no_grad()
    def _complete(self, p: Tensor) -> None:
        """Called by autograd when a parameter's gradient of this pass is complete."""
        grad = p.grad
        assert grad is not None
        if grad.requires_grad:
            p.grad = None
            raise RuntimeError(
                "backward(create_graph=True) while the step is fused: the weights change during "
                "the pass, so it cannot be differentiated again; remove the handle for this"
            )
        if not self._inside:
            self._enter_plain_backward()
        if id(p) in self._completed:
            raise RuntimeError(
                f"a parameter of shape {tuple(p.shape)} received gradients twice in one backward "
                "pass. With reentrant checkpointing of a shared parameter, use checkpoint(..., "
                "use_reentrant=False); after a backward pass that failed, remove the handle and "
                "fuse again"
            )
        self._completed.add(id(p))
        if self._mode == "norm" and self._accumulator.last:
            self._measure(p, self._accumulator.preview(p))
            self._accumulator.forget(p)
            return
        total = self._accumulator.add(p)
        if total is not None:
            self._wait(p, total)

    @torch.no_grad()
    def _end(self) -> None:
        if self._mode == "norm" and self._accumulator.last:
            for p in self._untouched():
                self._measure(p, self._accumulator.preview(p))
            return
        if self._accumulator.last:
            for p in self._untouched():
                self._wait(p, self._accumulator.take(p))
        self._flush()
        self._accumulator.advance()

    def _untouched(self) -> list[Tensor]:
        """Parameters with gradients of earlier passes only."""
        return [
            p for p in self._params if id(p) not in self._completed and self._accumulator.holds(p)
        ]

    # ------------------------------------------------------------------------- stepping

    def _wait(self, p: Tensor, grad: Tensor) -> None:
        if self._clip_value is not None:
            grad = _arithmetic(grad).clamp(-self._clip_value, self._clip_value)
        if self._coefficient is not None:
            grad = _arithmetic(grad) * self._coefficient.to(grad.device)
        self._waiting.append((p, grad))
        if sum(g.nbytes for _, g in self._waiting) >= _WAITING_BYTES:
            self._flush()

    def _flush(self) -> None:
        ready = [(*self._places[id(p)], p, grad) for p, grad in self._waiting]
        self._waiting.clear()
        for bucket in self._optimizer._bucketed(ready):
            self._optimizer._update(bucket)

    # ------------------------------------------------------------------- looking ahead

    def _measure(self, p: Tensor, grad: Tensor) -> None:
        if self._max_norm is not None:
            self._norms[id(p)] = torch.linalg.vector_norm(_arithmetic(grad), self._norm_type)
        if self._places[id(p)][0]["nonfinite"] != "propagate" and not bool(all_finite([grad])):
            self._nonfinite.append(p)

    def _clip_coefficient(self, max_norm: float) -> Tensor:
        """As ``torch.nn.utils.clip_grad_norm_``, from norms in the order of the parameters."""
        norms = [self._norms[id(p)] for p in self._params if id(p) in self._norms]
        device = norms[0].device
        stacked = torch.stack([norm.to(device) for norm in norms])
        self.total_norm = torch.linalg.vector_norm(stacked, self._norm_type)
        return torch.clamp(max_norm / (self.total_norm + 1e-6), max=1.0)

    def _leave_out(self) -> None:
        """Raise if a group with a gradient that is not finite says so, else count the step."""
        for p in self._nonfinite:
            group = self._places[id(p)][0]
            if group["nonfinite"] == "raise":
                raise self._optimizer._nonfinite_error(group, p)
        self._optimizer._count_skipped_step()


def _inside_reentrant_checkpoint() -> bool:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is CheckpointFunction.backward.__code__:
            return True
    return False


def _arithmetic(grad: Tensor) -> Tensor:
    """A gradient that torch can compute with: FP8 widened."""
    return grad.to(torch.float32) if grad.dtype.itemsize == 1 else grad
