"""Ctrl-C and SIGTERM: finish the step, write a checkpoint, and end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from .ranks import ALONE, Ranks
from .resume_command import resume_command

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(Exception):  # noqa: N818 - not an error: it was requested
    """A run has ended before its last step, because it was asked to.

    Args:
        step: Steps that it has made.
    """

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


class Interrupted(KeyboardInterrupt):
    """A comparison has ended before its last run, and can be resumed.

    Args:
        directory: Its run directory.
        signum: The signal that asked for it.

    Attributes:
        directory: As above.
        signum: As above.
    """

    def __init__(self, directory: Path, signum: int) -> None:
        super().__init__(directory, signum)
        self.directory, self.signum = directory, signum

    @property
    def hint(self) -> str:
        """How to resume."""
        return f"stopped; continue with\n  {resume_command(self.directory)}"


class StopRequest:
    """Whether a stop was requested.

    Attributes:
        signum: The signal that asked; ``None`` before it.
        on_request: Called, in the main thread, when a stop is requested.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self.on_request: Callable[[], None] = lambda: None

    def __call__(self) -> bool:
        """Whether a stop was requested."""
        return self.signum is not None

    def request(self, signum: int) -> None:
        """Request a stop, as a signal does."""
        if self.signum is None:
            self.signum = signum
            self.on_request()


class SharedStopRequest(StopRequest):
    """A stop that is requested of any rank, and known to all of them at the same step.

    Args:
        ranks: The ranks; they all ask, after the same steps.
    """

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks

    def __call__(self) -> bool:
        """Whether a stop was requested of any rank."""
        agreed = self._ranks.highest(self.signum or 0)
        if agreed:
            self.request(agreed)
        # A signal that came while the ranks agreed is one for the next step: only this rank has it.
        return agreed != 0


@contextmanager
def stop_requests(ranks: Ranks = ALONE) -> Iterator[StopRequest]:
    """Turn the first Ctrl-C or SIGTERM inside the block into a stop request; a second ends at once.

    Signals that are ignored stay ignored. Other threads than the main one get no signals, so
    there is no request in them. A rank waits for the others, and only its launcher ends it sooner.
    """
    request = SharedStopRequest(ranks) if ranks.several else StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {s: signal.getsignal(s) for s in _SIGNALS}
    before = {s: handler for s, handler in before.items() if handler not in (None, signal.SIG_IGN)}

    def handle(signum: int, frame: FrameType | None) -> None:
        if not ranks.several:
            for each, handler in before.items():
                signal.signal(each, handler)
        request.request(signum)

    for each in before:
        signal.signal(each, handle)
    try:
        yield request
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
