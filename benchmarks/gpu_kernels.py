"""One case of every Triton kernel, to be run under a sanitizer: ragged sizes, small tensors."""

from __future__ import annotations

import sys

import torch

from subulp import nn, optim
from subulp.nn.cached_table import EmbeddingTable
from subulp.ops.all_finite import are_finite
from subulp.ops.mixture import mixture_encode, triton_recipe

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


def main(device: str) -> None:
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
    for recipe, partition in (("tensor", "tensor"), ("subtensor-3way", "block-128x128")):
        layer = nn.MoRLinear(129, 131, mor=nn.MoR(recipe, partition)).to(device, BF16)  # type: ignore[arg-type]
        x = torch.randn(7, 129, device=device, dtype=BF16, requires_grad=True)
        layer(x).sum().backward()
    # Sums of so few chunks have no kernel of their own, but for this.
    triton_recipe.FEW = 1
    mixture_encode(torch.randn(70, 60, device=device), "tensor", (1, 1), (70, 60), "e8m0", 0.02)
    if device == "cuda":
        torch.cuda.synchronize()
    print("all kernels ran")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cuda")
