"""The grid of precisions, roundings, caches and eviction policies that a comparison trains.

The command line's help is made from it, so nothing here imports torch before it is needed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from ...engine.config import check_names
from .readers.layout import Precision

if TYPE_CHECKING:
    from ....nn import EmbeddingTable

Rounding = Literal["nearest", "stochastic"]
Policy = Literal["lfu", "lru"]

_MAX_WAYS = 64

_EXTRA_BITS = re.compile(r"(fp16|bf16)\+([1-9][0-9]*)")
_MOST_BITS = 16


def extra_bits_of(precision: str) -> tuple[str, int] | None:
    """Format and extra bits of the rows of ``"fp16+K"`` or ``"bf16+K"``; ``None`` of any other.

    Raises:
        ValueError: K is not from 1 to 16.
    """
    match = _EXTRA_BITS.fullmatch(precision)
    if match is None:
        return None
    if not 1 <= (bits := int(match[2])) <= _MOST_BITS:
        raise ValueError(
            f"precision={precision} keeps {bits} extra bits: give from 1 to {_MOST_BITS}"
        )
    return match[1], bits


def _check_precision(name: str) -> None:
    if extra_bits_of(name) is None:
        known = (*get_args(Precision), "fp16+K", "bf16+K")
        check_names("precision", (name,), known)
        if name not in get_args(Precision):
            raise ValueError(
                f"precision={name!r} has a letter for a number: give 1 to {_MOST_BITS}"
            )


@dataclass(frozen=True)
class Variant:
    """How the tables of a run are stored, rounded and cached; ``None`` where it does not matter.

    Attributes:
        precision: Storage of the rows.
        rounding: How rows that leave FP32 are rounded; FP32 rows are not, and extra bits are
            always stochastic.
        cache_fraction: Cached rows as a share of the rows. FP32 rows, and those with extra bits,
            need no cache.
        policy: Eviction policy of the cache, if there is one.
        ways: Rows in a set of the cache, if there is one.
        dense: Precision of the MLPs (default: ``"fp32"``).

    Raises:
        ValueError: The precision is unknown.
    """

    precision: str
    rounding: Rounding | None = None
    cache_fraction: float = 0.0
    policy: Policy | None = None
    ways: int | None = None
    dense: str = "fp32"

    def __post_init__(self) -> None:
        _check_precision(self.precision)

    def settings(self) -> dict[str, Any]:
        """The same as plain JSON, without MLPs in FP32, which runs of earlier versions had."""
        own = asdict(self)
        return own if self.dense != "fp32" else {k: v for k, v in own.items() if k != "dense"}

    @property
    def extra_bits(self) -> tuple[str, int] | None:
        """Format and extra bits of the rows, if they have any."""
        return extra_bits_of(self.precision)

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
        if self.extra_bits is not None:
            if storage is not None:
                raise ValueError(
                    f"precision={self.precision} and its own precision {storage} contradict each "
                    "other: rows with extra bits are parameters of one optimizer; leave one out"
                )
            own = self.extra_bits[0]
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
    dense: Sequence[str] = ("fp32",),
) -> dict[str, Variant]:
    """Every combination once, by name: FP32 has no rounding and no cache, no cache no policy.

    Extra bits have neither. Of several precisions of the MLPs, FP32 is not named.

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
        for precision in dense:
            own = [f"dense-{precision}"] if len(dense) > 1 and precision != "fp32" else []
            named, made = " ".join((*name, *own)), replace(variant, dense=precision)
            if found.get(named, made) != made:
                raise ValueError(
                    f"two variants are called {named!r}: cache_fraction={variant.cache_fraction} "
                    f"and {found[named].cache_fraction} differ by less than their names show; "
                    "leave one of the two out"
                )
            found[named] = made
    return found


def _combinations(
    precisions: Iterable[str],
    roundings: Iterable[str],
    cache_fractions: Iterable[float],
    policies: Iterable[str],
    ways: Sequence[int],
) -> Iterator[Variant]:
    for name in (precisions := tuple(precisions)):
        _check_precision(name)
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
        if precision == "fp32" or extra_bits_of(precision) is not None:
            yield Variant(precision)
            continue
        for cache, rounding in itertools.product(caches, roundings):
            yield Variant(precision, rounding, *cache)  # type: ignore[arg-type]
