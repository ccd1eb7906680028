"""Write the documentation's page of reproductions, and its figures, from their records.

    subulp reproduce all --out runs/reproduce
    python benchmarks/reproductions.py --take runs/reproduce/records

Records lie in benchmarks/results/reproductions; with ``--take``, new ones are copied there first.
Their numbers stay, and their verdicts become those of today's checks.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from cyclopts import App

from subulp.lab.reproduce import pages
from subulp.lab.reproduce.index import CLAIMS
from subulp.lab.reproduce.pages import figure_links, markdown, read_records, save_figures
from subulp.lab.reproduce.record import read_record

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks" / "results" / "reproductions"
PAGE = ROOT / "docs" / "reproductions.md"
FIGURES = PAGE.parent / pages.FIGURES

app = App(help=__doc__)


@app.default
def main(*, take: Path | None = None) -> None:
    """Write docs/reproductions.md and docs/figures/reproductions.

    Args:
        take: Folder of records to copy first; those of the smallest size stay where they are.
    """
    RECORDS.mkdir(exist_ok=True)
    for file in sorted(take.glob("*.json")) if take else ():
        if not file.stem.endswith("-smallest"):
            shutil.copyfile(file, RECORDS / file.name)
    claims = {claim.name: claim for claim in CLAIMS}
    for file in RECORDS.glob("*.json"):
        written = read_record(file)
        written.write(file, claims[written.claim])
    rows = read_records(RECORDS, CLAIMS)
    shutil.rmtree(FIGURES, ignore_errors=True)
    FIGURES.mkdir(parents=True)
    save_figures(rows, FIGURES)
    PAGE.write_text(markdown(rows, figure_links(rows)), encoding="utf-8")


if __name__ == "__main__":
    app()
