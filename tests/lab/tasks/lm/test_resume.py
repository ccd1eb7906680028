"""The language model goes on where it was stopped."""

import pytest

from subulp.lab.tasks.lm.task import load
from tests.lab.engine.resuming import assert_resumes

RUNS = [
    ("fp32", {}),
    ("master", {"dropout": 0.2}),
    ("nearest", {"dtype": "e4m3"}),
    ("stochastic", {"tie_head": True}),
    ("kahan", {"dtype": "fp16"}),
    ("collage-light", {"dtype": "e4m3"}),
    ("collage-plus", {"fuse_backward": True}),
    ("extra-bits-4", {}),
    ("nearest mor-3way", {"linear": ("bf16", "mor-3way"), "partition": ("subchannel-32",)}),
    ("master", {"activations": "bf16", "dropout": 0.2}),
    ("collage-plus", {"activations": "bf16", "fuse_backward": True}),
    ("nearest mor-2way", {"activations": "bf16", "linear": ("bf16", "mor-2way")}),
    ("extra-bits-8-stochastic", {"fuse_backward": True, "nonfinite": "skip"}),
]


@pytest.mark.parametrize(("precision", "changes"), RUNS, ids=[name for name, _ in RUNS])
def test_a_resumed_run_is_the_run_that_never_stopped(small, tmp_path, precision, changes):
    config = small(precision=(precision.split()[0],), **changes)
    assert_resumes(tmp_path, config, load(config), precision)
