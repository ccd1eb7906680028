"""What a first backward pass learns of all gradients, before a second one steps with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ...ops.all_finite import are_finite
from .. import loss_scaling, shards
from .clipping import Clipping
from .kept import KeptGradients


class LookAhead:
    """Sees every gradient of a step once, and keeps a few numbers of each.

    Args:
        clipping: If it needs norms, they are computed.
        factor: The factor that unscales gradients; ``None`` without a scaler.
        guarded: Whether the gradient of a parameter must be finite.
        kept: Takes the gradients that the second pass need not compute again.
    """

    def __init__(
        self,
        clipping: Clipping,
        factor: float | None,
        guarded: Callable[[Tensor], bool],
        kept: KeptGradients,
    ) -> None:
        self._clipping, self._factor, self._guarded = clipping, factor, guarded
        self._kept = kept
        self._norms: dict[int, Tensor] = {}
        self._finite: list[tuple[Tensor, Tensor]] = []

    def see(self, p: Tensor, grad: Tensor) -> None:
        """Record a gradient that is still scaled."""
        self._kept.add(p, grad)
        if self._guarded(p):
            self._finite.append((p, are_finite([shards.gradient_part(p, grad)])))
        if self._clipping.max_norm is not None:
            if self._factor is not None:
                grad = loss_scaling.unscale(grad, self._factor)
            self._norms[id(p)] = self._clipping.norm(p, grad)

    def see_all(self, params: Sequence[Tensor], grads: list[Tensor]) -> None:
        """:meth:`see` of several gradients, dense, plain and not scaled."""
        for p, grad in zip(params, grads, strict=True):
            self._kept.add(p, grad)
            if self._guarded(p):
                self._finite.append((p, are_finite([grad])))
        if self._clipping.max_norm is not None:
            norms = self._clipping.norms(params, grads)
            self._norms.update(zip(map(id, params), norms, strict=True))

    def nonfinite(self) -> list[Tensor]:
        """The guarded parameters whose gradients are not finite."""
        if not self._finite:
            return []
        # The host waits once for all of them.
        device = self._finite[0][1].device
        flags = torch.stack([finite.to(device) for _, finite in self._finite]).tolist()
        return [p for (p, _), finite in zip(self._finite, flags, strict=True) if not finite]

    def coefficient(self, order: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
        """Global norm and clipping coefficient, of norms in ``order``; ``None`` without norms."""
        norms = [self._norms[id(p)] for p in order if id(p) in self._norms]
        if not norms or self._clipping.max_norm is None:
            return None
        return self._clipping.coefficient(norms, self._clipping.max_norm)


@contextmanager
def statistics_kept(model: nn.Module) -> Iterator[None]:
    """A block after which modules of batch statistics have theirs of before.

    Where ``torch.utils.checkpoint`` computes activations again, they count the batch once more in
    every backward pass; it is to be once, as without a pass that looks ahead.
    """
    kept = [
        (buffer, buffer.detach().clone())
        for module in model.modules()
        if module.training and isinstance(getattr(module, "running_mean", None), Tensor)
        for buffer in module.buffers(recurse=False)
    ]
    try:
        yield
    finally:
        for buffer, before in kept:
            # Without a new version: the pass that steps needs none of their values.
            buffer.data.copy_(before)
