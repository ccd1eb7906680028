"""A matrix whose blocks are each in the format that a recipe chose for it.

The choice is that of :mod:`.recipes`, whose names stand here too.

Storage. Every element has a byte in ``codes``, where it stands in the matrix: the code of a narrow
format, or the upper byte of a wide (BF16 or FP16) number. The lower bytes of wide numbers follow
each other in ``wide``, block by block, so that both formats take what they would take alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from .formats import BF16, Format
from .metrics import RELATIVE_ERROR, Terms, block_sums, terms_of
from .partition import Partition, block_of, blocks_of_group, from_blocks, sizes_of_blocks, to_blocks
from .recipes import (
    ALWAYS_E4M3,
    ALWAYS_E5M2,
    DEFAULT_THRESHOLD,
    RECIPES,
    TENSOR,
    THREE_WAY,
    TWO_WAY,
    WIDE_FORMATS,
    Acceptance,
    Entry,
    Evidence,
    Granularity,
    Recipe,
    always,
    below_threshold,
    better_than,
    decide,
    fits_range,
    from_text,
    no_worse_than,
    to_text,
    wide_format_of,
)
from .rounding import FRACTION_BITS, position, round_to, value_at
from .scaling import BlockScales, Scaling, block_amax, check_matrix, scales_of

__all__ = [
    "ALWAYS_E4M3",
    "ALWAYS_E5M2",
    "DEFAULT_THRESHOLD",
    "RECIPES",
    "TENSOR",
    "THREE_WAY",
    "TWO_WAY",
    "WIDE_FORMATS",
    "Acceptance",
    "Entry",
    "Evidence",
    "Granularity",
    "Mixture",
    "Recipe",
    "Summary",
    "always",
    "below_threshold",
    "better_than",
    "decide",
    "decode",
    "encode",
    "encode_blocks",
    "fits_range",
    "from_text",
    "mantissa_rows",
    "no_worse_than",
    "numbers_of",
    "summarise",
    "to_text",
    "values_of",
    "wide_format_of",
]


class _Candidates:
    """Blocks as they would be in each format."""

    def __init__(
        self, blocks: Tensor, scaling: Scaling, groups: tuple[int, int], terms: Terms
    ) -> None:
        self._blocks, self._scaling, self._groups, self._terms = blocks, scaling, groups, terms
        self._scales: dict[Format, BlockScales] = {}
        magnitude = blocks.abs()
        self.amax = block_amax(blocks)
        self.smallest = torch.where(magnitude > 0, magnitude, torch.inf).amin((-2, -1))
        self._counted = (magnitude > 0) & torch.isfinite(self.amax)[..., None, None]
        self.counts = self._counted.sum((-2, -1))

    def scales(self, fmt: Format) -> BlockScales:
        """The blocks' scales."""
        if fmt not in self._scales:
            self._scales[fmt] = scales_of(self.amax, fmt, self._scaling, self._groups)
        return self._scales[fmt]

    def values(self, fmt: Format) -> tuple[Tensor, Tensor]:
        """The scaled blocks, and what they are rounded to."""
        scaled = self._blocks * self.scales(fmt).per_block()[..., None, None]
        return scaled, round_to(scaled, fmt)

    def sums(self, fmt: Format) -> Tensor:
        """The metric's terms of each block, summed up."""
        return block_sums(torch.where(self._counted, self._terms(*self.values(fmt)), 0.0))


@dataclass(frozen=True)
class Mixture:
    """A matrix in its chosen representation.

    Attributes:
        codes: uint8 (rows, k).
        types: uint8 (block rows, block columns), or (1, 1) if the tensor decided: the place in
            ``formats``, or ``len(formats)`` for the wide format.
        mantissa: FP32 (mantissas of ``fmt.max``, group rows, group columns); formats whose largest
            values have the same mantissa, as E4M3 and E5M2, share one.
        exponents: int8 (block rows, block columns); of wide blocks, that of the first format.
        wide: uint8, lower bytes of the wide numbers; as they follow each other, or of the shape of
            ``codes``, each at the place of its number and anything elsewhere: so a GPU leaves them,
            where the host need not know how many there are.
        formats: The narrow formats.
        block: Rows and columns of a block.
        blocks_of_group: Rows and columns of blocks in a group.
        wide_format: BF16 or FP16.
    """

    codes: Tensor
    types: Tensor
    mantissa: Tensor
    exponents: Tensor
    wide: Tensor
    formats: tuple[Format, ...]
    block: tuple[int, int]
    blocks_of_group: tuple[int, int]
    wide_format: Format = BF16

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

    def trimmed(self) -> Mixture:
        """The mixture whose wide numbers' lower bytes follow each other; a GPU's host waits."""
        if self.wide.dim() == 1:
            return self
        return replace(self, wide=to_blocks(self.wide, self.block)[self._wide_elements()])

    def lower_bytes(self) -> Tensor:
        """Lower bytes of wide numbers at their places, uint8 (rows, k), anything elsewhere.

        Raises:
            ValueError: There are more or fewer than wide numbers.
        """
        if self.wide.dim() == 2:
            return self.wide
        here = self._wide_elements()
        if int(here.sum()) != self.wide.numel():
            raise ValueError(
                f"wide has shape {tuple(self.wide.shape)}: expected ({int(here.sum())},)"
            )
        found = torch.zeros(here.shape, dtype=torch.uint8, device=here.device)
        found[here] = self.wide
        return from_blocks(found, self.shape)

    def _wide_elements(self) -> Tensor:
        return _wide_elements(self.block_types(), self.formats, self.shape, self.block)

    def block_types(self) -> Tensor:
        """uint8 (block rows, block columns), also if the tensor decided."""
        return self.types.expand(self.exponents.shape)

    def scales(self, index: int = 0) -> BlockScales:
        """The blocks' scales as those of ``formats[index]``."""
        row = mantissa_rows(self.formats)[index]
        return BlockScales(self.mantissa[row], self.exponents, self.blocks_of_group)


class Summary:
    """What was decided about a matrix.

    Its numbers stay where they were computed until one is asked for: on a GPU the host waits then.

    Args:
        names: The formats, the wide one last: BF16, or FP16 for an FP16 matrix.
        numbers: FP64 (parts of the blocks, numbers), see :func:`numbers_of`.

    Attributes:
        names: The formats.
        numbers: The numbers.
    """

    def __init__(self, names: tuple[str, ...], numbers: Tensor) -> None:
        self.names, self.numbers = names, numbers

    @property
    def blocks(self) -> tuple[int, ...]:
        """How many blocks each format has; if the tensor decided, all of one."""
        return tuple(int(n) for n in self._values[0 : 2 * len(self.names) : 2])

    @property
    def elements(self) -> tuple[int, ...]:
        """How many elements each format has."""
        return tuple(int(n) for n in self._values[1 : 2 * len(self.names) : 2])

    @property
    def error(self) -> float:
        """Mean error of what is in narrow formats; 0 if nothing is."""
        narrow, counted = self._values[-6:-4]
        return narrow / counted if counted else 0.0

    @property
    def first_error(self) -> float:
        """Mean error of the whole tensor in the first format."""
        first, counted = self._values[-4:-2]
        return first / counted if counted else 0.0

    @property
    def amax(self) -> float:
        """Largest magnitude; infinite if not all values are finite."""
        return self._values[-2]

    @property
    def smallest(self) -> float:
        """Smallest non-zero magnitude in finite blocks; infinite if there is none."""
        return self._values[-1]

    @property
    def sole(self) -> str | None:
        """The format that all elements have, ``None`` if there are several."""
        used = [n for n, count in zip(self.names, self.elements, strict=True) if count]
        return used[0] if len(used) == 1 else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Summary):
            return NotImplemented
        return self._all == other._all

    def __hash__(self) -> int:
        return hash(self._all)

    def __repr__(self) -> str:
        shares = ", ".join(
            f"{name}: {count}" for name, count in zip(self.names, self.elements, strict=True)
        )
        return f"Summary({shares}; error={self.error:.3g}, first_error={self.first_error:.3g})"

    @property
    def _all(self) -> tuple[object, ...]:
        return self.names, self._values

    @cached_property
    def _values(self) -> tuple[float, ...]:
        """The numbers of all parts together."""
        parts = self.numbers.cpu()
        added = parts[:, :-2].sum(0).tolist()
        return (*added, float(parts[:, -2].max()), float(parts[:, -1].min()))


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
    return found, summarise(recipe, numbers, found.wide_format)


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

    wide_format = wide_format_of(x.dtype)
    whole = _wide_codes(blocks, wide_format)
    codes = (whole >> 8) & 0xFF
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
        (whole & 0xFF).to(torch.uint8)[_wide_elements(types, recipe.formats, x.shape, block)],
        recipe.formats,
        block,
        candidates.scales(recipe.formats[0]).blocks_of_group,
        wide_format,
    )
    return found, numbers_of(found, evidence)


def decode(mixture: Mixture) -> Tensor:
    """The matrix, FP32: a narrow value times the inverse of its scale, or the wide number."""
    types = mixture.block_types()[..., None, None]
    codes = to_blocks(mixture.codes, mixture.block)
    whole = (codes.int() << 8) | to_blocks(mixture.lower_bytes(), mixture.block).int()
    if mixture.wide_format == BF16:
        values = (whole << 16).view(torch.float32)
    else:
        values = whole.to(torch.int16).view(torch.float16).float()
    for i, fmt in enumerate(mixture.formats):
        inverse = mixture.scales(i).inverse_per_block()[..., None, None]
        values = torch.where(types == i, values_of(codes, fmt) * inverse, values)
    return from_blocks(values, mixture.shape)


def numbers_of(mixture: Mixture, evidence: Evidence) -> Tensor:
    """What :class:`Summary` is made of, FP64 (1, numbers): per format blocks and elements; then two
    sums of errors, each followed by how many numbers it is of; amax and smallest magnitude. Where a
    GPU computes them they are as many rows as it took parts of the blocks.
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
    return torch.stack([n.double() for n in numbers])[None]


def summarise(recipe: Recipe, numbers: Tensor, wide_format: Format = BF16) -> Summary:
    """A summary of :func:`numbers_of`."""
    return Summary((*(fmt.name for fmt in recipe.formats), wide_format.name), numbers)


def _wide_elements(
    types: Tensor, formats: tuple[Format, ...], shape: torch.Size, block: tuple[int, int]
) -> Tensor:
    """Which elements of the blocks are wide numbers of the matrix, bool."""
    inside = torch.ones(shape, dtype=torch.bool, device=types.device)
    return to_blocks(inside, block) & (types == len(formats))[..., None, None]


def _wide_codes(x: Tensor, fmt: Format) -> Tensor:
    """Codes, int32; a NaN becomes the quiet one, since its payload may lie in the bits cut off."""
    sign = (x.view(torch.int32) >> 16) & 0x8000
    if fmt == BF16:
        return torch.where(x.isnan(), 0x7FC0 | sign, round_to(x, BF16).view(torch.int32) >> 16)
    # The values came from FP16.
    return torch.where(x.isnan(), 0x7E00 | sign, x.to(torch.float16).view(torch.int16).int())


def _codes(values: Tensor, fmt: Format) -> Tensor:
    """Codes, int32, of FP32 values on the format's grid."""
    sign = (values.view(torch.int32) < 0).int() << (fmt.exponent_bits + fmt.mantissa_bits)
    return (position(values, fmt) >> FRACTION_BITS).int() | sign


def values_of(codes: Tensor, fmt: Format) -> Tensor:
    """FP32 values of uint8 codes; of those that are not finite, anything."""
    width = fmt.exponent_bits + fmt.mantissa_bits
    magnitude = value_at((codes.long() & ((1 << width) - 1)).clamp(max=fmt.max_code), fmt)
    return torch.where((codes.int() >> width) & 1 == 1, -magnitude, magnitude)


def _mantissa_of_max(fmt: Format) -> float:
    return fmt.max / 2.0**fmt.max_exponent
