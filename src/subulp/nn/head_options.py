"""Options of a classifier over many labels, and what is wrong with them."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from numbers import Real
from typing import Literal, get_args

from ..numerics import BF16, E4M3, Format
from ..numerics.int_rows import IntFormat
from ..numerics.whole import is_whole
from ..ops.head import Products, Rounding
from .row_table import Storage, parse_storage

Reduction = Literal["mean", "sum"]
EncoderGradients = Literal["mean", "sum"]
Scale = Literal["table"] | float | None
ProductsChoice = Literal["auto", Products]


def has_products(storage: Storage, products: ProductsChoice) -> bool:
    """Whether rows of ``storage`` can be multiplied as ``products`` says.

    Raises:
        ValueError: ``storage`` is unknown.
    """
    made_of = parse_storage(storage)
    if products == "fp8":
        return made_of == E4M3
    if products == "bf16":
        # BF16 has all their numbers, whatever power of two scales them.
        return isinstance(made_of, Format) and made_of.mantissa_bits <= BF16.mantissa_bits
    return True


@dataclass(frozen=True)
class HeadOptions:
    """Arguments of :class:`.extreme_classifier.ExtremeClassifier`, which says what they mean.

    Raises:
        ValueError: One is out of range, or does not fit the others.
    """

    dim: int
    num_labels: int
    storage: Storage
    chunks: int
    head_fraction: float
    dropout: float
    rounding: Rounding
    reduction: Reduction
    scale: Scale
    products: ProductsChoice
    encoder_gradients: EncoderGradients

    def __post_init__(self) -> None:
        self._check_ranges()
        if isinstance(made_of := parse_storage(self.storage), IntFormat):
            _check_integer_scale(self.scale, made_of)
        _check_products(self.products, self.storage)

    def _check_ranges(self) -> None:
        for name in ("dim", "num_labels", "chunks"):
            if not is_whole(value := getattr(self, name)):
                raise ValueError(f"{name}={value!r} is not a whole number")
        for name in ("head_fraction", "dropout"):
            if not isinstance(value := getattr(self, name), Real):
                raise ValueError(f"{name}={value!r} is not a number")
        if self.dim < 1 or self.num_labels < 1:
            raise ValueError(f"dim={self.dim} and num_labels={self.num_labels} must be at least 1")
        if not 1 <= self.chunks <= self.num_labels:
            raise ValueError(
                f"chunks={self.chunks} is out of range: from 1 to the {self.num_labels} labels"
            )
        if not 0 <= self.head_fraction <= 1:
            raise ValueError(f"head_fraction={self.head_fraction} is out of range: from 0 to 1")
        if not 0 <= self.dropout < 1:
            raise ValueError(
                f"dropout={self.dropout} is out of range: from 0 to 1, which is excluded"
            )
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise ValueError(
                    f"{name}={value!r} is unknown: use {' or '.join(map(repr, choices))}"
                )

    @property
    def bound(self) -> float:
        """The limit of Xavier's uniform distribution, which initial weights are drawn from."""
        return math.sqrt(6 / (self.dim + self.num_labels))

    @property
    def factor(self) -> float:
        """What a stored number times is the weight."""
        if self.scale is None:
            return 1.0
        if self.scale != "table":
            return float(self.scale)
        # Initial weights reach to between 1/4 and 1/2: in E4M3 less than one in a hundred is zero,
        # and there is room for nine hundred times as much.
        return 2.0 ** (math.frexp(self.bound)[1] + 1)

    def checksum(self) -> int:
        """Of all of them: a number that ranks compare."""
        return zlib.crc32(repr(sorted(self.numbers().items())).encode())

    def numbers(self) -> dict[str, int | float]:
        """The options as numbers that the ranks of a mesh compare, by what they are."""
        choices = {**_CHOICES, "products": get_args(ProductsChoice)}
        return {
            **{name: getattr(self, name) for name in ("dim", "num_labels", "chunks")},
            **{name: float(getattr(self, name)) for name in ("head_fraction", "dropout")},
            "scale": self.factor,
            "storage, as a checksum,": zlib.crc32(repr(parse_storage(self.storage)).encode()),
            **{
                f"{name}, by number in {values},": values.index(getattr(self, name))
                for name, values in choices.items()
            },
        }


EDITABLE = ("chunks", "dropout", "rounding", "reduction", "products", "encoder_gradients")
"""Options that a head reads from its attributes."""

_CHOICES = {
    "rounding": get_args(Rounding),
    "reduction": get_args(Reduction),
    "encoder_gradients": get_args(EncoderGradients),
}


def _check_integer_scale(scale: Scale, storage: IntFormat) -> None:
    if scale not in (None, 1.0):
        raise ValueError(
            f"scale={scale!r} does not go with storage='{storage}': every row of integers has "
            "a scale of its own; leave scale out"
        )


def _check_products(products: ProductsChoice, storage: Storage) -> None:
    if products not in get_args(ProductsChoice):
        choices = " or ".join(map(repr, get_args(ProductsChoice)))
        raise ValueError(f"products={products!r} is unknown: use {choices}")
    if not has_products(storage, products):
        rows, remedy = {
            "fp8": ("rows in E4M3", "storage='e4m3'"),
            "bf16": ("rows of BF16 numbers", "storage='e4m3' or 'bf16'"),
        }[products]
        raise ValueError(
            f"products={products!r} multiplies {rows}, and storage={storage!r}: use {remedy}, or "
            "products='fp32'"
        )
