"""The grid of precisions, roundings, caches and eviction policies that a comparison trains.

The command line's help is made from it, so nothing here imports torch before it is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from ...engine.config import check_names
from .readers.layout import Precision

if TYPE_CHECKING:
    from ....nn import EmbeddingTable

Rounding = Literal["nearest", "stochastic"]
Policy = Literal["lfu", "lru"]

_MAX_WAYS = 64


@dataclass(frozen=True)
class Variant:
    """How the tables of a run are stored, rounded and cached; ``None`` where it does not matter.

    Attributes:
        precision: Storage of the rows.
        rounding: How rows that leave FP32 are rounded; FP32 rows are not.
        cache_fraction: Cached rows as a share of the rows. FP32 rows need no cache.
        policy: Eviction policy of the cache, if there is one.
        ways: Rows in a set of the cache, if there is one.
    """

    precision: Precision
    rounding: Rounding | None = None
    cache_fraction: float = 0.0
    policy: Policy | None = None
    ways: int | None = None

    def settings(self) -> dict[str, Any]:
        """The same as plain JSON."""
        return asdict(self)

    def table(self, rows: int, dim: int, storage: str | None = None) -> EmbeddingTable:
        """A table of this kind.

        Args:
            rows: Its rows.
            dim: Numbers of a row.
            storage: Its precision, if it is another one (default: ``None``).

        Raises:
            ValueError: A number or name is out of range.
        """
        from ....nn import EmbeddingTable  # noqa: PLC0415

        own = storage or self.precision
        # A run in FP32 is the reference: nothing in it is narrow.
        if self.precision == "fp32":
            own = "fp32"
        return EmbeddingTable(
            rows,
            dim,
            "e4m3" if own == "fp8" else own,
            self.cache_fraction,
            self.policy or "lfu",
            self.ways or 1,
            self.rounding or "nearest",
        )


def grid(
    precisions: Iterable[str],
    roundings: Iterable[str],
    cache_fractions: Iterable[float],
    policies: Iterable[str],
    ways: Sequence[int],
) -> dict[str, Variant]:
    """Every combination once, by name: FP32 has no rounding and no cache, no cache no policy.

    Raises:
        ValueError: A name or number is out of range.
    """
    found: dict[str, Variant] = {}
    for variant in _combinations(precisions, roundings, cache_fractions, policies, ways):
        name: list[str] = [variant.precision, *([variant.rounding] if variant.rounding else [])]
        if variant.policy:
            name += [variant.policy, f"{100 * variant.cache_fraction:g}%"]
        if variant.ways and len(ways) > 1:
            name.append(f"{variant.ways}-way")
        found[" ".join(name)] = variant
    return found


def _combinations(
    precisions: Iterable[str],
    roundings: Iterable[str],
    cache_fractions: Iterable[float],
    policies: Iterable[str],
    ways: Sequence[int],
) -> Iterator[Variant]:
    check_names("precision", precisions := tuple(precisions), get_args(Precision))
    check_names("rounding", roundings := tuple(roundings), get_args(Rounding))
    check_names("policy", policies := tuple(policies), get_args(Policy))
    for count in ways:
        if not 1 <= count <= _MAX_WAYS or count & (count - 1):
            raise ValueError(f"ways={count} is not a power of two from 1 to {_MAX_WAYS}")
    caches = [
        cache
        for fraction in cache_fractions
        for cache in (
            itertools.product((fraction,), policies, ways) if fraction else ((0.0, None, None),)
        )
    ]
    for precision in precisions:
        if precision == "fp32":
            yield Variant("fp32")
            continue
        for cache, rounding in itertools.product(caches, roundings):
            yield Variant(precision, rounding, *cache)  # type: ignore[arg-type]
