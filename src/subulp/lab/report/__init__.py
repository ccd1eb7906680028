"""The report: one page about one or several run directories, complete in itself."""

from __future__ import annotations

import importlib.resources
import itertools
from collections.abc import Sequence
from datetime import datetime
from importlib.resources.abc import Traversable
from pathlib import Path

import jinja2
from markupsafe import Markup

from ..._version import version
from ..engine.files import write_text
from ..engine.run_directory import COMPRESSION_PLOT, DESCENT_PLOT, LOSS_PLOT, MIXES, REPORT
from .figure import UNPRINTABLE, save_png, svg
from .group import Group
from .page import section
from .run_reader import read_run
from .styles import COLOURS


def write_report(runs: Sequence[Path], out: Path) -> None:
    """Write a page about run directories, of any task, ended or not.

    Args:
        runs: The folders; those of the same task are shown side by side.
        out: The HTML file, which is replaced.

    Raises:
        ValueError: There is no folder, one holds no run, or a file in it is damaged.
        OSError: A file cannot be read or written.
    """
    write_text(out, render(runs))


def render(runs: Sequence[Path]) -> str:
    """The page that :func:`write_report` writes."""
    if not runs:
        raise ValueError("there is no run to report: give at least one run directory")
    found = [read_run(Path(path)) for path in runs]
    tasks = list(dict.fromkeys(run.task for run in found))
    return _page([Group.of(task, [run for run in found if run.task == task]) for task in tasks])


def write_run_report(directory: Path) -> None:
    """Write a run directory's own page, and its main figures as PNG files.

    Args:
        directory: The run directory.

    Raises:
        ValueError: It holds no run, or a file in it is damaged.
        OSError: A file cannot be read or written.
    """
    run = read_run(directory)
    group = Group.of(run.task, [run])
    shown = section(group)
    for charts, name in (
        (shown.headline, LOSS_PLOT),
        (shown.lost, DESCENT_PLOT),
        (shown.compression, COMPRESSION_PLOT),
    ):
        if charts:
            save_png(charts, directory / name)
    for chart in shown.mixtures:
        (directory / MIXES).mkdir(exist_ok=True)
        save_png([chart], directory / MIXES / f"{chart.title.replace(' ', '-')}.png")
    write_text(directory / REPORT, _page([group]))


def _page(groups: Sequence[Group]) -> str:
    return fill(
        "page.html.jinja",
        sections=[section(group) for group in groups],
        title=", ".join(label for group in groups for label in group.labels),
    )


def fill(template: str, folder: Traversable | None = None, **values: object) -> str:
    """A page, complete in itself, with the style, the colours and the figures of all reports.

    Args:
        template: Name of a Jinja template.
        folder: Where it is; ``None`` is beside this file (default: ``None``).
        values: What it shows besides.
    """
    files = importlib.resources.files(__package__)
    places = (files,) if folder is None else (folder, files)

    def load(name: str) -> str | None:
        found = next((f / name for f in places if (f / name).is_file()), None)
        return None if found is None else found.read_text(encoding="utf-8")

    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FunctionLoader(load),
    )
    numbers = itertools.count()
    environment.globals["svg"] = lambda chart: Markup(svg(chart, f"f{next(numbers)}-"))
    page = environment.get_template(template).render(
        colours=COLOURS,
        version=version(),
        written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        **values,
    )
    return UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", page)
