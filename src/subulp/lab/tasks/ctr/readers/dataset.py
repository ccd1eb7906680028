"""A data set for click-through-rate prediction, and the first pass over its files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from ....data.counts import Counts
from ....data.digest import digest
from .example_stream import BadLines, ExampleStream, OnBadLine
from .examples import ColumnStatistics, Encoder, Examples
from .layout import Layout, Table

Blocks = Callable[[BadLines], Iterator[Examples]]
"""Reads the examples of a part in their order, again with each call, and tells of bad lines."""


@dataclass(frozen=True)
class CTRData:
    """A data set.

    Attributes:
        name: What it is called in tables and files.
        tables: The embedding tables, with the rows that they need.
        numbers: How many numbers an example has.
        train: The training part.
        test: The test part.
        encode: From examples to what a model takes.
        positive_share: Share of the training part's labels that are 1.
        digest: Digest of all examples, in hexadecimal digits.
        skipped: Lines that were skipped because they cannot be read.
        first_skipped: The message about the first of them.
    """

    name: str
    tables: tuple[Table, ...]
    numbers: int
    train: ExampleStream
    test: ExampleStream
    encode: Encoder
    positive_share: float
    digest: str
    skipped: int = 0
    first_skipped: str = ""


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How files are read.

    Attributes:
        on_bad_line: ``"raise"``, or ``"skip"`` to skip lines that cannot be read (default:
            ``"raise"``).
        buffer: Size of the shuffle buffer, in examples (default: 2**20).
        min_count: Training examples that a category needs to get its own row; ``None`` hashes
            categories to rows (default: ``None``).
    """

    on_bad_line: OnBadLine = "raise"
    buffer: int = 1 << 20
    min_count: int | None = None


def make_data(
    name: str,
    layout: Layout,
    train: Blocks,
    test: Blocks,
    options: ReadOptions,
) -> CTRData:
    """Read all lines once: every one is checked, and counts and vocabularies are those of the pass.

    A part that fits the buffer stays in memory; a larger one is read again for every epoch.

    Raises:
        ValueError: A line cannot be read, or a part has no examples, or training labels are equal.
    """
    bad = BadLines(options.on_bad_line)
    statistics = ColumnStatistics(len(layout.numbers))
    counts = [Counts(np.uint32) for _ in layout.tables] if options.min_count is not None else []
    positives = 0.0
    digests: list[str] = []
    ends: list[int] = []

    def note(block: Examples) -> None:
        digests.append(digest((block.labels, block.numbers, block.keys)))

    def see(block: Examples) -> None:
        nonlocal positives
        note(block)
        positives += float(block.labels.sum(dtype=np.float64))
        statistics.add(block.numbers)
        for table, count in enumerate(counts):
            count.add(block.keys[:, table])

    parts = {}
    for part, blocks, tell in (("training", train, see), ("test", test, note)):
        parts[part] = _part(blocks, options.buffer, bad, tell)
        ends.append(len(digests))
        if not len(parts[part]):
            raise ValueError(f"data={name} has no examples in its {part} part")
    if digests[: ends[0]] == digests[ends[0] :]:
        raise ValueError(
            f"data={name} has the same examples in its training part and its test part: a model "
            "would be tested on what it was trained on; give another test part"
        )
    share = positives / len(parts["training"])
    if share in (0.0, 1.0):
        raise ValueError(
            f"data={name}: all labels of the training part are {share:.0f}: nothing can be learned"
        )
    vocabularies = None
    if options.min_count is not None:
        vocabularies = [
            count.most_frequent(table.rows - 1, options.min_count)
            for count, table in zip(counts, layout.tables, strict=True)
        ]
    encode = Encoder(layout, statistics, vocabularies)
    tables = tuple(replace(t, rows=r) for t, r in zip(layout.tables, encode.rows, strict=True))
    return CTRData(
        name,
        tables,
        len(layout.numbers),
        parts["training"],
        parts["test"],
        encode,
        share,
        digest([*digests, repr(layout)]),
        bad.count,
        bad.first,
    )


def _part(
    blocks: Blocks, buffer: int, bad: BadLines, see: Callable[[Examples], None]
) -> ExampleStream:
    kept: list[Examples] = []
    count = 0
    for block in blocks(bad):
        see(block)
        count += len(block)
        kept = [*kept, block] if count <= buffer else []
    if kept:
        whole = Examples.join(kept)
        return ExampleStream(lambda: iter((whole,)), count, buffer)
    # The first pass has reported the bad lines.
    return ExampleStream(lambda: blocks(BadLines("skip")), count, buffer)
