"""The paper's emulation of a narrow table and its FP32 cache by one FP32 array.

"Mixed-Precision Embedding Using a Cache", section 4: Algorithms 1 and 2 as they stand there. Rows
that are not cached went through fake quantisation; which ones are cached is a list of numbers.
"""

from __future__ import annotations

import numpy as np

from . import int_rows, philox
from .grid import Grid
from .rounding import round_float

FLOATS = {"bf16": Grid(8, 7), "fp16": Grid(5, 10), "e4m3": Grid(4, 3, False)}
BYPASS, EVICT, FLUSH = 0, 1, 2
f32 = np.float32


def mixed(row: int) -> int:
    """MurmurHash3's 32-bit finaliser."""
    row = ((row ^ row >> 16) * 0x85EBCA6B) % 2**32
    row = ((row ^ row >> 13) * 0xC2B2AE35) % 2**32
    return row ^ row >> 16


def row_sum(values: list[np.float32]) -> np.float32:
    """Sixteen lanes, then halves."""
    lanes = [f32(0)] * 16
    for i, value in enumerate(values):
        lanes[i % 16] = lanes[i % 16] + value
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [lanes[i] + lanes[i + half] for i in range(half)]
    return lanes[0]


class Emulation:
    """One table; ``T`` starts as the FP32 rows ``initial``, all of them quantised to nearest."""

    def __init__(
        self,
        initial: np.ndarray,
        storage: str,
        rounding: str,
        policy: str,
        sets: int,
        ways: int,
        hash: str = "modulo",
        seed: int = 0,
        stream: int = 0,
    ) -> None:
        self.storage, self.rounding, self.policy = storage, rounding, policy
        self.sets, self.ways, self.hash = sets, ways, hash
        self.seed, self.stream, self.step = seed, stream, 0
        self.rows, self.dim = initial.shape
        self.T = initial.astype(f32)
        for i in range(self.rows):
            self.T[i] = self.quantized(self.T[i], None)
        self.IC: list[list[int | None]] = [[None] * ways for _ in range(sets)]
        self.PV = dict.fromkeys(range(self.rows), 0)
        self.accumulator: dict[int, np.ndarray] = {}
        self.evictions = 0

    def quantized(self, row: np.ndarray, random: list[int] | None) -> np.ndarray:
        """Algorithm 1, and its like for floating-point formats."""
        x = [float(v) for v in row]
        if self.storage == "fp32":
            return row
        if self.storage in FLOATS:
            grid = FLOATS[self.storage]
            if random is None:
                return np.array([round_float(v, grid) for v in x], f32)
            drawn = zip(x, random, strict=True)
            return np.array([round_float(v, grid, "stochastic", r) for v, r in drawn], f32)
        bits = int(self.storage.removeprefix("int"))
        return np.array(int_rows.decode(int_rows.encode(x, bits, random)), f32)

    def fake_quantize(self, i: int, slot: int) -> None:
        """Row ``i`` leaves FP32."""
        random = None
        if self.rounding == "stochastic":
            width = 16 if self.storage == "bf16" else 32
            random = [
                philox.draw(
                    i * self.dim + d,
                    seed=self.seed,
                    stream=self.stream,
                    step=self.step,
                    slot=slot,
                    width=width,
                )
                for d in range(self.dim)
            ]
        self.T[i] = self.quantized(self.T[i], random)

    def update(self, optimizer: str, options: dict, bags: list, grads: np.ndarray) -> None:
        """Algorithm 2. ``bags`` are lists of (row, weight); ``grads`` the gradient of each."""
        self.step += 1
        lookups: dict[int, int] = {}
        updates: dict[int, np.ndarray] = {}
        for bag, grad in zip(bags, grads, strict=True):
            for i, weight in bag:
                lookups[i] = lookups.get(i, 0) + 1
                updates[i] = updates.get(i, np.zeros(self.dim, f32)) + grad * f32(weight)
        for i in sorted(updates):
            self.PV[i] = self.PV[i] + lookups[i] if self.policy == "lfu" else self.step
            self.T[i] = self.optimized(optimizer, options, i, updates[i])
            if not self.sets:
                self.fake_quantize(i, BYPASS)
                continue
            residents = self.IC[(i if self.hash == "modulo" else mixed(i)) % self.sets]
            if i in residents:
                continue
            if None in residents:
                residents[residents.index(None)] = i
                continue
            j = min(residents, key=lambda k: self.PV[k])
            if self.PV[i] <= self.PV[j] and not (self.ways == 1 and self.policy == "lru"):
                self.fake_quantize(i, BYPASS)
            else:
                self.fake_quantize(j, EVICT if j > i else BYPASS)
                residents[residents.index(j)] = i
                self.evictions += 1

    def optimized(self, name: str, options: dict, i: int, g: np.ndarray) -> np.ndarray:
        """The row after its step, each operation rounded to FP32."""
        x = self.T[i]
        lr, decay = f32(options["lr"]), f32(options["weight_decay"])
        if decay:
            g = g + x * decay
        if name == "sgd":
            return x - g * lr
        eps = f32(options["eps"])
        if name == "adagrad":
            total = self.accumulator.get(i, np.zeros(self.dim, f32)) + g * g
            self.accumulator[i] = total
            return x - (g * lr) / (np.sqrt(total) + eps)
        total = self.accumulator.get(i, f32(0)) + row_sum(list(g * g)) / f32(self.dim)
        self.accumulator[i] = total
        return x - g * (lr / (np.sqrt(total) + eps))
