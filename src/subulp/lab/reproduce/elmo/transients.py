"""What a classifier's step needs beside its rows, by the number of chunks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ....diagnostics.memory import track_memory
from ..found import Found, Observation
from .classifier_memory import batch_of, classifier

TRANSIENT = "MiB beside the rows"


def by_chunks(storages: list[str], chunks: list[int], labels: int, dim: int, batch: int) -> Found:
    """Live tensors at the peak of a step in plain PyTorch, without the rows.

    Args:
        storages: Of the rows.
        chunks: Numbers of chunks.
        labels: Number of labels, a multiple of each.
        dim: Size of a vector.
        batch: Instances.
    """
    found = []
    with plain():
        for storage in storages:
            for count in chunks:
                head, optimizer = classifier(storage, labels, dim, count)
                given = batch_of(labels, dim, batch)
                with track_memory(head, optimizer) as memory:
                    head(*given).backward()
                peak = memory.peak_bytes["total"] - memory.peak_bytes["weights"]
                found.append(Observation(case_of(storage, count), TRANSIENT, peak / 2**20))
    return Found(tuple(found))


def case_of(storage: str, chunks: int) -> str:
    """What a case is called."""
    return f"{storage}, {chunks} chunk{'s' if chunks > 1 else ''}"


@contextmanager
def plain() -> Iterator[None]:
    """The reference, whose scratch memory is tensors; a chunk is one tile there, as on GPUs."""
    name = "SUBULP_BACKEND"
    saved = os.environ.get(name)
    os.environ[name] = "reference"
    try:
        yield
    finally:
        if saved is None:
            del os.environ[name]
        else:
            os.environ[name] = saved
