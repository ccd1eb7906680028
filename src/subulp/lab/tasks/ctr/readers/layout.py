"""What the lines of a file of examples hold, and what of it a model sees."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Precision = Literal["fp32", "bf16", "fp16", "fp8", "int8", "int4", "int2"]
Transform = Literal["log", "none"]


class LayoutError(ValueError):
    """A layout contradicts itself.

    Args:
        message: What is wrong.
        part: Where: ``"columns"``, ``"label"``, ``"numeric"``, ``"table"`` or ``"buckets"``.
        column: The column that it is about (default: ``None``).
    """

    def __init__(self, message: str, part: str, column: str | None = None) -> None:
        super().__init__(message)
        self.part, self.column = part, column


@dataclass(frozen=True)
class Number:
    """A column of numbers.

    Attributes:
        column: Its name.
        transform: ``"log"`` for ``log(1 + max(x, 0))``, as DLRM does with Criteo's counts, or
            ``"none"`` (default: ``"log"``).
        standardise: Subtract the training part's mean and divide by its deviation (default:
            ``False``). A missing number is the mean; without it, zero.
    """

    column: str
    transform: Transform = "log"
    standardise: bool = False


@dataclass(frozen=True)
class Table:
    """An embedding table: of one column, or of several that are crossed.

    Attributes:
        columns: Their names.
        rows: Rows of the table, at most, with a vocabulary.
        storage: Its precision, whatever the run's is; ``None`` for the run's (default: ``None``).

    Raises:
        ValueError: There are no columns, or ``rows`` is out of range.
    """

    columns: tuple[str, ...]
    rows: int
    storage: Precision | None = None

    def __post_init__(self) -> None:
        if not self.columns:
            raise ValueError("a table has no columns: give one, or several to cross")
        if not 1 <= self.rows < 2**31:
            raise ValueError(f"table {self.name} has {self.rows} rows: give 1 to 2**31 - 1")

    @property
    def name(self) -> str:
        """What messages and figures call the table."""
        return " x ".join(self.columns)


@dataclass(frozen=True)
class Layout:
    """The columns of a file, and how they become features.

    Attributes:
        columns: All of them in their order.
        label: The column to predict; ``None`` where nobody knows it, and examples have the label 0.
        numbers: Columns of numbers.
        tables: Columns of categories, alone or crossed.
        separator: One character.
        header: The first line names the columns (default: ``False``).
        quote: Character around fields that contain the separator; empty for none (default: none).
        positive: Values of the label that are 1.
        negative: Values of the label that are 0.
        missing: Besides nothing at all, what a missing number is written as (default: nothing).
        buckets: Ascending bounds for columns of numbers; as a category, such a number is the count
            of the bounds that it reaches (default: none).
        hexadecimal: Categories are hexadecimal numbers of 32 bits, as Criteo's, and hash to
            themselves; nothing is 0 (default: ``False``).

    Raises:
        LayoutError: A name is unknown or named twice, or bounds do not ascend.
    """

    columns: tuple[str, ...]
    label: str | None
    numbers: tuple[Number, ...]
    tables: tuple[Table, ...]
    separator: str
    header: bool = False
    quote: str = ""
    positive: tuple[str, ...] = ("1", "1.0")
    negative: tuple[str, ...] = ("0", "0.0")
    missing: str = ""
    buckets: Mapping[str, Sequence[float]] = field(default_factory=dict)
    hexadecimal: bool = False

    def __post_init__(self) -> None:
        self._check_columns()
        for column, bounds in self.buckets.items():
            if not bounds or not all(map(math.isfinite, bounds)) or list(bounds) != sorted(bounds):
                message = f"buckets of {column} are {list(bounds)}: give ascending numbers"
                raise LayoutError(message, "buckets", column)
        for part, name in (("table", "tables"), ("numeric", "numbers")):
            if not getattr(self, name):
                raise LayoutError(f"there are no {name}: a model needs at least one", part)
        if set(self.positive) & set(self.negative) or not self.positive or not self.negative:
            raise LayoutError(
                f"positive={list(self.positive)} and negative={list(self.negative)}: give each "
                "label to one",
                "label",
            )

    def _check_columns(self) -> None:
        twice = sorted({name for name in self.columns if self.columns.count(name) > 1})
        if twice:
            raise LayoutError(
                f"columns repeats {', '.join(twice)}: a name is of one column", "columns"
            )
        numeric = {number.column for number in self.numbers}
        for where, names in (
            ("label", set() if self.label is None else {self.label}),
            ("numeric", numeric),
            ("buckets", set(self.buckets)),
            ("table", self.categories),
        ):
            for name in sorted(names):
                problem = unknown(where, name, self.columns)
                if problem is not None:
                    raise LayoutError(problem, where, name)
        if self.label is not None and self.label in numeric | self.categories:
            part = "numeric" if self.label in numeric else "table"
            raise LayoutError(
                f"label={self.label} is a feature too: a model would see the answer",
                part,
                self.label,
            )

    def unlabelled(self, *, column: bool) -> Layout:
        """The same without a label.

        Args:
            column: Its column is there, and ignored; otherwise it is missing.
        """
        columns = tuple(name for name in self.columns if column or name != self.label)
        return replace(self, columns=columns, label=None)

    @property
    def categories(self) -> set[str]:
        """Columns that tables are made of."""
        return {column for table in self.tables for column in table.columns}


def unknown(where: str, name: str, known: Iterable[str]) -> str | None:
    """That ``name`` is not ``known``, with the nearest that is; ``None`` if it is."""
    known = list(known)
    if name in known:
        return None
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    hint = f": did you mean {near[0]!r}?" if near else ""
    return f"{where} names {name!r}, which is unknown{hint}"


NUMBERS = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))


def criteo_layout(rows: Sequence[int]) -> Layout:
    """The layout of Criteo's advertising data: Kaggle's ``train.txt``, the terabyte's ``day_N.gz``.

    A line is a label, 13 counts and 26 categories of at most 8 hexadecimal digits, with tabs
    between them. A missing value is empty.

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
