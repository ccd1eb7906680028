"""A matrix whose blocks are each in the narrowest format that represents them well enough.

"MoR: Mixture of Representations", section 3: the framework goes through an ordered list of formats,
the most aggressive one first; a block, or the whole tensor, takes the first whose acceptance test
it passes, and BF16 if there is none. There our copy of the paper ends: the tests and what follows
are not read in it.

* A tensor or block of zeros takes the first format; one with an infinity or a NaN takes BF16.
* Errors are means over the non-zero values of blocks without infinities and NaN.
* An FP16 matrix keeps FP16 where others keep BF16: as many bits, and all of its own.

A recipe is data: formats in order, each with tests that are data too. So it can be compared,
copied, pickled and spelled out (:func:`to_text`), and kernels can run it.

Storage. Every element has a byte in ``codes``, where it stands in the matrix: the code of a narrow
format, or the upper byte of a wide (BF16 or FP16) number. The lower bytes of wide numbers follow
each other in ``wide``, block by block, so that both formats take what they would take alone.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from .formats import BF16, E4M3, E5M2, FP16, STORED, Format
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
        self._sums: dict[Format, Tensor] = {}
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
        if fmt not in self._sums:
            self._sums[fmt] = self._sums_of(fmt)
        return self._sums[fmt]

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


Kind = Literal["always", "below-threshold", "better-than", "no-worse-than", "fits-range"]


@dataclass(frozen=True)
class Acceptance:
    """A test that a region must pass; :func:`below_threshold` and the others below make it.

    Args:
        kind: What is tested.
        format: The format whose error or range is tested; ``None`` for ``"always"`` only.
        other: The format that it is compared with, for ``"better-than"`` and ``"no-worse-than"``.
        threshold: The bound of ``"below-threshold"``; ``None`` for the user's number.

    Raises:
        ValueError: An argument is unknown, missing or superfluous.
    """

    kind: Kind
    format: Format | None = None
    other: Format | None = None
    threshold: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            choices = ", ".join(map(repr, get_args(Kind)))
            raise ValueError(f"kind={self.kind!r} is unknown: use one of {choices}")
        wanted = {
            "format": self.kind != "always",
            "other": self.kind in ("better-than", "no-worse-than"),
        }
        for name, needed in wanted.items():
            value = getattr(self, name)
            if needed != isinstance(value, Format) or not (needed or value is None):
                what = "a subulp.numerics.Format" if needed else "nothing"
                raise ValueError(f"{name}={value!r} cannot apply: {self.kind!r} takes {what}")
            if needed:
                _check_narrow(value)
        bound = self.threshold
        if bound is None:
            return
        if self.kind != "below-threshold":
            raise ValueError(f"threshold={bound!r} cannot apply: {self.kind!r} takes nothing")
        if isinstance(bound, bool) or not isinstance(bound, (int, float)) or not bound > 0:
            raise ValueError(f"threshold={bound!r} is out of range: a number above 0")

    def __call__(self, evidence: Evidence) -> Tensor:
        """Which regions pass, bool (regions...)."""
        if self.kind == "always":
            return torch.ones_like(evidence.amax, dtype=torch.bool)
        assert self.format is not None
        if self.kind == "fits-range":
            span = self.format.max / self.format.smallest_normal
            return evidence.amax / evidence.smallest <= span
        error = evidence.error(self.format)
        if self.kind == "below-threshold":
            return error < (evidence.threshold if self.threshold is None else self.threshold)
        assert self.other is not None
        other = evidence.error(self.other)
        return error < other if self.kind == "better-than" else error <= other

    @property
    def compared(self) -> tuple[Format, ...]:
        """The formats whose errors are asked for."""
        if self.kind in ("always", "fits-range"):
            return ()
        return tuple(fmt for fmt in (self.format, self.other) if fmt is not None)


@dataclass(frozen=True)
class Entry:
    """A format, and what a region must pass to be in it.

    Args:
        format: A format that fits a byte.
        accepts: A test, or several, all of which must hold.

    Raises:
        ValueError: The format does not fit, or a test is not data.
    """

    format: Format
    accepts: Acceptance | tuple[Acceptance, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.format, Format):
            raise ValueError(f"format={self.format!r} is no subulp.numerics.Format")
        _check_narrow(self.format)
        tests = self.accepts if isinstance(self.accepts, (tuple, list)) else (self.accepts,)
        for test in tests:
            if not isinstance(test, Acceptance):
                raise ValueError(
                    f"accepts={test!r} is not a test: kernels cannot run Python, so a recipe is "
                    "data; use mixture.below_threshold, better_than, no_worse_than, fits_range or "
                    "always, or a tuple of them, and a metric of your own for another error"
                )
        if not tests:
            raise ValueError("accepts=() is empty: use mixture.always to accept every region")
        # The same test, written as itself and as a tuple of one, is one entry.
        object.__setattr__(self, "accepts", tuple(tests))

    @property
    def tests(self) -> tuple[Acceptance, ...]:
        """The tests, all of which must hold."""
        assert isinstance(self.accepts, tuple)
        return self.accepts

    def accepted(self, evidence: Evidence) -> Tensor:
        """Which regions pass all tests, bool (regions...)."""
        found = [test(evidence) for test in self.tests]
        return functools.reduce(torch.logical_and, found)


@dataclass(frozen=True)
class Recipe:
    """An ordered list of formats; BF16 is what remains.

    Args:
        name: What errors and tables call it.
        entries: From the most aggressive format to the least.
        granularity: Whether a ``"block"`` decides for itself, or the ``"tensor"`` does.

    Raises:
        ValueError: There is no entry, one is not data, or two formats have one name.
    """

    name: str
    entries: tuple[Entry, ...]
    granularity: Granularity = "block"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ValueError(f"name={self.name!r} is no string: say what tables call the recipe")
        if not isinstance(self.entries, (tuple, list)) or not self.entries:
            raise ValueError(f"recipe {self.name} has no entry: give at least one format")
        object.__setattr__(self, "entries", tuple(self.entries))
        for entry in self.entries:
            if not isinstance(entry, Entry):
                raise ValueError(f"recipe {self.name} has {entry!r}: use a mixture.Entry")
        if self.granularity not in get_args(Granularity):
            choices = ", ".join(map(repr, get_args(Granularity)))
            raise ValueError(f"granularity={self.granularity!r} is unknown: use one of {choices}")
        names = [fmt.name for fmt in self.formats]
        if len(set(names)) < len(names):
            raise ValueError(
                f"recipe {self.name} names a format twice: {', '.join(names)}; one entry each, "
                "and a name of its own for each format"
            )
        for wide in WIDE_FORMATS:
            if wide.name in names:
                raise ValueError(f"format={wide.name} has the name of what remains: use another")

    @property
    def formats(self) -> tuple[Format, ...]:
        """The narrow formats, in the order of the entries."""
        return tuple(entry.format for entry in self.entries)

    @property
    def rules(self) -> tuple[tuple[Entry, ...], Granularity]:
        """What decides: all but the name."""
        return self.entries, self.granularity

    @property
    def candidates(self) -> tuple[Format, ...]:
        """The narrow formats, then the others whose errors a test asks for."""
        asked = [f for entry in self.entries for test in entry.tests for f in test.compared]
        return tuple(dict.fromkeys((*self.formats, *asked)))

    @property
    def uses_threshold(self) -> bool:
        """Whether a test compares with the user's number."""
        tests = [test for entry in self.entries for test in entry.tests]
        return any(t.kind == "below-threshold" and t.threshold is None for t in tests)


def below_threshold(fmt: Format, threshold: float | None = None) -> Acceptance:
    """A test that the format's error is below the threshold, given here or by the user."""
    return Acceptance("below-threshold", fmt, threshold=threshold)


def better_than(fmt: Format, other: Format) -> Acceptance:
    """A test that the format's error is below the other one's."""
    return Acceptance("better-than", fmt, other)


def no_worse_than(fmt: Format, other: Format) -> Acceptance:
    """A test that the format's error is not above the other one's."""
    return Acceptance("no-worse-than", fmt, other)


def fits_range(fmt: Format) -> Acceptance:
    """A test that one scale makes all non-zero magnitudes normal numbers."""
    return Acceptance("fits-range", fmt)


WIDE_FORMATS = (BF16, FP16)
"""What remains: FP16 for FP16 matrices, BF16 for all others."""


def wide_format_of(dtype: torch.dtype) -> Format:
    """The wide format of a matrix of this dtype."""
    return FP16 if dtype == torch.float16 else BF16


def _check_narrow(fmt: Format) -> None:
    """Raise ValueError unless values of ``fmt`` can be scaled to, and fit a byte."""
    check_format(fmt)
    if 1 + fmt.exponent_bits + fmt.mantissa_bits > 8:
        raise ValueError(f"format={fmt.name} does not fit: a narrow value is stored in a byte")


always = Acceptance("always")
"""Accepts every region, whatever its error."""

TENSOR = Recipe("tensor", (Entry(E4M3, below_threshold(E4M3)),), "tensor")
TWO_WAY = Recipe("subtensor-2way", (Entry(E4M3, better_than(E4M3, E5M2)),))
THREE_WAY = Recipe(
    "subtensor-3way",
    (Entry(E4M3, no_worse_than(E4M3, E5M2)), Entry(E5M2, fits_range(E5M2))),
)
RECIPES = {recipe.name: recipe for recipe in (TENSOR, TWO_WAY, THREE_WAY)}
"""By the titles of "MoR", sections 3.1 (tensor) and 3.2 (blocks, in two ways or three), whose text
our copy lacks."""

ALWAYS_E4M3 = Recipe("e4m3", (Entry(E4M3, always),), "tensor")
"""What the recipes are compared with: FP8 for all. Only a tensor that is not finite is in BF16."""


# ------------------------------------------------------------------------------- recipes as text


@functools.cache
def to_text(recipe: Recipe) -> str:
    """A recipe as text: its name if it is one of :data:`RECIPES`, else JSON."""
    if RECIPES.get(recipe.name) == recipe:
        return recipe.name
    entries = [
        {
            "format": _plain(entry.format),
            "accepts": [
                [test.kind, _plain(test.format), _plain(test.other), test.threshold]
                for test in entry.tests
            ],
        }
        for entry in recipe.entries
    ]
    return json.dumps({"name": recipe.name, "granularity": recipe.granularity, "entries": entries})


@functools.lru_cache(maxsize=256)
def from_text(text: str) -> Recipe:
    """The recipe that :func:`to_text` spelled out.

    Raises:
        ValueError: The text is neither a name of :data:`RECIPES` nor a recipe.
    """
    if text in RECIPES:
        return RECIPES[text]
    try:
        plain = json.loads(text)
        entries = tuple(
            Entry(
                _format(entry["format"]),
                tuple(
                    Acceptance(
                        kind,
                        fmt and _format(fmt),
                        other and _format(other),
                        threshold,
                    )
                    for kind, fmt, other, threshold in entry["accepts"]
                ),
            )
            for entry in plain["entries"]
        )
        return Recipe(plain["name"], entries, plain["granularity"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        choices = ", ".join(map(repr, RECIPES))
        raise ValueError(
            f"recipe={text!r} is unknown ({error}): use one of {choices}, or what "
            "numerics.mixture.to_text makes of a Recipe"
        ) from None


def _plain(fmt: Format | None) -> list[Any] | None:
    if fmt is None:
        return None
    dtype = None if fmt.dtype is None else str(fmt.dtype)
    return [fmt.name, fmt.exponent_bits, fmt.mantissa_bits, fmt.has_infinity, dtype]


def _format(plain: Iterable[Any]) -> Format:
    name, exponent_bits, mantissa_bits, has_infinity, dtype = plain
    dtypes = {str(fmt.dtype): fmt.dtype for fmt in STORED}
    return Format(name, exponent_bits, mantissa_bits, has_infinity, dtype and dtypes[dtype])


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
        wide: uint8, lower bytes of the wide numbers.
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
        names: The formats, the wide one last: BF16, or FP16 for an FP16 matrix.
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
    low = torch.zeros_like(codes)
    low[_wide_elements(types[..., 0, 0], mixture.formats, mixture.shape, mixture.block)] = (
        mixture.wide
    )
    whole = (codes.int() << 8) | low.int()
    if mixture.wide_format == BF16:
        values = (whole << 16).view(torch.float32)
    else:
        values = whole.to(torch.int16).view(torch.float16).float()
    for i, fmt in enumerate(mixture.formats):
        inverse = mixture.scales(i).inverse_per_block()[..., None, None]
        values = torch.where(types == i, values_of(codes, fmt) * inverse, values)
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


def summarise(recipe: Recipe, numbers: Tensor, wide_format: Format = BF16) -> Summary:
    """A summary of :func:`numbers_of`."""
    values = numbers.tolist()
    types = len(recipe.formats) + 1
    narrow, counted, first, all_counted, amax, smallest = values[2 * types :]
    return Summary(
        (*(fmt.name for fmt in recipe.formats), wide_format.name),
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
        chosen = torch.where(recipe.entries[i].accepted(evidence), i, chosen)
    chosen = torch.where(evidence.amax == 0, 0, chosen)
    return torch.where(torch.isfinite(evidence.amax), chosen, last).to(torch.uint8)


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
