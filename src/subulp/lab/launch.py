"""``--ranks``: the same command once more in each of several processes, by ``torchrun``."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from tempfile import TemporaryDirectory

from .engine.launched import started


class RanksWanted(Exception):  # noqa: N818 - not an error: the command has to be started otherwise
    """A command is to run in several processes.

    Args:
        count: How many.
    """

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count


def want_ranks(count: int | None, given: int | None) -> None:
    """Go on in as many processes as are wanted.

    Args:
        count: Their number; ``None`` is one.
        given: The same, if the user has said so.

    Raises:
        ValueError: ``torchrun`` has started another number, or it is below 1.
        RanksWanted: They are still to be started.
    """
    there = started()
    if given is not None and given < 1:
        raise ValueError(f"ranks={given} is out of range: give at least 1")
    if there == 1 and count is not None and count > 1:
        raise RanksWanted(count)
    if there > 1 and given is not None and given != there:
        raise ValueError(
            f"ranks={given} and the {there} processes that were started contradict each other: "
            "leave ranks out"
        )


def launch(words: Sequence[str], count: int) -> int:
    """Run ``subulp WORDS`` in several processes.

    Returns:
        The exit code: that of the first rank that failed, or 128 and the number of a signal.
    """
    from torch.distributed import run as torchrun  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing import SignalException  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415

    # The threads of a rank are an option of the run.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        # Ranks say themselves what is wrong.
        logging.disable(logging.CRITICAL)
        # torchrun keeps a file for the error of each rank, and leaves behind a folder of its own.
        with TemporaryDirectory(prefix="subulp-ranks-", ignore_cleanup_errors=True) as errors:
            place = ["--standalone", f"--nproc-per-node={count}", f"--log-dir={errors}"]
            arguments = torchrun.parse_args([*place, "-m", "subulp"])  # type: ignore[no-untyped-call]
            # Not parsed: torchrun takes options of ours for beginnings of its own.
            arguments.training_script_args = list(words)
            torchrun.run(arguments)  # type: ignore[no-untyped-call]
    except SignalException as asked:
        return 128 + int(asked.sigval)
    except ChildFailedError as error:
        return _code_of({rank: found.exitcode for rank, found in error.failures.items()})
    finally:
        logging.disable(logging.NOTSET)
    return 0


def _code_of(codes: Mapping[int, int]) -> int:
    """The exit code for those of the ranks that failed, which are negative for signals."""
    for rank, code in codes.items():
        # The launcher itself ends the others by SIGTERM.
        if code < 0 and -code != signal.SIGTERM:
            print(
                f"error: rank {rank} was killed by {signal.Signals(-code).name}; if memory ran "
                "out, start more ranks with --parallel fsdp, or train a smaller model",
                file=sys.stderr,
            )
            return 1
    return next((code for code in codes.values() if code > 0), 128 + signal.SIGTERM)
