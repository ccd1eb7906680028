"""Steps of a classifier on a GPU, beside the products that they cannot do without.

``products=`` says what the operands are, so each kind has bare products of its own: those of
``"fp8"`` have their logits in FP8 and both gradients in BF16, as ELMO has them.
"""

from __future__ import annotations

from typing import Any

import torch
from gpu_aims import peaks_of
from gpu_peers import Peers
from gpu_turns import Sizes, Step, Turns, release
from torch import Tensor

from subulp import nn, optim

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn

# Operands of logits, gradient of the inputs, and gradient of the weights.
OPERANDS = {
    "fp32": ("fp32", "fp32", "fp32"),
    "bf16": ("bf16", "bf16", "bf16"),
    "fp8": ("fp8", "bf16", "bf16"),
    # More than any of ours has: what FP8 units could do.
    "all fp8": ("fp8", "fp8", "fp8"),
}
FEW, MANY = 1, 8
"""Instances in multiples of those of the paper: with few of them reading the weights takes longer
than multiplying by them, so that no peak is in reach."""


def heads(device: torch.device, sizes: Sizes, peers: Peers) -> dict[str, Any]:
    """Steps by operands, chunks and whether there is a loss, beside bare products and torch."""
    del peers  # No package has such a step.
    units = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    peaks = peaks_of(torch.cuda.get_device_name(device) if device.type == "cuda" else None)
    found = squares(device, sizes, peaks, units=units)
    for times in (FEW, MANY):
        found |= of_batch(device, sizes, times * sizes["instances"], peaks, units=units)
        release(device)
    return found


def squares(
    device: torch.device, sizes: Sizes, peaks: dict[str, float], *, units: bool
) -> dict[str, Any]:
    """Large square products: what this device reaches of its nominal peaks."""
    size = sizes["square"]
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    kinds = ("bf16", "fp8") if units else ("bf16",)
    turns = Turns(device, sizes["rounds"])
    turns.run({kind: product(kind, a, b) for kind in kinds})
    flops = 2 * size**3
    return {
        f"{size:,} x {size:,} product, {kind}": {
            "seconds": turns.median(kind),
            "flops_per_second": flops / turns.median(kind),
            "share_of_peak": share_of_peak({kind: flops}, turns.median(kind), peaks),
            **{"products": kind, "peer": True, "bare": True},
        }
        for kind in kinds
    }


def of_batch(
    device: torch.device,
    sizes: Sizes,
    batch: int,
    peaks: dict[str, float],
    *,
    units: bool,
) -> dict[str, Any]:
    labels, dim = sizes["labels"], sizes["width"]
    x = torch.randn(batch, dim, device=device, requires_grad=True)
    rows = torch.arange(batch, device=device)
    positives = torch.randint(labels, (batch,), device=device)

    def ours(kind: str, chunks: int, *, loss: bool) -> Step:
        head = nn.ExtremeClassifier(
            dim,
            labels,
            chunks=chunks,
            seed=0,
            products=kind,  # type: ignore[arg-type]
            device=device,
        )
        optim.RowSGD(head, lr=0.1)
        return lambda: head(x, rows, positives, loss=loss).backward()

    linear = torch.nn.Linear(dim, labels, bias=False, device=device)
    sgd = torch.optim.SGD(linear.parameters(), lr=0.1)

    def torchs() -> None:
        target = torch.zeros(batch, labels, device=device)
        target[rows, positives] = 1.0
        sgd.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(linear(x), target).backward()
        sgd.step()

    kinds = [kind for kind in OPERANDS if units or "fp8" not in kind]
    weight, g = (torch.randn(n, m, device=device) for n, m in ((labels, dim), (batch, labels)))
    bare = {bare_name(kind, batch): three(kind, weight, g, x.detach()) for kind in kinds}
    about: dict[str, dict[str, Any]] = {
        bare_name(kind, batch): {"products": kind, "peer": kind == "all fp8", "bare": True}
        for kind in kinds
    }
    methods: dict[str, Step] = dict(bare)
    for kind in ("fp32", "bf16", "fp8"):
        if kind not in kinds:
            continue
        for chunks, loss in ((1, False), (8, False), (1, True)):
            name = f"{kind}, {batch:,} instances, {chunks} chunk{'s' * (chunks > 1)}"
            name += ", loss" * loss
            methods[name] = ours(kind, chunks, loss=loss)
            about[name] = {"products": kind, "peer": False, "bare": False}
    methods[torch_name := f"torch, {batch:,} instances"] = torchs
    about[torch_name] = {"products": "fp32", "peer": True, "bare": False}
    turns = Turns(device, sizes["rounds"])
    turns.run(methods)
    flops = 2 * labels * dim * batch
    found = {}
    for name in methods:
        kind = about[name]["products"]
        by_kind = {k: OPERANDS[kind].count(k) * flops for k in set(OPERANDS[kind])}
        found[name] = {
            "seconds": turns.median(name),
            "flops_per_second": 3 * flops / turns.median(name),
            "share_of_peak": share_of_peak(by_kind, turns.median(name), peaks),
            "time_of_products": 1 / turns.ratio(name, bare_name(kind, batch)),
            "times_torch": turns.ratio(name, torch_name),
            **about[name],
        }
    return found


def bare_name(kind: str, batch: int) -> str:
    return f"three bare products, {kind}, {batch:,} instances"


def share_of_peak(flops: dict[str, float], seconds: float, peaks: dict[str, float]) -> float | None:
    """The time that operations take at their operands' peaks, over the time that they took."""
    if not set(flops) <= set(peaks):
        return None
    return sum(count / peaks[kind] for kind, count in flops.items()) / seconds


def three(kind: str, weight: Tensor, g: Tensor, x: Tensor) -> Step:
    """Logits and both gradients, of operands that lie as the units want them.

    Args:
        kind: A key of ``OPERANDS``.
        weight: FP32 ``(labels, dim)``.
        g: FP32 ``(batch, labels)``, the gradient of the logits.
        x: FP32 ``(batch, dim)``.
    """
    of_logits, of_inputs, of_weights = OPERANDS[kind]
    steps = (
        product(of_logits, x, weight.t()),
        product(of_inputs, g, weight),
        product(of_weights, g.t(), x),
    )

    def run() -> None:
        for step in steps:
            step()

    return run


def product(kind: str, a: Tensor, b: Tensor) -> Step:
    """``a @ b`` with operands in a format, which are made before."""
    if kind != "fp8":
        dtype = BF16 if kind == "bf16" else torch.float32
        left, right = a.to(dtype), b.to(dtype)
        return lambda: torch.mm(left, right)
    # Units of FP8 take the first operand row by row and the second column by column.
    codes, others = a.contiguous().to(E4M3), b.t().contiguous().to(E4M3).t()
    one = torch.ones((), device=a.device)
    return lambda: torch._scaled_mm(codes, others, scale_a=one, scale_b=one, out_dtype=BF16)
