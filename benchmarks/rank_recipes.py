"""Commands that train one run on two ranks: their memory per rank, and how they scale.

Every recipe of ``docs/many-ranks.md`` is run as a user runs it, in turns: by one process, and by
two ranks of gloo, each with one thread. Two ranks have two cores here, and nothing between them but
memory, so what is measured is what the sharing itself takes. Times are medians over a run's steps
that measured nothing else, and over the rounds; ratios are medians over the rounds.

    python benchmarks/rank_recipes.py --out benchmarks/results/rank-recipes-NAME.json
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from cyclopts import App
from machine import describe
from rich.console import Console
from rich.table import Table

LM = [
    *("lm", "--precision", "collage-plus", "--width", "512", "--layers", "6", "--heads", "8"),
    *("--batch-size", "8", "--steps", "8", "--eval-every", "8", "--activations", "fp32"),
    *("--data", "TEXT"),
]
# Short: its evaluation would take longer than the steps that are measured.
TEXT = "".join(f"{i} green bottles hanging on the wall,\n" for i in range(1200))
RECIPES: dict[str, list[str]] = {
    "lm": LM,
    "lm, fused": [*LM, "--fuse-backward"],
    "image": ["image", "--precision", "extra-bits-8", "--steps", "12", "--eval-epochs", "9"],
    "xmc": [
        *("xmc", "--precision", "fp8", "--steps", "20", "--batch-size", "128"),
        *("--eval-epochs", "9"),
    ],
    "ctr": [
        *("ctr", "--precision", "int8", "--rounding", "stochastic", "--cache-fraction", "0.05"),
        *("--steps", "40", "--batch-size", "2048", "--evaluations", "1"),
    ],
}
SHARING: dict[str, list[str]] = {
    "one": [],
    "ddp": ["--ranks", "2", "--parallel", "ddp"],
    "fsdp": ["--ranks", "2", "--parallel", "fsdp"],
}

app = App(help=__doc__)


def measure(words: list[str], sharing: list[str]) -> dict[str, Any]:
    """The summary of a run, as the command prints it."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        text = Path(folder) / "text.txt"
        text.write_text(TEXT)
        named = [str(text) if word == "TEXT" else word for word in words]
        command = [sys.executable, "-m", "subulp", "train", *named, *sharing]
        printed = subprocess.run(
            [*command, "--json", "--out", str(out), "--jobs", "1", "--watch-every", "100"],
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        ).stdout
    (run,) = json.loads(printed)["runs"]
    return run  # type: ignore[no-any-return]


def row(recipe: str, rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """What the rounds of a recipe say."""
    first = rounds[0]
    return {
        "recipe": recipe,
        "parameters": first["one"]["parameters"],
        "ms_per_step": {
            name: 1000 * statistics.median(r[name]["seconds_per_step"] for r in rounds)
            for name in SHARING
        },
        "speed_up": {
            name: statistics.median(
                r["one"]["seconds_per_step"] / r[name]["seconds_per_step"] for r in rounds
            )
            for name in ("ddp", "fsdp")
        },
        "peak_bytes": {name: first[name]["peak_bytes"] for name in SHARING},
        "train_loss": {name: first[name]["train_loss"] for name in SHARING},
    }


def shown(rows: list[dict[str, Any]]) -> Table:
    table = Table("recipe", "parameters", "one", "ddp", "fsdp", "MiB one", "ddp", "fsdp")
    for each in rows:
        times, ratios, peaks = each["ms_per_step"], each["speed_up"], each["peak_bytes"]
        table.add_row(
            each["recipe"],
            f"{each['parameters'] / 1e6:.1f} M",
            f"{times['one']:.0f} ms",
            *(f"{times[n]:.0f} ms, {ratios[n]:.2f} x" for n in ("ddp", "fsdp")),
            *(f"{peaks[n]['total'] / 2**20:.1f}" for n in SHARING),
        )
    return table


@app.default
def main(*, rounds: int = 3, out: Path | None = None) -> None:
    """Run all recipes.

    Args:
        rounds: Runs of each.
        out: File for the record.
    """
    machine = describe(())
    rows = []
    for recipe, words in RECIPES.items():
        found = [
            {name: measure(words, sharing) for name, sharing in SHARING.items()}
            for _ in range(rounds)
        ]
        rows.append(row(recipe, found))
    console = Console(width=120)
    console.print(f"{machine['processor']}, load {machine['load_before']:.2f}")
    console.print(shown(rows))
    if out:
        record = {
            "benchmark": "rank_recipes",
            "machine": machine,
            "commands": RECIPES,
            "sharing": SHARING,
            "rounds": rounds,
            "recipes": rows,
        }
        out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    app()
