"""Forward error of additions in FP16, with and without extra bits, against exact sums.

"Memory Efficient Mixed Precision Optimizers", Figure 6: random values from the standard normal
distribution are kept in FP16, and in FP16 and eight extra bits in three codings: the nearest head
with a stochastically rounded tail, both truncated, both stochastic. A sum is computed in FP32 from
the stored value and stored again. Left: the error of the FP16 head after one addition. Right: of
the whole stored value after 64 additions, by the condition number of the sum.

    python benchmarks/extra_bits_error.py --out docs/figures/extra-bits-error.png
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from cyclopts import App

from subulp.lab.report.styles import STYLES
from subulp.lab.reproduce.extra_bits.forward_error import (
    ADDITIONS,
    binned,
    forms,
    many_additions,
    one_addition,
)

mpl.use("Agg")
import matplotlib.pyplot as plt

K = 8
# The round-off of FP16.
UNIT = 2.0**-11

app = App(help=__doc__)


@app.default
def main(*, values: int = 50_000, out: Path = Path("extra-bits-error.png")) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), constrained_layout=True)
    sizes = [2**i for i in range(4, 18)]
    for (name, store), look in zip(forms("fp16", K).items(), STYLES, strict=False):
        style = {"color": look.hex, "marker": look.marker, "markersize": 5, "label": name}
        left.plot(sizes, [one_addition(store, n) / UNIT for n in sizes], **style)
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
