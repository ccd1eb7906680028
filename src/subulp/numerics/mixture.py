"""A matrix whose blocks are each in the narrowest format that represents them well enough.

"MoR: Mixture of Representations", section 3. The framework goes through an ordered list of formats,
the most aggressive one first; a block, or the whole tensor, takes the first whose acceptance test
it passes, and BF16 if there is none. What the paper's text in our copy leaves open:

* A tensor or block of zeros takes the first format; one with an infinity or a NaN takes BF16.
* Errors are means over the non-zero values of blocks without infinities and NaN.

Storage. Every element has a byte in ``codes``, where it stands in the matrix: the code of a narrow
format, or the upper byte of a BF16 number. The lower bytes of BF16 numbers follow each other in
``wide``, block by block, so that both formats take what they would take alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .formats import BF16, E4M3, E5M2, Format
from .metrics import RELATIVE_ERROR, Terms, block_sums, terms_of, total
from .partition import Partition, block_of, blocks_of_group, from_blocks, sizes_of_blocks, to_blocks
from .rounding import FRACTION_BITS, position, round_to, value_at
from .scaling import BlockScales, Scaling, block_amax, check_format, check_matrix, scales_of

Granularity = Literal["tensor", "block"]
DEFAULT_THRESHOLD = 0.045


class Evidence:
    """What an acceptance test may ask; a region is a block, or the tensor.

    Args:
        recipe: Whose regions are meant.
        amax: FP32 (block rows, block columns), infinite where a block is not finite.
        smallest: FP32 (block rows, block columns), smallest non-zero magnitudes; infinite where
            there are none.
        counts: int64 (block rows, block columns), non-zero values; 0 where a block is not finite.
        threshold: The user's number.
        sums: Sums of the metric's terms over the blocks in a format.

    Attributes:
        amax: FP32 (regions...), largest magnitudes.
        smallest: FP32 (regions...), smallest non-zero magnitudes in finite blocks; infinite where
            there are none.
        counts: int64 (regions...), non-zero values in finite blocks.
        block_counts: The same of blocks.
        threshold: The user's number.
    """

    def __init__(
        self,
        recipe: Recipe,
        amax: Tensor,
        smallest: Tensor,
        counts: Tensor,
        threshold: float,
        sums: Callable[[Format], Tensor],
    ) -> None:
        self._recipe, self._sums_of = recipe, sums
        self._sums: dict[str, Tensor] = {}
        self.block_counts = counts
        self.counts = self._of_regions(counts, Tensor.sum)
        self.amax = self._of_regions(amax, Tensor.amax)
        smallest = torch.where(torch.isfinite(amax), smallest, torch.inf)
        self.smallest = self._of_regions(smallest, Tensor.amin)
        self.threshold = threshold

    def _of_regions(self, of_blocks: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        if self._recipe.granularity == "block":
            return of_blocks
        return reduce(of_blocks).view(1, 1)

    def block_sums(self, fmt: Format) -> Tensor:
        """Sum of the metric's terms over each block in ``fmt``, FP32."""
        if fmt.name not in self._sums:
            self._sums[fmt.name] = self._sums_of(fmt)
        return self._sums[fmt.name]

    def error(self, fmt: Format) -> Tensor:
        """The metric of each region in ``fmt``, FP32 (regions...); 0 where nothing counts."""
        sums = self.block_sums(fmt)
        if self._recipe.granularity == "tensor":
            sums = total(sums).view(1, 1)
        return sums / self.counts.clamp(min=1).to(torch.float32)


class _Candidates:
    """Blocks as they would be in each format."""

    def __init__(
        self, blocks: Tensor, scaling: Scaling, groups: tuple[int, int], terms: Terms
    ) -> None:
        self._blocks, self._scaling, self._groups, self._terms = blocks, scaling, groups, terms
        self._scales: dict[str, BlockScales] = {}
        magnitude = blocks.abs()
        self.amax = block_amax(blocks)
        self.smallest = torch.where(magnitude > 0, magnitude, torch.inf).amin((-2, -1))
        self._counted = (magnitude > 0) & torch.isfinite(self.amax)[..., None, None]
        self.counts = self._counted.sum((-2, -1))

    def scales(self, fmt: Format) -> BlockScales:
        """The blocks' scales."""
        if fmt.name not in self._scales:
            self._scales[fmt.name] = scales_of(self.amax, fmt, self._scaling, self._groups)
        return self._scales[fmt.name]

    def values(self, fmt: Format) -> tuple[Tensor, Tensor]:
        """The scaled blocks, and what they are rounded to."""
        scaled = self._blocks * self.scales(fmt).per_block()[..., None, None]
        return scaled, round_to(scaled, fmt)

    def sums(self, fmt: Format) -> Tensor:
        """The metric's terms of each block, summed up."""
        return block_sums(torch.where(self._counted, self._terms(*self.values(fmt)), 0.0))


Acceptance = Callable[[Evidence], Tensor]
"""From the evidence to a bool tensor of the regions' shape."""


@dataclass(frozen=True)
class Entry:
    """A format, and the test that a region must pass to be in it."""

    format: Format
    accepts: Acceptance


@dataclass(frozen=True)
class Recipe:
    """An ordered list of formats; BF16 is what remains.

    Args:
        name: What errors and tables call it.
        entries: From the most aggressive format to the least.
        granularity: Whether a ``"block"`` decides for itself, or the ``"tensor"`` does.

    Raises:
        ValueError: There is no entry, or a format does not fit a byte or cannot be scaled to.
    """

    name: str
    entries: tuple[Entry, ...]
    granularity: Granularity = "block"

    def __post_init__(self) -> None:
        if not self.entries:
            raise ValueError(f"recipe {self.name} has no entry: give at least one format")
        for entry in self.entries:
            check_format(entry.format)
            if 1 + entry.format.exponent_bits + entry.format.mantissa_bits > 8:
                raise ValueError(
                    f"format={entry.format.name} does not fit: a narrow value is stored in a byte"
                )
        if len(set(self.formats)) < len(self.entries):
            raise ValueError(f"recipe {self.name} names a format twice: one entry each")

    @property
    def formats(self) -> tuple[Format, ...]:
        """The narrow formats, in the order of the entries."""
        return tuple(entry.format for entry in self.entries)


def below_threshold(fmt: Format) -> Acceptance:
    """A test that the format's error is below the threshold."""
    return lambda evidence: evidence.error(fmt) < evidence.threshold


def better_than(fmt: Format, other: Format) -> Acceptance:
    """A test that the format's error is below the other one's."""
    return lambda evidence: evidence.error(fmt) < evidence.error(other)


def no_worse_than(fmt: Format, other: Format) -> Acceptance:
    """A test that the format's error is not above the other one's."""
    return lambda evidence: evidence.error(fmt) <= evidence.error(other)


def fits_range(fmt: Format) -> Acceptance:
    """A test that one scale makes all non-zero magnitudes normal numbers."""
    span = fmt.max / fmt.smallest_normal
    return lambda evidence: evidence.amax / evidence.smallest <= span


def always(evidence: Evidence) -> Tensor:
    """Accepts every region, whatever its error."""
    return torch.ones_like(evidence.amax, dtype=torch.bool)


TENSOR = Recipe("tensor", (Entry(E4M3, below_threshold(E4M3)),), "tensor")
TWO_WAY = Recipe("subtensor-2way", (Entry(E4M3, better_than(E4M3, E5M2)),))
THREE_WAY = Recipe(
    "subtensor-3way",
    (Entry(E4M3, no_worse_than(E4M3, E5M2)), Entry(E5M2, fits_range(E5M2))),
)
RECIPES = {recipe.name: recipe for recipe in (TENSOR, TWO_WAY, THREE_WAY)}
"""The recipes of "MoR", section 3.1 and, by blocks, section 3.2, Algorithms 2 and 1."""

ALWAYS_E4M3 = Recipe("e4m3", (Entry(E4M3, always),), "tensor")
"""What the recipes are compared with: FP8 for all. Only a tensor that is not finite is in BF16."""


@dataclass(frozen=True)
class Mixture:
    """A matrix in its chosen representation.

    Attributes:
        codes: uint8 (rows, k).
        types: uint8 (block rows, block columns), or (1, 1) if the tensor decided: the place in
            ``formats``, or ``len(formats)`` for BF16.
        mantissa: FP32 (mantissas of ``fmt.max``, group rows, group columns); formats whose largest
            values have the same mantissa, as E4M3 and E5M2, share one.
        exponents: int8 (block rows, block columns); of blocks in BF16, that of the first format.
        wide: uint8, lower bytes of the BF16 numbers.
        formats: The narrow formats.
        block: Rows and columns of a block.
        blocks_of_group: Rows and columns of blocks in a group.
    """

    codes: Tensor
    types: Tensor
    mantissa: Tensor
    exponents: Tensor
    wide: Tensor
    formats: tuple[Format, ...]
    block: tuple[int, int]
    blocks_of_group: tuple[int, int]

    @property
    def shape(self) -> torch.Size:
        """Rows and columns."""
        return self.codes.shape

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The stored tensors."""
        return self.codes, self.types, self.mantissa, self.exponents, self.wide

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensors."""
        return sum(t.nbytes for t in self.tensors)

    def block_types(self) -> Tensor:
        """uint8 (block rows, block columns), also if the tensor decided."""
        return self.types.expand(self.exponents.shape)

    def scales(self, index: int = 0) -> BlockScales:
        """The blocks' scales as those of ``formats[index]``."""
        row = mantissa_rows(self.formats)[index]
        return BlockScales(self.mantissa[row], self.exponents, self.blocks_of_group)


@dataclass(frozen=True)
class Summary:
    """What was decided about a matrix.

    Attributes:
        names: The formats, BF16 last.
        blocks: How many blocks each has; if the tensor decided, all of one.
        elements: How many elements each has.
        error: Mean error of what is in narrow formats; 0 if nothing is.
        first_error: Mean error of the whole tensor in the first format.
        amax: Largest magnitude; infinite if not all values are finite.
        smallest: Smallest non-zero magnitude in finite blocks; infinite if there is none.
    """

    names: tuple[str, ...]
    blocks: tuple[int, ...]
    elements: tuple[int, ...]
    error: float
    first_error: float
    amax: float
    smallest: float

    @property
    def sole(self) -> str | None:
        """The format that all elements have, ``None`` if there are several."""
        used = [n for n, count in zip(self.names, self.elements, strict=True) if count]
        return used[0] if len(used) == 1 else None


def mantissa_rows(formats: tuple[Format, ...]) -> tuple[int, ...]:
    """Row of ``Mixture.mantissa`` that each format uses."""
    distinct = list(dict.fromkeys(_mantissa_of_max(fmt) for fmt in formats))
    return tuple(distinct.index(_mantissa_of_max(fmt)) for fmt in formats)


def encode(
    x: Tensor,
    recipe: Recipe,
    partition: Partition = "tensor",
    *,
    scaling: Scaling = "gam",
    group: Partition = "tensor",
    threshold: float = DEFAULT_THRESHOLD,
    metric: str = RELATIVE_ERROR,
) -> tuple[Mixture, Summary]:
    """Choose the representations of a matrix, and encode it.

    Args:
        x: FP32, BF16 or FP16 ``(rows, k)``, contraction dimension last.
        recipe: The list of formats.
        partition: Blocks (default: ``"tensor"``).
        scaling: ``"gam"``, ``"amax"`` or ``"e8m0"``, see :mod:`.scaling` (default: ``"gam"``).
        group: Groups of blocks that share a mantissa, for ``"gam"`` (default: ``"tensor"``).
        threshold: What acceptance tests compare with (default: 0.045).
        metric: Name of the error, see :mod:`.metrics` (default: ``"relative-error"``).

    Raises:
        ValueError: ``x`` is no matrix of numbers, or an argument is unknown or cannot apply.
    """
    check_matrix(x)
    block = block_of(partition, x.shape)
    groups = (1, 1) if scaling == "amax" else blocks_of_group(group, block, x.shape)
    found, numbers = encode_blocks(x, recipe, block, groups, scaling, threshold, metric)
    return found, summarise(recipe, numbers)


def encode_blocks(
    x: Tensor,
    recipe: Recipe,
    block: tuple[int, int],
    groups: tuple[int, int],
    scaling: Scaling,
    threshold: float,
    metric: str = RELATIVE_ERROR,
) -> tuple[Mixture, Tensor]:
    """:func:`encode` with the sizes of blocks and groups worked out; :func:`numbers_of` it."""
    blocks = to_blocks(x.float(), block)
    candidates = _Candidates(blocks, scaling, groups, terms_of(metric))
    amax, smallest, counts = candidates.amax, candidates.smallest, candidates.counts
    evidence = Evidence(recipe, amax, smallest, counts, threshold, candidates.sums)
    chosen = decide(recipe, evidence)
    types = chosen.expand(amax.shape)

    bf16 = _bf16_codes(blocks)
    codes = (bf16 >> 8) & 0xFF
    exponents = candidates.scales(recipe.formats[0]).exponents.clone()
    for i, fmt in enumerate(recipe.formats):
        here = types == i
        codes = torch.where(here[..., None, None], _codes(candidates.values(fmt)[1], fmt), codes)
        exponents = torch.where(here, candidates.scales(fmt).exponents, exponents)
    rows = mantissa_rows(recipe.formats)
    first = [rows.index(row) for row in range(max(rows) + 1)]
    found = Mixture(
        from_blocks(codes.to(torch.uint8), x.shape),
        chosen,
        torch.stack([candidates.scales(recipe.formats[i]).mantissa for i in first]),
        exponents,
        (bf16 & 0xFF).to(torch.uint8)[_wide_elements(types, recipe.formats, x.shape, block)],
        recipe.formats,
        block,
        candidates.scales(recipe.formats[0]).blocks_of_group,
    )
    return found, numbers_of(found, evidence)


def decode(mixture: Mixture) -> Tensor:
    """The matrix, FP32: a narrow value times the inverse of its scale, or the BF16 number."""
    types = mixture.block_types()[..., None, None]
    codes = to_blocks(mixture.codes, mixture.block)
    low = torch.zeros_like(codes)
    low[_wide_elements(types[..., 0, 0], mixture.formats, mixture.shape, mixture.block)] = (
        mixture.wide
    )
    values = (((codes.int() << 8) | low.int()) << 16).view(torch.float32)
    for i, fmt in enumerate(mixture.formats):
        inverse = mixture.scales(i).inverse_per_block()[..., None, None]
        values = torch.where(types == i, _values(codes, fmt) * inverse, values)
    return from_blocks(values, mixture.shape)


def numbers_of(mixture: Mixture, evidence: Evidence) -> Tensor:
    """What :class:`Summary` is made of, FP64: per format blocks and elements; then two sums of
    errors, each followed by how many numbers it is of; amax and smallest magnitude.
    """
    types, sizes = mixture.block_types(), sizes_of_blocks(mixture.shape, mixture.block)
    sizes = sizes.to(types.device)
    numbers: list[Tensor] = []
    narrow = torch.zeros((), dtype=torch.float64, device=types.device)
    counted = torch.zeros((), dtype=torch.int64, device=types.device)
    for i in range(len(mixture.formats) + 1):
        here = types == i
        numbers += [here.sum(), (sizes * here).sum()]
        if i < len(mixture.formats) and bool(here.any()):
            sums = evidence.block_sums(mixture.formats[i])
            narrow = narrow + torch.where(here, sums, 0.0).double().sum()
            counted = counted + (evidence.block_counts * here).sum()
    first = evidence.block_sums(mixture.formats[0]).double().sum()
    numbers += [narrow, counted, first, evidence.counts.sum()]
    numbers += [evidence.amax.max(), evidence.smallest.min()]
    return torch.stack([n.double() for n in numbers])


def summarise(recipe: Recipe, numbers: Tensor) -> Summary:
    """A summary of :func:`numbers_of`."""
    values = numbers.tolist()
    types = len(recipe.formats) + 1
    narrow, counted, first, all_counted, amax, smallest = values[2 * types :]
    return Summary(
        (*(fmt.name for fmt in recipe.formats), BF16.name),
        tuple(int(n) for n in values[0 : 2 * types : 2]),
        tuple(int(n) for n in values[1 : 2 * types : 2]),
        narrow / counted if counted else 0.0,
        first / all_counted if all_counted else 0.0,
        amax,
        smallest,
    )


def decide(recipe: Recipe, evidence: Evidence) -> Tensor:
    """The first entry that accepts each region, uint8."""
    last = len(recipe.formats)
    chosen = torch.full(evidence.amax.shape, last, dtype=torch.uint8, device=evidence.amax.device)
    for i in reversed(range(last)):
        chosen = torch.where(recipe.entries[i].accepts(evidence), i, chosen)
    chosen = torch.where(evidence.amax == 0, 0, chosen)
    return torch.where(torch.isfinite(evidence.amax), chosen, last).to(torch.uint8)


def _wide_elements(
    types: Tensor, formats: tuple[Format, ...], shape: torch.Size, block: tuple[int, int]
) -> Tensor:
    """Which elements of the blocks are BF16 numbers of the matrix, bool."""
    inside = torch.ones(shape, dtype=torch.bool, device=types.device)
    return to_blocks(inside, block) & (types == len(formats))[..., None, None]


def _bf16_codes(x: Tensor) -> Tensor:
    """Codes, int32; a NaN becomes the quiet one, since its payload may lie in the bits cut off."""
    sign = (x.view(torch.int32) >> 16) & 0x8000
    return torch.where(x.isnan(), 0x7FC0 | sign, round_to(x, BF16).view(torch.int32) >> 16)


def _codes(values: Tensor, fmt: Format) -> Tensor:
    """Codes, int32, of FP32 values on the format's grid."""
    sign = (values.view(torch.int32) < 0).int() << (fmt.exponent_bits + fmt.mantissa_bits)
    return (position(values, fmt) >> FRACTION_BITS).int() | sign


def _values(codes: Tensor, fmt: Format) -> Tensor:
    """FP32 values of uint8 codes; of those that are not finite, anything."""
    width = fmt.exponent_bits + fmt.mantissa_bits
    magnitude = value_at((codes.long() & ((1 << width) - 1)).clamp(max=fmt.max_code), fmt)
    return torch.where((codes.int() >> width) & 1 == 1, -magnitude, magnitude)


def _mantissa_of_max(fmt: Format) -> float:
    return fmt.max / 2.0**fmt.max_exponent
