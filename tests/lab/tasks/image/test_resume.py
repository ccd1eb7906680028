"""The image classifier goes on where it was stopped."""

import pytest

from subulp.lab.tasks.image.config import ImageConfig
from tests.lab.engine.resuming import assert_resumes
from tests.lab.tasks.image.test_task import SMALL

RUNS = [
    ("fp32", {}),
    ("amp", {"grad_scaler": True}),
    ("nearest", {"grad_scaler": True, "fuse_backward": True}),
    ("extra-bits-13", {}),
    ("extra-bits-8-stochastic", {"fuse_backward": True}),
    ("collage-plus", {"dtype": "bf16"}),
    ("e5m2", {}),
    ("e5m2+8", {"augment": False}),
]


@pytest.mark.parametrize(("precision", "changes"), RUNS, ids=[name for name, _ in RUNS])
def test_a_resumed_run_is_the_run_that_never_stopped(digits, tmp_path, precision, changes):
    config = ImageConfig(**{**SMALL, **changes}, precision=(precision,))
    assert_resumes(tmp_path, config, digits, precision)
