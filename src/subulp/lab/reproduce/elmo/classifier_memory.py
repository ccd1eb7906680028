"""Memory and time of a classifier's training step by number of labels, chunks and storage."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from .... import nn, optim
from ....diagnostics.memory import track_memory
from ...engine.process_memory import alone, kib
from ...tasks.lm.models import BERT, Shape, use_bf16
from ...tasks.xmc.renee import ReneeClassifier
from ..found import MOST_POINTS, Curve, Found, Observation

STORAGES = {"fp32": "fp32", "bf16": "bf16", "fp8": "e4m3"}
POSITIVES = 5
"""Labels of an instance."""

PEAK, SECONDS = "peak GiB", "seconds of a step"
_GIB = 2**30
_ROUNDS = 5


def classifier(
    storage: str, labels: int, dim: int, chunks: int, dropout: float = 0.0
) -> tuple[Any, optim.RowSGD]:
    """A classifier of a storage, or the baseline ``"renee"``, and its optimizer."""
    head: Any
    if storage == "renee":
        head = ReneeClassifier(dim, labels, 0)
    else:
        head = nn.ExtremeClassifier(
            dim,
            labels,
            storage=STORAGES[storage],
            chunks=chunks,
            dropout=dropout,
            seed=0,
            reduction="sum",
        )
    return head, optim.RowSGD(head, lr=0.05)


def batch_of(labels: int, dim: int, batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, and instances and labels of their pairs."""
    x = torch.randn(batch, dim).mul_(0.3).requires_grad_()
    rows = torch.arange(batch).repeat_interleave(POSITIVES)
    return x, rows, torch.randint(labels, (batch * POSITIVES,))


def step(
    storage: str, labels: int, dim: int, batch: int, chunks: int, dropout: float = 0.0
) -> float:
    """Build a classifier and train it for two steps; seconds of the second."""
    head, _ = classifier(storage, labels, dim, chunks, dropout)
    given = batch_of(labels, dim, batch)
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        head(*given).backward()
        seconds = time.perf_counter() - start
    return seconds


def measure(
    storage: str,
    labels: int,
    dim: int,
    batch: int,
    chunks: int,
    threads: int,
    dropout: float = 0.0,
) -> tuple[int, float]:
    """Peak bytes above what this process had before, and seconds of a step."""
    torch.set_num_threads(threads)
    step(storage, 2000, 16, batch, 2, dropout)
    before = kib("/proc/self/status", "VmRSS")
    seconds = step(storage, labels, dim, batch, chunks, dropout)
    return (kib("/proc/self/status", "VmHWM") - before) * 1024, seconds


def by_labels(
    storages: list[str], labels: list[int], at: list[int], dim: int, batch: int, threads: int
) -> Found:
    """Peak of resident memory by number of labels, each case in a process of its own.

    Args:
        storages: Of the rows, with the baseline.
        labels: Numbers of labels, ascending, at least two.
        at: Numbers of labels at which a straight line through the last two is read.
        dim: Size of a vector.
        batch: Instances.
        threads: Threads of each process.
    """
    observations, curves = [], []
    for storage in storages:
        peaks = [alone(measure, storage, n, dim, batch, 8, threads)[0] / _GIB for n in labels]
        curves.append(Curve(storage, PEAK, tuple(labels), tuple(peaks)))
        slope = (peaks[-1] - peaks[-2]) / (labels[-1] - labels[-2])
        observations.append(
            Observation(storage, "bytes of a weight at the peak", slope * _GIB / dim)
        )
        observations += [
            Observation(f"{storage}, {n:,} labels", "GiB of the classifier by a line", value)
            for n, value in ((n, peaks[-1] + slope * (n - labels[-1])) for n in at)
        ]
    return Found(tuple(observations), tuple(curves))


def by_chunks(
    storage: str, chunks: list[int], labels: int, dim: int, batch: int, threads: int
) -> Found:
    """Peak memory and seconds of a step by the number of chunks.

    Args:
        storage: Of the rows.
        chunks: Numbers of chunks.
        labels: Number of labels.
        dim: Size of a vector.
        batch: Instances.
        threads: Threads of each process.
    """
    observations = []
    for count in chunks:
        peak, _ = alone(measure, storage, labels, dim, batch, count, threads)
        observations.append(Observation(f"{count} chunks", PEAK, peak / _GIB))
    cases = {f"{n} chunks": (storage, n) for n in chunks}
    observations += alone(_seconds, cases, labels, dim, batch, threads, _ROUNDS)
    peaks = tuple(o.value for o in observations[: len(chunks)])
    return Found(tuple(observations), (Curve(storage, PEAK, tuple(chunks), peaks),))


def by_storage(
    storages: list[str], labels: int, dim: int, batch: int, threads: int, rounds: int
) -> Found:
    """Seconds of a classifier's step, storages by turns, and the speed beside the first one.

    Args:
        storages: Of the rows, with the baseline.
        labels: Number of labels.
        dim: Size of a vector.
        batch: Instances.
        threads: Threads of the process.
        rounds: Steps of each storage.
    """
    cases = {storage: (storage, 8) for storage in storages}
    return Found(tuple(alone(_seconds, cases, labels, dim, batch, threads, rounds)))


def _seconds(
    cases: dict[str, tuple[str, int]], labels: int, dim: int, batch: int, threads: int, rounds: int
) -> list[Observation]:
    """Medians; a slow moment of the machine meets all cases."""
    torch.set_num_threads(threads)
    heads = {name: classifier(s, labels, dim, chunks) for name, (s, chunks) in cases.items()}
    given = batch_of(labels, dim, batch)
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(rounds + 1):
        for name, (head, _) in heads.items():
            begin = time.perf_counter()
            head(*given).backward()
            # The first step makes what later ones find.
            if turn:
                taken[name].append(time.perf_counter() - begin)
    first = next(iter(taken.values()))
    found = []
    for name, seconds in taken.items():
        found.append(Observation(name, SECONDS, statistics.median(seconds)))
        ratio = statistics.median(a / b for a, b in zip(first, seconds, strict=True))
        found.append(Observation(name, "speed beside the first", ratio))
    return found


def dropouts(
    storage: str, dropout: float, labels: int, dim: int, batch: int, threads: int
) -> Found:
    """Peak memory with and without dropout of the classifier's weights.

    Args:
        storage: Of the rows.
        dropout: Share of the weights that a step drops.
        labels: Number of labels.
        dim: Size of a vector.
        batch: Instances.
        threads: Threads of each process.
    """
    found = []
    for name, share in (("without dropout", 0.0), ("with dropout", dropout)):
        peak, _ = alone(measure, storage, labels, dim, batch, 8, threads, share)
        found.append(Observation(name, "bytes of a weight", peak / (labels * dim)))
    return Found(tuple(found))


def trace(storages: list[str], labels: int, dim: int, batch: int, chunks: int) -> Found:
    """Live tensors over a step of the classifier, from before the forward pass to its end.

    Args:
        storages: Of the rows, with the baseline.
        labels: Number of labels.
        dim: Size of a vector.
        batch: Instances.
        chunks: Parts of the labels.
    """
    observations, curves = [], []
    weights = labels * dim
    for storage in storages:
        head, optimizer = classifier(storage, labels, dim, chunks)
        given = batch_of(labels, dim, batch)
        head(*given).backward()
        with track_memory(head, optimizer) as memory:
            head(*given).backward()
        kept = sum(t.nbytes for t in (*head.parameters(), *head.buffers()))
        # What stands there at the beginning comes tensor by tensor.
        live = [m.bytes["total"] for m in memory.timeline if m.bytes["total"] >= kept]
        curves.append(
            highest(storage, "live bytes of a weight", [value / weights for value in live])
        )
        observations += [
            Observation(storage, "bytes of a weight before the step", kept / weights),
            Observation(storage, "bytes of a weight at the peak", max(live) / weights),
        ]
        del head, optimizer, memory
    return Found(tuple(observations), tuple(curves))


def highest(case: str, quantity: str, values: list[float]) -> Curve:
    """At most as many points as a figure shows, each the highest of those that it stands for."""
    each = -(-len(values) // MOST_POINTS)
    parts = [values[i : i + each] for i in range(0, len(values), each)]
    moments = tuple(100 * (i + 1) / len(parts) for i in range(len(parts)))
    return Curve(case, quantity, moments, tuple(map(max, parts)))


def encoder(shape: dict[str, int], tokens: int, batches: list[int], at: int) -> Found:
    """Live tensors of an encoder in BF16 with Kahan summation, at the moment between its forward
    pass and the classifier's step: weights, states and all activations.

    Args:
        shape: Sizes of a BERT, see :class:`..tasks.lm.models.Shape`.
        tokens: Tokens of a text.
        batches: Two numbers of texts; every text adds the same.
        at: Number of texts at which the straight line is read.
    """
    torch.manual_seed(0)
    sizes = Shape(**shape, context=tokens, tie_head=True, model="bert")
    model = BERT(sizes).to(torch.bfloat16)
    use_bf16(model)
    optimizer = optim.AdamW(model.parameters(), precision="kahan")
    # The states are there from the first step on.
    model.encoded(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    live = []
    for batch in batches:
        with track_memory(model, optimizer) as memory:
            encoded = model.encoded(torch.randint(sizes.vocabulary, (batch, tokens)))
            live.append(memory.timeline[-1].bytes["total"] / _GIB)
        del encoded
    slope = (live[1] - live[0]) / (batches[1] - batches[0])
    return Found(
        (
            Observation("encoder", "GiB of a text", slope),
            Observation("encoder", "GiB by a line", live[1] + slope * (at - batches[1])),
        )
    )
