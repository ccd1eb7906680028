"""Files of examples, read in blocks: memory does not grow with the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from ..xmc.lines import fail, whole_lines
from .examples import Examples
from .layout import Layout
from .parse import parse_block

OnBadLine = Literal["raise", "skip"]


@dataclass(frozen=True)
class Span:
    """Lines of a file, from ``start`` to before ``stop``, counted from 0; ``None`` is its end."""

    path: Path
    start: int = 0
    stop: int | None = None


class BadLines:
    """What happens to lines that cannot be read, and how many there were.

    Args:
        policy: ``"raise"``, or ``"skip"`` to leave them out.

    Attributes:
        count: Lines left out.
        first: The message about the first one; empty before it.
    """

    def __init__(self, policy: OnBadLine) -> None:
        self._policy = policy
        self.count = 0
        self.first = ""

    def __call__(self, path: Path, line: int, message: str) -> None:
        """Note a line, counted from 1.

        Raises:
            ValueError: The policy is ``"raise"``.
        """
        if self._policy == "raise":
            fail(path, line, f"{message} (--on-bad-line skip leaves such lines out)")
        self.first = self.first or f"{path}:{line}: {message}"
        self.count += 1


def count_lines(path: Path) -> int:
    """Lines of a file, empty ones included."""
    return sum(_lines(block) for _, block in whole_lines(path))


def read_spans(layout: Layout, spans: Sequence[Span], bad: BadLines) -> Iterator[Examples]:
    """The examples of lines, a block at a time."""
    for span in spans:
        for number, block in whole_lines(span.path):
            first = number - 1
            if span.stop is not None and first >= span.stop:
                break
            count = _lines(block)
            if first + count <= span.start:
                continue
            begin = max(0, span.start - first)
            end = count if span.stop is None else min(count, span.stop - first)
            chosen = _cut(block, begin, end) if (begin, end) != (0, count) else block
            yield parse_block(layout, chosen, _telling(bad, span.path, number + begin))


def _telling(bad: BadLines, path: Path, line: int) -> Callable[[int, str], None]:
    return lambda index, message: bad(path, line + index, message)


def _lines(block: bytes) -> int:
    return block.count(b"\n") + (not block.endswith(b"\n"))


def _cut(block: bytes, begin: int, end: int) -> bytes:
    ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + 1
    ends = np.concatenate(([0], ends, [len(block)]))
    return block[ends[begin] : ends[end]]


class Part:
    """The examples of one part of a data set, to be read again and again.

    Args:
        blocks: Reads them in their order.
        count: How many there are.
        buffer: Examples that are shuffled among each other, and that memory may hold.
    """

    def __init__(self, blocks: Callable[[], Iterator[Examples]], count: int, buffer: int) -> None:
        self._blocks, self._count, self._buffer = blocks, count, buffer

    def __len__(self) -> int:
        return self._count

    def chunks(self) -> Iterator[Examples]:
        """All examples in their order, about as many at a time as the buffer holds."""
        waiting: list[Examples] = []
        for block in self._blocks():
            waiting.append(block)
            if sum(map(len, waiting)) >= self._buffer:
                yield Examples.join(waiting)
                waiting = []
        if waiting:
            yield Examples.join(waiting)

    def batches(self, batch_size: int, seed: int) -> Iterator[Examples]:
        """Batches without end, in an order that the seed alone decides.

        Examples are shuffled within the buffer; one that holds all of them shuffles all. Those that
        do not fill an epoch's last batch are left out.
        """
        generator = np.random.default_rng(seed)
        while True:
            rest: list[Examples] = []
            drawn = 0
            for chunk in self.chunks():
                waiting = Examples.join([*rest, chunk])
                order = generator.permutation(len(waiting))
                whole = len(order) // batch_size
                for batch in order[: whole * batch_size].reshape(whole, batch_size):
                    yield waiting.take(batch)
                drawn += whole
                rest = [waiting.take(order[whole * batch_size :])]
            if drawn != self._count // batch_size:
                raise ValueError(
                    f"the data had {self._count} examples and now make {drawn} batches of "
                    f"{batch_size}: the file has changed while it was read"
                )

    def in_order(self, batch_size: int) -> Iterator[Examples]:
        """All examples once, in their order."""
        for block in self._blocks():
            for start in range(0, len(block), batch_size):
                yield block.take(slice(start, start + batch_size))
