import io
import re

import pytest
from rich.console import Console

from subulp.lab.engine.metrics import Record, RunProgress
from subulp.lab.engine.progress import Bars, Lines, Plan, duration_text, reporter

PLAN = Plan((("master", 0), ("nearest", 0)), 6, ("val_loss", "accuracy"))


class Clock:
    """A clock that a test sets."""

    now = 100.0

    def __call__(self):
        return self.now


def test_bars_on_a_terminal_lines_elsewhere():
    assert isinstance(reporter(PLAN, Console(file=io.StringIO())), Lines)
    assert isinstance(reporter(PLAN, Console(file=io.StringIO(), force_terminal=True)), Bars)


def test_what_is_trained_on_is_told_first():
    file = io.StringIO()
    data = {"name": "small.txt", "train": 1234, "unseen_labels": 0}
    reporter(Plan((("nearest", 0),), 6, (), data), Console(file=file))
    assert file.getvalue() == "small.txt: 1,234 train, 0 unseen labels\n"


def test_lines_tell_every_evaluation():
    file = io.StringIO()
    clock = Clock()
    with Lines(PLAN, Console(file=file), clock) as progress:
        progress.on_record(
            Record("master", 0, 2, 3.0, 1e-3, 0.5, {"val_loss": 2.75, "accuracy": 0.5})
        )
        clock.now += 10
        progress.on_record(Record("master", 0, 3, 3.0, 1e-3, 0.5))
        progress.on_record(
            Record("master", 0, 6, 3.0, 1e-3, 0.5, {"val_loss": 2.5, "accuracy": 0.75})
        )
    # The first rate is the step's own, the second that of all steps since the line before.
    assert file.getvalue() == (
        "master: step 2/6, loss 3.000, val loss 2.75, accuracy 0.5, 2.0 steps/s\n"
        "master: step 6/6, loss 3.000, val loss 2.5, accuracy 0.75, 0.4 steps/s\n"
    )


def test_bars_show_loss_and_rate():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=120)
    with reporter(Plan((("nearest", 0), ("nearest", 1)), 6), console) as progress:
        progress.on_record(Record("nearest", 1, 6, 3.25, 1e-3, 0.5))
    assert "nearest, seed 1" in file.getvalue()
    assert "loss 3.250" in file.getvalue()
    assert "2.0 steps/s" in file.getvalue()


def test_lines_tell_the_time_that_is_left_every_few_seconds():
    file, clock = io.StringIO(), Clock()
    plan = Plan((("master", 0), ("nearest", 0)), 1000, done={("nearest", 0): 100})
    with Lines(plan, Console(file=file, width=200), clock) as progress:
        # Workers have taken a minute to start.
        clock.now += 60
        for step in range(1, 401):
            clock.now += 0.1
            progress.on_progress(RunProgress("master", 0, step))
            progress.on_progress(RunProgress("nearest", 0, 100 + step))
    first, *lines = file.getvalue().splitlines()
    assert first == "5 % done: master 1/1,000"
    # Five seconds are fifty steps; another five percent of the time for each line.
    assert lines[0].startswith("10 % done, about 90 s left: master 5")
    assert re.match(r"4\d % done, about 5\d s left: master 3\d\d/1,000, nearest", lines[-1])
    assert 6 <= len(lines) <= 8


def test_a_long_run_has_fewer_lines():
    file, clock = io.StringIO(), Clock()
    with Lines(Plan((("nearest", 0),), 100_000), Console(file=file), clock) as progress:
        for step in range(1, 100_000):
            clock.now += 1
            progress.on_progress(RunProgress("nearest", 0, step))
    # More than a day: a line a minute.
    assert 1600 < len(file.getvalue().splitlines()) < 1750


def test_bars_move_between_records():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=120)
    with reporter(Plan((("nearest", 0),), 6), console) as progress:
        progress.on_progress(RunProgress("nearest", 0, 5))
    assert "5/6" in file.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0 s"),
        (59.6, "60 s"),
        (100, "2 min"),
        (5000, "83 min"),
        (7200, "2.0 h"),
        (3e5, "3.5 days"),
    ],
)
def test_durations(seconds, text):
    assert duration_text(seconds) == text
