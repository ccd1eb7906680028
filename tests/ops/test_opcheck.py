"""The ops keep the promises of torch.library: schema, fake kernels, autograd, compilation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from subulp.ops import all_finite

from .support import BF16, E4M3, FP16, FP32, Setup, arguments, fresh_state, gradients, parameters

SIZES = (40, 0, 7)
DEFAULT = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


def checks(dtype: torch.dtype) -> tuple[str, ...]:
    """All of opcheck; its check of the schema does arithmetic that FP8 tensors lack."""
    return DEFAULT[1:] if dtype == E4M3 else DEFAULT


def call(setup: Setup) -> dict[str, Any]:
    state = fresh_state(setup, parameters(setup, SIZES))
    return arguments(setup, state, gradients(setup, SIZES, 1), 1)


@pytest.mark.parametrize(
    "setup",
    [
        Setup("adam", "fp32", FP32),
        Setup("adam", "collage-plus", BF16),
        Setup("adam", "stochastic", E4M3),
        Setup("adam", "extra-bits-8", FP16, grad_dtype=FP32),
        Setup("sgd", "fp32", FP32, momentum=None),
        Setup("sgd", "kahan", BF16, nesterov=True),
        Setup("sgd", "collage-plus", E4M3),
        Setup("sgd", "extra-bits-8-stochastic", BF16),
    ],
    ids=str,
)
def test_step(setup):
    torch.library.opcheck(setup.operator, (), call(setup), test_utils=checks(setup.dtype))


@pytest.mark.parametrize("tensors", [[torch.ones(5), torch.ones(3, 2, dtype=BF16)], []])
def test_all_finite(tensors):
    torch.library.opcheck(all_finite, (tensors,))


def test_compiled_step_is_eager_step():
    setup = Setup("adam", "collage-plus", BF16)
    eager, compiled = call(setup), call(setup)
    setup.operator(**eager)
    operator = setup.operator
    torch.compile(lambda: operator(**compiled), backend="aot_eager", fullgraph=True)()
    for a, b in zip(eager["params"], compiled["params"], strict=True):
        assert torch.equal(a, b)
