"""The index of all claims as a page of the documentation, and as one report with all figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from ..engine.files import write_text
from ..engine.progress import duration_text
from ..report import fill
from ..report.dot_chart import DotChart
from ..report.figure import Chart, save_png
from ..report.line_chart import LineChart
from .check import CONFIDENCE, LEAST_SEEDS, Verdict
from .claim import PAPERS, SIZES, Claim
from .figures import charts
from .record import Written, read_record
from .run import record_file
from .table import number_text, outcome_text, range_text, seeds_text

FIGURES = "figures/reproductions"
"""Folder of the figures beside the page of the documentation."""

# There are many of them.
_DPI = 100

VERDICTS: tuple[Verdict, ...] = ("holds", "holds in part", "does not hold", "undecided", "not run")

RULES = (
    f"A check compares numbers of runs with the same seed: the mean of their differences or "
    f"ratios, in brackets the {100 * CONFIDENCE:g} % interval of Student's distribution. It holds "
    f"if the whole interval lies in the claimed range, does not hold if none of it does, and is "
    f"undecided otherwise, or with fewer than {LEAST_SEEDS} seeds where chance has a part. Each is "
    "looked at alone: where there is no difference, one of forty still shows one. A claim holds if "
    "all its checks do, holds in part if some do, and does not hold if none does and one is "
    "refuted. Checks in italics are ours: premises, without which an experiment tells nothing, and "
    "comparisons that a paper does not make. They decide nothing else."
)


@dataclass(frozen=True)
class Line:
    """A check in words."""

    says: str
    range: str
    paper: str
    here: str
    verdict: str
    ours: bool


@dataclass(frozen=True)
class Shown:
    """A claim as the pages show it.

    Attributes:
        claim: The claim.
        written: Its record; ``None`` without one.
    """

    claim: Claim
    written: Written | None

    @property
    def verdict(self) -> Verdict:
        """The verdict; without a record, ``"not run"``."""
        return "not run" if self.written is None else self.written.verdict(self.claim)

    @property
    def command(self) -> str:
        """What repeats it."""
        if self.written is not None:
            return self.written.command
        return f"subulp reproduce {self.claim.name}" if self.claim.experiment else ""

    @property
    def seeds(self) -> str:
        """Seeds in words."""
        return "" if self.written is None else seeds_text(self.written.seeds)

    @property
    def time(self) -> str:
        """How long its runs took."""
        if self.written is None:
            return ""
        wall, found = self.written.wall_seconds, self.written.found.seconds
        if wall is None and self.written.seeds:
            return f"{duration_text(found)} of steps"
        return duration_text(found if wall is None else wall)

    @property
    def checks(self) -> list[Line]:
        """The checks, in the order of the claim."""
        if self.written is None:
            return []
        lines = []
        for outcome in self.written.outcomes(self.claim):
            paper = outcome.check.published(self.claim.published)
            lines.append(
                Line(
                    outcome.check.says,
                    range_text(outcome),
                    "" if paper is None else number_text(paper),
                    outcome_text(outcome),
                    outcome.verdict,
                    outcome.check.role != "claim",
                )
            )
        return lines

    @property
    def charts(self) -> list[Chart]:
        """All figures."""
        return [] if self.written is None else charts(self.claim, self.written)

    @property
    def dots(self) -> list[Chart]:
        """The paper's numbers beside ours."""
        return [chart for chart in self.charts if isinstance(chart, DotChart)]

    @property
    def lines(self) -> list[Chart]:
        """Curves."""
        return [chart for chart in self.charts if isinstance(chart, LineChart)]


@dataclass(frozen=True)
class Paper:
    """The claims of a paper."""

    name: str
    title: str
    rows: Sequence[Shown]


def read_records(folder: Path, claims: Sequence[Claim]) -> list[Shown]:
    """All claims, each with the record of the largest size that is there.

    Raises:
        ValueError: A file is no record.
    """
    found = []
    for claim in claims:
        files = [record_file(folder, claim.name, size) for size in reversed(SIZES)]
        file = next((file for file in files if file.exists()), None)
        found.append(Shown(claim, None if file is None else read_record(file)))
    return found


def write_report(folder: Path, claims: Sequence[Claim], out: Path) -> None:
    """Write one HTML file about all claims of which there is a record, with all figures.

    Of the papers that these are of, claims that nothing here can run are in it too, with the
    reason.

    Raises:
        ValueError: A file is no record.
        OSError: The file cannot be written.
    """
    every = read_records(folder, claims)
    papers = {row.claim.paper for row in every if row.written is not None}
    rows = [
        row
        for row in every
        if row.written is not None or (row.claim.not_run and row.claim.paper in papers)
    ]
    page = fill(
        "reproductions.html.jinja",
        resources.files(__package__),
        title="Reproductions",
        papers=_papers(rows),
        summary=_summary(rows),
        rules=RULES,
    )
    write_text(out, page)


def markdown(rows: Sequence[Shown], figures: Mapping[str, str] = {}) -> str:
    """The page of the documentation.

    Args:
        rows: All claims.
        figures: Of claims by name, where their figures are (default: none).
    """
    lines = [
        "# Reproductions",
        "",
        "Every table, figure, algorithm and numbered claim of the five papers, and whether it "
        "holds here. A command repeats each row:",
        "",
        "```sh",
        "subulp reproduce                                  # this list",
        "subulp reproduce collage-table6                   # what two cores carry",
        "subulp reproduce collage-table6 --size paper --data FILE",
        "subulp reproduce collage                          # all of a paper",
        "```",
        "",
        "It resumes when it was stopped, writes a record for each claim, and one report with the "
        "paper's numbers beside ours. `--size smallest` shows in seconds that a command works.",
        "",
        RULES,
        "",
        _summary(rows),
        "",
    ]
    for paper in _papers(rows):
        lines += [
            f"## {paper.title}",
            "",
            "| Where | What it says | Run here | Paper → here | Verdict |",
            "|---|---|---|---|---|",
            *(_row(row, figures.get(row.claim.name)) for row in paper.rows),
            "",
        ]
    return "\n".join(lines).rstrip() + "\n"


def _row(row: Shown, figure: str | None) -> str:
    says = f"{row.claim.says} {row.claim.differs}".strip()
    if row.written is None:
        run = f"`{row.command}`" if row.claim.experiment else ""
        verdict = f"not run: {row.claim.not_run}" if row.claim.not_run else "not run yet"
        return _cells(row.claim.place, says, run, "", verdict)
    run = (
        f"`{row.command}`<br>{row.written.experiment}; seeds {row.seeds}; {row.time}, "
        f"{row.written.machine['processor']}"
    )
    compared = [
        f"{f'*{line.says}*' if line.ours else line.says}: "
        f"{line.paper + ' → ' if line.paper else ''}{line.here}"
        + ("" if line.verdict == "holds" else f" (**{line.verdict}**)")
        for line in row.checks
    ]
    place = row.claim.place if figure is None else f"{row.claim.place}<br>[figure]({figure})"
    return _cells(place, says, run, "<br>".join(compared), f"**{row.verdict}**")


def _cells(*texts: str) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def _papers(rows: Sequence[Shown]) -> list[Paper]:
    return [
        Paper(name, title, own)
        for name, title in PAPERS.items()
        if (own := [row for row in rows if row.claim.paper == name])
    ]


def _summary(rows: Sequence[Shown]) -> str:
    counts: Mapping[str, int] = Counter(row.verdict for row in rows)
    told = ", ".join(f"{verdict} {counts[verdict]}" for verdict in VERDICTS if counts[verdict])
    return f"{len(rows)} claims: {told}."


def figure_links(rows: Sequence[Shown]) -> dict[str, str]:
    """Of each claim that has figures, where the page of the documentation finds them."""
    return {row.claim.name: f"{FIGURES}/{row.claim.name}.png" for row in rows if row.charts}


def save_figures(rows: Sequence[Shown], folder: Path) -> None:
    """Save the figures of each claim as one PNG in a folder."""
    for row in rows:
        if row.charts:
            save_png(row.charts, folder / f"{row.claim.name}.png", _DPI)
