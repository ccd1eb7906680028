"""The click-through-rate model goes on where it was stopped."""

import pytest

from subulp.lab.tasks.ctr.config import CTRConfig
from subulp.lab.tasks.ctr.task import load
from tests.lab.engine.resuming import assert_resumes
from tests.lab.tasks.ctr.support import SMALL, write_clicks

CACHED = {"cache_fraction": (0.02,), "ways": (2,)}
RUNS = [
    ("fp32", {}),
    ("int8 nearest", {"cache_fraction": (0.0,), "row_optimizer": "adagrad"}),
    ("int4 stochastic lfu 2%", CACHED),
    ("int8 stochastic lru 2%", {**CACHED, "policy": ("lru",), "row_optimizer": "sgd"}),
    ("int2 nearest lru 2%", {**CACHED, "policy": ("lru",), "ways": (1,), "fuse_backward": True}),
    ("fp8 stochastic lfu 2%", CACHED),
    ("fp16+8", {"optimizer": "sgd", "row_optimizer": "sgd", "dense_precision": ("extra-bits-8",)}),
    # More examples than the buffer: batches begin in one chunk and end in the next.
    ("bf16 stochastic lfu 2%", {**CACHED, "shuffle_rows": 60, "epochs": 2}),
]


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
    return write_clicks(tmp_path_factory.mktemp("clicks"))


@pytest.mark.parametrize(("variant", "changes"), RUNS, ids=[name for name, _ in RUNS])
def test_a_resumed_run_is_the_run_that_never_stopped(clicks, tmp_path, variant, changes):
    precision = (variant.split()[0],)
    config = CTRConfig(**{**SMALL, "data": clicks, "precision": precision, **changes})
    assert_resumes(tmp_path, config, load(config), variant)
