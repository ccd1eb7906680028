"""What a step counts on the device: the host's numbers, to the bit, at every step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from subulp.ops import adam, sgd
from subulp.ops.capture import Held
from subulp.ops.step import counts
from subulp.ops.step.job import NEWS, StepJob

from .support import BF16, E4M3, Setup, arguments, fresh_state, interpreted

BETAS = ((0.9, 0.999), (0.0, 0.0), (0.5, 0.9999), (0.999, 0.3))
SETUPS = (
    Setup("adam", "nearest", BF16),
    Setup("adam", "nearest", E4M3, weight_decay=0.3),
    Setup("adam", "nearest", BF16, decoupled=False),
    Setup("sgd", "nearest", BF16),
)
# Those of whole trainings, beyond the end of each table, and where a counter stays as it is.
STEPS = (*range(8), *(2**n - 1 for n in range(4, 23)), 16_634, 36_700, 2**24)


@pytest.mark.parametrize("betas", BETAS)
def test_tables_have_what_the_host_computes(betas):
    beta1, beta2 = betas
    biases, roots = counts.corrections(*betas)
    assert (biases.dtype, roots.dtype) == (np.float64, np.float32)
    assert biases.tolist() == [1.0 - beta1 ** (i + 1) for i in range(len(biases))]
    expected = [1.0 / math.sqrt(1.0 - beta2 ** (i + 1)) for i in range(len(roots))]
    assert np.array_equal(roots, np.array(expected, dtype=np.float32))
    for table in (biases, roots):
        assert table[-1] == 1.0
        assert not (table[:-1] == 1.0).any()


@pytest.mark.parametrize("betas", [(0.9, 0.99998), (0.99996, 0.9)])
def test_the_largest_tables(betas):
    counts.check_betas(*betas)
    assert max(map(len, counts.corrections(*betas))) <= counts.LONGEST


@pytest.mark.parametrize(
    ("betas", "name"), [((0.99999, 0.9), "beta1"), ((0.9, 1 - 2**-53), "beta2")]
)
def test_tables_that_would_be_larger_are_refused(betas, name):
    with pytest.raises(ValueError, match=f"{name}=0.99.* is not available with capturable=True"):
        counts.check_betas(*betas)


def job_of(setup: Setup, steps: Any, lr: Any, **options: Any) -> StepJob:
    params = [torch.zeros(1, dtype=setup.dtype) for _ in STEPS]
    state = fresh_state(setup, params)
    args = arguments(setup, state, params, 0, steps=steps, lr=lr, **options)
    if setup.op == "adam":
        args |= {"beta1": 0.9, "beta2": 0.999}
    make = {"adam": adam, "sgd": sgd}[setup.op].make_job
    return make(**args)


@interpreted
@pytest.mark.parametrize(
    "lr",
    [3e-3, 0.1 / 3, 1e-300, torch.tensor(0.1), torch.tensor([1 / 3], dtype=torch.float64)],
    ids=str,
)
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_the_device_computes_what_the_host_does(setup, lr):
    triton_news = pytest.importorskip("subulp.ops.step.triton_news")
    fresh = [i % 3 == 0 for i in range(len(STEPS))]
    options = {"fresh": fresh} if setup.op == "sgd" else {}
    now = [torch.tensor(float(t)) + 1.0 for t in STEPS]
    expected = job_of(setup, now, lr, **options)
    held = [torch.tensor(float(t)) for t in STEPS]
    job = job_of(setup, held, lr, held=Held(), **options)
    assert job.scalars["step"].tolist() == [1] * len(STEPS)
    news, progress = triton_news.run(job)
    assert held == now
    for column, name in enumerate(NEWS):
        wanted = torch.from_numpy(expected.scalars[name].view(np.int32))
        assert torch.equal(news.view(-1, len(NEWS))[:, column], wanted), name
    assert progress.tolist() == ([[0, 0]] * len(STEPS) if setup.dtype == E4M3 else [])


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_the_host_may_settle_what_the_device_counts(setup):
    fresh = {"fresh": [i % 3 == 0 for i in range(len(STEPS))]} if setup.op == "sgd" else {}
    given = {"streams": list(range(5, 5 + len(STEPS))), **fresh}
    expected = job_of(setup, [torch.tensor(float(t)) + 1.0 for t in STEPS], 0.1, **given)
    steps = [torch.tensor(float(t)) for t in STEPS]
    job = job_of(setup, steps, torch.tensor(0.1, dtype=torch.float64), held=Held(), **given)
    job.settle_counts()
    assert np.array_equal(job.scalars, expected.scalars)
    assert steps == [torch.tensor(float(t)) for t in STEPS]
    # Known now, whatever becomes of the counters.
    steps[0].fill_(7.0)
    job.settle()
    assert np.array_equal(job.scalars["step"], expected.scalars["step"])


@interpreted
def test_more_tensors_than_a_block():
    triton_news = pytest.importorskip("subulp.ops.step.triton_news")
    setup, count = SETUPS[0], 2 * triton_news.BLOCK + 3
    params = [torch.zeros(1, dtype=BF16) for _ in range(count)]
    steps = [torch.tensor(float(i)) for i in range(count)]
    args = arguments(setup, fresh_state(setup, params), params, 0, steps=steps, held=Held())
    news, _ = triton_news.run(adam.make_job(**args))
    assert news[:, NEWS.index("step")].tolist() == list(range(1, count + 1))
    assert [int(t) for t in steps] == list(range(1, count + 1))
