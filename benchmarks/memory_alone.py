"""The memory that a step of an embedding table must touch, and a loop that does nothing else.

A bound by bytes takes it that memory is read in order. Rows lie anywhere: each of their lines is a
wait of its own, and how many waits a core can have at a time, not the bandwidth, decides. So a loop
in C (memory_alone.c, compiled with ``cc`` when a benchmark runs) asks for the lines of a batch and
touches them, each different row once a pass:

* the forward pass reads the rows, where they lie, and the tags of their sets;
* the update reads the tags, and reads and writes counts, accumulators and the rows again.

A thread has the same rows in both passes. No lookup, sum, gradient, sort or random bit is in it.

How long a core waits for what another one wrote is measured beside it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from subulp.nn import CachedEmbeddingBag
from subulp.ops.embedding.rows import set_of

SOURCE = Path(__file__).with_suffix(".c")

RUN = np.dtype([("at", np.uint64), ("bytes", np.int32), ("written", np.int32)])
"""As memory_alone.c has it."""


@cache
def loop() -> ctypes.CDLL | None:
    """The compiled loop; ``None`` where there is no C compiler."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "memory_alone.so"
        options = ("-O2", "-fopenmp", "-shared", "-fPIC")
        subprocess.run([compiler, *options, str(SOURCE), "-o", str(made)], check=True)
        library = ctypes.CDLL(str(made))
    library.touch_runs.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)
    library.touch_runs.restype = None
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    library.touch_beside_sums.argtypes = (pointer, number, number, number, pointer, pointer)
    library.touch_beside_sums.restype = None
    library.between_cores.argtypes, library.between_cores.restype = (number,), ctypes.c_double
    return library


SHARED_SECONDS = 80e-9
"""Cores of one third-level cache hand a number on in less.

On a Zen 4 they take 30 to 60 ns, those of two caches 160 to 220.
"""


def between_cores(turns: int = 2000) -> float | None:
    """Seconds from the write of one core to the other's reading of it; ``None`` without two.

    A virtual machine's cores may lie within one third-level cache for a while, and then in two.
    """
    library = loop()
    seconds = -1.0 if library is None else float(library.between_cores(turns))
    return seconds if seconds > 0 else None


class MemoryAlone:
    """The two passes over a module's memory.

    Args:
        bag: One table, with its optimizer of rows. Rows that enter or leave its cache later are
            touched where they are now.
        values: int64 ``(lookups,)``: a batch's row numbers.
    """

    def __init__(self, bag: CachedEmbeddingBag, values: Tensor) -> None:
        (table,) = bag.tables
        codes, cached, tags = table.stored()
        counts, _, _ = table.policy_state()
        rows = values.unique()
        lie = _runs(codes, rows, written=True)
        sets = []
        if tags.numel():
            place = _places(tags, rows)
            hit = (place >= 0).numpy()
            lie[hit] = _runs(cached, place[place >= 0], written=True)
            own = set_of(rows, table.sets, mixed=table.config.hash == "mixed")
            sets = [_runs(tags.view(-1, table.ways), own, written=False)]
        reads = lie.copy()
        reads["written"] = 0
        state = bag.checked_optimizer().accumulator(table.codes)
        kept = [_runs(t, rows, written=True) for t in (counts, state) if t is not None]
        self._passes = [_in_turn([*sets, reads]), _in_turn([*sets, *kept, lie])]
        self.nbytes = sum(int(runs["bytes"].sum()) for runs in self._passes)

    @property
    def reads(self) -> np.ndarray:
        """What the forward pass reads: the address and the bytes of each run of memory."""
        return self._passes[0]

    def touch(self) -> None:
        """Both passes, on as many threads as torch has."""
        library = loop()
        assert library is not None
        for runs in self._passes:
            library.touch_runs(runs.ctypes.data, len(runs), torch.get_num_threads())


def _runs(memory: Tensor, rows: Tensor, *, written: bool) -> np.ndarray:
    nbytes = memory[:1].nbytes
    runs = np.empty(len(rows), RUN)
    runs["at"] = memory.data_ptr() + rows.numpy().astype(np.uint64) * np.uint64(nbytes)
    runs["bytes"], runs["written"] = nbytes, written
    return runs


def _places(tags: Tensor, rows: Tensor) -> Tensor:
    """Where each row is in the cache, -1 for those that are not."""
    held, place = tags.flatten().long().sort()
    found = torch.searchsorted(held, rows).clamp_(max=len(held) - 1)
    return torch.where(held[found] == rows, place[found], -1)


def _in_turn(kinds: Sequence[np.ndarray]) -> np.ndarray:
    """The first of each, then the second of each."""
    return np.ascontiguousarray(np.stack(kinds, 1).reshape(-1))
