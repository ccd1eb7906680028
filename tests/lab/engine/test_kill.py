"""Trainings that are killed end as if they had not been, bit for bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CASES = ("lm", "image", "xmc", "ctr")


def killed(case, kills, folder):
    """Run the program of ``killing.py``: what it counted."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, "-m", "tests.lab.engine.killing", case, str(kills), str(folder)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("case", CASES)
def test_a_training_survives_a_few_kills(case, tmp_path):
    found = killed(case, 2, tmp_path)
    assert found["kills"] == 2
    assert found["completed"] >= 1


def test_a_training_survives_a_kill_at_every_step_of_writing_a_checkpoint(tmp_path):
    """The first of ten calls begins, and the last ones come after the folder has its name."""
    found = killed("lm", 0, tmp_path)
    assert found["kills"] == 10
    assert found["inside"] >= 7


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES)
def test_a_training_survives_fifty_kills(case, tmp_path):
    found = killed(case, 50, tmp_path)
    print(case, found)
    assert found["kills"] == 50
    # Half of the attempts were killed while they wrote a checkpoint, or a moment later.
    assert found["inside"] >= 5
