"""How much of a mixture's validation loss is chance, and how much the operands of its evaluation.

    python benchmarks/mixture_chance.py --record benchmarks/results/mixture-chance.json

Trains the language model of `subulp train lm --linear bf16,mor-2way --partition subchannel-128
--width 128`, several times for each seed:

* In BF16 as it is, and with an error of E4M3's size in every initial matrix: uniform, with a mean
  of 2.25 %, unbiased. How far those end from the first is what any error of that size does, even
  one that is made only once.
* With mixtures, from the same disturbed weights: another draw of what chance makes of them.
* The weights trained in BF16 are evaluated again with operands in mixtures, which took no part in
  training. That loss remains however well one trains.
* In one more training step of theirs, the operands of the linear layers are represented by blocks
  and by sub-channels, along the product's contraction and across: where the values are the same,
  nothing but chance can tell the partitions apart.
"""

from __future__ import annotations

import copy
import json
import math
import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cyclopts import App
from machine import describe
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from subulp.lab.engine.linear_operands import PLAIN, PartitionName, Variant
from subulp.lab.engine.task import Workload
from subulp.lab.tasks.lm import task
from subulp.lab.tasks.lm.config import LMConfig
from subulp.lab.tasks.lm.models import GPT
from subulp.lab.tasks.lm.text import Text, evaluation_batches
from subulp.nn import Linear, MoR
from subulp.numerics.scaling import Scaling
from subulp.ops.mixture import decode

ERROR = 0.0225
# One recipe, as the command line calls it and as the library does.
MIXTURE, RECIPE = "mor-2way", "subtensor-2way"
MIXTURE_PARTITION: PartitionName = "subchannel-128"
PARTITIONS: tuple[PartitionName, ...] = ("block-128x128", "subchannel-128")
SCALINGS: tuple[Scaling, ...] = ("gam", "amax")

app = App(help=__doc__)


class Job(NamedTuple):
    """One training; draw 0 is the one whose initial weights have no error."""

    linear: str
    seed: int
    draw: int


class Run(NamedTuple):
    """What became of it; the last two are of trainings in BF16."""

    job: Job
    val_loss: float
    evaluated_in: dict[str, float]
    alike: dict[str, dict[str, float]]


def train(steps: int, job: Job) -> Run:
    torch.set_num_threads(1)
    linear, seed, draw = job
    config = LMConfig(
        linear=(linear,),
        partition=None if linear == PLAIN else (MIXTURE_PARTITION,),
        precision=("master",),
        width=128,
        seeds=(seed,),
        steps=steps,
    )
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
    if linear != PLAIN:
        return Run(job, val_loss, {}, {})
    losses = {p: evaluated_in(p, config, data, work.model) for p in PARTITIONS}
    return Run(job, val_loss, losses, {scaling: alike(scaling, work) for scaling in SCALINGS})


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
    """Validation loss with operands in mixtures; the weights stay."""
    mixed = copy.deepcopy(model)
    task.convert_blocks(mixed, Variant("master", MIXTURE, partition))
    batches = evaluation_batches(data.validation, task.EVALUATION_BATCH, config.context)
    return task.evaluate(mixed, list(batches))


def alike(scaling: Scaling, work: Workload) -> dict[str, float]:
    """Shares of operands' values that are the same in another partition or direction."""
    block, sub_channel = (MoR(RECIPE, p, scaling=scaling) for p in PARTITIONS)
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


def spread(values: Sequence[float]) -> dict[str, float]:
    deviation = statistics.stdev(values)
    return {
        "mean": statistics.mean(values),
        "standard deviation": deviation,
        "standard error": deviation / math.sqrt(len(values)),
        "least": min(values),
        "most": max(values),
    }


def summarise(runs: Sequence[Run]) -> dict[str, Any]:
    """Percent of BF16's loss, and shares."""
    loss = {run.job: run.val_loss for run in runs}
    disturbed = [job for job in loss if job.draw]
    plain = [run for run in runs if run.job.linear == PLAIN]
    return {
        "an error at the start, above none": spread(
            [percent(loss[j], loss[Job(PLAIN, j.seed, 0)]) for j in disturbed if j.linear == PLAIN]
        ),
        "a mixture, above BF16 from the same disturbed weights": spread(
            [percent(loss[j], loss[Job(PLAIN, *j[1:])]) for j in disturbed if j.linear != PLAIN]
        ),
        "weights trained in BF16, evaluated in": {
            p: spread([percent(run.evaluated_in[p], run.val_loss) for run in plain])
            for p in PARTITIONS
        },
        "values alike": {
            scaling: {
                what: statistics.mean(run.alike[scaling][what] for run in plain)
                for what in ("partitions", "directions")
            }
            for scaling in SCALINGS
        },
    }


def show(runs: Sequence[Run]) -> None:
    loss = {run.job: run.val_loss for run in runs}
    table = Table("seed", "BF16's loss", "an error at the start, %", "a mixture after it, %")
    for seed in sorted({job.seed for job in loss}):
        draws = sorted({job.draw for job in loss if job.seed == seed} - {0})
        plain = [loss[Job(PLAIN, seed, draw)] for draw in (0, *draws)]
        mixed = [loss[Job(MIXTURE, seed, draw)] for draw in draws]
        table.add_row(
            f"{seed}",
            f"{plain[0]:.4f}",
            ", ".join(f"{percent(value, plain[0]):+.2f}" for value in plain[1:]),
            ", ".join(f"{percent(*pair):+.2f}" for pair in zip(mixed, plain[1:], strict=True)),
        )
    Console().print(table)


@app.default
def main(
    *,
    record: Path = Path("mixture-chance.json"),
    seeds: Sequence[int] = tuple(range(12)),
    draws: int = 2,
    steps: int = 2000,
) -> None:
    """How much of a mixture's validation loss is chance, and how much its operands in evaluation.

    Args:
        record: JSON file of the results; trainings that it has already, of as many steps, stay.
        seeds: Seeds of the initial weights and the data order.
        draws: Errors at the start, for each seed.
        steps: Steps of each training.
    """
    if len(seeds) * draws < 2:
        raise SystemExit("mixture_chance: a spread needs two trainings with an error, or more")
    jobs = [Job(PLAIN, seed, draw) for seed in seeds for draw in range(draws + 1)]
    jobs += [Job(MIXTURE, seed, draw) for seed in seeds for draw in range(1, draws + 1)]
    machine = describe()
    runs = read(record, steps)
    missing = [job for job in jobs if job not in {run.job for run in runs}]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(partial(train, steps), missing)
        for run in track(results, description="Training", total=len(missing)):
            runs.append(run)
            write(record, machine, steps, runs)
    chosen = [run for run in runs if run.job in jobs]
    summary = summarise(chosen)
    write(record, machine, steps, runs, summary)
    show(chosen)
    print(json.dumps(summary, indent=2))


def read(record: Path, steps: int) -> list[Run]:
    written = json.loads(record.read_text()) if record.exists() else {}
    if written.get("steps") != steps:
        return []
    return [Run(**{**run, "job": Job(**run["job"])}) for run in written["runs"]]


def write(
    record: Path,
    machine: dict[str, Any],
    steps: int,
    runs: Sequence[Run],
    summary: dict[str, Any] | None = None,
) -> None:
    written = {"machine": machine, "steps": steps, "error": ERROR, **(summary or {})}
    written["runs"] = [{**run._asdict(), "job": run.job._asdict()} for run in runs]
    record.write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    app()
