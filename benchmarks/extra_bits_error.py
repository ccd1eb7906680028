"""Forward error of additions in FP16, with and without extra bits, against exact sums.

"Memory Efficient Mixed Precision Optimizers", Figure 6: random values from the standard normal
distribution are kept in FP16, and in FP16 and eight extra bits in three codings: the nearest head
with a stochastically rounded tail, both truncated, both stochastic. A sum is computed in FP32 from
the stored value and stored again. Left: the error of the FP16 head after one addition. Right: of
the whole stored value after 64 additions, by the condition number of the sum.

    python benchmarks/extra_bits_error.py --out docs/figures/extra-bits-error.png
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import torch
from cyclopts import App
from torch import Tensor

from subulp.lab.report.styles import STYLES
from subulp.numerics import FP16, extra_bits, random_bits, round_to

mpl.use("Agg")
import matplotlib.pyplot as plt

K = 8
ADDITIONS = 64

# Stores a value; returns what the model sees and what the next addition starts from.
Store = Callable[[Tensor, int], tuple[Tensor, Tensor]]


def fp16(x: Tensor, step: int) -> tuple[Tensor, Tensor]:
    head = round_to(x, FP16)
    return head, head


def truncated(x: Tensor, step: int) -> tuple[Tensor, Tensor]:
    head, tail = extra_bits.split(x, FP16, K, "truncate")
    return head, extra_bits.join(head, tail, FP16, K, "truncate")


def nearest(x: Tensor, step: int) -> tuple[Tensor, Tensor]:
    bits = random_bits.draw(x.shape, seed=0, step=step)
    head, tail = extra_bits.split(x, FP16, K, bits=bits)
    return head, extra_bits.join(head, tail, FP16, K)


def stochastic(x: Tensor, step: int) -> tuple[Tensor, Tensor]:
    bits = random_bits.draw(x.shape, seed=0, step=step)
    head, tail = extra_bits.split(x, FP16, K, "stochastic", bits=bits)
    return head, extra_bits.join(head, tail, FP16, K, "stochastic")


FORMS: dict[str, Store] = {
    "fp16": fp16,
    f"fp16+{K}": nearest,
    f"fp16+{K} truncate": truncated,
    f"fp16+{K} stochastic": stochastic,
}


def one_addition(store: Store, n: int) -> float:
    """Relative error of a tensor (by norms) after one in-place addition, in units of 2**-11."""
    generator = torch.Generator().manual_seed(n)
    x, y = (torch.randn(n, generator=generator) for _ in range(2))
    _, wide = store(x, 0)
    head, _ = store(wide + y, 1)
    exact = x.double() + y.double()
    return float((head.double() - exact).norm() / exact.norm()) * 2**11


def many_additions(store: Store, n: int) -> tuple[Tensor, Tensor]:
    """Condition numbers of n sums of 64 terms, and their relative errors."""
    generator = torch.Generator().manual_seed(1)
    terms = torch.randn(ADDITIONS, n, generator=generator)
    wide = torch.zeros(n)
    for step in range(ADDITIONS):
        _, wide = store(wide + terms[step], step)
    exact = terms.double().sum(0)
    condition = terms.double().abs().sum(0) / exact.abs()
    return condition, (wide.double() - exact).abs() / exact.abs()


def binned(condition: Tensor, error: Tensor) -> tuple[list[float], list[float]]:
    edges = torch.logspace(0.5, 4, 15, dtype=torch.float64)
    centres, medians = [], []
    for low, high in itertools.pairwise(edges):
        inside = (condition >= low) & (condition < high)
        if int(inside.sum()) >= 20:
            centres.append(float((low * high).sqrt()))
            medians.append(float(error[inside].median()))
    return centres, medians


app = App(help=__doc__)


@app.default
def main(*, values: int = 50_000, out: Path = Path("extra-bits-error.png")) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), constrained_layout=True)
    sizes = [2**i for i in range(4, 18)]
    for (name, store), look in zip(FORMS.items(), STYLES, strict=False):
        style = {"color": look.hex, "marker": look.marker, "markersize": 5, "label": name}
        left.plot(sizes, [one_addition(store, n) for n in sizes], **style)
        condition, error = many_additions(store, values)
        right.loglog(*binned(condition, error), **style)
        print(f"{name}: median relative error after {ADDITIONS} additions {error.median():.2e}")
    left.set_xscale("log", base=2)
    left.set_ylim(bottom=0)
    left.set_title("The FP16 value after one addition", loc="left")
    left.set_xlabel("size of the tensor")
    left.set_ylabel("relative error, units of 2$^{-11}$")
    right.set_title(f"The stored value after {ADDITIONS} additions", loc="left")
    right.set_xlabel("condition number of the sum")
    right.set_ylabel("median relative error")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(out, dpi=150)


if __name__ == "__main__":
    app()
