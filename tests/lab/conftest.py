"""A comparison small enough to train in a second."""

import pytest

from subulp.lab.tasks.lm.config import LMConfig

SMALL = {
    "precision": ("master", "nearest"),
    "steps": 6,
    "batch_size": 2,
    "context": 8,
    "width": 16,
    "layers": 1,
    "heads": 2,
    "eval_every": 3,
    "watch_every": 4,
    "log_every": 2,
    "device": "cpu",
}


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """Four kilobytes of text, so that evaluating it takes no time."""
    path = tmp_path_factory.mktemp("text") / "small.txt"
    path.write_text("".join(f"{i} green bottles hanging on the wall,\n" for i in range(100)))
    return path


@pytest.fixture(scope="session")
def small(text_file):
    """Make a small configuration, with fields replaced."""

    def make(**changes):
        return LMConfig(**{**SMALL, "data": text_file, **changes})

    return make
