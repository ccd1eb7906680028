"""Running what repeats a claim, taking up what an earlier call left, and writing the record."""

from __future__ import annotations

import datetime
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..engine.files import write_text
from ..engine.machine import describe_machine
from ..engine.metrics import to_json
from ..engine.stopping import Interrupted
from ..engine.typed_files import read_json
from .claim import Claim, Experiment, Options, Part, Size, Watch
from .record import Written, digest_of
from .versions import versions

EXPERIMENT, WALL = "experiment.json", "seconds.json"
RECORDS = "records"
FOLDER = Path("runs") / "reproduce"


def reproduce(
    claim: Claim,
    options: Options,
    folder: Path = FOLDER,
    watch: Watch = Watch(),  # noqa: B008 - frozen
) -> Written:
    """Run what repeats a claim, and write its record.

    Claims of one experiment share its runs. What an earlier call has finished is read, and a run
    that was stopped goes on from its last checkpoint.

    Args:
        claim: The claim.
        options: How much is run, and on what.
        folder: Where runs and records are (default: ``runs/reproduce``).
        watch: Who is told how it goes on (default: nobody).

    Raises:
        ValueError: Nothing repeats the claim, or not at this size, or the folder has runs of
            another experiment.
        OSError: A file is missing, or cannot be written.
        KeyboardInterrupt: Ctrl-C or SIGTERM; the same call goes on.
    """
    experiment = check_runnable(claim, options.size)
    parts = experiment.parts(options)
    at = folder / f"{experiment.name}-{options.size}"
    origin = _same(at, parts)
    command = _command(claim, options)
    found = []
    for i, part in enumerate(parts):
        numbered = replace(watch, tell=partial(_tell, watch, f"{i + 1} of {len(parts)}"))
        begin = time.perf_counter()
        try:
            found.append(part.run(at / part.name, numbered))
        except Interrupted as stopped:
            place = [] if folder == FOLDER else ["--out", str(folder)]
            again = shlex.join([*command, *place])
            raise Stopped(again, stopped.directory, stopped.signum) from None
        finally:
            wall = _lasted(at / WALL, part.name, time.perf_counter() - begin)
    own = claim.own(experiment.whole(found))
    written = Written(
        claim=claim.name,
        size=options.size,
        experiment=experiment.sizes[options.size],
        digest=digest_of(parts),
        command=shlex.join(command),
        **origin,
        seeds=sorted({o.seed for o in own.observations if o.seed is not None}),
        found=own,
        wall_seconds=wall,
    )
    written.write(record_file(folder / RECORDS, claim.name, options.size), claim)
    return written


class Stopped(Interrupted):
    """A reproduction has ended before its last run, and goes on when it is called again.

    Args:
        command: The call.
        directory: The run directory that was written last.
        signum: The signal that asked for it.
    """

    def __init__(self, command: str, directory: Path, signum: int) -> None:
        super().__init__(directory, signum)
        self.command = command

    @property
    def hint(self) -> str:
        """How to go on."""
        return f"stopped; continue with\n  {self.command}"


def _lasted(file: Path, part: str, seconds: float) -> float:
    """Add to the time that a part has taken, over all calls; returns that of all parts."""
    known: dict[str, float] = dict(read_json(file)) if file.exists() else {}
    known[part] = known.get(part, 0.0) + seconds
    write_text(file, to_json(known))
    return sum(known.values())


def _tell(watch: Watch, number: str, line: str) -> None:
    watch.tell(f"{number}: {line}")


def record_file(folder: Path, claim: str, size: Size) -> Path:
    """The record of a claim in a folder of records."""
    return folder / f"{claim}-{size}.json"


def check_runnable(claim: Claim, size: Size) -> Experiment:
    """What repeats a claim.

    Raises:
        ValueError: Nothing does, or not at this size.
    """
    if claim.experiment is None:
        raise ValueError(f"claims={claim.name} is not run: {claim.not_run}")
    if size not in claim.experiment.sizes:
        known = ", ".join(claim.experiment.sizes)
        raise ValueError(f"size={size} is not there for {claim.name}: use one of {known}")
    return claim.experiment


def _same(at: Path, parts: Sequence[Part]) -> dict[str, Any]:
    """Have the folder of an experiment say what it holds, and when and by what it was computed.

    Raises:
        ValueError: It holds runs of another experiment, or by other versions.
    """
    now: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "machine": describe_machine(),
        "versions": versions(),
    }
    file, digest = at / EXPERIMENT, digest_of(parts)
    if file.exists():
        found = read_json(file)
        if found.get("digest") != digest:
            raise ValueError(
                f"out={at.parent} has runs of {at.name} with other options, seeds or data: give "
                "another folder, or remove it"
            )
        # Folders of earlier versions do not say it.
        origin = {name: found.get(name, value) for name, value in now.items()}
        here, there = now["versions"], origin["versions"]
        if other := [name for name in here | there if here.get(name) != there.get(name)]:
            is_now = ", ".join(f"{name} {here.get(name)}" for name in other)
            was = ", ".join(f"{name} {there.get(name)}" for name in other)
            raise ValueError(
                f"out={at.parent} has runs of {at.name} by {was}, and this is {is_now}: give "
                "another folder, or remove it"
            )
        return origin
    at.mkdir(parents=True, exist_ok=True)
    settings = {part.name: dict(part.settings) for part in parts}
    write_text(file, to_json({"digest": digest, **now, "parts": settings}, indent=2))
    return now


def _command(claim: Claim, options: Options) -> list[str]:
    """What repeats it, wherever its runs are."""
    words = ["subulp", "reproduce", claim.name, "--size", options.size]
    if options.seeds is not None:
        words += ["--seeds", ",".join(map(str, options.seeds))]
    if options.data is not None:
        words += ["--data", options.data]
    if options.encoder is not None:
        words += ["--encoder", options.encoder]
    return words
