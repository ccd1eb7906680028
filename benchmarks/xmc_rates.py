"""Which rate suits the storage of a classifier: trainings that a tenth of their texts judges.

    python benchmarks/xmc_rates.py --record benchmarks/results/xmc-rates.json --out runs/rates

With ``--layers 0`` the encoder has no residual layer; what that showed made it the default.

Of the bundled reverse dictionary's training texts, a tenth is kept aside, each time another one, by
which rates are compared; its test part has no say. Each tenth has a seed, which both storages
share. It goes on where it was stopped.
"""

from __future__ import annotations

import gzip
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cyclopts import App
from machine import describe

from subulp.lab.compare import compare, resume
from subulp.lab.engine.run_directory import CONFIG, SUMMARY
from subulp.lab.tasks.xmc.config import XMCConfig
from subulp.lab.tasks.xmc.readers import load

MEASURES = ("P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5")
SECONDS = "seconds"
STORAGES = ("fp32", "fp8")
PARTS = 10

app = App(help=__doc__)


@app.default
def sweep(
    *,
    record: Path,
    out: Path,
    rates: Sequence[float] = (0.1, 0.14, 0.2),
    batches: Sequence[int] = (128,),
    folds: Sequence[int] = (7, 3, 1, 5),
    layers: int = 1,
    jobs: int | None = None,
) -> None:
    """Compare rates.

    Args:
        record: JSON file to write.
        out: Folder of the runs and of their data.
        rates: Highest learning rates of the classifier.
        batches: Texts in a batch.
        folds: Which tenths are kept aside, 0 to 9, one after another: by seed 0, seed 1 and so on.
        layers: Residual layers of the encoder.
        jobs: Runs that train at the same time; one per core by default.
    """
    if len(set(folds)) < len(folds) or not set(folds) <= set(range(PARTS)):
        raise ValueError(f"folds={list(folds)}: give different ones from 0 to {PARTS - 1}")
    machine = describe(())
    found = {
        (batch, rate): [
            measured(out, batch, rate, fold, seed, layers, jobs) for seed, fold in enumerate(folds)
        ]
        for batch in batches
        for rate in rates
    }
    rows = [
        {"batch_size": batch, "head_lr": rate, **about(runs, storage)}
        for (batch, rate), runs in found.items()
        for storage in STORAGES
    ]
    for row in rows:
        means = ", ".join(f"{name} {row[name]['mean']:.2f}" for name in MEASURES)
        print(f"{row['precision']}, rate {row['head_lr']:g}, batch {row['batch_size']}: {means}")
    described = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine,
        "folds": list(folds),
        "seeds": list(range(len(folds))),
        "parts": PARTS,
        "layers": layers,
        "rows": rows,
    }
    record.write_text(json.dumps(described, indent=1) + "\n")


def measured(
    out: Path, batch: int, rate: float, fold: int, seed: int, layers: int, jobs: int | None
) -> dict[str, dict[str, float]]:
    """Measures of both storages, one fold kept aside."""
    folder = out / f"{fold}-seed-{seed}-{rate:g}-{batch}-{layers}"
    if not (folder / SUMMARY).exists():
        config = XMCConfig(
            precision=STORAGES,
            seeds=(seed,),
            data=kept_aside(fold, out / f"data-{fold}"),
            head_lr=rate,
            batch_size=batch,
            watch_every=100_000,
            eval_epochs=8,
            epochs=4,
            layers=layers,
            # Rows of one byte a weight, and the authors' encoder.
            head_fraction=0.0,
            encoder_precision="kahan",
        )
        if (folder / CONFIG).exists():
            resume(folder, jobs=jobs)
        else:
            compare(config, out=folder, jobs=jobs)
    runs = json.loads((folder / SUMMARY).read_text())["runs"]
    return {
        run["precision"]: {
            **{name: run[name] for name in MEASURES},
            SECONDS: run["seconds_per_step"] * run["steps"],
        }
        for run in runs
    }


def kept_aside(fold: int, folder: Path) -> Path:
    """A data set of the training texts alone, of which a tenth is the test part."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = Path(load.__file__).parent / load.BUNDLED
    texts, pairs = (read(whole / name) for name in ("trn_X.txt.gz", "trn_X_Y.txt.gz"))
    _, labels = pairs.pop(0).split()
    for part in ("trn", "tst"):
        chosen = [i for i in range(len(texts)) if (i % PARTS == fold) == (part == "tst")]
        write(folder / f"{part}_X.txt.gz", [texts[i] for i in chosen])
        own = [pairs[i] for i in chosen]
        write(folder / f"{part}_X_Y.txt.gz", [f"{len(own)} {labels}", *own])
    (folder / "Y.txt.gz").write_bytes((whole / "Y.txt.gz").read_bytes())
    return folder


def read(path: Path) -> list[str]:
    return gzip.decompress(path.read_bytes()).decode().splitlines()


def write(path: Path, lines: Sequence[str]) -> None:
    path.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0))


def about(runs: Sequence[dict[str, dict[str, float]]], storage: str) -> dict[str, Any]:
    """Mean and single values of every measure, and of the seconds of all steps."""
    row: dict[str, Any] = {"precision": storage}
    for name in (*MEASURES, SECONDS):
        values = [run[storage][name] for run in runs]
        row[name] = {"mean": statistics.fmean(values), "values": values}
    return row


if __name__ == "__main__":
    app()
