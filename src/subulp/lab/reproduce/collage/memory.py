"""Peak memory of a training step of a language model, whole and by strategy."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise
from statistics import fmean

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel

from .... import optim
from ....diagnostics.memory import track_memory
from ...engine.process_memory import alone, give_back_at_once
from ...tasks.lm.models import Shape, build, use_bf16
from ..found import Found, Observation
from .tensor_parallel import divide, first_rank_of, on_this_rank

_GIB = 2**30
PEAK, SAVED = "peak GiB", "percent saved"
GROWTH = "least growth of percent saved"
SHARE = "of the memory allowed"
MEAN = "mean percent saved"
FITTING = "combinations that fit"


def peak(
    name: str,
    strategies: list[str],
    shape: dict[str, int],
    batch: int,
    model: str = "llama",
    ranks: int = 1,
    micro_batches: int = 1,
) -> Found:
    """Live bytes at the peak of the second step, when all states are there, of one rank, in a fresh
    process, which has a process group of its own and gives all memory back.

    Args:
        name: What the model is called in the cases.
        strategies: Of AdamW.
        shape: Sizes of a model, see :class:`..tasks.lm.models.Shape`.
        batch: Sequences in a batch.
        model: Which model (default: ``"llama"``).
        ranks: That the model is divided over, by tensor parallelism; the first is measured
            (default: 1).
        micro_batches: Batches whose gradients are added up before the step (default: 1).
    """
    sizes = Shape(**shape, model=model)  # type: ignore[arg-type]
    found = [Observation(name, "million parameters", sizes.parameters / 1e6)]
    peaks: dict[str, int] = alone(_peaks, sizes, strategies, batch, ranks, micro_batches)
    for strategy, peak_bytes in peaks.items():
        found.append(Observation(f"{name} {strategy}", PEAK, peak_bytes / _GIB))
    return Found(tuple(found))


def _peaks(
    sizes: Shape, strategies: list[str], batch: int, ranks: int, micro_batches: int
) -> dict[str, int]:
    give_back_at_once()
    with nullcontext() if ranks == 1 else first_rank_of(ranks) as mesh:
        return {o: live_bytes(sizes, o, batch, mesh, micro_batches) for o in strategies}


def live_bytes(
    sizes: Shape, strategy: str, batch: int, mesh: DeviceMesh | None, micro_batches: int = 1
) -> int:
    """Bytes of live tensors at the peak of the second step, on this rank.

    Args:
        sizes: Of the model.
        strategy: Of AdamW.
        batch: Sequences in a batch.
        mesh: Ranks that the model is divided over; ``None`` is one process.
        micro_batches: Batches whose gradients are added up before the step (default: 1).
    """
    torch.manual_seed(0)
    with torch.device("meta"):
        model = build(sizes).to(torch.bfloat16)
    use_bf16(model)
    if mesh is not None:
        divide(model, mesh)
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(on_this_rank(parameter), std=0.02)
    optimizer = optim.AdamW(model.parameters(), precision=strategy, betas=(0.9, 0.95))
    ids = torch.randint(sizes.vocabulary, (batch, sizes.context + 1))
    memory = track_memory(model, optimizer)
    for step in range(2):
        # To make the states two tokens do.
        now = ids if step else ids[:1, :3]
        with memory if step else nullcontext(), nullcontext() if mesh is None else loss_parallel():
            for _ in range(micro_batches if step else 1):
                model.loss(now[:, :-1], now[:, 1:]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    return memory.peak_bytes["total"]


def savings(found: Found, beside: str) -> tuple[Observation, ...]:
    """What every strategy saves of another one's peak, and how that grows with the model.

    Args:
        found: What :func:`peak` has found of several models: GPTs, the smallest first, and then
            one of another kind.
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
        *gpts, _ = saved
        growth = [after - before for before, after in pairwise(gpts)]
        derived += [
            Observation(strategy, GROWTH, min(growth)),
            Observation(f"GPTs {strategy}", MEAN, fmean(gpts)),
            Observation(f"all {strategy}", MEAN, fmean(saved)),
        ]
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
