"""The page of the documentation is what the records say, and these are of today's experiments."""

from pathlib import Path

import pytest

from subulp.lab.reproduce.claim import Options
from subulp.lab.reproduce.index import CLAIMS
from subulp.lab.reproduce.pages import figure_links, markdown, read_records
from subulp.lab.reproduce.record import digest_of, read_record

ROOT = Path(__file__).parents[3]
RECORDS = ROOT / "benchmarks" / "results" / "reproductions"
BY_NAME = {claim.name: claim for claim in CLAIMS}
FILES = sorted(RECORDS.glob("*.json"))


def test_the_page_is_generated():
    page = (ROOT / "docs" / "reproductions.md").read_text()
    rows = read_records(RECORDS, CLAIMS)
    assert page == markdown(rows, figure_links(rows)), "run python benchmarks/reproductions.py"


def test_every_check_of_a_record_has_a_number():
    rows = [row for row in read_records(RECORDS, CLAIMS) if row.written is not None]
    assert rows
    without = [
        f"{row.claim.name}: {outcome.check.says}"
        for row in rows
        for outcome in row.written.outcomes(row.claim)
        if not outcome.seeds
    ]
    assert not without


def test_figures_are_there():
    wanted = set(figure_links(read_records(RECORDS, CLAIMS)).values())
    there = {
        f"figures/reproductions/{path.name}"
        for path in (ROOT / "docs" / "figures" / "reproductions").iterdir()
    }
    assert there == wanted


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_record_is_of_the_experiment_that_the_claim_has(file, tmp_path):
    written = read_record(file)
    claim = BY_NAME[written.claim]
    assert file.stem == f"{claim.name}-{written.size}"
    assert claim.experiment is not None
    parts = claim.experiment.parts(Options(written.size))
    assert written.digest == digest_of(parts), f"run {written.command} again"
    assert written.experiment == claim.experiment.sizes[written.size]
    written.write(tmp_path / file.name, claim)
    now = (tmp_path / file.name).read_text()
    assert now == file.read_text(), "run python benchmarks/reproductions.py"
