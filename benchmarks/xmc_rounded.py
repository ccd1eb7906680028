"""What narrow storage alone costs a classifier that trained in FP32: parts of it are rounded, once.

    subulp train xmc --precision fp32,fp8 --seeds 0,1,2 --out runs/xmc
    python benchmarks/xmc_rounded.py runs/xmc --record benchmarks/results/xmc-rounded.json

What FP8 rows are behind FP32 beyond this, training in FP8 has cost.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from cyclopts import App
from machine import describe
from torch import nn

from subulp.lab.engine.run_directory import read_config
from subulp.lab.engine.saved_model import model_names
from subulp.lab.engine.trained import load_named
from subulp.lab.tasks.xmc.config import XMCConfig
from subulp.lab.tasks.xmc.task import evaluate, load
from subulp.nn import ExtremeClassifier
from subulp.numerics import BF16, E4M3, Format, random_bits, round_to

MEASURES = ("P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5")
WIDE = "fp32"

app = App(help=__doc__)

Change = Callable[[nn.ModuleDict], None]


def narrow_encoder(model: nn.ModuleDict) -> None:
    with torch.no_grad():
        for parameter in model["encoder"].parameters():
            parameter.copy_(parameter.bfloat16())


def narrow_rows(fmt: Format, *, stochastic: bool = False) -> Change:
    def change(model: nn.ModuleDict) -> None:
        table = model["head"].table
        for start, stop in table.slices():
            values = table.decode(start, stop)
            if stochastic:
                bits = random_bits.draw(values.shape, seed=0, offset=start * table.dim)
                table.store(start, round_to(values, fmt, "stochastic", bits=bits))
            else:
                table.store(start, round_to(values, fmt))

    return change


CHANGES: dict[str, tuple[Change, ...]] = {
    "as it trained": (),
    "encoder in BF16": (narrow_encoder,),
    "rows in BF16": (narrow_rows(BF16),),
    "rows in E4M3, to nearest": (narrow_rows(E4M3),),
    "rows in E4M3, stochastic": (narrow_rows(E4M3, stochastic=True),),
    "encoder in BF16, rows in E4M3, to nearest": (narrow_encoder, narrow_rows(E4M3)),
}


@app.default
def rounded(run: Path, *, record: Path) -> None:
    """Measure the models of a run, and those in FP32 again with parts of them rounded.

    Args:
        run: Run directory of `subulp train xmc`, with models in FP32.
        record: JSON file to write.
    """
    config, _ = read_config(run)
    if not isinstance(config, XMCConfig):
        raise ValueError(f"run={run} is of {config.task}: give one of xmc")
    names = model_names(run)
    machine, data = describe(()), load(config)
    torch.set_num_threads(config.threads)
    rows = []
    for name in names:
        for case, changes in CHANGES.items():
            if changes and name.variant != WIDE:
                continue
            model = load_named(run, name, "stored", "cpu").model
            assert isinstance(model, nn.ModuleDict)
            assert isinstance(model["head"], ExtremeClassifier)
            for change in changes:
                change(model)
            found = evaluate(config, data, model)
            rows.append(
                {
                    "precision": name.variant,
                    "seed": name.seed,
                    "case": case,
                    **{measure: found[measure] for measure in MEASURES},
                }
            )
            print(name, case, *(f"{m} {found[m]:.2f}" for m in MEASURES), sep=", ", flush=True)
    described = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine,
        "data": Path(config.data).name if config.data else "bundled",
        "rows": rows,
    }
    record.write_text(json.dumps(described, indent=1) + "\n")


if __name__ == "__main__":
    app()
