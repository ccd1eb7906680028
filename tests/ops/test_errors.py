"""Calls that do not fit are refused with the argument, the reason and what to do."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from subulp.ops import adam_step, backend, sgd_step

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
# Positions of arguments of both ops.
PARAMS, GRADS = 0, 1


def call(setup: Setup) -> list:
    state = fresh_state(setup, parameters(setup, SIZES))
    return list(arguments(setup, state, gradients(setup, SIZES, 1), 1))


def refused(setup: Setup, args: list, message: str) -> None:
    before = [p.clone() for p in args[PARAMS] if isinstance(p, torch.Tensor)]
    op = adam_step if setup.op == "adam" else sgd_step
    with pytest.raises(ValueError, match=message):
        op(*args)
    for old, new in zip(before, args[PARAMS], strict=True):
        assert torch.equal(old.float(), new.float())


ADAM = Setup("adam", "collage-plus", BF16)
SGD = Setup("sgd", "kahan", FP16)
ADAM_ROLES = {
    "params": 0,
    "grads": 1,
    "exp_avgs": 2,
    "exp_avg_sqs": 3,
    "extras": 4,
    "exp_avg_sq_lows": 5,
}
SGD_ROLES = {"params": 0, "grads": 1, "momentum_buffers": 2, "extras": 3}
ROLES = [
    *(pytest.param(ADAM, i, name, id=f"adam-{name}") for name, i in ADAM_ROLES.items()),
    *(pytest.param(SGD, i, name, id=f"sgd-{name}") for name, i in SGD_ROLES.items()),
]
BESIDE = [case for case in ROLES if case.values[1] > GRADS]


@pytest.mark.parametrize(("setup", "role", "name"), ROLES)
def test_shape(setup, role, name):
    args = call(setup)
    args[role][1] = args[role][1][:-1].contiguous()
    if name == "params":
        name = "grads"
    refused(setup, args, rf"{name}\[1\] has shape")


@pytest.mark.parametrize(("setup", "role", "name"), ROLES)
def test_strides(setup, role, name):
    args = call(setup)
    args[role][1] = torch.cat([args[role][1]] * 2)[::2]
    refused(setup, args, rf"{name}\[1\] has strides \(2,\): pass contiguous")


@pytest.mark.parametrize(("setup", "role", "name"), ROLES)
def test_dtype(setup, role, name):
    args = call(setup)
    args[role][1] = args[role][1].to(FP32)
    refused(setup, args, rf"{name}\[1\] is torch.float32 on cpu: expected torch")


@pytest.mark.parametrize(("setup", "role", "name"), BESIDE)
def test_missing_tensor(setup, role, name):
    args = call(setup)
    args[role].pop()
    refused(setup, args, f"{name} has 1 tensors: .* takes 2")


@pytest.mark.parametrize(
    ("setup", "role", "name"), [case for case in BESIDE if case.values[2] != "momentum_buffers"]
)
def test_missing_role(setup, role, name):
    args = call(setup)
    args[role] = []
    refused(setup, args, f"{name} has 0 tensors: .* takes 2")


@pytest.mark.parametrize("setup", [Setup("adam", "nearest", BF16), Setup("sgd", "nearest", BF16)])
def test_roles_that_the_strategy_lacks(setup):
    args = call(setup)
    extras = ADAM_ROLES["extras"] if setup.op == "adam" else SGD_ROLES["extras"]
    args[extras] = [p.clone() for p in args[PARAMS]]
    refused(setup, args, "extras has 2 tensors: precision='nearest' takes 0")


def test_momentum_lows_without_momentum():
    setup = Setup("sgd", "collage-plus", BF16)
    args = call(setup)
    args[SGD_ROLES["momentum_buffers"]] = []
    refused(setup, args, "momentum_lows are given without momentum_buffers")


def test_packed_words():
    setup = Setup("adam", "extra-bits-8", BF16)
    args = call(setup)
    args[ADAM_ROLES["extras"]][0] = torch.zeros(40, dtype=torch.int32)
    refused(setup, args, r"extras\[0\] has shape \(40,\): expected \(16,\)")


def test_no_parameters():
    args = call(ADAM)
    for role in ADAM_ROLES.values():
        args[role] = []
    refused(ADAM, args, "params is empty")


@pytest.mark.parametrize("setup", [ADAM, SGD], ids=str)
@pytest.mark.parametrize("position", [-1, -2])
def test_streams_and_offsets(setup, position):
    args = call(setup)
    args[position] = [0]
    refused(setup, args, "steps, streams and offsets have")


def test_steps():
    args = call(ADAM)
    args[7], args[-1], args[-2] = args[7][:1], [0], [0]
    refused(ADAM, args, "steps has 1 entries: expected one for each of 2 parameters")


@pytest.mark.parametrize("op", ["adam", "sgd"])
def test_amaxes(op):
    setup = Setup(op, "nearest", E4M3)
    args = call(setup)
    args[6 if op == "adam" else 5] = []
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
    args[args.index("collage-plus")] = precision
    refused(ADAM, args, message)


def test_gradient_dtype():
    args = call(ADAM)
    args[GRADS] = [g.double() for g in args[GRADS]]
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
    args[args.index("wide")] = arithmetic
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
