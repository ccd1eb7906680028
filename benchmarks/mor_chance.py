"""How much of a mixture's validation loss is chance, and how much the operands of its evaluation.

    python benchmarks/mor_chance.py --out benchmarks/results/mor-chance.json

Trains the language model of `subulp train lm --linear bf16 --width 128`, no mixture taking part:

* Once as it is, and several times with an error of E4M3's size in every initial matrix: uniform,
  with a mean of 2.25 %, unbiased. How far those end from the first is what any error of that size
  does, even one that is made only once.
* The trained weights are evaluated again with operands in mixtures, which took no part in training.
  That loss remains however well one trains.
* In one more training step, the operands of the linear layers are represented by blocks and by
  sub-channels, along the product's contraction and across: where the values are the same, nothing
  but chance can tell the partitions apart.
"""

from __future__ import annotations

import copy
import json
import math
import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cyclopts import App
from machine import describe
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from subulp.nn import Linear, MoR
from subulp.numerics.scaling import Scaling
from subulp.ops.mixture import decode
from subulp.train.data.text import Text, evaluation_batches
from subulp.train.linear import PartitionName, Variant
from subulp.train.lm import task
from subulp.train.lm.config import LMConfig
from subulp.train.lm.gpt import GPT
from subulp.train.task import Workload

ERROR = 0.0225
PARTITIONS: tuple[PartitionName, ...] = ("block-128x128", "subchannel-128")
SCALINGS: tuple[Scaling, ...] = ("gam", "amax")

app = App(help=__doc__)


@dataclass(frozen=True)
class Run:
    """One training; ``draw`` 0 is the one whose initial weights have no error."""

    seed: int
    draw: int
    val_loss: float
    evaluated_in: dict[str, float]
    alike: dict[str, dict[str, float]]


def train(steps: int, job: tuple[int, int]) -> Run:
    seed, draw = job
    torch.set_num_threads(1)
    config = LMConfig(precision=("master",), width=128, seeds=(seed,), steps=steps)
    data = task.load(config)
    work = task.build(config, data, "master", seed, torch.device("cpu"))
    if draw:
        weights = work.optimizer.full_precision_state_dict(work.model)
        work.optimizer.load_full_precision_state_dict(work.model, disturbed(weights, seed, draw))
    schedule = torch.optim.lr_scheduler.LambdaLR(work.optimizer, work.learning_rate)
    for _ in range(steps):
        work.loss(False).backward()
        work.optimizer.step()
        work.optimizer.zero_grad()
        schedule.step()
    val_loss = work.evaluate()["val_loss"]
    losses = {p: evaluated_in(p, config, data, work.model) for p in PARTITIONS}
    shares = {scaling: alike(scaling, work) for scaling in SCALINGS}
    return Run(seed, draw, val_loss, losses, shares)


def disturbed(weights: dict[str, Tensor], seed: int, draw: int) -> dict[str, Tensor]:
    """With an error in every matrix."""
    generator = torch.Generator().manual_seed(1000 * draw + seed)

    def error(value: Tensor) -> Tensor:
        # Uniform in (-1, 1), whose magnitudes have a mean of 1/2.
        return 2 * ERROR * (2 * torch.rand(value.shape, generator=generator) - 1)

    return {
        name: value * (1 + error(value)) if value.dim() == 2 else value
        for name, value in weights.items()
    }


def evaluated_in(partition: PartitionName, config: LMConfig, data: Text, model: GPT) -> float:
    """Validation loss with the operands of ``mor-2way``; the weights stay."""
    mixed = copy.deepcopy(model)
    task.convert_blocks(mixed, Variant("master", "mor-2way", partition))
    batches = evaluation_batches(data.validation, task.EVALUATION_BATCH, config.context)
    return task.evaluate(mixed, list(batches))


def alike(scaling: Scaling, work: Workload) -> dict[str, float]:
    """Shares of operands' values that are the same in another partition or direction."""
    block, sub_channel = (MoR("subtensor-2way", p, scaling=scaling) for p in PARTITIONS)
    found: dict[str, list[float]] = {"partitions": [], "directions": []}
    for matrix in operands(work):
        values, across = represented(matrix, sub_channel), represented(matrix.t(), sub_channel).t()
        found["partitions"].append(same(values, represented(matrix, block)))
        found["directions"].append(same(values, across))
    return {name: statistics.mean(shares) for name, shares in found.items()}


def operands(work: Workload) -> list[Tensor]:
    """Inputs, weights and output gradients of the blocks' linear layers in one training step."""
    found: list[Tensor] = []

    def keep(layer: Linear, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        found.extend((inputs[0].flatten(0, -2), layer.weight))
        output.register_hook(lambda grad: found.append(grad.flatten(0, -2)))

    hooks = [
        layer.register_forward_hook(keep)
        for name, layer in work.model.named_modules()
        if name.startswith("blocks.") and isinstance(layer, Linear)
    ]
    work.loss(False).backward()
    for hook in hooks:
        hook.remove()
    return [matrix.detach() for matrix in found]


def represented(matrix: Tensor, mor: MoR) -> Tensor:
    return decode(mor.encode(matrix)[0])


def same(a: Tensor, b: Tensor) -> float:
    return float((a == b).float().mean())


def percent(value: float, than: float) -> float:
    """By how much a loss is above another."""
    return 100 * (value / than - 1)


def summarise(runs: Sequence[Run]) -> dict[str, Any]:
    plain = {run.seed: run.val_loss for run in runs if run.draw == 0}
    chance = [percent(run.val_loss, plain[run.seed]) for run in runs if run.draw]
    spread = statistics.stdev(chance)
    return {
        "an error at the start": {
            "mean": statistics.mean(chance),
            "standard deviation": spread,
            "standard error": spread / math.sqrt(len(chance)),
            "least": min(chance),
            "most": max(chance),
        },
        "evaluated in": {
            p: statistics.mean(percent(run.evaluated_in[p], run.val_loss) for run in runs)
            for p in PARTITIONS
        },
        "values alike": {
            scaling: {
                what: statistics.mean(run.alike[scaling][what] for run in runs)
                for what in ("partitions", "directions")
            }
            for scaling in SCALINGS
        },
    }


def show(runs: Sequence[Run]) -> None:
    plain = {run.seed: run.val_loss for run in runs if run.draw == 0}
    table = Table("seed", "validation loss", "with an error at the start, %", *PARTITIONS)
    for seed, loss in plain.items():
        mine = [run for run in runs if run.seed == seed]
        chance = ", ".join(f"{percent(r.val_loss, loss):+.2f}" for r in mine if r.draw)
        cost = [
            statistics.mean(percent(r.evaluated_in[p], r.val_loss) for r in mine)
            for p in PARTITIONS
        ]
        table.add_row(f"{seed}", f"{loss:.4f}", chance, *(f"{c:+.3f}" for c in cost))
    Console().print(table)


@app.default
def main(
    *,
    out: Path | None = None,
    seeds: Sequence[int] = tuple(range(12)),
    draws: int = 2,
    steps: int = 2000,
) -> None:
    """How much of a mixture's validation loss is chance, and how much its operands in evaluation.

    Args:
        out: JSON file of the results.
        seeds: Of initial weights and data order.
        draws: Trainings of each seed with an error at the start.
        steps: Of each training.
    """
    if len(seeds) * draws < 2:
        raise SystemExit("mor_chance: a spread needs two trainings with an error, or more")
    jobs = [(seed, draw) for seed in seeds for draw in range(draws + 1)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(partial(train, steps), jobs)
        runs = list(track(results, description="Training", total=len(jobs)))
    show(runs)
    summary = summarise(runs)
    print(json.dumps(summary, indent=2))
    if out is not None:
        record = {"machine": describe(), "steps": steps, "error": ERROR, **summary}
        record["runs"] = [asdict(run) for run in runs]
        out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    app()
