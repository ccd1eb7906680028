"""Peers of the benchmarks of GPUs, as modules of the same names and arguments."""

from __future__ import annotations

import enum
import sys
import time
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
import torch

from subulp import nn

from .scripts import script

gpu_peers, gpu_rates, gpu_turns = map(script, ("gpu_peers", "gpu_rates", "gpu_turns"))
CPU, BF16 = torch.device("cpu"), torch.bfloat16


def stub(monkeypatch, name: str, **members) -> None:
    """A module, and the packages that it is in."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        path = ".".join(parts[:i])
        module = sys.modules.get(path)
        if not isinstance(module, ModuleType) or not getattr(module, "is_stub", False):
            module = ModuleType(path)
            module.__spec__, module.__path__, module.is_stub = ModuleSpec(path, None), [], True
            monkeypatch.setitem(sys.modules, path, module)
        if i > 1:
            monkeypatch.setattr(
                sys.modules[".".join(parts[: i - 1])], parts[i - 1], module, raising=False
            )
    for member, value in members.items():
        setattr(sys.modules[name], member, value)


@pytest.fixture(autouse=True)
def none_installed(monkeypatch):
    """Only stubs are there, whatever this machine has."""

    def installed(package):
        return getattr(sys.modules.get(package), "is_stub", False)

    monkeypatch.setattr(gpu_peers, "installed", installed)


def test_what_is_installed_is_found(monkeypatch):
    monkeypatch.undo()
    assert gpu_peers.installed("torch")
    assert not gpu_peers.installed("transformer_engine")


class Counting:
    """An optimizer that notes how it was made."""

    made: ClassVar[list[tuple]] = []

    def __init__(self, params, lr, **options):
        self.made.append((type(self).__name__, options, {p.dtype for p in params}))
        assert all(p.grad is not None for p in params)

    def step(self):
        pass


def test_optimizers(monkeypatch):
    names = "AdamW", "SGD", "FlashAdamW", "FlashSGD"
    kinds = {name: type(name, (Counting,), {}) for name in names}
    monkeypatch.setattr(Counting, "made", [])
    stub(monkeypatch, "optimi", AdamW=kinds["AdamW"], SGD=kinds["SGD"])
    stub(monkeypatch, "flashoptim", FlashAdamW=kinds["FlashAdamW"], FlashSGD=kinds["FlashSGD"])
    peers = gpu_peers.Peers()
    found = gpu_rates.optimizers(CPU, gpu_turns.SMALL, peers)
    assert peers.record() == {"absent": [], "failed": {}}
    for kind in ("AdamW", "SGD"):
        row = found[f"collage-plus, {kind}, bfloat16"]
        assert {"times_torch-optimi Kahan", "times_FlashOptim", "times_copy"} < row.keys()
        row = found[f"fp32, {kind}, float32"]
        assert {"times_torch-optimi", "times_FlashOptim"} < row.keys()
        assert "times_FlashOptim" not in found[f"stochastic, {kind}, float8_e4m3fn"]
    momentum = {"momentum": 0.9}
    assert Counting.made == [
        ("AdamW", {"kahan_sum": True, "triton": False}, {BF16}),
        ("FlashAdamW", {}, {BF16}),
        ("AdamW", {"kahan_sum": False, "triton": False}, {torch.float32}),
        ("FlashAdamW", {}, {torch.float32}),
        ("SGD", {"kahan_sum": True, "triton": False, **momentum}, {BF16}),
        ("FlashSGD", momentum, {BF16}),
        ("SGD", {"kahan_sum": False, "triton": False, **momentum}, {torch.float32}),
        ("FlashSGD", momentum, {torch.float32}),
    ]


def test_tables(monkeypatch):
    sparse = enum.Enum("SparseType", ["FP32", "FP16", "INT8"])
    module = "fbgemm_gpu.split_table_batched_embeddings_ops"

    class Bags(torch.nn.Module):
        def __init__(self, specs, *, optimizer, learning_rate, weights_precision):
            super().__init__()
            assert {spec[2:] for spec in specs} == {("host", "cpu")}
            assert (optimizer, learning_rate) == ("rowwise", 0.01)
            self.count, self.dim = len(specs), specs[0][1]
            self.is_known = weights_precision is not sparse.INT8

        def init_embedding_weights_uniform(self, low, high):
            self.weight = torch.nn.Parameter(torch.empty(self.dim).uniform_(low, high))

        def forward(self, values, offsets):
            if not self.is_known:
                raise NotImplementedError("no such rows")
            bags = (len(offsets) - 1) // self.count
            return self.weight.repeat(bags, self.count)

    stub(
        monkeypatch,
        "fbgemm_gpu.split_embedding_configs",
        EmbOptimType=SimpleNamespace(EXACT_ROWWISE_ADAGRAD="rowwise"),
        SparseType=sparse,
    )
    place = SimpleNamespace(DEVICE="device", HOST="host")
    stub(monkeypatch, f"{module}_common", EmbeddingLocation=place)
    stub(
        monkeypatch,
        f"{module}_training",
        ComputeDevice=SimpleNamespace(CUDA="cuda", CPU="cpu"),
        SplitTableBatchedEmbeddingBagsCodegen=Bags,
    )
    peers = gpu_peers.Peers()
    found = gpu_rates.tables(CPU, gpu_turns.SMALL, peers)
    # What fails is named once, and what is left is measured.
    assert peers.record() == {
        "absent": [],
        "failed": {"fbgemm int8": "NotImplementedError: no such rows"},
    }
    dims = [gpu_turns.SMALL["dim"] // part for part in (4, 2, 1)]
    assert [gpu_turns.FULL["dim"] // part for part in (4, 2, 1)] == [32, 64, 128]
    for dim in dims:
        row = found[f"int8+5%, {dim} numbers"]
        assert {"times_fbgemm fp32", "times_fbgemm fp16"} < row.keys()
        assert "times_fbgemm int8" not in row
        assert found[f"fbgemm fp16, {dim} numbers"]["peer"]


@pytest.mark.parametrize("autocast", ["autocast", "fp8_autocast"])
def test_linear_layers(monkeypatch, autocast):
    events = []

    def convert(model):
        assert [type(layer) for layer in model] == [torch.nn.Linear]
        events.append("converted")
        return model

    class Linear(torch.nn.Linear):
        def __init__(self, inputs, outputs, *, bias, params_dtype, device):
            super().__init__(inputs, outputs, bias=bias, dtype=params_dtype, device=device)

        def forward(self, x):
            assert events[-1] == "entered"
            return super().forward(x)

    class Autocast:
        def __init__(self, *, enabled):
            assert enabled

        def __enter__(self):
            events.append("entered")

        def __exit__(self, *_):
            events.append("left")

    stub(monkeypatch, "torchao.float8", convert_to_float8_training=convert)
    stub(monkeypatch, "transformer_engine.pytorch", Linear=Linear, **{autocast: Autocast})
    peers = gpu_peers.Peers()
    found = gpu_rates.mixtures(CPU, gpu_turns.SMALL, peers)
    assert peers.record() == {"absent": [], "failed": {}}
    for size in ("128", "256"):
        assert found[f"torchao float8, {size}"]["times_bf16"] > 0
        assert found[f"TransformerEngine FP8, {size}"]["times_bf16"] > 0
    assert events.count("converted") == 2
    assert events.count("entered") == events.count("left") > 2


@pytest.mark.parametrize("dtype", [BF16, torch.float8_e4m3fn], ids=str)
def test_each_step_meets_other_weights_and_adds_to_no_gradient(dtype):
    layer = nn.Linear(16, 16, bias=False).to(dtype)
    x = torch.ones(2, 16, dtype=BF16, requires_grad=True)
    step = gpu_peers.both_passes(layer, x, torch.ones(2, 16, dtype=BF16))
    weights, grads = [], []
    for _ in range(2):
        gpu_turns.prepare(step)
        step()
        weights.append(layer.weight.detach().float())
        grads.append(layer.weight.grad.float())
    assert torch.equal(weights[0], -weights[1])
    assert torch.equal(grads[0], grads[1])


def test_what_comes_before_a_step_is_not_in_its_time():
    events = []
    step = gpu_turns.Prepared(lambda: events.append("step"), lambda: time.sleep(0.2))
    turns = gpu_turns.Turns(CPU, 2)
    turns.run({"a": step}, warm_up=1)
    assert events == ["step"] * 3
    assert turns.median("a") < 0.1
