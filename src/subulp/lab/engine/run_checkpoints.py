"""The checkpoints of one run: when to write one, which to keep, which to resume from."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from . import checkpoint
from .checkpoint import Header
from .config import RunConfig
from .config_json import plain_fields
from .files import replacing
from .metrics import Record, Summary
from .saved_state import flatten, rebuild
from .sealed import DamagedError, check_seal, read_unchecked, sealed
from .task import task_of
from .typed_files import checked

FINISHED = "finished.json"

SECONDS = 600.0
"""Between checkpoints, unless ``checkpoint_every`` counts steps."""

_NAME = re.compile(r"step-(\d{8,18})")
_OTHER = "it belongs to another run; move it elsewhere"
_SUMMARY, _RECORDS = TypeAdapter(Summary), TypeAdapter(list[Record])
_CONFIG = TypeAdapter(dict[str, Any])


def run_name(variant: str, seed: int) -> str:
    """Name of a run's files and folders."""
    return f"{variant}-seed-{seed}"


@dataclass(frozen=True)
class Found:
    """A checkpoint to resume from.

    Attributes:
        path: Its folder.
        step: Its step.
        damaged: What is wrong with newer ones, which were given other names.
    """

    path: Path
    step: int
    damaged: tuple[str, ...] = ()


class RunCheckpoints:
    """The folder ``CHECKPOINTS/VARIANT-seed-SEED``.

    Args:
        folder: ``CHECKPOINTS``.
        config: The comparison.
        variant: The run's strategy.
        seed: The run's seed.
        clock: Monotonic clock, in seconds (default: the machine's).
    """

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        variant: str,
        seed: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder / run_name(variant, seed)
        self._every, self._keep = config.checkpoint_every, config.keep_checkpoints
        self._sign = 1.0 if task_of(config).METRICS[0].higher_is_better else -1.0
        # The device is "auto" at first, and what that meant when the run is resumed; and the data
        # may have moved.
        fields = plain_fields(config) | dict.fromkeys(("device", *config.data_fields))
        self._header = Header(config.task, variant, seed, 0, fields)
        self._earlier = config.earlier
        self._clock, self._last = clock, clock()
        self._best: float | None = None

    # ------------------------------------------------------------------------------- writing

    def due(self, step: int, value: float | None, *, last: bool = False) -> bool:
        """Whether a checkpoint is due after a step.

        Args:
            step: Steps made.
            value: The first metric, if it was measured after it.
            last: It is the last step (default: ``False``).
        """
        if self._every is None:
            return not last and self._clock() - self._last >= SECONDS
        return self._every > 0 and (step % self._every == 0 or last or self._improves(value))

    def _improves(self, value: float | None) -> bool:
        return value is not None and (
            self._best is None or self._sign * value > self._sign * self._best
        )

    def see(self, value: float | None) -> None:
        """Remember the best value of the first metric so far."""
        if self._improves(value):
            self._best = value

    def write(self, step: int, value: float | None, state: Any, *, asked: bool = False) -> Path:
        """Write a checkpoint, and remove those that are no longer to be kept.

        Args:
            step: Steps made.
            value: The first metric, if it was measured after it.
            state: What to write.
            asked: It is written because the run stops (default: ``False``).

        Raises:
            UnwritableError: It could not be written; the others are unchanged.
        """
        path = self.folder / _folder(step)
        checkpoint.write(path, replace(self._header, step=step, value=value, asked=asked), state)
        self._last = self._clock()
        if not asked:
            self._prune()
        return path

    def _prune(self) -> None:
        """Keep the newest, the best, and no more that were written because a run had to stop."""
        headers = {path: _header(path) for path in self._paths()}
        due = [path for path, header in headers.items() if header and not header.asked]
        kept = set(due[-self._keep :])
        values = {p: h.value for p in due if (h := headers[p]) and h.value is not None}
        if values:
            kept.add(max(values, key=lambda path: self._sign * values[path]))
        checkpoint.clear(*(path for path in headers if path not in kept))

    def finish(self, summary: Summary, records: list[Record]) -> None:
        """Write what a finished run has measured."""
        self.folder.mkdir(parents=True, exist_ok=True)
        plain, _ = flatten(
            {
                "summary": asdict(summary),
                "records": [asdict(r) for r in records],
                "config": self._header.config,
            }
        )
        with replacing(self.folder / FINISHED) as unfinished:
            unfinished.write_text(sealed(plain), encoding="utf-8")
            checkpoint.sync(unfinished)
        checkpoint.sync(self.folder)

    # ------------------------------------------------------------------------------- reading

    def finished(self) -> tuple[Summary, list[Record]] | None:
        """The records and summary of a finished run; ``None`` for an unfinished one.

        Raises:
            ValueError: The file is damaged, or of another run or configuration.
        """
        path = self.folder / FINISHED
        try:
            fields = read_unchecked(path)
            # Earlier versions wrote no sum, and no configuration.
            if set(fields) != {"summary", "records"}:
                check_seal(path, fields)
            saved = rebuild(fields, {})
            summary: Summary = checked(_SUMMARY, saved["summary"], lambda _: str(path))
            records: list[Record] = checked(_RECORDS, saved["records"], lambda _: str(path))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, RecursionError) as error:
            raise ValueError(
                f"{path} is damaged ({error}): remove it, and the run is resumed from its last "
                "checkpoint"
            ) from None
        for name, ours, theirs in (
            ("variant", self._header.variant, summary.name),
            ("seed", self._header.seed, summary.seed),
        ):
            if ours != theirs:
                raise ValueError(
                    f"{path} has {name}={theirs}, and this run has {name}={ours}: {_OTHER}"
                )
        if "config" in saved:
            config: dict[str, Any] = checked(_CONFIG, saved["config"], lambda _: str(path))
            self._check_config(path, config)
        return summary, records

    def newest(self) -> Found | None:
        """The newest intact checkpoint; ``None`` if there is no checkpoint at all.

        What a killed process left half-written is removed, and damaged checkpoints that are newer
        get a name that ends in ``.damaged``.

        Raises:
            ValueError: All are damaged, or one is of another run or a newer version.
        """
        checkpoint.clear(*self.folder.glob(".step-*"))
        damaged: list[str] = []
        for path in reversed(self._paths()):
            try:
                header = checkpoint.check(path)
            except DamagedError as error:
                damaged.append(str(error))
                continue
            self._check_mine(path, header)
            for other in self._paths():
                if _step(other) > header.step:
                    aside = other.with_name(f"{other.name}.damaged")
                    checkpoint.clear(aside)
                    other.rename(aside)
            return Found(path, header.step, tuple(damaged))
        if damaged:
            raise ValueError(
                f"no checkpoint in {self.folder} is intact; remove the folder to start the run "
                f"from scratch: {'; '.join(damaged)}"
            )
        return None

    def read(self, path: Path) -> Any:
        """The state of a checkpoint.

        Raises:
            ValueError: It is damaged, of another run, or of a newer version.
        """
        header, state = checkpoint.read(path)
        self._check_mine(path, header)
        for each in self._paths():
            found = _header(each)
            self.see(found.value if found else None)
        return state

    def logged(self, found: Found) -> list[Record]:
        """The steps that the run of a checkpoint had logged."""
        try:
            plain = checkpoint.read_plain(found.path)
            logged = rebuild(plain["tally"]["records"], {})
            records: list[Record] = checked(_RECORDS, logged, lambda _: str(found.path))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{found.path} holds no state of a run ({error}): remove it") from None
        return records

    def go_back(self) -> Path | None:
        """The newest checkpoint that was due, to which a run that failed rolls back.

        Those that were written because the run had to stop do not count, and newer ones go: where
        a run goes back to does not depend on when it was stopped.
        """
        for path in reversed(self._paths()):
            header = _header(path)
            if header is not None and not header.asked:
                return path
            checkpoint.clear(path)
        return None

    def _paths(self) -> list[Path]:
        """All that look like checkpoints, by step."""
        if not self.folder.is_dir():
            return []
        found = [path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(found, key=_step)

    def _check_mine(self, path: Path, header: Header) -> None:
        if _step(path) != header.step:
            raise ValueError(
                f"{path} holds the checkpoint of step {header.step}: it was renamed; call it "
                f"{_folder(header.step)} again, or move it elsewhere"
            )
        mine = self._header
        for name in ("task", "variant", "seed"):
            ours, theirs = getattr(mine, name), getattr(header, name)
            if ours != theirs:
                raise ValueError(
                    f"{path} has {name}={theirs}, and this run has {name}={ours}: {_OTHER}"
                )
        self._check_config(path, header.config)

    def _check_config(self, path: Path, config: Mapping[str, Any]) -> None:
        mine, written = self._header, {**self._earlier, **config}
        for name in [*mine.config, *(name for name in written if name not in mine.config)]:
            ours, theirs = mine.config.get(name), written.get(name)
            if ours != theirs:
                raise ValueError(
                    f"{path} was written with {name}={theirs}, and config.json has {name}={ours}: "
                    "a run is resumed with the options it was started with; restore the value"
                )


def _folder(step: int) -> str:
    return f"step-{step:08d}"


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _header(path: Path) -> Header | None:
    """The header of a checkpoint; its files are not read."""
    try:
        return checkpoint.read_header(path)
    except ValueError:
        return None
