"""What precision and range a classifier over many labels needs: the ELMO paper's Figures 2 and 5.

Figure 2(a): P@1 of classifiers whose rows are stored with few exponent and mantissa bits, rounded
stochastically or to nearest:

    python benchmarks/xmc_formats.py sweep --record benchmarks/results/xmc-formats.json \
        --out docs/figures/xmc-formats.png

Figures 2(b) and 5: exponents of the classifier's gradients, weights and inputs at the end of a
training in FP32, with the ranges of the FP8 formats:

    python benchmarks/xmc_formats.py exponents --out docs/figures/xmc-exponents.png

Both train `subulp train xmc`'s encoder, smaller, on the bundled reverse dictionary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from cyclopts import App
from machine import describe
from matplotlib.axes import Axes

from subulp import numerics
from subulp.diagnostics import ExponentHistogram
from subulp.lab.engine.loop import run
from subulp.lab.report.figure import TEXT
from subulp.lab.report.styles import COLOURS
from subulp.lab.reproduce.elmo.exponents import histograms
from subulp.lab.tasks.xmc.config import XMCConfig
from subulp.lab.tasks.xmc.task import XMCText, load

mpl.use("Agg")
import matplotlib.pyplot as plt

EXPONENTS = (2, 3, 4, 5)
MANTISSAS = (1, 3, 5)
_ROUNDINGS = {"": "stochastic rounding", "+nearest": "rounding to nearest"}
# A range's name, its format, colour and dashes.
_RANGES = {
    "E4M3": (numerics.E4M3, COLOURS["blue"][0], "solid"),
    "E5M2": (numerics.E5M2, COLOURS["vermilion"][0], (0, (4, 2))),
}

app = App(help=__doc__)


def configuration(width: int, epochs: int, batch_size: int, head_lr: float, seed: int) -> XMCConfig:
    return XMCConfig(
        precision=("fp32",),
        width=width,
        layers=1,
        epochs=epochs,
        batch_size=batch_size,
        head_lr=head_lr,
        eval_epochs=epochs,
        seeds=(seed,),
        watch_every=10**9,
        device="cpu",
        # Formats are compared without remainders, and under the authors' encoder.
        head_fraction=0.0,
        encoder_precision="kahan",
    )


@app.command
def sweep(
    *,
    out: Path = Path("xmc-formats.png"),
    record: Path = Path("xmc-formats.json"),
    exponents: Sequence[int] = EXPONENTS,
    mantissas: Sequence[int] = MANTISSAS,
    width: int = 64,
    epochs: int = 2,
    batch_size: int = 512,
    head_lr: float = 0.05,
    seed: int = 0,
    draw_only: bool = False,
) -> None:
    """P@1 by exponent and mantissa bits, with and without stochastic rounding.

    Args:
        out: PNG file.
        record: JSON file of the results; those that it has already, of the same options, stay.
        exponents: Exponent bits to try.
        mantissas: Mantissa bits to try.
        width: Width of the encoder.
        epochs: Epochs of each training.
        batch_size: Batch size of each training.
        head_lr: Learning rate of the classifier, for a loss that is summed over the batch.
        seed: Seed of all trainings.
        draw_only: Draw the figure from the record.
    """
    if not draw_only:
        config = configuration(width, epochs, batch_size, head_lr, seed)
        data = load(config)
        formats = [f"e{e}m{m}" for e in exponents for m in mantissas]
        names = ["fp32", *(f + rounding for f in formats for rounding in _ROUNDINGS)]
        options = {
            "width": width,
            "epochs": epochs,
            "batch_size": batch_size,
            "head_lr": head_lr,
            "seed": seed,
        }
        written = json.loads(record.read_text()) if record.exists() else {}
        if written.get("options") != options:
            written = {"machine": describe(), "options": options, "P@1": {}}
        for name in names:
            if name not in written["P@1"]:
                written["P@1"][name] = precision_at_1(config, data, name, seed)
                record.write_text(json.dumps(written, indent=2) + "\n")
    draw_sweep(json.loads(record.read_text()), out)


def precision_at_1(config: XMCConfig, data: XMCText, precision: str, seed: int) -> float:
    summary = run(replace(config, precision=(precision,)), data, precision, seed)
    print(f"{precision}: {summary.metrics['P@1']:.2f}", flush=True)
    return summary.metrics["P@1"]


def draw_sweep(written: dict[str, Any], out: Path) -> None:
    results = written["P@1"]
    bits = sorted({tuple(map(int, n[1:].split("+")[0].split("m"))) for n in results if n[0] == "e"})
    exponents, mantissas = (sorted({pair[i] for pair in bits}) for i in (0, 1))
    figure, panels = plt.subplots(1, 2, figsize=(10.5, 3.9), layout="constrained", sharey=True)
    for ax, (suffix, title) in zip(panels, _ROUNDINGS.items(), strict=True):
        # A record that is not complete yet has holes.
        grid = np.array(
            [[results.get(f"e{e}m{m}{suffix}", np.nan) for m in mantissas] for e in exponents]
        )
        image = ax.imshow(grid, cmap="viridis", vmin=0, vmax=results["fp32"], aspect="auto")
        for (row, column), value in np.ndenumerate(grid):
            if np.isnan(value):
                continue
            dark = value < 0.65 * results["fp32"]
            colour = "white" if dark else "black"
            ax.text(column, row, f"{value:.1f}", ha="center", va="center", color=colour)
        ax.set_xticks(range(len(mantissas)), mantissas)
        ax.set_yticks(range(len(exponents)), exponents)
        ax.set_xlabel("mantissa bits", color=TEXT)
        ax.set_title(title, loc="left", color=TEXT)
        ax.spines[:].set_visible(False)
    panels[0].set_ylabel("exponent bits", color=TEXT)
    bar = figure.colorbar(image, ax=panels, pad=0.02)
    bar.set_label(f"P@1, %; in FP32 {results['fp32']:.1f}", color=TEXT)
    bar.outline.set_visible(False)
    figure.savefig(out, dpi=150, facecolor="white")


@app.command
def exponents(
    *,
    out: Path = Path("xmc-exponents.png"),
    width: int = 128,
    epochs: int = 2,
    batch_size: int = 128,
    head_lr: float = 0.2,
    seed: int = 0,
    batches: int = 4,
) -> None:
    """Exponents of gradients, weights and inputs, with the ranges of the FP8 formats.

    Args:
        out: PNG file.
        width: Width of the encoder.
        epochs: Epochs of the training.
        batch_size: Batch size of the training.
        head_lr: Learning rate of the classifier, for a loss that is summed over the batch.
        seed: Seed of the training.
        batches: Batches whose inputs and gradients are counted.
    """
    config = configuration(width, epochs, batch_size, head_lr, seed)
    found = histograms(config, load(config), seed, batches)
    for name, histogram in found.items():
        for title, (format, *_) in _RANGES.items():
            shares = histogram.under(format)._asdict().items()
            print(f"{name}, {title}: " + ", ".join(f"{n} {100 * s:.1f} %" for n, s in shares))
    draw_exponents(found, out)


def draw_exponents(found: dict[str, ExponentHistogram], out: Path) -> None:
    names = ("gradients of logits", "gradients of weights", "weights", "inputs")
    figure, panels = plt.subplots(2, 2, figsize=(11, 6), layout="constrained")
    for ax, name in zip(panels.flat, names, strict=True):
        shares = {e: 100 * share for e, share in found[name].shares().items()}
        ax.bar(shares.keys(), shares.values(), width=0.9, color=COLOURS["grey"][0])
        mark_ranges(ax, found[name])
        zeros = 100 * found[name].zeros / found[name].total
        ax.set_title(
            f"{name[0].upper()}{name[1:]}, {zeros:.1f} % zero", loc="left", fontsize=10, color=TEXT
        )
        ax.set_xlabel("exponent, floor(log2 |x|)", fontsize=9, color=TEXT)
        ax.set_ylabel("share of values, %", fontsize=9, color=TEXT)
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=150, facecolor="white")


def mark_ranges(ax: Axes, histogram: ExponentHistogram) -> None:
    """Each format's range as a line above the bars, with the share of values below it."""
    top = ax.get_ylim()[1]
    for place, (name, (format, colour, dashes)) in enumerate(_RANGES.items()):
        height = top * (1.05 + 0.24 * place)
        first, last = format.min_exponent - format.mantissa_bits, format.max_exponent
        ax.plot([first - 0.5, last + 0.5], [height] * 2, color=colour, linestyle=dashes, lw=2.5)
        ax.vlines([first - 0.5, last + 0.5], 0, height, color=colour, linestyle=dashes, lw=0.8)
        label = f"{name}, {100 * histogram.under(format).below:.1f} % below"
        height += 0.03 * top
        ax.text((first + last) / 2, height, label, color=colour, fontsize=9, ha="center")
    # Of all panels the same; gradients have a thin tail below.
    ax.set_xlim(-30, 18)
    ax.set_ylim(0, top * 1.5)


if __name__ == "__main__":
    app()
