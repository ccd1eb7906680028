"""Files of examples, read in blocks: memory does not grow with the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ....data.lines import count_lines, fail, whole_lines
from .examples import Examples
from .layout import Layout
from .parse_block import parse_block

OnBadLine = Literal["raise", "skip"]

_SKIP = " (--on-bad-line skip skips such lines)"


@dataclass(frozen=True)
class Span:
    """Lines of a file, from ``start`` to before ``stop``, counted from 0; ``None`` is its end."""

    path: Path
    start: int = 0
    stop: int | None = None


class BadLines:
    """The policy for unreadable lines, and how many there were.

    Args:
        policy: ``"raise"``, or ``"skip"`` to skip them.
        hint: What ends the message of an error (default: that they can be skipped).

    Attributes:
        count: Lines that were skipped.
        first: The message about the first one; empty before it.
    """

    def __init__(self, policy: OnBadLine, hint: str = _SKIP) -> None:
        self._policy, self._hint = policy, hint
        self.count = 0
        self.first = ""

    def __call__(self, path: Path, line: int, message: str) -> None:
        """Note a line, counted from 1.

        Raises:
            ValueError: The policy is ``"raise"``.
        """
        if self._policy == "raise":
            fail(path, line, f"{message}{self._hint}")
        self.first = self.first or f"{path}:{line}: {message}"
        self.count += 1


def read_spans(layout: Layout, spans: Sequence[Span], bad: BadLines) -> Iterator[Examples]:
    """The examples of lines, a block at a time."""
    for span in spans:
        for number, block in whole_lines(span.path):
            first = number - 1
            if span.stop is not None and first >= span.stop:
                break
            count = count_lines(block)
            if first + count <= span.start:
                continue
            begin = max(0, span.start - first)
            end = count if span.stop is None else min(count, span.stop - first)
            chosen = _cut(block, begin, end) if (begin, end) != (0, count) else block
            yield parse_block(layout, chosen, _telling(bad, span.path, number + begin))


def _telling(bad: BadLines, path: Path, line: int) -> Callable[[int, str], None]:
    return lambda index, message: bad(path, line + index, message)


def _cut(block: bytes, begin: int, end: int) -> bytes:
    ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + 1
    ends = np.concatenate(([0], ends, [len(block)]))
    return block[ends[begin] : ends[end]]


class ExampleStream:
    """The examples of one part of a data set, to be read again and again.

    Args:
        blocks: Reads them in their order.
        count: How many there are.
        buffer: Size of the shuffle buffer, in examples.
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

    def batches(self, batch_size: int, seed: int) -> Batches:
        """Batches without end, in an order that the seed alone decides."""
        return Batches(self, batch_size, seed)

    def in_order(self, batch_size: int) -> Iterator[Examples]:
        """All examples once, in their order."""
        for block in self._blocks():
            for start in range(0, len(block), batch_size):
                yield block.take(slice(start, start + batch_size))


class Batches(Iterator[Examples]):
    """Batches without end, in an order that the seed alone decides.

    Examples are shuffled within the buffer; one that holds all of them shuffles all. Those that do
    not fill an epoch's last batch are left out.

    Args:
        stream: What to draw from.
        batch_size: Examples of a batch.
        seed: Seed of the generator that shuffles.
    """

    def __init__(self, stream: ExampleStream, batch_size: int, seed: int) -> None:
        self._stream, self._size = stream, batch_size
        self._generator = np.random.default_rng(seed)
        self._place: dict[str, Any] | None = None
        self._batches = self._epochs()

    def __next__(self) -> Examples:
        return next(self._batches)

    def _epochs(self) -> Iterator[Examples]:
        while True:
            yield from self._epoch()
            self._place = None

    def _epoch(self) -> Iterator[Examples]:
        """The batches of an epoch, from the place in it where it was left."""
        begin = self._place or {"chunk": 0, "before": 0, "drawn": 0, "rest": None}
        rest, before, first = begin["rest"], begin["before"], begin["drawn"]
        for number, chunk in enumerate(self._stream.chunks()):
            if number < begin["chunk"]:
                continue
            waiting = Examples.join([chunk] if rest is None else [rest, chunk])
            # What it takes to shuffle this chunk again.
            shuffle = self._generator.bit_generator.state
            order = self._generator.permutation(len(waiting))
            whole = len(order) // self._size
            for batch in range(first, whole):
                self._place = {
                    "chunk": number,
                    "before": before,
                    "drawn": batch + 1,
                    "rest": rest,
                    "generator": shuffle,
                }
                yield waiting.take(order[batch * self._size : (batch + 1) * self._size])
            rest = waiting.take(order[whole * self._size :])
            before, first = before + whole, 0
        if before != len(self._stream) // self._size:
            raise ValueError(
                f"the data had {len(self._stream)} examples and now make {before} batches of "
                f"{self._size}: the file has changed while it was read"
            )

    def state_dict(self) -> dict[str, Any]:
        """The place in the order; it is found again by reading the epoch up to there."""
        if self._place is None:
            return {"place": None, "generator": self._generator.bit_generator.state}
        rest: Examples | None = self._place["rest"]
        arrays = None if rest is None else [rest.labels, rest.numbers, rest.keys.view(np.int32)]
        kept = None if arrays is None else [torch.from_numpy(array) for array in arrays]
        return {"place": {**self._place, "rest": kept}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a place."""
        place = state_dict["place"]
        self._generator.bit_generator.state = (place or state_dict)["generator"]
        if place is not None and place["rest"] is not None:
            labels, numbers, keys = (tensor.numpy().copy() for tensor in place["rest"])
            place = {**place, "rest": Examples(labels, numbers, keys.view(np.uint32))}
        self._place = place
        self._batches = self._epochs()
