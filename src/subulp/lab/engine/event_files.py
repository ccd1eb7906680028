"""TensorBoard's event files of a comparison: the numbers of ``metrics.jsonl``, a folder a run."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .checkpoint import clear
from .metrics import Record

FOLDER = "tensorboard"

_MEASURED = ("loss", "lr", "seconds", "descent_share", "lost_arithmetic")


def is_installed() -> bool:
    """Whether the package tensorboard is installed."""
    return importlib.util.find_spec("tensorboard") is not None


def check_available() -> None:
    """Raise ValueError if the package tensorboard is missing."""
    if not is_installed():
        raise ValueError(
            "log=tensorboard needs the package tensorboard, which is not installed: "
            "pip install tensorboard"
        )


class EventFiles:
    """Writes event files while runs train.

    Args:
        folder: The folder to write to; existing files are replaced.
        records: What was logged before (default: nothing).

    Raises:
        ValueError: The package tensorboard is missing.
    """

    def __init__(self, folder: Path, records: Iterable[Record] = ()) -> None:
        check_available()
        # It takes seconds to import.
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

        clear(folder)
        self._folder = folder
        self._make: Any = SummaryWriter
        self._writers: dict[tuple[str, int], Any] = {}
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        """Write the finite measurements of a logged step."""
        name = record.name, record.seed
        if name not in self._writers:
            run = f"{record.name.replace('/', '-')}-seed-{record.seed}"
            self._writers[name] = self._make(self._folder / run)
        for tag, value in _scalars(record):
            self._writers[name].add_scalar(tag, value, record.step)

    def close(self) -> None:
        """Write everything that is pending."""
        for writer in self._writers.values():
            writer.close()


def _scalars(record: Record) -> Iterator[tuple[str, float]]:
    for name in _MEASURED:
        value = getattr(record, name)
        if value is not None and math.isfinite(value):
            yield f"training/{name}", value
    for name, value in record.metrics.items():
        if math.isfinite(value):
            yield f"validation/{name}", value
