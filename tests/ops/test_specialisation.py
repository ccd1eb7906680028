"""What is compiled ahead of time is what Triton compiles at a launch with the same arguments."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton.language as tl
from triton.runtime.jit import JITFunction

from subulp.ops.triton import launch

from . import aot_worker, launched
from .support import BF16, E4M3, FP16, Setup

VALUES = (0, 1, 2, 15, 16, 17, 2048, -1, -16, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**31 + 1)
VALUES += (2**63 - 16, 2**63 - 1, 2**63, 2**64 - 1)


def kernel(x, number, other, scale, BLOCK: tl.constexpr):  # noqa: N803
    pass


# Also where kernels are interpreted, functions can be made ready to compile.
KERNELS = {
    "all": JITFunction(kernel),
    "varying": JITFunction(kernel, do_not_specialize=["number"]),
    "unaligned": JITFunction(kernel, do_not_specialize_on_alignment=["number"]),
    "others": JITFunction(kernel, do_not_specialize=["x", "other"]),
    "others unaligned": JITFunction(kernel, do_not_specialize_on_alignment=["x", "other"]),
}


def is_refused(target: launch.Target) -> bool:
    try:
        launch.gpu_of(target)
    except RuntimeError:
        return True
    return False


TARGETS = [target for target in (90, "gfx942") if not is_refused(target)]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", KERNELS)
def test_integers(name, value, target):
    function = KERNELS[name]
    expected, _ = launched.at_launch(function, target, torch.zeros(16), value, 48, 1.0, 128)
    arguments = {"x": "*fp32", "number": value, "other": 48, "scale": "fp32"}
    found = launch.source_for(function, target, arguments, BLOCK=128)
    assert found.signature == expected.signature
    assert found.constants == expected.constants
    assert found.attrs == expected.attrs


@pytest.mark.parametrize(
    "setup",
    [
        Setup("adam", "stochastic", E4M3),
        Setup("adam", "extra-bits-7-stochastic", FP16),
        Setup("sgd", "kahan", BF16, nesterov=True),
    ],
    ids=str,
)
def test_steps(compiler, setup):
    check(compiler.submit(launched.step, setup).result(), 2 if setup.dtype == E4M3 else 1)


@pytest.mark.parametrize("rate", [None, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("setup", [Setup("adam", "nearest", E4M3), Setup("sgd", "kahan", BF16)])
def test_counts(compiler, setup, rate):
    check(compiler.submit(launched.counts, setup, rate).result(), 1)


def test_all_finite(compiler):
    check(compiler.submit(launched.all_finite, BF16).result(), 1)


@pytest.mark.parametrize("sizes", [(64, 16, 8), aot_worker.RAGGED, aot_worker.ONES])
@pytest.mark.parametrize("products", ["fp32", "bf16"])
def test_head(compiler, products, sizes):
    check(compiler.submit(launched.head, E4M3, products, sizes).result(), 2)


@pytest.mark.parametrize("count", [1, 100, 1024])
def test_sum(compiler, count):
    check(compiler.submit(launched.exact_sum, count).result(), 1)


@pytest.mark.parametrize("sizes", [(26, 32), (3, 5), (1, 1)])
@pytest.mark.parametrize(("kind", "kernels"), [("pool", 1), ("weight-grad", 1), ("update", 3)])
def test_tables(compiler, kind, kernels, sizes):
    check(compiler.submit(launched.tables, kind, sizes).result(), kernels)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("shape", [(256, 128), (100, 60), (1, 32)])
@pytest.mark.parametrize(("block", "kernels"), [((256, 128), 6), ((1, 32), 5)])
def test_mixtures(compiler, block, kernels, shape, kept):
    of_one = kernels == 5 or shape[0] <= 128
    call = compiler.submit(launched.mixture, block, shape, kept)
    check(call.result(), 5 if of_one else kernels)


@pytest.mark.parametrize("shape", [(256, 384), (100, 60), (1, 32)])
@pytest.mark.parametrize("side", [32, 128])
def test_mixtures_along_both(compiler, side, shape):
    check(compiler.submit(launched.mixture_both, side, shape).result(), 3)


def check(sources: tuple[list[launched.Source], list[launched.Source]], kernels: int) -> None:
    launches, compiles = sources
    assert len(launches) == kernels
    assert compiles == launches
