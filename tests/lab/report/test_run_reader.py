"""Damaged run directories: what the message names, and that nothing else is raised."""

import json
import math

import pytest

from subulp.lab.report.run_reader import read_run
from tests.lab.report.support import LM, lm_records, lm_summary, write_run

RECORD = {"precision": "a", "seed": 0, "step": 1, "loss": 1.0, "lr": 0.1, "seconds": 0.1}


def _number(_):
    """Lines of a megabyte are no names for tests: pytest numbers them."""
    return ""


def test_what_was_written_is_read(tmp_path):
    run = read_run(write_run(tmp_path / "run", summary=lm_summary()))
    assert run.task == "lm"
    assert len(run.records) == len(lm_records())
    assert run.records[1].metrics.keys() == {"val_loss", "perplexity"}
    assert len(run.summaries) == 6
    assert run.summaries[0].peak_bytes["total"] == 22500
    assert not run.cut


def test_the_later_record_of_a_step_counts(tmp_path):
    lines = [RECORD, {**RECORD, "loss": 2.0}]
    run = read_run(write_run(tmp_path / "run", records=lines))
    assert [record.loss for record in run.records] == [2.0]


def test_what_is_too_large_to_be_plotted_is_not_finite(tmp_path):
    for name, loss in (("float", 1e300), ("integer", 10**400)):
        run = read_run(write_run(tmp_path / name, records=[{**RECORD, "loss": loss}]))
        assert math.isnan(run.records[0].loss)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no JSON", ":2: expected a JSON object: expected ident"),
        ("[1]", ":2: expected a JSON object, got [1]"),
        ('{"a": NaN}', ":2: expected a JSON object: expected value"),
        ('{"a": ' + "9" * 5000 + "}", ":2: expected a JSON object: number out of range"),
        ("[" * 100_000, ":2: expected a JSON object"),
        ('{"a": ' + "[" * 300 + "]" * 300 + "}", ":2: expected a JSON object: recursion limit"),
        ("\udcff", ":2: expected a JSON object"),
        (" " * (2**20 + 1), ":2: above 1,048,576 bytes: expected a JSON object a line"),
        (json.dumps({**RECORD, "seed": True}), ":2: expected seed to be a valid integer, got true"),
        (json.dumps({**RECORD, "seed": -1}), ":2: expected seed to be greater than or equal to 0"),
        (json.dumps({**RECORD, "step": 1e9}), ":2: expected step to be a valid integer"),
        (json.dumps({**RECORD, "loss": "low"}), 'expected loss to be a valid number, got "low"'),
        (json.dumps({**RECORD, "variant": 3}), "expected variant to be a valid string, got 3"),
        (json.dumps({**RECORD, "mix": [{}]}), "mix[0].layer is missing"),
        (json.dumps({**RECORD, "mix": 1}), "expected mix to be a valid array, got 1"),
        ('{"precision": "a"}', "seed is missing"),
    ],
    ids=_number,
)
def test_a_bad_line_is_named(tmp_path, line, message):
    folder = write_run(tmp_path / "run", records=[RECORD])
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(line.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: ") as caught:
        read_run(folder)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "config.json:1: expected a JSON object"),
        ('{\n"task": }', "config.json:2: expected a JSON object"),
        ("{}", "config.json: expected a task, one of lm, image, xmc, ctr"),
        ('{"task": "../../etc"}', "config.json: expected a task"),
        ('{"task": ["lm"]}', "config.json: expected a task"),
    ],
    ids=_number,
)
def test_a_bad_configuration_is_named(tmp_path, text, message):
    folder = write_run(tmp_path / "run")
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match="config") as caught:
        read_run(folder)
    assert message in str(caught.value)


def with_first(**changes):
    summary = lm_summary()
    summary["runs"][0] |= changes
    return summary


@pytest.mark.parametrize(
    ("summary", "message"),
    [
        ({"task": "lm"}, "summary.json: runs is missing"),
        ({"runs": [3]}, "summary.json: expected runs[0] to be an object, got 3"),
        ({"runs": [], "data": 3}, "summary.json: expected data to be an object"),
        (
            with_first(peak_bytes={}),
            "runs[0].peak_bytes to be an object with weights, gradients",
        ),
        (with_first(peak_bytes=None), "expected runs[0].peak_bytes to be an object, got null"),
        (
            with_first(bytes_per_parameter={"parameter": 2}),
            "expected runs[0].bytes_per_parameter to be an object with a total",
        ),
        (with_first(simulated=0), "expected runs[0].simulated to be a valid boolean"),
    ],
    ids=_number,
)
def test_a_bad_summary_is_named(tmp_path, summary, message):
    folder = write_run(tmp_path / "run", summary=summary)
    with pytest.raises(ValueError, match=r"summary\.json") as caught:
        read_run(folder)
    assert message in str(caught.value)


def test_a_huge_file_is_refused_before_it_is_parsed(tmp_path):
    folder = write_run(tmp_path / "run", LM)
    with (folder / "summary.json").open("wb") as file:
        file.truncate(2**33)
    with pytest.raises(ValueError, match=r"summary\.json: above 67,108,864 bytes"):
        read_run(folder)
