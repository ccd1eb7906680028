"""One case of every Triton kernel, to be run under a sanitizer: ragged sizes, small tensors.

    python benchmarks/gpu_kernels.py [cuda|cpu] [optimizers|tables|heads|mixtures ...]

All parts, without the name of any.
"""

from __future__ import annotations

import sys

import torch

from subulp import nn, optim
from subulp.nn.cached_table import EmbeddingTable
from subulp.numerics import mixture
from subulp.numerics.mixture import THREE_WAY
from subulp.ops.all_finite import are_finite
from subulp.ops.head import fp8
from subulp.ops.mixture import mixture_encode, triton_product, triton_recipe
from subulp.ops.mixture.operand import Operand, ProductJob

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


def optimizers(device: str) -> None:
    for dtype, precision in ((BF16, "collage-plus"), (FP16, "extra-bits-7"), (E4M3, "stochastic")):
        for kind in (optim.AdamW, optim.SGD):
            sizes = (1, 37, 1025, 4096)
            params = [torch.randn(n, device=device).to(dtype).requires_grad_() for n in sizes]
            for p in params:
                p.grad = torch.randn(p.shape, device=device).to(dtype)
            options = {"momentum": 0.9} if kind is optim.SGD else {}
            kind(params, lr=0.1, precision=precision, seed=0, **options).step()
            # Steps that a graph may hold count by a kernel of their own.
            options |= {"capturable": True, "nonfinite": "propagate"}
            kind(params, lr=0.1, precision=precision, seed=0, **options).step()
            assert are_finite([p.grad for p in params])


def tables(device: str) -> None:
    for rule in ("sgd", "adagrad", "rowwise"):
        configs = [EmbeddingTable(50, 19, storage, 0.2) for storage in ("int8", "int4", "e4m3")]
        bags = nn.CachedEmbeddingBags(configs, narrow_above=0, seed=0, device=device)
        if rule == "sgd":
            optim.RowSGD(bags, lr=0.1)
        else:
            optim.RowAdagrad(bags, lr=0.1, rowwise=rule == "rowwise")
        # More lookups of one row than a span has.
        values = torch.cat([torch.zeros(70, device=device).long(), torch.arange(50, device=device)])
        values = values.repeat(3)
        lengths = torch.tensor([70, 50] * 3, device=device)
        bags(values, lengths).sum().backward()


def heads(device: str) -> None:
    for storage, products, dropout in (
        *(("e4m3", "fp32", 0.2), ("e4m3", "bf16", 0.0), ("e4m3", "fp8", 0.0)),
        *(("int4", "fp32", 0.2), ((3, 4), "fp32", 0.0)),
    ):
        options = {"storage": storage, "products": products, "dropout": dropout, "device": device}
        head = nn.ExtremeClassifier(21, 130, chunks=2, seed=0, **options)  # type: ignore[arg-type]
        optim.RowSGD(head, lr=0.1)
        x = torch.randn(5, 21, device=device, requires_grad=True)
        rows = torch.arange(5, device=device)
        head(x, rows, rows * 26, loss=True).backward()
        head.topk(x.detach())


def mixtures(device: str) -> None:
    for recipe, partition in (
        ("tensor", "tensor"),
        ("subtensor-3way", "block-128x128"),
        ("subtensor-3way", "subchannel-128"),
    ):
        layer = nn.MoRLinear(129, 131, mor=nn.MoR(recipe, partition)).to(device, BF16)  # type: ignore[arg-type]
        x = torch.randn(7, 129, device=device, dtype=BF16, requires_grad=True)
        layer(x).sum().backward()
    # Sums of so few chunks have no kernel of their own, but for this.
    triton_recipe.FEW = 1
    mixture_encode(torch.randn(70, 60, device=device), "tensor", (1, 1), (70, 60), "e8m0", 0.02)
    for job in products(device):
        triton_product.multiply(job)


def products(device: str) -> list[ProductJob]:
    """Products whose sizes units of FP8 can read; in one of them they multiply some parts only."""
    # Kernels that are interpreted have the units' branch too.
    units = device == "cpu" or fp8.units_at(torch.device(device))
    cases = (
        (128, 128, "tensor", BF16, False),
        (128, 128, "block-128x128", BF16, False),
        (144, 64, (32, 32), BF16, True),
        (144, 64, (32, 32), FP16, True),
        (128, 128, "tensor", torch.float32, False),
        # Few rows have configurations of their own.
        (48, 128, "subchannel-128", BF16, False),
    )
    found = []
    for rows, k, partition, dtype, is_mixed in cases:
        factors = []
        for height in (rows, 144):
            x = torch.randn(height, k, generator=torch.Generator().manual_seed(height))
            if is_mixed:
                # A block of the first 128 rows that E4M3 is too narrow for.
                x[70:80, :32] *= torch.logspace(-4, 3, 32)
            factors.append(Operand(*mixture.encode(x.to(device, dtype), THREE_WAY, partition)))  # type: ignore[arg-type]
        found.append(ProductJob(*factors, dtype, None, units=units))
    return found


PARTS = {f.__name__: f for f in (optimizers, tables, heads, mixtures)}


def main(device: str, *parts: str) -> None:
    for name in parts or PARTS:
        PARTS[name](device)
    if device == "cuda":
        torch.cuda.synchronize()
    print(f"all kernels of {', '.join(parts or PARTS)} ran")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["cuda"]))
