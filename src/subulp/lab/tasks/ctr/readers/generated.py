"""Examples that are drawn: categories by Zipf's law, and clicks that depend on pairs of them.

Every category has a vector. The logit of an example is the sum of the dot products of the vectors
of some pairs of its categories, and of some numbers: what a recommendation model can learn, and
no table alone. Categories may also have main effects, which a table learns alone. A category's
popularity falls with its rank, whose order may move on in time.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ....data.digest import digest
from ....data.drawn import NAME, Drawn
from .dataset import CTRData
from .example_stream import ExampleStream
from .examples import ColumnStatistics, Encoder, Examples
from .layout import Layout, Number, Table

_SHARED = 4
"""Numbers of a category's vector."""


@dataclass(frozen=True, kw_only=True)
class Generated(Drawn):
    """What is drawn.

    Attributes:
        examples: All of them, the test part included (default: 100,000).
        tables: Columns of categories, 2 to 64 (default: 8).
        rows: Categories of the first, third and every other table; the others have a quarter
            (default: 20,000).
        numbers: Columns of numbers, 1 to 64; with 13 and 26 tables, examples are of the shape of
            Criteo's. All together they have the same part in the logits (default: 4).
        zipf: Popularity falls with the rank to the power of so much (default: 1.05).
        drift: Share of its categories over which the most popular one moves from the first example
            to the last (default: 0).
        signal: Standard deviation of the logits, about (default: 2).
        main_effects: Standard deviation of what categories add to the logits by themselves, against
            that of what pairs and numbers add (default: 0).
        seed: Of the vectors and of the draws (default: 0).

    Raises:
        ValueError: A number is out of range.
    """

    examples: int = 100_000
    tables: int = 8
    rows: int = 20_000
    numbers: int = _SHARED
    zipf: float = 1.05
    drift: float = 0.0
    signal: float = 2.0
    main_effects: float = 0.0
    seed: int = 0

    _RANGES: ClassVar = {
        "examples": (100, 10**9),
        "tables": (2, 64),
        "rows": (8, 2**31 - 1),
        "numbers": (1, 64),
        "zipf": (0, 8),
        "drift": (0, 1),
        "signal": (0, 100),
        "main_effects": (0, 100),
        "seed": (0, 2**32 - 1),
    }

    @property
    def sizes(self) -> list[int]:
        """Categories of each table."""
        return [self.rows if i % 2 == 0 else max(2, self.rows // 4) for i in range(self.tables)]

    @property
    def layout(self) -> Layout:
        """The columns: a label, numbers, and categories as Criteo's."""
        numbers = [f"I{i + 1}" for i in range(self.numbers)]
        categories = [f"C{i + 1}" for i in range(self.tables)]
        return Layout(
            columns=("label", *numbers, *categories),
            label="label",
            numbers=tuple(Number(name, "none") for name in numbers),
            tables=tuple(
                Table((name,), rows) for name, rows in zip(categories, self.sizes, strict=True)
            ),
            separator="\t",
            hexadecimal=True,
        )

    def draw(self) -> Examples:
        """All examples in the order of time."""
        source = np.random.default_rng(self.seed)
        time = np.arange(self.examples) / self.examples
        keys = np.stack([self._categories(source, rows, time) for rows in self.sizes], 1)
        vectors = [source.standard_normal((rows, _SHARED)) for rows in self.sizes]
        numbers = source.standard_normal((self.examples, self.numbers))
        own = [of[keys[:, i]] for i, of in enumerate(vectors)]
        direct = numbers.sum(1) * (_SHARED / self.numbers) ** 0.5
        logits = sum((a * b).sum(1) for a, b in pairwise(own)) + direct
        spread = (_SHARED * self.tables) ** 0.5
        if self.main_effects:
            logits = logits + self.main_effects * spread * self._main_effects(keys)
            spread *= (1 + self.main_effects**2) ** 0.5
        click = 1 / (1 + np.exp(-self.signal * np.asarray(logits) / spread))
        labels = source.random(self.examples) < click
        return Examples(labels.astype(np.float32), numbers.astype(np.float32), keys)

    def _main_effects(self, keys: npt.NDArray[np.uint32]) -> npt.NDArray[np.float64]:
        """What the categories add by themselves, float64 ``(examples,)``, of variance 1.

        It has a source of its own, so that all else is as without it.
        """
        source = np.random.default_rng((self.seed, 1))
        added: npt.NDArray[np.float64] = np.zeros(len(keys))
        for i, rows in enumerate(self.sizes):
            added += source.standard_normal(rows)[keys[:, i]]
        added /= self.tables**0.5
        return added

    def _categories(
        self, source: np.random.Generator, rows: int, time: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.uint32]:
        """Categories of one table, uint32 ``(examples,)``."""
        chances = np.arange(1, rows + 1, dtype=np.float64) ** -self.zipf
        edges = np.cumsum(chances / chances.sum())
        ranks = np.searchsorted(edges, source.random(len(time))).clip(max=rows - 1)
        moved = (ranks + np.floor(time * self.drift * rows).astype(np.int64)) % rows
        # Popular categories stand anywhere in the table.
        order: npt.NDArray[np.uint32] = source.permutation(rows).astype(np.uint32)
        popular: npt.NDArray[np.uint32] = order[moved]
        return popular


def generate(options: Generated, *, buffer: int, test_share: float) -> CTRData:
    """Draw a data set; its last examples are the test part.

    Args:
        options: What is drawn.
        buffer: Size of the shuffle buffer, in examples: a smaller one keeps what is near in time
            together.
        test_share: Share of the examples that test.

    Raises:
        ValueError: There is no training part, or its labels are equal.
    """
    drawn = options.draw()
    cut = len(drawn) - max(1, round(test_share * len(drawn)))
    if cut < 1:
        raise ValueError(f"data={NAME}: test_share={test_share} leaves no training part")
    train, test = drawn.take(slice(0, cut)), drawn.take(slice(cut, None))
    share = float(train.labels.mean(dtype=np.float64))
    if share in (0.0, 1.0):
        raise ValueError(
            f"data={NAME}: all labels of the training part are {share:.0f}: nothing can be learned"
        )
    layout = options.layout
    statistics = ColumnStatistics(len(layout.numbers))
    statistics.add(train.numbers)
    return CTRData(
        options.name,
        layout.tables,
        len(layout.numbers),
        _stream(train, buffer),
        _stream(test, buffer),
        Encoder(layout, statistics, None),
        share,
        digest([digest((drawn.labels, drawn.numbers, drawn.keys)), repr(layout), str(cut)]),
    )


def _stream(part: Examples, buffer: int) -> ExampleStream:
    blocks = [part.take(slice(i, i + buffer)) for i in range(0, len(part), buffer)]
    return ExampleStream(lambda: iter(blocks), len(part), buffer)
