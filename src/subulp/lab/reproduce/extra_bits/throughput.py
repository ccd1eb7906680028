"""Bytes that an addition to narrow parameters moves in a second, against a copy of the machine's.

"Memory Efficient Mixed Precision Optimizers", Figure 3. The operation is a step of SGD without
momentum, which adds a multiple of the gradient in place.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from .... import optim
from ..found import Found, Observation

COPY = "copy"
TORCH = "torch's add_"


def additions(strategies: list[str], dtype: str, elements: int, rounds: int) -> Found:
    """Share of the copy's bandwidth, all by turns in one process.

    Args:
        strategies: Of SGD.
        dtype: Of parameters and gradients, a name in torch.
        elements: Of the parameter; more than caches hold.
        rounds: Turns of each; a slow moment of the machine meets all of them.
    """
    narrow = getattr(torch, dtype)
    source = torch.randn(elements)
    target = torch.empty_like(source)
    added, addend = torch.randn(elements).to(narrow), torch.randn(elements).to(narrow)
    calls: dict[str, Callable[[], object]] = {
        COPY: lambda: target.copy_(source),
        TORCH: lambda: added.add_(addend, alpha=-1e-3),
    }
    # Read and written; of additions, the addend is read too.
    moved = {COPY: 2 * source.nbytes, TORCH: 2 * added.nbytes + addend.nbytes}
    for strategy in strategies:
        p = torch.nn.Parameter(torch.randn(elements).to(narrow))
        p.grad = addend
        # Gradients are not looked at, as torch's addition does not look at its addend.
        optimizer = optim.SGD([p], lr=1e-3, precision=strategy, nonfinite="propagate")
        optimizer.step()
        kept = [t for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)]
        beside = sum(t.nbytes for t in kept if t.numel() > 1)
        moved[strategy] = 2 * (p.nbytes + beside) + addend.nbytes
        calls[strategy] = optimizer.step
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            if turn:
                times[name].append(time.perf_counter() - begin)
    found = []
    for name, spent in times.items():
        bytes_of_copy = moved[name] / moved[COPY]
        shares = [bytes_of_copy * copy / own for copy, own in zip(times[COPY], spent, strict=True)]
        found.append(Observation(name, "share of a copy's bandwidth", statistics.median(shares)))
        found.append(Observation(name, "seconds", statistics.median(spent)))
    return Found(tuple(found))


def means(found: Found, cases: dict[str, list[str]]) -> tuple[Observation, ...]:
    """Mean shares of several cases together.

    Args:
        found: What :func:`additions` has found.
        cases: Names of the means, and of what is in them.
    """
    quantity = "share of a copy's bandwidth"
    means = []
    for name, own in cases.items():
        shares = [of for case in own if (of := found.values(case, quantity))]
        for seed in shares[0] if shares else ():
            mean = statistics.fmean(of[seed] for of in shares)
            means.append(Observation(name, quantity, mean, seed))
    return tuple(means)
