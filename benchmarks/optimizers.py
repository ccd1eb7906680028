"""Rates of optimizer steps, against PyTorch, torch-optimi and torchao.

One process; methods take turns; medians over the rounds. Ratios are medians of the ratios within a
round, so that a machine whose speed drifts does not enter them. The memory bound of a method is the
bytes that its strategy must move, each stored tensor read and written once, over the bandwidth of a
large copy in the same round. `in cache` repeats the step on a tensor that fits the outer cache:
what the arithmetic alone, and Python around it, would allow.

`200 small` is a step over 200 parameters of 1 KiB to 1 MiB, where Python around the kernels counts:
beside torch's fused AdamW of the same dtype, which moves 14 bytes a BF16 parameter and 28 an FP32
one, as "nearest" and "fp32" do.

    python benchmarks/optimizers.py --out benchmarks/results/optimizers-NAME.json
"""

from __future__ import annotations

import json
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from cyclopts import App, Parameter
from machine import describe
from rich.console import Console
from rich.table import Column, Table

from subulp import optim
from subulp.ops import facts, native
from subulp.ops.strategy import all_names, parse_strategy

Step = Callable[[], object]

# Of BF16, or FP32, and some of FP16.
HALF = ", FP16"
STRATEGIES = (
    *all_names(8, 16),
    *(name + HALF for name in ("nearest", "kahan", "collage-light")),
    *(name + HALF for name in all_names(8) if name.startswith("extra-bits")),
)

# (name, numerator, denominator, least ratio of rates)
TARGETS = (
    ("light vs torch master", "collage-light", "torch master", 1.6),
    ("plus vs torch master", "collage-plus", "torch master", 1.4),
    ("light vs torch fused FP32", "collage-light", "torch fused FP32", 1.0),
    ("kahan vs torch-optimi", "kahan", "torch-optimi Kahan", 6.0),
    ("stochastic vs torchao", "stochastic", "torchao stochastic", 6.0),
    ("light vs torch-optimi", "collage-light", "torch-optimi Kahan", 6.0),
    ("light vs torchao", "collage-light", "torchao stochastic", 6.0),
    ("stochastic vs nearest", "stochastic", "nearest", 1 / 1.4),
)
LEAST_SHARE_OF_BOUND = 0.8
BOUND_STRATEGIES = ("nearest", "collage-light", "collage-plus")


def tensors(numel: int, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """About a transformer's: large matrices and many vectors, with gradients; or one tensor."""
    vectors = [1024] * 64 if numel > 1 << 20 else []
    rest = numel - sum(vectors)
    shapes = [rest // 4] * 3 + [rest - 3 * (rest // 4), *vectors] if vectors else [numel]
    params = [torch.nn.Parameter((torch.randn(n) * 0.02).to(dtype)) for n in shapes]
    for p in params:
        p.grad = (torch.randn(p.shape) * 1e-3).to(dtype)
    return params


def small_tensors(dtype: torch.dtype, count: int = 200) -> list[torch.nn.Parameter]:
    """Parameters of 1 KiB to 1 MiB in equal ratios, with gradients."""
    sizes = [round(1024 ** (1 + i / (count - 1))) // dtype.itemsize for i in range(count)]
    params = [torch.nn.Parameter(torch.randn(n).to(dtype)) for n in sizes]
    for p in params:
        p.grad = (torch.randn(p.shape) * 1e-3).to(dtype)
    return params


def dtype_of(name: str) -> torch.dtype:
    if name.endswith(HALF):
        return torch.float16
    return parse_strategy(name).dtypes[0]


def ours(name: str, numel: int) -> Step:
    parameters = tensors(numel, dtype_of(name))
    return optim.AdamW(parameters, lr=1e-4, precision=name.removesuffix(HALF)).step


def torch_fused(numel: int) -> Step:
    return torch.optim.AdamW(tensors(numel, torch.float32), lr=1e-4, fused=True).step


def torch_master(numel: int) -> Step:
    """Master weights as done with PyTorch: cast the gradient, fused AdamW, cast back."""
    narrow = tensors(numel, torch.bfloat16)
    master = [torch.nn.Parameter(p.detach().float()) for p in narrow]
    for m in master:
        m.grad = torch.zeros_like(m)
    optimizer = torch.optim.AdamW(master, lr=1e-4, fused=True)
    grads = [p.grad for p in narrow]

    @torch.no_grad()
    def step() -> None:
        torch._foreach_copy_([m.grad for m in master], grads)
        optimizer.step()
        torch._foreach_copy_(narrow, master)

    return step


def optimi_kahan(numel: int) -> Step:
    from optimi import AdamW  # noqa: PLC0415 - slow to import, and optional

    return AdamW(tensors(numel, torch.bfloat16), lr=1e-4, weight_decay=1e-2, kahan_sum=True).step


def torchao_stochastic(numel: int) -> Step:
    from torchao.optim import _AdamW  # noqa: PLC0415 - slow to import, and optional

    return _AdamW(tensors(numel, torch.bfloat16), lr=1e-4, bf16_stochastic_round=True).step


PEERS: dict[str, Callable[[int], Step]] = {
    "torch fused FP32": torch_fused,
    "torch master": torch_master,
    "torch-optimi Kahan": optimi_kahan,
    "torchao stochastic": torchao_stochastic,
}
SLOW = ("torch-optimi Kahan", "torchao stochastic")


def seconds(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def interleave(steps: dict[str, Step], rounds: int, slow_rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for name, step in steps.items():
        step()
        if name in SLOW:
            step()
    for i in range(rounds):
        for name, step in steps.items():
            if name not in SLOW or i < slow_rounds:
                times[name].append(seconds(step))
    return times


def paired(numerator: list[float], denominator: list[float]) -> float:
    """Median over the rounds of a ratio of times taken in the same round."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=False) if a and b)


@dataclass
class Row:
    name: str
    rate: float
    low: float
    high: float
    in_cache: float | None
    share_of_bound: float | None


SMALL = ("fp32", "nearest", "collage-light", "collage-plus", "master")


def measure_small(rounds: int) -> list[dict[str, Any]]:
    """Milliseconds of a step over small tensors, and how much faster it is than torch's."""
    peers = {torch.float32: "torch fused FP32", torch.bfloat16: "torch fused BF16"}
    steps: dict[str, Step] = {
        name: torch.optim.AdamW(small_tensors(dtype), lr=1e-4, fused=True).step
        for dtype, name in peers.items()
    }
    for name in SMALL:
        params = small_tensors(dtype_of(name))
        steps[name] = optim.AdamW(params, lr=1e-4, precision=name).step
    times = interleave(steps, rounds, 0)
    rows = []
    for name, spent in times.items():
        dtype = dtype_of(name) if name in SMALL else None
        moved = dtype and dtype.itemsize + 2 * parse_strategy(name).stored_bytes(dtype)
        ratio = paired(times[peers[dtype]], spent) if dtype else 1.0
        milliseconds = [1e3 * of(spent) for of in (statistics.median, min)]
        rows.append(
            {"name": name, "milliseconds": milliseconds[0], "least": milliseconds[1],
             "bytes_moved_per_parameter": moved, "times_as_fast_as_torch": ratio}
        )  # fmt: skip
    return rows


def measure(numel: int, rounds: int, slow_rounds: int, peers: Sequence[str]) -> dict[str, Any]:
    machine = describe()
    copy_from = torch.randn(2 * numel)
    copy_to = torch.empty_like(copy_from)
    steps: dict[str, Step] = {"copy": lambda: copy_to.copy_(copy_from)}
    steps |= {name: ours(name, numel) for name in STRATEGIES}
    steps |= {name: PEERS[name](numel) for name in peers}
    times = interleave(steps, rounds, slow_rounds)
    copies = times.pop("copy")
    bandwidth = 2 * copy_from.nbytes / statistics.median(copies)

    cached_numel = 1 << 20
    cached = interleave({n: ours(n, cached_numel) for n in STRATEGIES}, 10 * rounds, 0)
    rows = []
    for name, spent in times.items():
        share = None
        if name in STRATEGIES:
            dtype = dtype_of(name)
            strategy = parse_strategy(name.removesuffix(HALF))
            grad, rest = dtype.itemsize, strategy.stored_bytes(dtype)
            moved = (grad + 2 * rest) * numel / (2 * copy_from.nbytes)
            share = moved * paired(copies, spent)
        in_cache = cached_numel / min(cached[name]) if name in cached else None
        rows.append(
            Row(name, numel / statistics.median(spent), numel / max(spent), numel / min(spent),
                in_cache, share)
        )  # fmt: skip
    ratios = {name: paired(times[b], times[a]) for name, a, b, _ in TARGETS if {a, b} <= set(times)}
    targets = [
        {"name": name, "ratio": ratios[name], "least": least, "met": ratios[name] >= least}
        for name, _, _, least in TARGETS
        if name in ratios
    ]
    targets += [
        {
            "name": f"{row.name} share of memory bound",
            "ratio": row.share_of_bound,
            "least": LEAST_SHARE_OF_BOUND,
            "met": row.share_of_bound >= LEAST_SHARE_OF_BOUND,
        }
        for row in rows
        if row.name in BOUND_STRATEGIES and row.share_of_bound is not None
    ]
    isa = next(name for name, code in facts.ISAS.items() if code == native.isa())
    return {
        "benchmark": "optimizers",
        "machine": machine,
        "instruction_set": isa,
        "parameters": numel,
        "rounds": rounds,
        "copy_bandwidth_bytes_per_second": bandwidth,
        "methods": [vars(row) for row in rows],
        "targets": targets,
        "200_small": measure_small(10 * rounds),
    }


def show(result: dict[str, Any], console: Console) -> None:
    machine = result["machine"]
    console.print(
        f"{machine['processor']}, {machine['threads']} threads, {result['instruction_set']}, "
        f"torch {machine['versions']['torch']}; copy "
        f"{result['copy_bandwidth_bytes_per_second'] / 1e9:.1f} GB/s"
    )
    name = Column("method", no_wrap=True)
    table = Table(name, "G parameters/s", "min", "max", "in cache", "of memory bound")
    for row in result["methods"]:
        numbers = [row["rate"], row["low"], row["high"], row["in_cache"]]
        share = row["share_of_bound"]
        table.add_row(
            row["name"],
            *("" if n is None else f"{n / 1e9:.2f}" for n in numbers),
            "" if share is None else f"{share:.0%}",
        )
    console.print(table)
    table = Table("200 small", "ms", "min", "bytes moved", "times as fast as torch")
    for row in result["200_small"]:
        moved = row["bytes_moved_per_parameter"]
        table.add_row(
            row["name"],
            f"{row['milliseconds']:.1f}",
            f"{row['least']:.1f}",
            f"{moved:.0f}" if moved else "",
            f"{row['times_as_fast_as_torch']:.2f}",
        )
    console.print(table)
    table = Table("target", "measured", "at least", "")
    for target in result["targets"]:
        met = "[green]met[/]" if target["met"] else "[red]missed[/]"
        table.add_row(target["name"], f"{target['ratio']:.2f}", f"{target['least']:.2f}", met)
    console.print(table)


app = App(help=__doc__)


@app.default
def main(
    *,
    parameters: int = 33_000_000,
    rounds: int = 15,
    slow_rounds: int = 5,
    peers: Annotated[str, Parameter(help="Comma-separated names, or none.")] = ",".join(PEERS),
    out: Path | None = None,
) -> None:
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    names = [] if peers == "none" else peers.split(",")
    result = measure(parameters, rounds, slow_rounds, names)
    show(result, Console())
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    app()
