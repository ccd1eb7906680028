"""Peak memory of a training step of a language model, whole and by strategy."""

from __future__ import annotations

from itertools import pairwise

import torch

from .... import optim
from ....diagnostics.memory import track_memory
from ...tasks.lm.models import Shape, build, use_bf16
from ..found import Found, Observation

_GIB = 2**30
PEAK, SAVED = "peak GiB", "percent saved"
GROWTH = "least growth of percent saved"
SHARE = "of the memory allowed"
FITTING = "combinations that fit"


def peak(name: str, strategies: list[str], shape: dict[str, int], batch: int) -> Found:
    """Live bytes at the peak of the second step, when all states are there.

    Args:
        name: What the model is called in the cases.
        strategies: Of AdamW.
        shape: Sizes of a model with rotary positions, see :class:`..tasks.lm.models.Shape`.
        batch: Sequences in a batch.
    """
    sizes = Shape(**shape, model="llama")  # type: ignore[arg-type]
    found = [Observation(name, "million parameters", sizes.parameters / 1e6)]
    for strategy in strategies:
        torch.manual_seed(0)
        with torch.device("meta"):
            model = build(sizes).to(torch.bfloat16)
        model = model.to_empty(device="cpu")
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        use_bf16(model)
        optimizer = optim.AdamW(model.parameters(), precision=strategy, betas=(0.9, 0.95))
        ids = torch.randint(sizes.vocabulary, (batch, sizes.context + 1))
        memory = track_memory(model, optimizer)
        for step in range(2):
            # To make the states two tokens do.
            now = ids if step else ids[:1, :3]
            with memory if step else torch.enable_grad():
                model.loss(now[:, :-1], now[:, 1:]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
        gib = memory.peak_bytes["total"] / _GIB
        found.append(Observation(f"{name} {strategy}", PEAK, gib))
        del model, optimizer, memory, parameter
    return Found(tuple(found))


def savings(found: Found, beside: str) -> tuple[Observation, ...]:
    """What every strategy saves of another one's peak, and how that grows with the model.

    Args:
        found: What :func:`peak` has found of several models, the smallest first.
        beside: The other strategy.
    """
    names, strategies, peaks = _table(found)
    derived = []
    for strategy in strategies:
        if strategy == beside:
            continue
        saved = [100 * (1 - peaks[f"{n} {strategy}"] / peaks[f"{n} {beside}"]) for n in names]
        derived += [
            Observation(f"{name} {strategy}", SAVED, percent)
            for name, percent in zip(names, saved, strict=True)
        ]
        growth = [after - before for before, after in pairwise(saved)]
        derived.append(Observation(strategy, GROWTH, min(growth)))
    return tuple(derived)


def fitting(found: Found, beside: str) -> tuple[Observation, ...]:
    """Which batches fit into the memory that one strategy needs for the smallest of them.

    Args:
        found: What :func:`peak` has found of several batches, the smallest first.
        beside: That strategy.
    """
    names, strategies, peaks = _table(found)
    allowed = peaks[f"{names[0]} {beside}"]
    derived = []
    for strategy in strategies:
        shares = {f"{name} {strategy}": peaks[f"{name} {strategy}"] / allowed for name in names}
        derived += [Observation(case, SHARE, share) for case, share in shares.items()]
        fit = sum(share <= 1 for share in shares.values())
        derived.append(Observation(strategy, FITTING, fit))
    return tuple(derived)


def _table(found: Found) -> tuple[list[str], list[str], dict[str, float]]:
    """Names of what was measured, strategies, and the peaks of each with each."""
    names = [o.case for o in found.observations if o.quantity == "million parameters"]
    peaks = {o.case: o.value for o in found.observations if o.quantity == PEAK}
    strategies = [case.removeprefix(f"{names[0]} ") for case in peaks if case.startswith(names[0])]
    return names, strategies, peaks
