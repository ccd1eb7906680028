"""Recipes: which formats a matrix's blocks may take, in order, and the tests that decide.

"MoR: Mixture of Representations", section 3: the framework goes through an ordered list of formats,
the most aggressive one first; a block, or the whole tensor, takes the first whose acceptance test
it passes, and BF16 if there is none. There our copy of the paper ends: the tests and what follows
are not read in it.

* A tensor or block of zeros takes the first format; one with an infinity or a NaN takes BF16.
* Errors are means over the non-zero values of blocks without infinities and NaN.
* An FP16 matrix keeps FP16 where others keep BF16: as many bits, and all of its own.

A recipe is data: formats in order, each with tests that are data too. So it can be compared,
copied, pickled and spelled out (:func:`to_text`), and kernels can run it.
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
from .metrics import total
from .scaling import check_format

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
ALWAYS_E5M2 = Recipe("e5m2", (Entry(E5M2, always),), "tensor")
"""The same with more range and a bit less: for gradients beside E4M3 ("MoR", section 1)."""


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


def decide(recipe: Recipe, evidence: Evidence) -> Tensor:
    """The first entry that accepts each region, uint8."""
    last = len(recipe.formats)
    chosen = torch.full(evidence.amax.shape, last, dtype=torch.uint8, device=evidence.amax.device)
    for i in reversed(range(last)):
        chosen = torch.where(recipe.entries[i].accepted(evidence), i, chosen)
    chosen = torch.where(evidence.amax == 0, 0, chosen)
    return torch.where(torch.isfinite(evidence.amax), chosen, last).to(torch.uint8)
