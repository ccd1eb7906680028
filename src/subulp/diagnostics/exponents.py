"""The distribution of exponents, and the shares that a format's range would lose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..nn import RowTable
from ..nn.cached_table import CachedTable
from ..numerics import Format

# Values that are widened at a time.
_SLICE = 1 << 22


class Shares(NamedTuple):
    """Shares of some values by their place in a format's range; the five add up to 1.

    Attributes:
        zero: Zeros.
        below: Values whose exponent is below that of the format's smallest subnormal.
        inside: Values in the range, with fewer mantissa bits near its lower end.
        above: Values whose exponent is above that of the largest finite value.
        nonfinite: Infinities and NaN.
    """

    zero: float
    below: float
    inside: float
    above: float
    nonfinite: float


@dataclass(frozen=True)
class ExponentHistogram:
    """How many values have each exponent ``floor(log2(|x|))``.

    Attributes:
        counts: Values by exponent, ascending; exponents without values are missing.
        zeros: Values that are zero, which have no exponent.
        nonfinite: Infinities and NaN.
    """

    counts: dict[int, int]
    zeros: int
    nonfinite: int

    @property
    def total(self) -> int:
        """All values."""
        return sum(self.counts.values()) + self.zeros + self.nonfinite

    def __add__(self, other: ExponentHistogram) -> ExponentHistogram:
        """The histogram of the values of both."""
        counts = Counter(self.counts) + Counter(other.counts)
        return ExponentHistogram(
            dict(sorted(counts.items())),
            self.zeros + other.zeros,
            self.nonfinite + other.nonfinite,
        )

    def shares(self) -> dict[int, float]:
        """Share of all values by exponent."""
        return {exponent: count / max(1, self.total) for exponent, count in self.counts.items()}

    def under(self, format: Format) -> Shares:
        """What the range of a format would make of the values (ELMO, Figures 2b and 5).

        The range goes by exponents, as in the paper: E4M3's is [-9, 8]. Rounding to nearest keeps
        a little more, the upper half of the exponent below.
        """
        lowest = format.min_exponent - format.mantissa_bits
        below = sum(n for exponent, n in self.counts.items() if exponent < lowest)
        above = sum(n for exponent, n in self.counts.items() if exponent > format.max_exponent)
        inside = self.total - below - above - self.zeros - self.nonfinite
        counted = (self.zeros, below, inside, above, self.nonfinite)
        return Shares(*(count / max(1, self.total) for count in counted))


def exponent_histogram(
    source: Tensor | nn.Module | Iterable[Tensor], *, gradients: bool = False
) -> ExponentHistogram:
    """Count values by their exponents, exactly, subnormal numbers included.

    Args:
        source: A tensor of any floating-point dtype; several; or a module, of which all parameters
            count. Rows of a table count as the weights that they stand for, scale and remainders
            included, cached ones as they are in the cache.
        gradients: Count the gradients of the module's or the tensors' instead of the values
            themselves; parameters without one are left out (default: ``False``).

    Raises:
        ValueError: A tensor is not floating-point, or ``gradients`` is asked for where there are
            none.
    """
    found = ExponentHistogram({}, 0, 0)
    if gradients:
        grads = [tensor.grad for tensor in _parameters(source) if tensor.grad is not None]
        if not grads:
            raise ValueError(
                "there are no gradients to count: call this between backward() and zero_grad(); "
                "rows that update themselves never have any"
            )
        source = grads
    for values in _values(source):
        found += _count(values)
    return found


def _parameters(source: Tensor | nn.Module | Iterable[Tensor]) -> list[Tensor]:
    if isinstance(source, nn.Module):
        return list(source.parameters())
    return [source] if isinstance(source, Tensor) else list(source)


def _values(source: Tensor | nn.Module | Iterable[Tensor]) -> Iterator[Tensor]:
    """The values in pieces of FP32 or FP64."""
    if isinstance(source, nn.Module):
        tables = [module for module in source.modules() if isinstance(module, RowTable)]
        # Stored rows of those that are in a cache are out of date.
        cached = {id(m.table): m for m in source.modules() if isinstance(m, CachedTable)}
        for table in tables:
            whole = cached.get(id(table))
            values = table.wide if whole is None else whole.weight_slice
            for start, stop in table.slices():
                yield values(start, stop)
        rows = {id(table.codes) for table in tables}
        source = [p for p in source.parameters() if id(p) not in rows]
    for tensor in [source] if isinstance(source, Tensor) else source:
        if not tensor.is_floating_point():
            raise ValueError(
                f"a tensor has dtype {tensor.dtype}: exponents are those of floating-point numbers"
            )
        wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        for piece in tensor.detach().reshape(-1).split(_SLICE):
            yield piece.to(wide)


def _count(values: Tensor) -> ExponentHistogram:
    finite = torch.isfinite(values)
    nonzero = finite & (values != 0)
    # frexp has mantissas from 1/2: its exponents are one higher.
    exponents = torch.frexp(values[nonzero]).exponent.to(torch.int64) - 1
    found, counts = exponents.unique(return_counts=True)  # type: ignore[no-untyped-call]
    nonfinite = values.numel() - int(finite.sum())
    zeros = values.numel() - nonfinite - exponents.numel()
    by_exponent = dict(zip(found.tolist(), counts.tolist(), strict=True))
    return ExponentHistogram(by_exponent, zeros, nonfinite)
