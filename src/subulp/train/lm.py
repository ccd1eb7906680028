"""The task ``lm``: train a small GPT under several precisions and compare what each one lost."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from .config import LMConfig
from .data.text import load_text
from .loop import parameter_dtype, resolve_device
from .metrics import Record, Summary
from .parallel import default_jobs, run_all
from .progress import Reporter
from .run_directory import DESCENT_PLOT, LOSS_PLOT, RunDirectory, summary_object

TASK = "lm"


@dataclass(frozen=True)
class Comparison:
    """What :func:`train_lm` found.

    Attributes:
        directory: The run directory.
        records: Every logged step, run by run.
        summaries: One per run: precision by precision, each with all seeds.
    """

    directory: Path
    records: list[Record]
    summaries: list[Summary]


def train_lm(
    config: LMConfig,
    *,
    out: Path | None = None,
    overwrite: bool = False,
    jobs: int | None = None,
    reporter: Reporter | None = None,
) -> Comparison:
    """Train one model for every precision and seed of ``config``, and write a run directory.

    All runs of a seed start from the same weights and see the same text in the same order. Worker
    processes import the calling script: guard its main part with ``if __name__ == "__main__":``,
    or use ``jobs=1``.

    Args:
        config: The comparison.
        out: The run directory; ``None`` makes ``runs/lm-TIMESTAMP`` (default: ``None``).
        overwrite: Replace an earlier run in ``out`` (default: ``False``).
        jobs: Runs that train at the same time; ``None`` is one per core on a CPU and one on a GPU,
            which changes no result (default: ``None``).
        reporter: Entered when training starts, told every logged step, left when it ends
            (default: ``None``).

    Raises:
        ValueError: An argument or a field of ``config`` is wrong, or the text is.
        OSError: A file or a folder is missing, in the way, or not accessible.
    """
    runs = [(precision, seed) for precision in config.precision for seed in config.seeds]
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs={jobs} is out of range: give at least 1")
    for precision in config.precision:
        parameter_dtype(precision, config.dtype)
    device = resolve_device(config.device)
    text = load_text(config.data, config.level)
    text.check_context(config.context)
    if jobs is None:
        jobs = default_jobs(len(runs)) if device.type == "cpu" else 1
    directory = RunDirectory.create(TASK, out, overwrite=overwrite)
    directory.write_config(TASK, config, device=device.type, jobs=jobs)

    records: list[Record] = []

    def keep(record: Record) -> None:
        records.append(record)
        directory.add_record(record)
        if reporter is not None:
            reporter.on_record(record)

    with reporter or nullcontext():
        summaries = run_all(config, text, runs, jobs, keep)
    # Runs that train at the same time interleave their records.
    records.sort(key=lambda record: runs.index((record.precision, record.seed)))
    directory.write_summary(summary_object(TASK, summaries))
    # Matplotlib takes a second to import, which a failing run need not wait for.
    from .plots import plot_descent_quality, plot_loss  # noqa: PLC0415

    plot_loss(records, directory.path / LOSS_PLOT)
    plot_descent_quality(records, directory.path / DESCENT_PLOT)
    return Comparison(directory.path, records, summaries)
