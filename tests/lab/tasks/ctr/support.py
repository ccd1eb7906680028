"""A comparison on generated clicks, small enough for a second."""

from tests.lab.tasks.ctr.readers.support import criteo_lines, write_lines

SMALL = {
    "rows": (2000,),
    "dim": 4,
    "bottom": (8,),
    "top": (8,),
    "batch_size": 32,
    "watch_every": 4,
    "log_every": 4,
    "evaluations": 2,
    "device": "cpu",
}


def write_clicks(folder):
    """A file in Criteo's form, as ``--data`` takes it."""
    return f"criteo:{write_lines(folder / 'clicks.txt', criteo_lines(420))}"
