"""``subulp reproduce``: what it prints, writes and refuses."""

import json

import pytest

from subulp.lab.cli import main
from subulp.lab.reproduce.index import CLAIMS

EXACT = "collage-table9"
NOT_RUN = next(claim for claim in CLAIMS if claim.not_run)


@pytest.mark.parametrize("words", [(), ("list",), ("LIST",)])
def test_all_claims_are_listed(words, capsys):
    assert main(["reproduce", *words]) == 0
    printed = capsys.readouterr().out
    assert all(claim.name in printed for claim in CLAIMS)


def test_the_list_as_json(capsys):
    assert main(["reproduce", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in printed["claims"]] == [claim.name for claim in CLAIMS]
    assert all(bool(entry["sizes"]) != bool(entry["not_run"]) for entry in printed["claims"])


def test_a_claim_is_shown_beside_the_paper(tmp_path, capsys):
    assert main(["reproduce", EXACT, "--out", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "Verdict: holds" in " ".join(captured.out.split())
    assert "BF16: 7 mantissa bits" in captured.out
    assert f"wrote {tmp_path / 'records'}" in captured.err
    assert "<svg" in (tmp_path / "report.html").read_text()
    record = json.loads((tmp_path / "records" / f"{EXACT}-small.json").read_text())
    assert record["command"] == f"subulp reproduce {EXACT} --size small"
    assert str(tmp_path) not in json.dumps(record)


def test_records_as_json_are_all_that_is_printed(tmp_path, capsys):
    names = [EXACT, "collage-table1"]
    assert main(["reproduce", *names, "--out", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [record["claim"] for record in printed["records"]] == names
    assert [record["verdict"] for record in printed["records"]] == ["holds", "holds in part"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "claims='nothing' is unknown. Use all, a paper (collage, extra-bits"),
        ([NOT_RUN.name], f"claims={NOT_RUN.name} is not run: {NOT_RUN.not_run}"),
        ([EXACT, "--seeds", "1,1"], "seeds repeats 1: give each once"),
        ([EXACT, "--seeds", "-1"], "seeds=-1 is out of range"),
        ([EXACT, "--seeds", "x"], "seeds=x is not a list of integers"),
        ([EXACT, "--jobs", "0"], "jobs=0 is out of range: give at least 1"),
        ([EXACT, "--seeds", "5"], f"seeds=5 has no effect on claims={EXACT} of size=small"),
        ([EXACT, "--data", "x"], f"data=x has no effect on claims={EXACT} of size=small"),
        (["collage", "--encoder", "x"], "encoder=x has no effect on claims=collage of size=small"),
        ([EXACT, "elmo-table2", "--size", "paper"], "size=paper needs data and encoder: give"),
        ([EXACT, "--size", "huge"], 'Invalid value "huge" for --size'),
    ],
)
def test_wrong_input_is_one_line(words, message, tmp_path, capsys):
    assert main(["reproduce", *words, "--out", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert message in " ".join(captured.err.split())
    assert not captured.out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [["--seeds", "1"], ["list", "--size", "paper"], ["--jobs", "2"]])
def test_a_list_takes_no_options(words, capsys):
    assert main(["reproduce", *words]) == 2
    assert "has no effect on a list: name the claims to repeat" in capsys.readouterr().err


def test_runs_of_other_options_are_not_overwritten(tmp_path, capsys):
    words = ["reproduce", "collage-appendixd-fp8", "--size", "smallest", "--out", str(tmp_path)]
    assert main(words) == 0
    assert main([*words, "--seeds", "3"]) == 2
    assert "has runs of collage-fp8-smallest with other options" in capsys.readouterr().err


def test_a_file_in_the_way_is_named(tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("mine")
    assert main(["reproduce", EXACT, "--out", str(file)]) == 2
    assert "file" in capsys.readouterr().err
    assert file.read_text() == "mine"
