"""Options of a classifier over many labels, and what is wrong with them."""

from __future__ import annotations

import math
from typing import Literal, get_args

from ..numerics import BF16, E4M3, Format
from ..numerics.int_rows import IntFormat
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


def check_products(products: ProductsChoice, storage: Storage) -> None:
    """Raise ValueError unless rows of ``storage`` can be multiplied as ``products`` says."""
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


def scale_of(scale: Scale, storage: Storage, bound: float) -> float:
    """The factor from stored numbers to weights.

    Args:
        scale: The ``scale=`` argument.
        storage: Format of the rows.
        bound: The largest initial weight.

    Raises:
        ValueError: Rows of integers have scales of their own.
    """
    made_of = parse_storage(storage)
    if isinstance(made_of, IntFormat) and scale not in (None, 1.0):
        raise ValueError(
            f"scale={scale!r} does not go with storage='{made_of}': every row of integers has "
            "a scale of its own; leave scale out"
        )
    if scale is None:
        return 1.0
    if scale != "table":
        return float(scale)
    # Initial weights reach to between 1/4 and 1/2: in E4M3 less than one in a hundred is zero, and
    # there is room for nine hundred times as much.
    return 2.0 ** (math.frexp(bound)[1] + 1)


def check_options(
    dim: int,
    num_labels: int,
    chunks: int,
    head_fraction: float,
    dropout: float,
    rounding: str,
    reduction: str,
    encoder_gradients: str,
) -> None:
    """Raise ValueError if one is out of range."""
    if dim < 1 or num_labels < 1:
        raise ValueError(f"dim={dim} and num_labels={num_labels} must be at least 1")
    if not 1 <= chunks <= num_labels:
        raise ValueError(f"chunks={chunks} is out of range: from 1 to the {num_labels} labels")
    if not 0 <= head_fraction <= 1:
        raise ValueError(f"head_fraction={head_fraction} is out of range: from 0 to 1")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout={dropout} is out of range: from 0 to 1, which is excluded")
    for name, value, choices in (
        ("rounding", rounding, get_args(Rounding)),
        ("reduction", reduction, get_args(Reduction)),
        ("encoder_gradients", encoder_gradients, get_args(EncoderGradients)),
    ):
        if value not in choices:
            raise ValueError(f"{name}={value!r} is unknown: use {' or '.join(map(repr, choices))}")
