"""A run directory that version 0.1 left, before the lab was a package of its own."""

import json
import shutil
from pathlib import Path

import pytest

from subulp.lab.compare import resume
from subulp.lab.report import write_report
from subulp.lab.report.run_reader import read_run

EARLIER = Path(__file__).parent / "earlier_run"


def test_the_report_opens_it(tmp_path):
    run = read_run(EARLIER)
    assert [record.step for record in run.records] == [1, 5, 6, 10, 11, 15, 16, 20]
    assert [summary.name for summary in run.summaries] == ["collage-plus"]
    write_report([EARLIER], tmp_path / "report.html")
    assert "collage-plus" in (tmp_path / "report.html").read_text()


def test_it_is_resumed(tmp_path):
    """It was stopped after step 10; the expected losses are those of the version that began it."""
    shutil.copytree(EARLIER, tmp_path / "run")
    expected = {record.step: record for record in read_run(EARLIER).records}
    found = resume(tmp_path / "run", jobs=1)
    assert [record.step for record in found.records] == list(expected)
    for record in found.records:
        # Matrix products differ in their last bits from processor to processor.
        assert record.loss == pytest.approx(expected[record.step].loss, rel=1e-3)
    before, after = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (EARLIER, tmp_path / "run")
    )
    assert after[:4] == before[:4]
