"""Comparisons: train all variants and seeds, and write the run directory with its report."""

from __future__ import annotations

import errno
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from .data.room import available_memory, check_room, size_text
from .engine.config import RunConfig
from .engine.event_files import FOLDER as EVENTS
from .engine.event_files import EventFiles, check_available
from .engine.files import UnwritableError
from .engine.loop import Trial, resolve_device, thread_count, trial
from .engine.machine import check_kernels
from .engine.metrics import Metric, Record, RunProgress, Summary, with_drops
from .engine.parallel import PlannedRun, default_jobs, follow, run_all
from .engine.progress import Plan, Reporter, duration_text
from .engine.ranks import ALONE, Parallel, Ranks, join, naming_lost_ranks
from .engine.resume_command import resume_command
from .engine.run_checkpoints import run_name
from .engine.run_directory import (
    CONFIG,
    RunDirectory,
    read_config,
    read_ranks,
    summary_object,
)
from .engine.stopping import stop_requests
from .engine.task import Decided, metrics_of, task_of


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`compare`.

    Attributes:
        task: Name of the task.
        directory: The run directory.
        metrics: What the task measures.
        data: The data that all runs share: its name and its sizes, as plain JSON.
        records: Every logged step, run by run.
        summaries: One per run: variant by variant, each with all seeds.
        was_complete: A comparison that was already finished was only read (default: ``False``).
    """

    task: str
    directory: Path
    metrics: tuple[Metric, ...]
    data: dict[str, Any]
    records: list[Record]
    summaries: list[Summary]
    was_complete: bool = False


def compare(
    config: RunConfig,
    *,
    out: Path | None = None,
    overwrite: bool = False,
    jobs: int | None = None,
    parallel: Parallel | None = None,
    reporter: Callable[[Plan], Reporter] | None = None,
    log: Literal["tensorboard"] | None = None,
) -> Comparison:
    """Train one model for every variant and seed of ``config``, and write a run directory.

    All runs of a seed start from the same weights and see the same data in the same order. Worker
    processes import the calling script: guard its main part with ``if __name__ == "__main__":``,
    or use ``jobs=1``.

    In processes that ``torchrun`` has started, or that have a default process group, all ranks
    call this, and make each run together. Rank 0 writes and reports; others return the summaries
    alone.

    Args:
        config: The comparison, which also says of which task.
        out: The run directory; ``None`` makes ``runs/TASK-TIMESTAMP`` (default: ``None``).
        overwrite: Replace an earlier run in ``out`` (default: ``False``).
        jobs: Runs that train at the same time; ``None`` is one per core on a CPU and one on a GPU,
            which changes no result (default: ``None``).
        parallel: How several ranks share dense parameters: ``"ddp"``, all have all of them, or
            ``"fsdp"``, each has a shard; ``None`` is ``"ddp"`` (default: ``None``).
        reporter: Makes a context for the training that receives every logged step (default:
            ``None``).
        log: Write TensorBoard's event files too, into the run directory; a resumed comparison
            continues them (default: ``None``).

    Raises:
        ValueError: An argument or a field of ``config`` is wrong, or the data is.
        OSError: A file or a folder is missing, in the way, or not accessible.
        ChildProcessError: Another rank has ended.
        Interrupted: Ctrl-C or SIGTERM: the runs have written checkpoints, see :func:`resume`.
    """
    _check_jobs(jobs)
    if overwrite and out is None:
        raise ValueError("overwrite=True has no effect without out: name the run to replace")
    if log is not None:
        check_available()
    with join(parallel) as joined:
        _check_ranks(config, joined, jobs)
        device = resolve_device(config.device)
        ranks = joined.on(device)
        check_kernels(device)
        config = config.located()
        data = task_of(config).load(config)
        digest = task_of(config).digest(data)
        ranks.agree("the data", digest)
        runs = [PlannedRun(variant, seed) for variant in config.variants for seed in config.seeds]
        jobs = _fitting_jobs(config, data, runs, jobs, device, ranks)
        decided = ranks.first(partial(_decided, config, device))
        config = decided.config
        if ranks.rank > 0:
            return _follow(config, data, ranks)
        with RunDirectory.create(config.task, out, overwrite=overwrite) as directory:
            directory.write_config(
                config,
                device=device.type,
                jobs=jobs,
                ranks=ranks,
                decided=decided.record,
                digest=digest,
            )
            if log is not None:
                (directory.path / EVENTS).mkdir()
            begun = _ResumePoint(notes=[*decided.notes])
            if reporter is not None and not ranks.several:
                begun.notes.extend(_expectation(config, data, runs, jobs, device))
            return _train(config, data, directory, runs, jobs, begun, reporter, ranks)


def resume(
    directory: Path,
    *,
    jobs: int | None = None,
    parallel: Parallel | None = None,
    reporter: Callable[[Plan], Reporter] | None = None,
) -> Comparison:
    """Continue a comparison that was stopped or killed from the last checkpoint of each run.

    Its results are those of a comparison that never stopped, timings aside, if it goes on with as
    many ranks as before. A finished one is only read.

    Args:
        directory: The run directory, which holds its configuration.
        jobs: As in :func:`compare` (default: ``None``).
        parallel: As in :func:`compare`; ``None`` is what it was before (default: ``None``).
        reporter: As in :func:`compare` (default: ``None``).

    Raises:
        ValueError: The configuration, the data or the checkpoints are damaged or have changed.
        OSError: The folder is missing, holds no run, is in use or cannot be written.
        ChildProcessError: Another rank has ended.
        Interrupted: As in :func:`compare`.
    """
    _check_jobs(jobs)
    with join(parallel) as joined:
        if joined.rank > 0:
            return _follow_resumed(directory, joined)
        with RunDirectory.open(directory) as opened:
            config, digest = read_config(directory)
            count, before_parallel = read_ranks(directory)
            ranks = replace(joined, parallel=parallel or before_parallel or "ddp")
            _check_ranks(config, ranks, jobs)
            names = [(variant, seed) for variant in config.variants for seed in config.seeds]
            before = _ResumePoint.of(opened, config, names)
            ended = opened.read_summary()
            if len(before.summaries) == len(names) and ended is not None:
                found = _comparison(config, opened, ended["data"], names, before)
                return ranks.first(partial(replace, found, was_complete=True))
            device = resolve_device(config.device)
            check_kernels(device)
            ranks.first(lambda: (config, parallel or before_parallel))
            ranks = ranks.on(device)
            data = _same_data(config, opened.path)
            if task_of(config).digest(data) != digest:
                raise ValueError(
                    f"resume={directory} was started on other data than "
                    f"data={config.data or 'bundled'} has now: "  # type: ignore[attr-defined]
                    "restore the data, or the encoder's folder, or start a new run"
                )
            ranks.agree("the data", digest)
            if ranks.count != count:
                before.notes.append(
                    f"note: {_ranks_text(ranks.count)} now, and {_ranks_text(count)} at the start: "
                    "sums are rounded in another order from here on"
                )
            opened.write_records(before.records)
            runs = [PlannedRun(*name, before.begins.get(name)) for name in names]
            runs = [run for run in runs if (run.variant, run.seed) not in before.summaries]
            jobs = _fitting_jobs(config, data, runs, jobs, device, ranks)
            return _train(config, data, opened, runs, jobs, before, reporter, ranks)


def _follow_resumed(directory: Path, ranks: Ranks) -> Comparison:
    """Resume with rank 0, which alone reads the run directory."""
    told = ranks.first(_nothing)
    if isinstance(told, Comparison):
        return told
    config, parallel = told
    ranks = replace(ranks, parallel=parallel or "ddp").on(resolve_device(config.device))
    data = _same_data(config, directory)
    ranks.agree("the data", task_of(config).digest(data))
    return _follow(config, data, ranks)


def _ranks_text(count: int) -> str:
    return "one process" if count == 1 else f"{count} ranks"


def _nothing() -> Any:
    """What ranks other than the first have to say."""


def _follow(config: RunConfig, data: Any, ranks: Ranks) -> Comparison:
    """Make the runs with rank 0, and return what it returns."""
    runs, path = ranks.first(_nothing)
    with naming_lost_ranks(path), stop_requests(ranks) as stop:
        follow(config, data, runs, path, stop, ranks)
    ended: Comparison = ranks.first(_nothing)
    return ended


def _same_data(config: RunConfig, directory: Path) -> Any:
    """The data of a comparison that is resumed."""
    try:
        return task_of(config).load(config)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"resume={directory}: {error}; if the data has moved, change its path in "
            f"{directory / CONFIG}"
        ) from error


@dataclass(frozen=True)
class _ResumePoint:
    """What the runs had done when a comparison was resumed; empty for a new one.

    Attributes:
        summaries: Results of the runs that finished.
        begins: Checkpoints that the others resume from.
        steps: Steps that each run has made.
        records: Logged steps of all runs, up to these.
        notes: Messages about it for the user.
    """

    summaries: dict[tuple[str, int], Summary] = field(default_factory=dict)
    begins: dict[tuple[str, int], Path] = field(default_factory=dict)
    steps: dict[tuple[str, int], int] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls, directory: RunDirectory, config: RunConfig, names: Sequence[tuple[str, int]]
    ) -> _ResumePoint:
        """Read what finished runs and checkpoints have left."""
        before = cls(notes=[f"note: {change}" for change in directory.other_versions()])
        for name in names:
            called = run_name(*name)
            checkpoints = directory.checkpoints(config, *name)
            finished = checkpoints.finished()
            if finished is not None:
                before.summaries[name], records = finished
                before.records.extend(records)
                before.steps[name] = finished[0].steps
                continue
            found = checkpoints.newest()
            if found is None:
                before.notes.append(f"{called} starts from scratch: it has no checkpoint")
                continue
            before.begins[name], before.steps[name] = found.path, found.step
            before.records.extend(checkpoints.logged(found))
            before.notes.extend(f"warning: {problem}" for problem in found.damaged)
            before.notes.append(f"{called} resumes from step {found.step}")
        return before


def _check_jobs(jobs: int | None) -> None:
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs={jobs} is out of range: give at least 1")


def _check_ranks(config: RunConfig, ranks: Ranks, jobs: int | None) -> None:
    """Refuse what several ranks cannot do together.

    Raises:
        ValueError: ``jobs`` or a field of ``config`` is for one process.
    """
    if not ranks.several:
        return
    if jobs is not None and jobs > 1:
        raise ValueError(
            f"jobs={jobs} and {ranks.count} ranks contradict each other: all ranks make one run "
            "after the other together; leave jobs out"
        )
    size: int = config.batch_size  # type: ignore[attr-defined]
    if size < ranks.count:
        raise ValueError(
            f"batch_size={size} is below the number of ranks, {ranks.count}: each takes its part "
            "of every batch; give a larger batch, or fewer ranks"
        )
    check = getattr(task_of(config), "check_ranks", None)
    if check is not None:
        check(config, ranks)


def _fitting_jobs(
    config: RunConfig,
    data: Any,
    runs: Sequence[PlannedRun],
    jobs: int | None,
    device: torch.device,
    ranks: Ranks = ALONE,
) -> int:
    """How many runs train at a time: what was asked for, or as many as cores and memory allow.

    Raises:
        ValueError: Not even one run fits into memory, or not as many as were asked for.
    """
    if not runs:
        return jobs or 1
    there = available_memory()
    if device.type == "cuda":
        there = torch.cuda.mem_get_info()[0]
    task = task_of(config)
    needs = {run.variant: task.least_memory(config, data, run.variant) for run in runs}
    if ranks.several:
        # The least: what all of them share is on none of them whole.
        on_one = ranks.local if device.type == "cpu" else 1
        needs = {variant: need * on_one // ranks.count for variant, need in needs.items()}
        jobs = 1
    largest = max(needs, key=lambda variant: needs[variant])
    check_room(
        f"precision={largest}", needs[largest], "give a smaller model or a smaller batch", there
    )
    if jobs is None:
        fitting = default_jobs(len(runs)) if device.type == "cpu" else 1
        return fitting if there is None else max(1, min(fitting, there // max(1, needs[largest])))
    together = sorted(needs[run.variant] for run in runs)[-jobs:]
    check_room(f"jobs={jobs}", sum(together), "give fewer jobs, or a smaller model", there)
    return jobs


def _decided(config: RunConfig, device: torch.device) -> Decided:
    """What the task decides for this machine, measured as its runs will compute."""
    decide = getattr(task_of(config), "decide", None)
    if decide is None:
        return Decided(config)
    with thread_count(config.threads), torch.random.fork_rng([]):
        decided: Decided = decide(config, device)
        return decided


_WORTH_A_TRIAL = 100
_TRIAL_SECONDS = 2.0


def _expectation(
    config: RunConfig, data: Any, runs: Sequence[PlannedRun], jobs: int, device: torch.device
) -> list[str]:
    """What a long comparison will take, from the first steps of some of its runs; or nothing."""
    steps = task_of(config).steps(config, data)
    if steps * len(runs) < _WORTH_A_TRIAL:
        return []
    found: dict[str, Trial] = {}
    begun = time.monotonic()
    for run in runs:
        if run.variant not in found and time.monotonic() - begun < _TRIAL_SECONDS:
            tried = trial(config, data, run.variant, run.seed)
            if tried is not None:
                found[run.variant] = tried
    if not found:
        return []
    mean = statistics.fmean(each.seconds_per_step for each in found.values())
    own = {variant: each.seconds_per_step for variant, each in found.items()}
    seconds = [steps * own.get(run.variant, mean) for run in runs]
    total = max(sum(seconds) / jobs, *seconds)
    peak = max(each.peak_bytes for each in found.values())
    there = available_memory() if device.type == "cpu" else torch.cuda.mem_get_info()[0]
    of = "" if there is None else f" of {size_text(there)}"
    return [
        f"expected: about {duration_text(total)}, evaluations aside, and "
        f"{size_text(jobs * peak)}{of} for the tensors of {jobs} run{'s' if jobs > 1 else ''} "
        "at a time"
    ]


def _train(
    config: RunConfig,
    data: Any,
    directory: RunDirectory,
    runs: Sequence[PlannedRun],
    jobs: int,
    before: _ResumePoint,
    reporter: Callable[[Plan], Reporter] | None,
    ranks: Ranks,
) -> Comparison:
    """Make the runs that are left, and write what all have found."""
    ranks.first(lambda: (runs, directory.path))
    task = task_of(config)
    described = task.describe(data)
    names = [(variant, seed) for variant in config.variants for seed in config.seeds]
    plan = Plan(
        tuple(names),
        task.steps(config, data),
        tuple(m.name for m in metrics_of(task, config) if m.drop_of is None),
        described,
        before.steps,
        tuple(before.notes),
    )
    progress = reporter(plan) if reporter else None
    # Its folder says that event files were asked for, also when the comparison was begun.
    folder = directory.path / EVENTS
    events = EventFiles(folder, before.records) if folder.is_dir() else None
    found = replace(before, records=list(before.records), summaries=dict(before.summaries))

    def keep(record: Record) -> None:
        found.records.append(record)
        directory.add_record(record)
        if events is not None:
            events.add(record)
        if progress is not None:
            progress.on_record(record)

    def move(made: RunProgress) -> None:
        if progress is not None:
            progress.on_progress(made)

    def end(planned: PlannedRun, summary: Summary) -> None:
        name = planned.variant, planned.seed
        found.summaries[name] = summary
        own = [record for record in found.records if (record.name, record.seed) == name]
        directory.checkpoints(config, *name).finish(summary, own)

    try:
        with (
            _resumable(directory),
            naming_lost_ranks(directory.path),
            progress or nullcontext(),
            stop_requests(ranks) as stop,
        ):
            run_all(config, data, runs, jobs, directory, stop, keep, end, move, ranks)
    finally:
        if events is not None:
            events.close()
    compared = _comparison(config, directory, described, names, found)
    with _resumable(directory):
        directory.write_summary(summary_object(config.task, described, compared.summaries))
        # Matplotlib takes a second to import, which a run that fails need not wait for.
        from .report import write_run_report  # noqa: PLC0415

        plot = getattr(task, "plot", None)
        if plot is not None:
            plot(config, data, directory.path)
        write_run_report(directory.path)
    return ranks.first(lambda: compared)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def _resumable(directory: RunDirectory) -> Iterator[None]:
    """Say how to go on where there is no room for a file."""
    try:
        yield
    except OSError as error:
        if not isinstance(error, UnwritableError):
            if error.errno not in _FULL:
                raise
            error = UnwritableError.of(str(error.filename or directory.path), error)
        hint = f"; make room there, and continue with {resume_command(directory.path)}"
        if not directory.path.is_dir():
            hint = ", for the run directory is gone"
        raise UnwritableError(error.errno, f"{error}{hint}") from error


def _comparison(
    config: RunConfig,
    directory: RunDirectory,
    described: dict[str, Any],
    names: Sequence[tuple[str, int]],
    found: _ResumePoint,
) -> Comparison:
    """What all runs have found, in the order of the runs."""
    metrics = metrics_of(task_of(config), config)
    summaries = with_drops(metrics, [found.summaries[name] for name in names])
    # Runs that train at the same time interleave their records, and those that have gone back have
    # two of a step: the later one counts.
    latest = {(names.index((r.name, r.seed)), r.step): r for r in found.records}
    records = [latest[key] for key in sorted(latest)]
    return Comparison(config.task, directory.path, metrics, described, records, summaries)
