"""Seconds of whole training steps of a language model, strategies by turns."""

from __future__ import annotations

import statistics
import time

import torch

from .... import optim
from ...tasks.lm.models import Shape, build, use_bf16
from ..found import Found, Observation


def steps(strategies: list[str], shape: dict[str, int], batch: int, rounds: int) -> Found:
    """Median seconds of a step, forward, backward and optimizer, and the speed beside others.

    Args:
        strategies: Of AdamW; the last one is what the others are compared with.
        shape: Sizes of a model with rotary positions.
        batch: Sequences in a batch.
        rounds: Steps of each strategy; a slow moment of the machine meets all of them.
    """
    sizes = Shape(**shape, model="llama")  # type: ignore[arg-type]
    ids = torch.randint(
        sizes.vocabulary, (batch, sizes.context + 1), generator=torch.Generator().manual_seed(0)
    )
    runs = {}
    for strategy in strategies:
        torch.manual_seed(0)
        model = build(sizes).to(torch.bfloat16)
        use_bf16(model)
        runs[strategy] = (model, optim.AdamW(model.parameters(), precision=strategy))
    seconds: dict[str, list[float]] = {strategy: [] for strategy in strategies}
    for turn in range(rounds + 1):
        for strategy, (model, optimizer) in runs.items():
            begin = time.perf_counter()
            model.loss(ids[:, :-1], ids[:, 1:]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            # The first step makes the states.
            if turn:
                seconds[strategy].append(time.perf_counter() - begin)
    found = [Observation("model", "million parameters", sizes.parameters / 1e6)]
    for strategy, taken in seconds.items():
        found.append(Observation(strategy, "seconds of a step", statistics.median(taken)))
        ratio = statistics.median(
            b / own for b, own in zip(seconds[strategies[-1]], taken, strict=True)
        )
        found.append(Observation(strategy, "speed beside master", ratio))
    return Found(tuple(found))
