"""Which of several processes this one is, and whether it speaks to the user."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What ``torchrun`` tells the processes that it starts."""

_NOTE = "on rank "
# Ranks start together, but on a loaded machine not at the same time.
_SECONDS_TO_BEGIN = 60


class Silent(Exception):  # noqa: N818 - another rank says what is wrong
    """A rank ends because of what another one tells the user.

    Args:
        error: What happened here.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


def _process_group() -> Any:
    """``torch.distributed``, if there is a default process group."""
    # Nobody has made one unless this has been imported, and importing it takes long.
    dist = sys.modules.get("torch.distributed")
    made = dist is not None and dist.is_available() and dist.is_initialized()
    return dist if made else None


def started() -> int:
    """How many ranks there are; 1 in a process of its own."""
    if (dist := _process_group()) is not None:
        return int(dist.get_world_size())
    return int(os.environ["WORLD_SIZE"]) if all(v in os.environ for v in VARIABLES) else 1


def is_first() -> bool:
    """Whether this process is the one that writes and speaks."""
    if (dist := _process_group()) is not None:
        return bool(dist.get_rank() == 0)
    return started() == 1 or os.environ["RANK"] == "0"


def speak(error: BaseException, rank: int) -> None:
    """Let a rank other than the first tell the user about an error."""
    error.add_note(f"{_NOTE}{rank}")


def speaker_of(error: BaseException) -> str | None:
    """Who tells the user about an error, as the beginning of a message; ``None``: not this process.

    The first rank speaks for all, unless it is gone, or has no part in what is wrong.
    """
    if is_first():
        return ""
    notes = getattr(error, "__notes__", ())
    noted = (f"{n.removeprefix('on ')}: " for n in notes if n.startswith(_NOTE))
    return next(noted, None) or _speaker_before_all_met(error)


def _speaker_before_all_met(error: BaseException) -> str | None:
    """Wait for the first rank to say what is wrong, which it finds too unless it is here alone.

    Its launcher ends all ranks as soon as one has, and would end the first one before its words.
    """
    asked = isinstance(error, KeyboardInterrupt)
    if asked or _process_group() is not None or "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    # Ended by the launcher, in the middle, once the first rank has spoken.
    time.sleep(_SECONDS_TO_BEGIN)
    return f"rank {os.environ['RANK']}: "
