"""The report: one page about one or several run directories, complete in itself."""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import jinja2

from ..._version import version
from ..engine.files import replacing
from .group import Group
from .line_styles import NAMED, SPARE, Look
from .page import section
from .run_reader import read_run
from .swatch import swatch

# The same colours, brighter, where the page is dark.
_DARK = {
    "#000000": "#F0F0F0",
    "#D55E00": "#FF8C42",
    "#0072B2": "#5DB7F2",
    "#009E73": "#2CCB9B",
    "#CC79A7": "#EDA3CB",
    "#E69F00": "#FFBE3D",
    "#56B4E9": "#A4DBFF",
    "#7A5195": "#C094DF",
    "#7F7F7F": "#A9A9A9",
    "#8C564B": "#CF9387",
    "#4B0092": "#A882FF",
    "#5D5D00": "#C9C93A",
}

# What neither HTML nor UTF-8 can hold; a file name may.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


def write_report(runs: Sequence[Path], out: Path) -> None:
    """Write a page about run directories, of any task, ended or not.

    Args:
        runs: The folders; those of the same task are shown side by side.
        out: The HTML file, which is replaced.

    Raises:
        ValueError: There is no folder, one holds no run, or a file in it is damaged.
        OSError: A file cannot be read or written.
    """
    page = render(runs)
    with replacing(out) as unfinished:
        unfinished.write_text(page, encoding="utf-8")


def render(runs: Sequence[Path]) -> str:
    """The page that :func:`write_report` writes."""
    if not runs:
        raise ValueError("there is no run to report: give at least one run directory")
    found = [read_run(Path(path)) for path in runs]
    tasks = list(dict.fromkeys(run.task for run in found))
    groups = [Group.of(task, [run for run in found if run.task == task]) for task in tasks]
    files = importlib.resources.files(__package__)
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FunctionLoader(lambda name: (files / name).read_text(encoding="utf-8")),
    )
    environment.globals["swatch"] = swatch
    page = environment.get_template("page.html.jinja").render(
        sections=[section(group) for group in groups],
        colours=[(color, _DARK[color]) for color in dict.fromkeys(map(_color, _all_looks()))],
        version=version(),
        written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        title=", ".join(label for group in groups for label in group.labels),
    )
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", page)


def _all_looks() -> list[Look]:
    return [*NAMED.values(), *SPARE]


def _color(look: Look) -> str:
    return look.color
