"""Damaged run directories: what the message names, and that nothing else is raised."""

import json

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
    (record,) = read_run(write_run(tmp_path / "run", records=[{**RECORD, "loss": 1e300}])).records
    assert record.loss != record.loss


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no JSON", ":2: expected a JSON object: Expecting value"),
        ("[1]", ":2: expected a JSON object, got an array"),
        ('{"a": NaN}', ":2: expected a JSON object: NaN is not JSON"),
        ('{"a": ' + "9" * 5000 + "}", ":2: expected a JSON object: Exceeds the limit"),
        ("[" * 100_000, ":2: expected a JSON object"),
        ('{"a": ' + "[" * 100 + "]" * 100 + "}", ":2: expected a JSON object, got one too deep"),
        ("\udcff", ":2: expected JSON in UTF-8"),
        (" " * (2**20 + 1), ":2: above 1,048,576 bytes: expected a JSON object a line"),
        (json.dumps({**RECORD, "seed": True}), ":2: expected seed to be a whole number of at"),
        (json.dumps({**RECORD, "seed": -1}), ":2: expected seed to be a whole number of at least"),
        (json.dumps({**RECORD, "step": 1e9}), ":2: expected step to be a whole number"),
        (json.dumps({**RECORD, "loss": "low"}), "expected loss to be a number or null, got a str"),
        (json.dumps({**RECORD, "loss": 10**400}), "expected loss to be a number or null, got a n"),
        (json.dumps({**RECORD, "variant": None}), "expected variant to be a string, got null"),
        (json.dumps({**RECORD, "mix": [{}]}), "mix[0]: expected layer to be a string, got nothing"),
        (json.dumps({**RECORD, "mix": 1}), "expected mix to be an array, got a number"),
        ('{"precision": "a"}', "expected seed to be a whole number of at least 0, got nothing"),
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
        ({"task": "lm"}, "summary.json: expected runs to be an array, got nothing"),
        ({"runs": [3]}, "summary.json: runs[0]: expected an object, got a number"),
        ({"runs": [], "data": 3}, "summary.json: expected data to be an object"),
        (with_first(peak_bytes={}), "runs[0]: peak_bytes: expected weights to be a number of at"),
        (with_first(peak_bytes=None), "runs[0]: expected peak_bytes to be an object, got null"),
        (
            with_first(bytes_per_parameter={"parameter": 2}),
            "runs[0]: bytes_per_parameter: expected total to be a number of at least 0, got noth",
        ),
        (with_first(simulated=0), "runs[0]: expected simulated to be true or false"),
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
