"""How far rounding drives weights that are only shaken: master weights and extra bits.

BF16 weights in [1/2, 1) take 2,000 steps of AdamW (rate 1e-4, no decay) on pure noise. Every
precision sees the same gradients, and what it stores is compared with FP32 weights that took the
same steps. Left: the mean relative difference, which grows where rounding is biased. Right: the
mean distance of the BF16 weight, which the model computes with, from what is stored.

    python benchmarks/extra_bits_drift.py --out benchmarks/results/extra-bits-drift.json \\
        --figure docs/figures/extra-bits-drift.png
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl
import torch
from cyclopts import App
from torch import Tensor, nn

from subulp import optim
from subulp.lab.report.styles import STYLES
from subulp.numerics import BF16

mpl.use("Agg")
import matplotlib.pyplot as plt

PRECISIONS = (
    "master",
    "extra-bits-8",
    "extra-bits-8-deterministic",
    "extra-bits-8-stochastic",
    "extra-bits-8-truncate",
    "extra-bits-13-truncate",
)
RATE = 1e-4

app = App(help=__doc__)


def optimizer_of(start: Tensor, precision: str) -> tuple[nn.Parameter, optim.AdamW]:
    p = nn.Parameter(start.clone())
    return p, optim.AdamW([p], lr=RATE, weight_decay=0.0, precision=precision, seed=0)


def measure(precision: str, weights: int, steps: int, every: int) -> dict[str, list[float]]:
    generator = torch.Generator().manual_seed(0)
    start = (0.5 + 0.5 * torch.rand(weights, generator=generator)).to(torch.bfloat16)
    exact, exact_optimizer = optimizer_of(start.float(), "fp32")
    p, optimizer = optimizer_of(start, precision)
    found: dict[str, list[float]] = {"step": [], "drift": [], "head": []}
    for step in range(1, steps + 1):
        p.grad = torch.randn(weights, generator=generator).to(torch.bfloat16)
        exact.grad = p.grad.float()
        optimizer.step()
        exact_optimizer.step()
        if step % every == 0:
            wide = optimizer.wide_value(p).double()
            head = p.detach().double()
            found["step"].append(step)
            found["drift"].append(((wide - exact.detach()) / exact.detach().double()).mean().item())
            found["head"].append(((head - wide) / BF16.ulp(p.detach().float())).mean().item())
    return found


@app.default
def main(
    *,
    weights: int = 65_536,
    steps: int = 2_000,
    out: Path | None = None,
    figure: Path | None = None,
) -> None:
    """Measure every precision.

    Args:
        weights: Number of weights.
        steps: Steps of AdamW.
        out: Where to write the record.
        figure: Where to draw it.
    """
    runs = {name: measure(name, weights, steps, max(steps // 20, 1)) for name in PRECISIONS}
    for name, run in runs.items():
        print(
            f"{name:28} drift {100 * run['drift'][-1]:+.4f} %, "
            f"BF16 weight {run['head'][-1]:+.3f} ulp from what is stored"
        )
    record = {
        "weights": weights,
        "steps": steps,
        "lr": RATE,
        "torch": torch.__version__,
        "runs": runs,
    }
    if out is not None:
        out.write_text(json.dumps(record, indent=1) + "\n")
    if figure is not None:
        draw(runs, figure)


def draw(runs: dict[str, dict[str, list[float]]], path: Path) -> None:
    canvas, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), constrained_layout=True)
    for (name, run), look in zip(runs.items(), STYLES, strict=False):
        style = {"color": look.hex, "marker": look.marker, "markersize": 4, "label": name}
        left.plot(run["step"], [100 * d for d in run["drift"]], **style)
        right.plot(run["step"], run["head"], **style)
    left.set_title("Drift of what is stored, beside FP32", loc="left")
    left.set_ylabel("mean relative difference, %")
    right.set_title("The BF16 weight beside what is stored", loc="left")
    right.set_ylabel("mean difference, ulp")
    for axes in (left, right):
        axes.set_xlabel("step of pure noise")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    left.legend(frameon=False)
    canvas.savefig(path, dpi=150)


if __name__ == "__main__":
    app()
