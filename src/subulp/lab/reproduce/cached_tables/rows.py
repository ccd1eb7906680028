"""Measurements of embedding tables and their caches: exact, without a model."""

from __future__ import annotations

import numpy as np
import torch

from .... import nn, optim
from ....numerics import int_rows, random_bits
from ...tasks.ctr.presets import preset
from ...tasks.ctr.readers.dataset import ReadOptions
from ...tasks.ctr.readers.load import load_data
from ...tasks.ctr.task import access_counts
from ..found import Curve, Found, Observation


def rounding(bits: list[int], rows: int, dim: int, draws: int) -> Found:
    """Algorithm 1 against the same operations in NumPy's FP32, and the bias of random rounding.

    Args:
        bits: Of an integer.
        rows: Random rows.
        dim: Numbers of a row.
        draws: Times that every row is rounded at random.
    """
    x = torch.randn(rows, dim, generator=torch.Generator().manual_seed(0))
    found = []
    for width in bits:
        nearest = int_rows.decode(int_rows.encode(x, width))
        expected, steps = _by_numpy(x.numpy(), width)
        differing = int((nearest.numpy() != expected).sum())
        low = torch.from_numpy(steps)
        total = torch.zeros_like(x, dtype=torch.float64)
        far = 0
        for draw in range(draws):
            random = random_bits.draw(x.shape, seed=0, step=draw)
            rounded = int_rows.decode(int_rows.encode(x, width, "stochastic", random=random))
            # A step, and what FP32 makes of it.
            far += int(((rounded - x).abs() > low * (1 + 1e-5) + 1e-6).sum())
            total += rounded.double()
        errors = (total / draws - x.double()) / low
        # A number between two steps deviates by at most half a step from one draw.
        unit = 0.5 / (draws * errors.numel()) ** 0.5
        case = f"{width} bits"
        found += [
            Observation(case, "numbers that differ", differing),
            Observation(case, "numbers a step or more away", far),
            Observation(case, "mean error in standard errors", float(errors.mean()) / unit),
        ]
    return Found(tuple(found))


def _by_numpy(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows after rounding to nearest, and each row's step."""
    out = np.empty_like(x)
    steps = np.empty((len(x), 1), np.float32)
    for i, row in enumerate(x):
        bias = row.min()
        scale = np.float32(row.max() - bias) / np.float32(2**bits - 1)
        q = np.rint((row - bias) / scale).astype(np.float32)
        out[i] = q * scale + bias
        steps[i] = scale
    return out, steps


class Simulated:
    """Algorithm 2 in plain Python: which rows are cached, without their numbers.

    Args:
        sets: Of the cache.
        ways: Rows of a set.
        policy: ``"lfu"`` or ``"lru"``.
    """

    def __init__(self, sets: int, ways: int, policy: str) -> None:
        self.cached: list[list[int | None]] = [[None] * ways for _ in range(sets)]
        self.priority: dict[int, int] = {}
        self.policy, self.ways = policy, ways
        self.hits = self.evictions = self.step = 0

    def batch(self, accesses: list[int]) -> None:
        """Look up rows, and then update each once, in the order of their numbers."""
        self.step += 1
        sets = len(self.cached)
        self.hits += sum(row in self.cached[row % sets] for row in accesses)
        for row in sorted(set(accesses)):
            old = self.priority.get(row, 0)
            self.priority[row] = old + accesses.count(row) if self.policy == "lfu" else self.step
            own = self.cached[row % sets]
            if row in own:
                continue
            if None in own:
                own[own.index(None)] = row
                continue
            least = min(own, key=lambda resident: self.priority[resident or 0])
            assert least is not None
            always = self.ways == 1 and self.policy == "lru"
            if always or self.priority[row] > self.priority[least]:
                own[own.index(least)] = row
                self.evictions += 1

    @property
    def resident(self) -> list[int]:
        """The cached rows, ascending."""
        return sorted(row for own in self.cached for row in own if row is not None)


def caching(rows: int, fraction: float, ways: list[int], batches: int, lookups: int) -> Found:
    """Hits, evictions and cached rows of tables, against :class:`Simulated`.

    Args:
        rows: Of the table.
        fraction: Of them that are cached.
        ways: Rows of a set.
        batches: Of row numbers, drawn so that few rows have most accesses.
        lookups: Of a batch.
    """
    found = []
    for policy in ("lfu", "lru"):
        for way in ways:
            table = nn.CachedEmbeddingBag(
                rows, 4, "int8", fraction, policy, way, mode=None, rounding="nearest", seed=0
            )
            optim.RowSGD(table, lr=0.01)
            simulated = Simulated(table.table.sets, table.table.ways, policy)
            source = np.random.default_rng(0)
            for _ in range(batches):
                drawn = (rows ** source.random(lookups)).astype(np.int64) % rows
                table(torch.from_numpy(drawn)).sum().backward()
                simulated.batch(drawn.tolist())
            hits = round(table.hit_rate * batches * lookups)
            resident = table.table.resident().tolist()
            case = f"{policy}, {way}-way"
            found += [
                Observation(case, "hits", simulated.hits),
                Observation(case, "hits more or fewer", hits - simulated.hits),
                Observation(case, "evictions", simulated.evictions),
                Observation(
                    case, "evictions more or fewer", int(table.evictions) - simulated.evictions
                ),
                Observation(
                    case,
                    "cached rows that differ",
                    len(set(resident).symmetric_difference(simulated.resident)),
                ),
            ]
    return Found(tuple(found))


def factors(tables: list[tuple[int, float]], rows: int, dim: int) -> Found:
    """Bytes of tables with an LFU cache over those of FP32.

    Args:
        tables: Bits of an integer, and share of the rows that are cached.
        rows: Of a table.
        dim: Numbers of a row.
    """
    found = []
    for bits, fraction in tables:
        table = nn.CachedEmbeddingBag(rows, dim, f"int{bits}", fraction, "lfu", 32, seed=0)
        found.append(
            Observation(factor_case(bits, fraction), "compression", table.memory().compression)
        )
    return Found(tuple(found))


ALONE = "codes and cached rows over FP32"
"""Without what each row has on top, which depends on its width."""


def widths(bits: list[int], fraction: float, dims: list[int], rows: int) -> Found:
    """Bytes of tables with a cache of either policy over those of FP32, by the width of a row.

    Args:
        bits: Of an integer.
        fraction: Of the rows that are cached.
        dims: Numbers of a row.
        rows: Of a table.
    """
    found = []
    for width in bits:
        for policy in ("lru", "lfu"):
            for dim in dims:
                table = nn.CachedEmbeddingBag(
                    rows, dim, f"int{width}", fraction, policy, 32, seed=0
                )
                memory = table.memory()
                case = width_case(width, policy, dim)
                alone = (memory.codes + memory.cache) / memory.fp32
                found.append(Observation(case, "compression", memory.compression))
                found.append(Observation(case, ALONE, alone))
    return Found(tuple(found))


def width_case(bits: int, policy: str, dim: int) -> str:
    """What a case of :func:`widths` is called."""
    return f"{bits} bits, {policy}, {dim} numbers"


def factor_case(bits: int, fraction: float) -> str:
    """What a case of :func:`factors` is called."""
    return f"{bits} bits, {100 * fraction:g} % cached"


def sizes(name: str) -> Found:
    """Rows of a preset's tables, from the smallest to the largest."""
    found = preset(name)
    ordered = sorted(found.rows)
    observations = [
        Observation(f"table {i}", "rows", count) for i, count in enumerate(ordered, start=1)
    ]
    billions = sum(ordered) * found.dim / 1e9
    large = sum(count > 1000 for count in ordered)
    return Found(
        (
            *observations,
            Observation("all", "billion numbers", billions),
            Observation("all", "tables above 1,000 rows", large),
        )
    )


def accesses(data: str | None, above: int) -> Found:
    """Shares of a data set's accesses that the most used rows of its large tables have.

    Args:
        data: As ``subulp train ctr --data`` takes it; ``None`` is the bundled Adult.
        above: Tables of more rows are large.
    """
    # Each category has a row: hashed ones would leave rows that nothing accesses.
    read = load_data(data, ReadOptions(min_count=1))
    counts, _ = access_counts(read, above)
    found, curves = [], []
    least = 1.0
    for name, count in counts.items():
        shares = np.sort(count)[::-1].cumsum() / count.sum()
        fifth = float(shares[len(shares) // 5 - 1])
        least = min(least, fifth)
        found.append(Observation(name, "share of the most used fifth", fifth))
        at = np.unique(np.geomspace(1, len(shares), 40).round().astype(int)) - 1
        curves.append(
            Curve(
                name,
                "share of accesses",
                tuple(float((i + 1) / len(shares)) for i in at),
                tuple(float(shares[i]) for i in at),
            )
        )
    found.append(Observation("every table", "share of the most used fifth", least))
    return Found(tuple(found), tuple(curves))
