"""All runs of a comparison, and the run directory that they leave."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import RunConfig
from .loop import resolve_device
from .metrics import Metric, Record, Summary, with_drops
from .parallel import default_jobs, run_all
from .progress import Plan, Reporter
from .run_directory import (
    DESCENT_PLOT,
    LOSS_PLOT,
    MIXES,
    MODELS,
    REPORT,
    RunDirectory,
    summary_object,
)
from .task import metrics_of, task_of


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare` found.

    Attributes:
        directory: The run directory.
        metrics: What the task measures.
        data: The data that all runs share: its name and its sizes, as plain JSON.
        records: Every logged step, run by run.
        summaries: One per run: variant by variant, each with all seeds.
    """

    directory: Path
    metrics: tuple[Metric, ...]
    data: dict[str, Any]
    records: list[Record]
    summaries: list[Summary]


def compare(
    config: RunConfig,
    *,
    out: Path | None = None,
    overwrite: bool = False,
    jobs: int | None = None,
    reporter: Callable[[Plan], Reporter] | None = None,
) -> Comparison:
    """Train one model for every variant and seed of ``config``, and write a run directory.

    All runs of a seed start from the same weights and see the same data in the same order. Worker
    processes import the calling script: guard its main part with ``if __name__ == "__main__":``,
    or use ``jobs=1``.

    Args:
        config: The comparison, which also says of which task.
        out: The run directory; ``None`` makes ``runs/TASK-TIMESTAMP`` (default: ``None``).
        overwrite: Replace an earlier run in ``out`` (default: ``False``).
        jobs: Runs that train at the same time; ``None`` is one per core on a CPU and one on a GPU,
            which changes no result (default: ``None``).
        reporter: Makes what is entered when training starts, told every logged step, and left when
            it ends (default: ``None``).

    Raises:
        ValueError: An argument or a field of ``config`` is wrong, or the data is.
        OSError: A file or a folder is missing, in the way, or not accessible.
    """
    runs = [(variant, seed) for variant in config.variants for seed in config.seeds]
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs={jobs} is out of range: give at least 1")
    device = resolve_device(config.device)
    task = task_of(config)
    data = task.load(config)
    if jobs is None:
        jobs = default_jobs(len(runs)) if device.type == "cpu" else 1
    directory = RunDirectory.create(config.task, out, overwrite=overwrite)
    directory.write_config(config, device=device.type, jobs=jobs)

    records: list[Record] = []
    metrics = metrics_of(task, config)
    shown = tuple(metric.name for metric in metrics if metric.drop_of is None)
    described = task.describe(data)
    plan = Plan(tuple(runs), task.steps(config, data), shown, described)
    progress = reporter(plan) if reporter else None

    def keep(record: Record) -> None:
        records.append(record)
        directory.add_record(record)
        if progress is not None:
            progress.on_record(record)

    with progress or nullcontext():
        summaries = run_all(config, data, runs, jobs, keep, directory.path / MODELS)
    summaries = with_drops(metrics, summaries)
    # Runs that train at the same time interleave their records.
    records.sort(key=lambda record: runs.index((record.name, record.seed)))
    directory.write_summary(summary_object(config.task, described, summaries))
    found = Comparison(directory.path, metrics, described, records, summaries)
    # Matplotlib takes a second to import, which a failing run need not wait for.
    from .report import write_report  # noqa: PLC0415

    plot = getattr(task, "plot", None)
    if plot is None:
        _plot(found)
    else:
        plot(config, data, found)
    write_report([found.directory], found.directory / REPORT)
    return found


def _plot(found: Comparison) -> None:
    from .mix import plot_mixes  # noqa: PLC0415
    from .plots import plot_descent_quality, plot_quality  # noqa: PLC0415

    plot_quality(found.records, found.metrics, found.directory / LOSS_PLOT)
    plot_descent_quality(found.records, found.directory / DESCENT_PLOT)
    plot_mixes(found.records, found.directory / MIXES)
