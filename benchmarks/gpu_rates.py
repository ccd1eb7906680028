"""Rates and peak memory on a GPU, beside named peers and the bounds of the same run.

Run by gpu.py; needs nothing but PyTorch, Triton and NumPy. Peers that are not installed or that
fail are named. One process; methods take turns; medians over the rounds, ratios within a round.

    python benchmarks/gpu_rates.py tuning|optimizers|tables|heads|mixtures|memory

prints one JSON object: also which configurations kernels were launched with, and where these come
from (see SUBULP_TUNE). With ``--small`` the same code runs on small tensors of a CPU, to be tested.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import gpu_peers
import torch
from gpu_heads import heads
from gpu_memory import memory
from gpu_peers import Peers
from gpu_turns import FULL, SMALL, Sizes, Step, Turns, release
from torch import Tensor

from subulp import nn, optim
from subulp.nn.cached_table import EmbeddingTable
from subulp.ops.triton.tuning import chosen

BF16, E4M3, FP32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32

# Aims on an H100, which gpu_aims.py judges; elsewhere they are only shown.
AIMS = {
    "tuning": "no aim: which configurations are the fastest",
    "optimizers": "each step at least 0.85 of a copy's bandwidth",
    "tables": "at least FBGEMM's rate, in narrow rows",
    "heads": "products at least 0.55 of their operands' peak, a step at most 1.25 of their time",
    "mixtures": "E4M3 by tensor or block faster than BF16 from 4,096 x 4,096 on",
    "memory": "3 million labels and an encoder of BERT-base's size in at most 5 GiB (paper: 6.6)",
}


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


_BF16_PRECISIONS = ("nearest", "stochastic", "collage-light", "collage-plus", "kahan", "master")
PRECISIONS = {
    ("AdamW", BF16): (*_BF16_PRECISIONS, "extra-bits-8"),
    ("AdamW", FP32): ("fp32",),
    ("AdamW", E4M3): ("stochastic",),
    ("SGD", BF16): (*_BF16_PRECISIONS, "extra-bits-8"),
    ("SGD", FP32): ("fp32",),
    ("SGD", E4M3): ("stochastic",),
}


def optimizers(device: torch.device, sizes: Sizes, peers: Peers) -> dict[str, Any]:
    """Bytes of each step over its time, as a share of a copy's."""
    found = {}
    for kind, dtype in PRECISIONS:
        found |= of_kind(device, sizes, peers, kind, dtype)
        release(device)
    return found


def of_kind(
    device: torch.device, sizes: Sizes, peers: Peers, kind: str, dtype: torch.dtype
) -> dict[str, Any]:
    numel = sizes["numel"]
    options = {"lr": 1e-4, **({"momentum": 0.9} if kind == "SGD" else {})}
    suffix = f"{kind}, {str(dtype).removeprefix('torch.')}"
    wide = parameters(numel, FP32, device)
    theirs = {
        "copy": copy_of(numel, device),
        "torch fused FP32": getattr(torch.optim, kind)(wide, fused=True, **options).step,
    }
    if dtype in (BF16, FP32):
        gpu_peers.optimizers(
            peers, theirs, kind, dtype, device, lambda: parameters(numel, dtype, device)
        )
    found = {}
    for precision in PRECISIONS[kind, dtype]:
        ours = getattr(optim, kind)(
            parameters(numel, dtype, device), precision=precision, seed=0, **options
        )
        methods = {**theirs, "ours": ours.step}
        turns = Turns(device, sizes["rounds"])
        turns.run(methods)
        # What is stored is read and written; the gradient is read, for FP8 states' scales twice.
        stored = ours.bytes_per_parameter()
        reads = 2 if dtype == E4M3 else 1
        nbytes = 2 * (stored["total"] - stored["gradient"]) + reads * stored["gradient"]
        bandwidth = 8 * numel / turns.median("copy")
        found[f"{precision}, {suffix}"] = {
            "seconds": turns.median("ours"),
            "share_of_copy_bandwidth": nbytes * numel / turns.median("ours") / bandwidth,
            "copy_bytes_per_second": bandwidth,
            **{f"times_{peer}": turns.ratio("ours", peer) for peer in theirs},
        }
        del methods, ours
        release(device)
    return found


def tables(device: torch.device, sizes: Sizes, peers: Peers) -> dict[str, Any]:
    """Lookups a second of forward pass, backward pass and update, by the length of a row."""
    found = {}
    for part in (4, 2, 1):
        found |= of_dim(device, sizes, peers, sizes["dim"] // part)
        release(device)
    return found


def of_dim(device: torch.device, sizes: Sizes, peers: Peers, dim: int) -> dict[str, Any]:
    rows, batch, count = (sizes[k] for k in ("rows", "batch", "tables"))
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
    narrow = {name for name in methods if not name.startswith("fp32")}
    plain = torch.nn.EmbeddingBag(
        count * rows_each, dim, mode="sum", include_last_offset=True, device=device
    )
    plain_grad = grad.view(batch, count, dim).transpose(0, 1).reshape(-1, dim).contiguous()

    def torchs() -> None:
        plain.weight.grad = None
        plain(values, offsets).backward(plain_grad)
        with torch.no_grad():
            plain.weight.add_(plain.weight.grad, alpha=-0.01)

    own = set(methods)
    methods["torch, SGD on all rows"] = torchs
    gpu_peers.fbgemm(peers, methods, (rows_each, dim, count), (values, offsets, grad))
    turns = Turns(device, sizes["rounds"])
    turns.run(methods)
    others = [name for name in methods if name not in own]
    return {
        f"{name}, {dim} numbers": {
            "lookups_per_second": len(values) / turns.median(name),
            **{f"times_{peer}": turns.ratio(name, peer) for peer in others if peer != name},
            "narrow": name in narrow,
            "peer": name in others,
        }
        for name in methods
    }


# Recipe and partition of a layer, and whether the aim is of it.
MIXTURES = (
    ("tensor", "tensor", True),
    ("tensor", "block-128x128", True),
    ("tensor", "subchannel-128", False),
    ("subtensor-3way", "block-128x128", False),
)


def mixtures(device: torch.device, sizes: Sizes, peers: Peers) -> dict[str, Any]:
    """A linear layer forward and backward, by recipe and partition, beside BF16's."""
    found = {}
    for size in (sizes["layer"], 2 * sizes["layer"]):
        found |= of_size(device, sizes["rounds"], peers, size)
        release(device)
    return found


def of_size(device: torch.device, rounds: int, peers: Peers, size: int) -> dict[str, Any]:
    suffix = f", {size:,}"
    x = torch.randn(size, size, device=device, dtype=BF16, requires_grad=True)
    # Of random numbers: a layer may find the one value of a sum's gradient easier than others.
    grad = torch.randn(size, size, device=device, dtype=BF16)
    bf16 = f"bf16{suffix}"

    def step(layer: torch.nn.Module) -> Step:
        return gpu_peers.both_passes(layer, x, grad)

    made = {"bias": False, "device": device}
    methods = {bf16: step(torch.nn.Linear(size, size, **made).to(BF16))}
    judged = set()
    for recipe, partition, has_aim in MIXTURES:
        layer = nn.MoRLinear(size, size, mor=nn.MoR(recipe, partition), **made)  # type: ignore[arg-type]
        name = f"{recipe}, {partition}{suffix}"
        methods[name] = step(layer.to(BF16))
        if has_aim:
            judged.add(name)
    methods[f"e4m3 weights{suffix}"] = step(nn.Linear(size, size, **made).to(E4M3))
    gpu_peers.linear_layers(peers, methods, suffix, x, grad)
    turns = Turns(device, rounds)
    turns.run(methods)
    flops = 6 * size**3
    return {
        name: {
            "seconds": turns.median(name),
            "flops_per_second": flops / turns.median(name),
            "times_bf16": turns.ratio(name, bf16),
            "judged": name in judged,
        }
        for name in methods
    }


def tuning(device: torch.device, sizes: Sizes, peers: Peers) -> dict[str, Any]:
    """Run what is measured later once; the numbers of each kernel's configuration."""
    del peers  # Only ours have something to choose.
    for section in (optimizers, tables, heads, mixtures):
        section(device, sizes | {"rounds": 1}, NoPeers())
    return {choice.name: dict(choice.configuration) for choice in chosen()}


class NoPeers(Peers):
    """No peer is made."""

    def add(self, *_: Any) -> None:
        return


Section = Callable[[torch.device, Sizes, Peers], dict[str, Any]]
SECTIONS: dict[str, Section] = {
    f.__name__: f for f in (tuning, optimizers, tables, heads, mixtures, memory)
}


def configurations() -> Iterator[dict[str, Any]]:
    for choice in chosen():
        yield {
            "name": choice.name,
            "source": choice.source,
            "configuration": dict(choice.configuration),
        }


def main(arguments: list[str]) -> None:
    small = "--small" in arguments
    (name,) = (a for a in arguments if not a.startswith("--"))
    device, peers = torch.device("cpu" if small else "cuda"), Peers()
    found = SECTIONS[name](device, SMALL if small else FULL, peers)
    result = {
        "aim": AIMS[name],
        "rates": found,
        "peers": peers.record(),
        "configurations": list(configurations()),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
