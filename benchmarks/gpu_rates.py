"""Rates and peak memory on a GPU, beside named peers and the bounds of the same run.

Run by gpu.py; needs nothing but PyTorch, Triton and NumPy. Peers that are not installed are left
out by name. One process; methods take turns; medians over the rounds, ratios within a round.

    python benchmarks/gpu_rates.py tuning|optimizers|tables|heads|mixtures|memory

prints one JSON object: also which configurations kernels were launched with, and where these come
from (see SUBULP_TUNE). With ``--small`` the same code runs on small tensors of a CPU, to be tested.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subulp import nn, optim
from subulp.nn.cached_table import EmbeddingTable
from subulp.ops.strategy import parse_strategy
from subulp.ops.triton.tuning import chosen

Step = Callable[[], object]
Sizes = dict[str, int]

FULL: Sizes = {
    **{"rounds": 20, "numel": 1 << 28, "rows": 2_000_000, "dim": 128, "batch": 2048, "tables": 26},
    **{"labels": 131_072, "width": 768, "instances": 128, "layer": 4096, "all_labels": 3_000_000},
}
SMALL: Sizes = {
    **{"rounds": 1, "numel": 1 << 12, "rows": 200, "dim": 16, "batch": 2, "tables": 2},
    **{"labels": 256, "width": 32, "instances": 4, "layer": 128, "all_labels": 3000},
}
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn

# Aims on an H100; elsewhere they are only shown.
AIMS = {
    "tuning": "no aim: which configurations are the fastest",
    "optimizers": "each step at least 0.85 of a copy's bandwidth",
    "tables": "at least FBGEMM's rate, in narrow rows",
    "heads": "products at least 0.55 of their operands' peak, a step at most 1.25 of their time",
    "mixtures": "E4M3 by tensor or block faster than BF16 from 4,096 x 4,096 on",
    "memory": "3 million labels and an encoder of BERT-base's size in at most 5 GiB (paper: 6.6)",
}


class Turns:
    """Methods that take turns: seconds of each round."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        self.device, self.rounds = device, rounds
        self.seconds: dict[str, list[float]] = {}

    def run(self, methods: dict[str, Step], warm_up: int = 3) -> None:
        for _ in range(warm_up):
            for step in methods.values():
                step()
        for _ in range(self.rounds):
            for name, step in methods.items():
                self.seconds.setdefault(name, []).append(self._time(step))

    def _time(self, step: Step) -> float:
        if self.device.type != "cuda":
            started = time.perf_counter()
            step()
            return time.perf_counter() - started
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        first.record()
        step()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratio(self, name: str, other: str) -> float:
        """How many times as fast as another a method is."""
        pairs = zip(self.seconds[other], self.seconds[name], strict=True)
        return statistics.median(a / b for a, b in pairs)


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def copy_of(numel: int, device: torch.device) -> Step:
    source = torch.randn(numel, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def parameters(numel: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    sizes = [numel // 4] * 3 + [numel - 3 * (numel // 4) - 64, 64]
    made = [torch.nn.Parameter((torch.randn(n, device=device) * 0.02).to(dtype)) for n in sizes]
    for p in made:
        p.grad = (torch.randn(p.shape, device=device) * 1e-3).to(dtype)
    return made


def optimizers(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Bytes of each step over its time, as a share of a copy's."""
    numel, result = sizes["numel"], {}
    narrow = ("nearest", "stochastic", "collage-light", "collage-plus", "kahan", "master")
    cases = [*((name, BF16) for name in (*narrow, "extra-bits-8")), ("fp32", torch.float32)]
    for precision, dtype in [*cases, ("stochastic", E4M3)]:
        name = f"{precision}, {str(dtype).removeprefix('torch.')}"
        # What is stored is read and written; the gradient is read, for FP8 states' scales twice.
        grads = 2 if dtype == E4M3 else 1
        nbytes = grads * dtype.itemsize + 2 * parse_strategy(precision).stored_bytes(dtype)
        ours = parameters(numel, dtype, device)
        optimizer = optim.AdamW(ours, lr=1e-4, precision=precision, seed=0)
        theirs = torch.optim.AdamW(parameters(numel, torch.float32, device), lr=1e-4, fused=True)
        methods: dict[str, Step] = {
            "copy": copy_of(numel, device),
            "ours": optimizer.step,
            "torch fused FP32": theirs.step,
        }
        if installed("optimi") and dtype == BF16:
            from optimi import AdamW  # noqa: PLC0415 - a peer that may be missing

            peer = AdamW(
                parameters(numel, BF16, device),
                lr=1e-4,
                kahan_sum=True,
                triton=device.type == "cuda",
            )
            methods["torch-optimi Kahan"] = peer.step
        turns = Turns(device, sizes["rounds"])
        turns.run(methods)
        bandwidth = 8 * numel / turns.median("copy")
        result[name] = {
            "seconds": turns.median("ours"),
            "share_of_copy_bandwidth": nbytes * numel / turns.median("ours") / bandwidth,
            "copy_bytes_per_second": bandwidth,
            **{f"times_{peer}": turns.ratio("ours", peer) for peer in methods if peer != "ours"},
        }
        del methods, optimizer, theirs, ours
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return result


def tables(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Lookups a second of forward pass, backward pass and update."""
    rows, dim, batch, count = (sizes[k] for k in ("rows", "dim", "batch", "tables"))
    rows_each = max(1, rows // count)
    generator = torch.Generator().manual_seed(0)
    # Zipf's law: the row of rank r is as likely as 1 / r.
    ranks = float(rows_each) ** torch.rand(count * batch * 20, generator=generator)
    values = ((ranks.long().clamp(1, rows_each) - 1) * 7_368_787 % rows_each).to(device)
    offsets = torch.arange(0, len(values) + 1, 20, device=device)
    grad = torch.randn(batch, count * dim, device=device)
    methods: dict[str, Step] = {}

    def ours(storage: str, fraction: float) -> Step:
        configs = [EmbeddingTable(rows_each, dim, storage, fraction)] * count  # type: ignore[arg-type]
        bags = nn.CachedEmbeddingBags(configs, narrow_above=0, seed=0, device=device)
        optim.RowAdagrad(bags, lr=0.01)
        return lambda: bags(values, offsets=offsets).backward(grad)

    for storage, fraction in (("int8", 0.05), ("int4", 0.05), ("int8", 0.0), ("fp32", 0.0)):
        methods[f"{storage}+{fraction:.0%}"] = ours(storage, fraction)
    plain = torch.nn.EmbeddingBag(count * rows_each, dim, mode="sum", include_last_offset=True)
    plain.to(device)
    plain_grad = grad.view(batch, count, dim).transpose(0, 1).reshape(-1, dim).contiguous()

    def torchs() -> None:
        plain.weight.grad = None
        plain(values, offsets).backward(plain_grad)
        with torch.no_grad():
            plain.weight.add_(plain.weight.grad, alpha=-0.01)

    methods["torch, SGD on all rows"] = torchs
    if device.type == "cuda" and installed("fbgemm_gpu"):
        methods["fbgemm fp32"] = fbgemm(rows_each, dim, count, values, offsets, grad)
    turns = Turns(device, sizes["rounds"])
    turns.run(methods)
    peers = [name for name in methods if name.startswith(("torch", "fbgemm"))]
    return {
        name: {
            "lookups_per_second": len(values) / turns.median(name),
            **{f"times_{peer}": turns.ratio(name, peer) for peer in peers if peer != name},
        }
        for name in methods
    }


def fbgemm(rows: int, dim: int, count: int, values: Tensor, offsets: Tensor, grad: Tensor) -> Step:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType  # noqa: PLC0415
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (  # noqa: PLC0415
        EmbeddingLocation,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (  # noqa: PLC0415
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    bags = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)] * count,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.01,
    )
    return lambda: bags(values, offsets).backward(grad)


def heads(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """A step of a classifier, beside its three products alone and beside torch's."""
    labels, dim, batch = (sizes[k] for k in ("labels", "width", "instances"))
    x = torch.randn(batch, dim, device=device, requires_grad=True)
    rows = torch.arange(batch, device=device)
    positives = torch.randint(labels, (batch,), device=device)
    weight, g = (torch.randn(n, m, device=device) for n, m in ((labels, dim), (labels, batch)))
    narrow = weight.bfloat16(), g.bfloat16(), x.detach().bfloat16()

    def products(w: Tensor, dz: Tensor, inputs: Tensor) -> Step:
        return lambda: (w @ inputs.t(), dz.t() @ w, dz @ inputs)

    def ours(kind: str) -> Step:
        head = nn.ExtremeClassifier(dim, labels, chunks=1, seed=0, products=kind, device=device)  # type: ignore[arg-type]
        optim.RowSGD(head, lr=0.1)
        return lambda: head(x, rows, positives).backward()

    linear = torch.nn.Linear(dim, labels, bias=False, device=device)
    sgd = torch.optim.SGD(linear.parameters(), lr=0.1)

    def torchs() -> None:
        target = torch.zeros(batch, labels, device=device)
        target[rows, positives] = 1.0
        sgd.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(linear(x), target).backward()
        sgd.step()

    methods = {
        "e4m3, fp32": ours("fp32"),
        "e4m3, bf16": ours("bf16"),
        "three FP32 products": products(weight, g, x.detach()),
        "three BF16 products": products(*narrow),
        "torch": torchs,
    }
    if device.type == "cuda" and torch.cuda.get_device_capability() >= (8, 9):
        methods["e4m3, fp8"] = ours("fp8")
    turns = Turns(device, sizes["rounds"])
    turns.run(methods)
    flops = 6 * labels * dim * batch
    return {
        name: {
            "seconds": turns.median(name),
            "flops_per_second": flops / turns.median(name),
            "of_three_bf16_products": 1 / turns.ratio(name, "three BF16 products"),
            "times_torch": turns.ratio(name, "torch"),
        }
        for name in methods
    }


def mixtures(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """A linear layer forward and backward, by recipe and partition, beside BF16's."""
    size = sizes["layer"]
    x = torch.randn(size, size, device=device, dtype=BF16, requires_grad=True)

    def step(layer: torch.nn.Module) -> Step:
        layer.to(device, BF16)
        return lambda: layer(x).sum().backward()

    methods = {"bf16": step(torch.nn.Linear(size, size, bias=False))}
    recipes = (
        ("tensor", "tensor"),
        ("tensor", "block-128x128"),
        ("subtensor-3way", "block-128x128"),
    )
    for recipe, partition in recipes:
        layer = nn.MoRLinear(size, size, bias=False, mor=nn.MoR(recipe, partition))  # type: ignore[arg-type]
        methods[f"{recipe}, {partition}"] = step(layer)
    methods["e4m3 weights"] = step(nn.Linear(size, size, bias=False).to(E4M3))
    turns = Turns(device, sizes["rounds"])
    turns.run(methods)
    return {
        name: {"seconds": turns.median(name), "times_bf16": turns.ratio(name, "bf16")}
        for name in methods
    }


def memory(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Peak memory of a step of a classifier over millions of labels with a transformer encoder."""
    dim, full = sizes["width"], sizes is FULL
    layer = torch.nn.TransformerEncoderLayer(dim, 12 if full else 2, 4 * dim, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 12 if full else 1, enable_nested_tensor=False)
    encoder.to(device, BF16)
    optimizer = optim.AdamW(encoder.parameters(), lr=1e-5, precision="collage-plus", seed=0)
    head = nn.ExtremeClassifier(dim, sizes["all_labels"], chunks=64, seed=0, device=device)
    optim.RowSGD(head, lr=0.1)
    tokens = torch.randn(sizes["instances"], 128 if full else 4, dim, device=device, dtype=BF16)
    rows = torch.arange(sizes["instances"], device=device)
    positives = torch.randint(sizes["all_labels"], rows.shape, device=device)

    def step() -> None:
        optimizer.zero_grad()
        head(encoder(tokens).mean(1), rows, positives).backward()
        optimizer.step()

    step()
    if device.type != "cuda":
        return {"peak_bytes": None, "labels": sizes["all_labels"]}
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return {
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "labels": sizes["all_labels"],
        "seconds": time.perf_counter() - started,
    }


def tuning(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Run what is measured later once; the numbers of each kernel's configuration."""
    for section in (optimizers, tables, heads, mixtures):
        section(device, sizes | {"rounds": 1})
    return {choice.name: dict(choice.configuration) for choice in chosen()}


SECTIONS = {f.__name__: f for f in (tuning, optimizers, tables, heads, mixtures, memory)}


def main(arguments: list[str]) -> None:
    small = "--small" in arguments
    (name,) = (a for a in arguments if not a.startswith("--"))
    device = torch.device("cpu" if small else "cuda")
    found = SECTIONS[name](device, SMALL if small else FULL)
    configurations = [
        {"name": c.name, "source": c.source, "configuration": dict(c.configuration)}
        for c in chosen()
    ]
    print(json.dumps({"aim": AIMS[name], "rates": found, "configurations": configurations}))


if __name__ == "__main__":
    main(sys.argv[1:])
