"""A whole training loop gives the same bits under every backend that runs here."""

from __future__ import annotations

import pytest

from .support import BF16, FP16, FP32, Net, Run, assert_same, cases, train_net


@pytest.mark.parametrize("case", cases(["adamw", "sgd-nesterov"], dtypes=[FP32, BF16, FP16]))
def test_reference_is_cpu(case, monkeypatch):
    runs = []
    for backend in ("reference", "cpu"):
        monkeypatch.setenv("SUBULP_BACKEND", backend)
        net = Net(case.dtype)
        opt = case.make(net.parameters(), nonfinite="raise")
        train_net(net, opt, range(5))
        runs.append(Run(list(net.parameters()), opt))
    assert_same(*runs)


@pytest.mark.parametrize("case", cases())
def test_reference_is_the_default(case, monkeypatch):
    default = case.fresh().train()
    monkeypatch.setenv("SUBULP_BACKEND", "reference")
    assert_same(case.fresh().train(), default)
