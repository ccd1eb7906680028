import io

from rich.console import Console

from subulp.train.metrics import Record
from subulp.train.progress import Bars, Lines, reporter


def test_bars_on_a_terminal_lines_elsewhere(small):
    assert isinstance(reporter(small(), Console(file=io.StringIO())), Lines)
    assert isinstance(reporter(small(), Console(file=io.StringIO(), force_terminal=True)), Bars)


def test_lines_tell_every_evaluation(small):
    file = io.StringIO()
    clock = iter([100.0, 110.0, 115.0])
    with Lines(small(), Console(file=file), lambda: next(clock)) as progress:
        progress.on_record(Record("master", 0, 2, 3.0, 1e-3, 0.5, val_loss=2.75))
        progress.on_record(Record("master", 0, 3, 3.0, 1e-3, 0.5))
        progress.on_record(Record("master", 0, 6, 3.0, 1e-3, 0.5, val_loss=2.5))
    # The first rate is the step's own, the second that of all steps since the line before.
    assert file.getvalue() == (
        "master: step 2/6, loss 3.000, val loss 2.7500, 2.0 steps/s\n"
        "master: step 6/6, loss 3.000, val loss 2.5000, 0.4 steps/s\n"
    )


def test_bars_show_loss_and_rate(small):
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=120)
    with reporter(small(seeds=(0, 1)), console) as progress:
        progress.on_record(Record("nearest", 1, 6, 3.25, 1e-3, 0.5))
    assert "nearest, seed 1" in file.getvalue()
    assert "loss 3.250" in file.getvalue()
    assert "2.0 steps/s" in file.getvalue()
