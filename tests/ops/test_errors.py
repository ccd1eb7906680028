"""Calls that do not fit are refused with the argument, the reason and what to do."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from subulp.ops import backend

from .support import (
    BF16,
    E4M3,
    FP16,
    FP32,
    Setup,
    arguments,
    environment,
    fresh_state,
    gradients,
    parameters,
)

SIZES = (40, 7)


def call(setup: Setup) -> dict[str, Any]:
    state = fresh_state(setup, parameters(setup, SIZES))
    return arguments(setup, state, gradients(setup, SIZES, 1), 1)


def refused(setup: Setup, args: dict[str, Any], message: str) -> None:
    before = [p.clone() for p in args["params"]]
    with pytest.raises(ValueError, match=message):
        setup.operator(**args)
    for old, new in zip(before, args["params"], strict=True):
        assert torch.equal(old.float(), new.float())


ADAM = Setup("adam", "collage-plus", BF16)
SGD = Setup("sgd", "kahan", FP16)
STATES = [
    *((ADAM, name) for name in ("exp_avgs", "exp_avg_sqs", "extras", "exp_avg_sq_lows")),
    *((SGD, name) for name in ("momentum_buffers", "extras")),
]
TENSORS = [*((setup, name) for setup in (ADAM, SGD) for name in ("params", "grads")), *STATES]


@pytest.mark.parametrize(("setup", "name"), TENSORS, ids=str)
def test_shape(setup, name):
    args = call(setup)
    args[name][1] = args[name][1][:-1].contiguous()
    # Shapes are those of the parameters: it is the gradient that does not fit them.
    found = "grads" if name == "params" else name
    refused(setup, args, rf"{found}\[1\] has shape")


@pytest.mark.parametrize(("setup", "name"), TENSORS, ids=str)
def test_strides(setup, name):
    args = call(setup)
    args[name][1] = torch.cat([args[name][1]] * 2)[::2]
    refused(setup, args, rf"{name}\[1\] has strides \(2,\): pass contiguous")


@pytest.mark.parametrize(("setup", "name"), TENSORS, ids=str)
def test_dtype(setup, name):
    args = call(setup)
    args[name][1] = args[name][1].to(FP32)
    refused(setup, args, rf"{name}\[1\] is torch.float32 on cpu: expected torch")


@pytest.mark.parametrize(("setup", "name"), STATES, ids=str)
def test_missing_tensor(setup, name):
    args = call(setup)
    args[name].pop()
    refused(setup, args, f"{name} has 1 tensors: .* takes 2")


@pytest.mark.parametrize(
    ("setup", "name"), [case for case in STATES if case[1] != "momentum_buffers"], ids=str
)
def test_missing_role(setup, name):
    args = call(setup)
    args[name] = []
    refused(setup, args, f"{name} has 0 tensors: .* takes 2")


@pytest.mark.parametrize("setup", [Setup("adam", "nearest", BF16), Setup("sgd", "nearest", BF16)])
def test_roles_that_the_strategy_lacks(setup):
    args = call(setup)
    args["extras"] = [p.clone() for p in args["params"]]
    refused(setup, args, "extras has 2 tensors: precision='nearest' takes 0")


def test_momentum_lows_without_momentum():
    setup = Setup("sgd", "collage-plus", BF16)
    args = call(setup)
    args["momentum_buffers"] = []
    refused(setup, args, "momentum_lows are given without momentum_buffers")


def test_packed_words():
    setup = Setup("adam", "extra-bits-8", BF16)
    args = call(setup)
    args["extras"][0] = torch.zeros(40, dtype=torch.int32)
    refused(setup, args, r"extras\[0\] has shape \(40,\): expected \(16,\)")


def test_no_parameters():
    args = call(ADAM)
    for name in ("params", "grads", *(name for setup, name in STATES if setup == ADAM)):
        args[name] = []
    refused(ADAM, args, "params is empty")


@pytest.mark.parametrize("setup", [ADAM, SGD], ids=str)
@pytest.mark.parametrize("name", ["streams", "offsets"])
def test_streams_and_offsets(setup, name):
    args = call(setup)
    args[name] = [0]
    refused(setup, args, "steps, streams and offsets have")


def test_steps():
    args = call(ADAM)
    args |= {"steps": args["steps"][:1], "streams": [0], "offsets": [0]}
    refused(ADAM, args, "steps has 1 entries: expected one for each of 2 parameters")


@pytest.mark.parametrize("op", ["adam", "sgd"])
def test_amaxes(op):
    setup = Setup(op, "nearest", E4M3)
    args = call(setup)
    args["amaxes"] = []
    refused(setup, args, "amaxes has 0 tensors: the scaled states of FP8 parameters take 2")


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ("fp32", "precision='fp32' is not available for a parameter of dtype torch.bfloat16"),
        ("nearest-ish", "precision='nearest-ish' is unknown: use one of fp32, nearest"),
        ("extra-bits-17", "k=17 is out of range: keep 1 to 16"),
    ],
)
def test_precision(precision, message):
    args = call(ADAM)
    args["precision"] = precision
    refused(ADAM, args, message)


def test_gradient_dtype():
    args = call(ADAM)
    args["grads"] = [g.double() for g in args["grads"]]
    refused(ADAM, args, "float64 is not a format of subulp: use one of float32")


@pytest.mark.parametrize(
    ("setup", "arithmetic", "message"),
    [
        (ADAM, "loose", "arithmetic='loose' is unknown: use 'wide' or 'strict'"),
        (Setup("adam", "master", BF16), "strict", "not available for precision='master'"),
        (Setup("sgd", "nearest", E4M3), "strict", "with torch.float8_e4m3fn parameters"),
    ],
    ids=str,
)
def test_arithmetic(setup, arithmetic, message):
    args = call(setup)
    args["arithmetic"] = arithmetic
    refused(setup, args, message)


# -------------------------------------------------------------------------------------- backends


def test_unknown_backend():
    with environment(SUBULP_BACKEND="cuda"):
        refused(ADAM, call(ADAM), "SUBULP_BACKEND='cuda' is unknown")


def test_unknown_isa():
    with environment(SUBULP_BACKEND="cpu", SUBULP_ISA="mmx"):
        refused(ADAM, call(ADAM), "SUBULP_ISA='mmx' is not available here: use one of plain")


def test_backend_of_a_device():
    with environment(SUBULP_BACKEND=""):
        assert backend.choose(torch.device("cpu")).backend == "cpu"
        assert backend.choose(torch.device("cuda")).backend == "triton"
        assert backend.choose(torch.device("mps")).backend == "reference"
    with environment(SUBULP_BACKEND="reference"):
        assert backend.choose(torch.device("cuda")) == backend.Choice(
            "reference", "SUBULP_BACKEND is set"
        )


IN_A_PROCESS = """
import sys
import torch
{prelude}
from subulp.ops import all_finite
try:
    all_finite([torch.ones(3)])
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("prelude", "remedy"),
    [
        ("", "set TRITON_INTERPRET=1"),
        ("sys.modules['triton'] = None", "pip install triton"),
    ],
    ids=["compiled kernels, CPU tensors", "no Triton"],
)
def test_triton_names_the_remedy(prelude, remedy):
    with environment(SUBULP_BACKEND="triton", TRITON_INTERPRET="0"):
        command = [sys.executable, "-c", IN_A_PROCESS.format(prelude=prelude)]
        result = subprocess.run(command, check=True, capture_output=True, text=True)
    assert remedy in result.stdout
