"""How gpu_rates.py measures: methods take turns, and ratios are of one round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

Step = Callable[[], object]
Sizes = dict[str, int]

FULL: Sizes = {
    **{"rounds": 20, "numel": 1 << 28, "rows": 2_000_000, "dim": 128, "batch": 2048, "tables": 26},
    **{"labels": 131_072, "width": 768, "instances": 128, "layer": 4096, "all_labels": 3_000_000},
    **{"square": 8192, "layers": 12, "heads": 12, "tokens": 128, "words": 30_522, "places": 512},
}
SMALL: Sizes = {
    **{"rounds": 1, "numel": 1 << 12, "rows": 200, "dim": 16, "batch": 2, "tables": 2},
    **{"labels": 256, "width": 32, "instances": 4, "layer": 128, "all_labels": 3000},
    **{"square": 32, "layers": 1, "heads": 2, "tokens": 4, "words": 50, "places": 8},
}


@dataclass(frozen=True)
class Prepared:
    """A step, and what comes before each without being part of its time."""

    step: Step
    before: Step

    def __call__(self) -> object:
        return self.step()


def prepare(step: Step) -> None:
    if isinstance(step, Prepared):
        step.before()


class Turns:
    """Methods that take turns: seconds of each round."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        self.device, self.rounds = device, rounds
        self.seconds: dict[str, list[float]] = {}

    def run(self, methods: dict[str, Step], warm_up: int = 3) -> None:
        for _ in range(warm_up):
            for step in methods.values():
                prepare(step)
                step()
        for _ in range(self.rounds):
            for name, step in methods.items():
                self.seconds.setdefault(name, []).append(self._time(step))

    def _time(self, step: Step) -> float:
        prepare(step)
        if self.device.type != "cuda":
            started = time.perf_counter()
            step()
            return time.perf_counter() - started
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        first.record()
        step()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratio(self, name: str, other: str) -> float:
        """How many times as fast as another a method is."""
        pairs = zip(self.seconds[other], self.seconds[name], strict=True)
        return statistics.median(a / b for a, b in pairs)


def release(device: torch.device) -> None:
    """Give back what tensors that are gone have left reserved."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
