"""Criteo's display advertising data: Kaggle's ``train.txt``, and the terabyte's ``day_N.gz``.

A line is a label, 13 counts and 26 categories of at most 8 hexadecimal digits, with tabs between
them. What is missing is empty.
"""

from __future__ import annotations

from collections.abc import Sequence

from .layout import Layout, Number, Table

NUMBERS = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))


def criteo_layout(rows: Sequence[int]) -> Layout:
    """The layout of a line.

    Args:
        rows: Rows of every table, or of each.

    Raises:
        ValueError: There are neither 1 nor 26 numbers.
    """
    if len(rows) not in (1, len(CATEGORIES)):
        raise ValueError(
            f"rows has {len(rows)} numbers: give one for all tables, or {len(CATEGORIES)}"
        )
    sizes = list(rows) * (len(CATEGORIES) // len(rows))
    return Layout(
        columns=("label", *NUMBERS, *CATEGORIES),
        label="label",
        numbers=tuple(Number(name) for name in NUMBERS),
        tables=tuple(Table((name,), size) for name, size in zip(CATEGORIES, sizes, strict=True)),
        separator="\t",
        hexadecimal=True,
    )
