"""Heat maps of what mixtures of representations decided, as PNG files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ...diagnostics import MeanMix, OperandMix, RepresentationMix
from ...diagnostics.representation_mix import OPERAND_ROLES
from ...numerics import E5M2
from ..engine.metrics import Record


def plot_mix(mix: RepresentationMix | Iterable[OperandMix], path: Path | str) -> None:
    """Save a heat map, layer by role: the share of the elements in FP8, as a shade and a number.

    Below the number stand the share in E5M2, if any, and the mean error of what is in FP8.

    Args:
        mix: What :func:`representation_mix` found.
        path: The PNG file to write.

    Raises:
        ValueError: There is nothing to show.
    """
    operands = tuple(mix.operands if isinstance(mix, RepresentationMix) else mix)
    if not operands:
        raise ValueError("mix is empty: there is nothing to show")
    layers = list(dict.fromkeys(o.layer for o in operands))
    roles = [role for role in OPERAND_ROLES if any(o.role == role for o in operands)]
    shares = np.full((len(layers), len(roles)), np.nan)
    texts = [["not used" for _ in roles] for _ in layers]
    for o in operands:
        row, column = layers.index(o.layer), roles.index(o.role)
        shares[row, column] = 100 * o.narrow
        texts[row][column] = _text(o)
    figure = Figure(
        figsize=(2.2 + 1.35 * len(roles), 1.5 + 0.55 * len(layers)), layout="constrained"
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="Greys", vmin=0, vmax=130, aspect="auto")
    for row, column in np.ndindex(shares.shape):
        # What was not quantised compares as false.
        colour = "white" if shares[row, column] > 75 else "black"
        text = texts[row][column]
        axes.text(column, row, text, ha="center", va="center", fontsize=7, color=colour)
    _label(axes, layers, roles)
    bar = figure.colorbar(image, ax=axes, boundaries=np.linspace(0, 100, 101), ticks=[0, 50, 100])
    bar.set_label("share in FP8, %", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    figure.savefig(path, dpi=150)


def _label(axes: Any, layers: Sequence[str], roles: Sequence[str]) -> None:
    axes.set_xticks(range(len(roles)), [r.replace(" ", "\n") for r in roles], fontsize=8)
    axes.set_yticks(range(len(layers)), layers, fontsize=8)
    axes.set_xticks(np.arange(1, len(roles)) - 0.5, minor=True)
    axes.set_yticks(np.arange(1, len(layers)) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=2)
    axes.tick_params(which="both", length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_title("Elements in FP8, those in E5M2, mean relative error in FP8", fontsize=9)


def _text(o: OperandMix) -> str:
    lines = [f"{100 * o.narrow:.1f} %"]
    if o.elements.get(E5M2.name):
        lines.append(f"E5M2 {100 * o.elements[E5M2.name]:.1f} %")
    if o.narrow:
        lines.append(f"err {100 * o.error:.2f} %")
    return "\n".join(lines)


def plot_mixes(records: Iterable[Record], folder: Path) -> None:
    """Save a heat map for each variant with mixtures: the mean of its first seed's steps.

    Args:
        records: Logged steps of all runs.
        folder: Where to write ``VARIANT.png``; made if there is anything to write.
    """
    means: dict[str, tuple[int, MeanMix]] = {}
    for record in records:
        seed, mean = means.setdefault(record.name, (record.seed, MeanMix()))
        if record.seed == seed:
            for operand in record.mix or ():
                mean.add(OperandMix(**operand))
    for name, (_, mean) in means.items():
        if mean.operands:
            folder.mkdir(exist_ok=True)
            plot_mix(mean.operands, folder / f"{name.replace(' ', '-')}.png")
