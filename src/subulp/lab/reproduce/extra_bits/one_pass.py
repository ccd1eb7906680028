"""One pass over all parameters against one for each of them.

"Memory Efficient Mixed Precision Optimizers", the end of section 3.1, and section 4: what it calls
a fused optimizer.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.nn.functional as F

from .... import optim
from ...tasks.image.resnet import ResNet18
from ..found import Found, Observation

TOGETHER, EACH = "one pass", "one for each"
SECONDS, OF_STEP = "seconds of training steps", "seconds of the optimizer"

_PICTURE, _CLASSES = 8, 10


def turns(precision: str, width: int, batch: int, rounds: int, seeds: list[int]) -> Found:
    """Seconds of whole training steps and of the optimizer's part, both ways by turns.

    Args:
        precision: Of SGD with momentum, without random bits; parameters are in FP16.
        width: Channels of a ResNet-18.
        batch: Pictures of 8 x 8 of a step.
        rounds: Steps of each.
        seeds: Of weights and pictures.
    """
    found = []
    for seed in seeds:
        sides = {
            name: _Side(precision, width, seed, each=name == EACH) for name in (TOGETHER, EACH)
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        generator = torch.Generator().manual_seed(seed)
        for i in range(rounds):
            pictures = torch.randn(batch, 1, _PICTURE, _PICTURE, generator=generator).half()
            labels = torch.randint(_CLASSES, (batch,), generator=generator)
            for name in sorted(sides, reverse=i % 2 == 0):
                times[name].append(sides[name].step(pictures, labels))
        for name, spent in times.items():
            whole, own = (statistics.median(part) for part in zip(*spent, strict=True))
            found += [
                Observation(name, SECONDS, whole, seed),
                Observation(name, OF_STEP, own, seed),
            ]
        a, b = (list(side.model.parameters()) for side in sides.values())
        differ = sum(int((p != q).sum()) for p, q in zip(a, b, strict=True))
        found.append(Observation(EACH, "weights that differ", differ, seed))
    return Found(tuple(found))


class _Side:
    """A model in training, its parameters under one optimizer, or each under its own."""

    def __init__(self, precision: str, width: int, seed: int, *, each: bool) -> None:
        torch.manual_seed(seed)
        self.model = ResNet18(channels=1, classes=_CLASSES, width=width).half()
        parameters = list(self.model.parameters())
        groups = [[p] for p in parameters] if each else [parameters]
        self.optimizers = [
            optim.SGD(group, lr=0.05, momentum=0.9, precision=precision) for group in groups
        ]

    def step(self, pictures: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
        """Train; seconds of all of it, and of the optimizers' part."""
        begin = time.perf_counter()
        F.cross_entropy(self.model(pictures), labels).backward()  # type: ignore[no-untyped-call]
        middle = time.perf_counter()
        for optimizer in self.optimizers:
            optimizer.step()
        end = time.perf_counter()
        for p in self.model.parameters():
            p.grad = None
        return end - begin, end - middle
