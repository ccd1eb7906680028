"""Clipping and unscaling by hooks of parameters, in a step inside the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .... import optim
from ..found import Found, Observation

DIFFERENT = "numbers that differ"
CLIPPED = "share of the gradients that are clipped"
LEFT = "gradients left"

VALUE, SCALE, NORM, SUM, NONE = (
    "clipping by value",
    "loss scaling",
    "clipping by the norm of all",
    "accumulation",
    "clipping by value against none",
)
_SCALE = 2.0**10
_PASSES = 2


def hooks(
    optimizer: str, precision: str, width: int, steps: int, clip: float, seeds: list[int]
) -> Found:
    """Weights and states after steps inside the backward pass, and after the usual loop's.

    Hooks are those of the paper: ``p.register_hook(lambda grad: clamp(grad, -clip, clip))``.

    Args:
        optimizer: ``"SGD"`` or ``"AdamW"``.
        precision: Its strategy.
        width: Of a network of three layers in BF16.
        steps: Steps.
        clip: Largest element, and, tenfold, largest norm, of a gradient.
        seeds: Of weights and inputs.
    """
    found = []
    for seed in seeds:
        own = _Case(optimizer, precision, width, steps, clip, seed)
        for case, different in own.compared():
            found.append(Observation(case, DIFFERENT, different, seed))
        found.append(Observation(VALUE, CLIPPED, own.clipped, seed))
        found.append(Observation("fused", LEFT, own.left, seed))
    return Found(tuple(found))


class _Case:
    """Trainings that differ only in where they step and clip."""

    def __init__(
        self, optimizer: str, precision: str, width: int, steps: int, clip: float, seed: int
    ) -> None:
        self._optimizer, self._precision = optimizer, precision
        self._width, self._steps, self._clip, self._seed = width, steps, clip, seed
        self.clipped = 0.0
        self.left = 0

    def compared(self) -> Iterator[tuple[str, int]]:
        """Each case, and the stored numbers in which its two trainings differ."""
        clip = self._clip
        clamp = _hook(lambda grad: torch.clamp(grad, -clip, clip))
        by_value = self._usual(self._clip_values)
        yield VALUE, _differing(self._fused(clamp), by_value)
        yield NONE, _differing(by_value, self._usual(lambda _: None))
        unscale = _hook(lambda grad: grad / _SCALE)
        yield SCALE, _differing(self._fused(unscale, _SCALE), self._usual(_unscale, _SCALE))
        yield NORM, _differing(self._fused(max_norm=10 * clip), self._usual(self._clip_norm))
        summed = self._usual(lambda _: None, accumulate=_PASSES)
        yield SUM, _differing(self._fused(accumulate=_PASSES), summed)

    def _made(self) -> tuple[torch.nn.Module, optim.SGD | optim.AdamW, torch.Generator]:
        generator = torch.Generator().manual_seed(self._seed)
        width = self._width
        sizes = ((width, width), (width, width), (width, 1))
        layers = [torch.nn.Linear(*size, dtype=torch.bfloat16) for size in sizes]
        with torch.no_grad():
            for layer in layers:
                for p in layer.parameters():
                    p.copy_(torch.randn(p.shape, generator=generator) / width**0.5)
        model = torch.nn.Sequential(
            layers[0], torch.nn.Tanh(), layers[1], torch.nn.Tanh(), layers[2]
        )
        kind = getattr(optim, self._optimizer)
        return model, kind(model.parameters(), lr=2.0**-6, precision=self._precision), generator

    def _loss(self, model: torch.nn.Module, generator: torch.Generator) -> Tensor:
        x = torch.randn(32, self._width, generator=generator).bfloat16()
        loss: Tensor = (model(x).float() - x[:, :1].float()).square().mean()
        return loss

    def _fused(
        self,
        hooked: Callable[[torch.nn.Module], object] = lambda _: None,
        scale: float = 1.0,
        *,
        max_norm: float | None = None,
        accumulate: int = 1,
    ) -> list[Tensor]:
        model, optimizer, generator = self._made()
        hooked(model)
        with optim.fuse_backward(
            model, optimizer, max_norm=max_norm, accumulate=accumulate
        ) as fused:
            for _ in range(self._steps * accumulate):
                loss = self._loss(model, generator) * scale
                if max_norm is None:
                    loss.backward()  # type: ignore[no-untyped-call]
                else:
                    fused.backward(loss)
            self.left += sum(p.grad is not None for p in model.parameters())
        return _stored(model, optimizer)

    def _usual(
        self,
        change: Callable[[torch.nn.Module], None],
        scale: float = 1.0,
        *,
        accumulate: int = 1,
    ) -> list[Tensor]:
        model, optimizer, generator = self._made()
        for _ in range(self._steps):
            for _ in range(accumulate):
                (self._loss(model, generator) * scale).backward()  # type: ignore[no-untyped-call]
            change(model)
            optimizer.step()
            optimizer.zero_grad()
        return _stored(model, optimizer)

    def _clip_values(self, model: torch.nn.Module) -> None:
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        share = float((gradients.abs() > self._clip).float().mean())
        self.clipped += share / self._steps
        torch.nn.utils.clip_grad_value_(model.parameters(), self._clip)

    def _clip_norm(self, model: torch.nn.Module) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10 * self._clip)


def _hook(change: Callable[[Tensor], Tensor]) -> Callable[[torch.nn.Module], None]:
    def register(model: torch.nn.Module) -> None:
        for p in model.parameters():
            p.register_hook(change)  # type: ignore[no-untyped-call]

    return register


def _unscale(model: torch.nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad /= _SCALE


def _stored(model: torch.nn.Module, optimizer: optim.SGD | optim.AdamW) -> list[Tensor]:
    states = [t for p in model.parameters() for t in optimizer.state[p].values()]
    kept = [*model.parameters(), *(t for t in states if isinstance(t, Tensor))]
    return [t.detach().clone() for t in kept]


def _differing(a: list[Tensor], b: list[Tensor]) -> int:
    return sum(int((x != y).sum()) for x, y in zip(a, b, strict=True))
