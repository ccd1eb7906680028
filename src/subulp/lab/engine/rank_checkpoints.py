"""The checkpoints of a run that several ranks make: rank 0 writes and reads them for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from .ranks import Ranks
from .run_checkpoints import RunCheckpoints
from .whole_state import sent


class AnyCheckpoints(Protocol):
    """What the loop wants of checkpoints; see :class:`.run_checkpoints.RunCheckpoints`."""

    def due(self, step: int, value: float | None, *, last: bool = False) -> bool:
        """Whether a checkpoint is due after a step."""

    def see(self, value: float | None) -> None:
        """Remember the best value of the first metric so far."""

    def write(self, step: int, value: float | None, state: Any, *, asked: bool = False) -> Any:
        """Write a checkpoint."""

    def read(self, path: Path) -> Any:
        """The state of a checkpoint."""

    def go_back(self) -> Path | None:
        """The checkpoint that a run that failed rolls back to."""


class RankCheckpoints:
    """Those of rank 0, for every rank.

    Args:
        own: The checkpoints, on rank 0; ``None`` on others.
        ranks: The ranks.
    """

    def __init__(self, own: RunCheckpoints | None, ranks: Ranks) -> None:
        self._own, self._ranks = own, ranks

    def due(self, step: int, value: float | None, *, last: bool = False) -> bool:
        """Whether a checkpoint is due after a step: rank 0's clock decides."""
        own = self._own is not None and self._own.due(step, value, last=last)
        return bool(self._ranks.highest(own))

    def see(self, value: float | None) -> None:
        """Remember the best value of the first metric so far."""
        if self._own is not None:
            self._own.see(value)

    def write(self, step: int, value: float | None, state: Any, *, asked: bool = False) -> None:
        """Write a checkpoint on rank 0."""
        if self._own is not None:
            self._own.write(step, value, state, asked=asked)

    def read(self, path: Path) -> Any:
        """The state of a checkpoint, which rank 0 reads and sends."""
        state = None if self._own is None else self._own.read(path)
        return sent(state, 0, self._ranks)

    def go_back(self) -> Path | None:
        """The checkpoint that a run that failed rolls back to."""
        own = self._own
        return self._ranks.first(lambda: own.go_back() if own else None)
