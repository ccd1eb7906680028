import io

from rich.console import Console

from subulp.lab.engine.metrics import Record
from subulp.lab.engine.progress import Bars, Lines, Plan, reporter

PLAN = Plan((("master", 0), ("nearest", 0)), 6, ("val_loss", "accuracy"))


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
    clock = iter([100.0, 110.0, 115.0])
    with Lines(PLAN, Console(file=file), lambda: next(clock)) as progress:
        progress.on_record(
            Record("master", 0, 2, 3.0, 1e-3, 0.5, {"val_loss": 2.75, "accuracy": 0.5})
        )
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
