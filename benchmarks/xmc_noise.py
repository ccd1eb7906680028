"""Which roundings of E4M3 rows cost a classifier quality: only some happen, the rest is in FP32.

    python benchmarks/xmc_noise.py --record benchmarks/results/xmc-noise.json

The bundled set, with the defaults of `subulp train xmc` and a residual layer in the encoder, which
was among them. Encoder, products and rows are FP32; after a step's update a part of the rows is
rounded stochastically. What is reported beside P@k, the log-loss of the test part, varies less from
seed to seed.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from cyclopts import App
from machine import describe
from torch import Tensor

from subulp.lab.data.batches import ShuffledBatches
from subulp.lab.engine.recipe import rise_and_fall
from subulp.lab.tasks.xmc.config import XMCConfig
from subulp.lab.tasks.xmc.encoder import CONSTANTS, prior_weight
from subulp.lab.tasks.xmc.metrics import PROPENSITIES, RankingMetrics
from subulp.lab.tasks.xmc.task import XMCText, build_encoder, build_optimizer, load, steps
from subulp.numerics import BF16, E4M3, Format

CPU = torch.device("cpu")
WIDE = "fp32"
TESTED = 256

app = App(help=__doc__)


@dataclass(frozen=True)
class Step:
    """Where in a training an update is rounded.

    Attributes:
        done: Share of the steps that came before.
        labels: int64 ``(labels of the batch's texts,)``.
        order: int64 ``(labels,)``: the most frequent ones first.
    """

    done: float
    labels: Tensor
    order: Tensor

    @property
    def met(self) -> Tensor:
        """bool ``(labels, 1)``: whether a text of the batch has the label."""
        return torch.zeros(len(self.order), 1, dtype=torch.bool).index_fill(0, self.labels, True)

    def frequent(self, share: float) -> Tensor:
        """bool ``(labels, 1)``: the most frequent labels, that share of all."""
        chosen = self.order[: int(share * len(self.order))]
        return torch.zeros(len(self.order), 1, dtype=torch.bool).index_fill(0, chosen, True)


Part = Callable[[Step], Tensor | bool]

CASES: dict[str, tuple[Format, Part]] = {
    WIDE: (E4M3, lambda _: False),
    "bf16": (BF16, lambda _: True),
    "e4m3": (E4M3, lambda _: True),
    "e4m3, labels of the batch": (E4M3, lambda step: step.met),
    "e4m3, other labels": (E4M3, lambda step: ~step.met),
    "e4m3, first three quarters of the steps": (E4M3, lambda step: step.done < 0.75),
    "e4m3, last quarter of the steps": (E4M3, lambda step: step.done >= 0.75),
    "e4m3, all but the most frequent fifth": (E4M3, lambda step: ~step.frequent(0.2)),
    "e4m3, all but the most frequent twentieth": (E4M3, lambda step: ~step.frequent(0.05)),
}


def rounded(x: Tensor, fmt: Format, generator: torch.Generator) -> Tensor:
    """Stochastically, as :func:`subulp.numerics.round_to` in distribution, in a fifth of its time.

    Weights stay far below the largest number of each format.
    """
    exponent = torch.frexp(x)[1] - 1
    ulp = torch.ldexp(torch.ones_like(x), exponent.clamp(min=fmt.min_exponent) - fmt.mantissa_bits)
    return torch.floor(x / ulp + torch.rand(x.shape, generator=generator)) * ulp


def train(config: XMCConfig, data: XMCText, case: str, seed: int) -> dict[str, float]:
    """Train with the roundings of a case, and measure the test part."""
    fmt, part = CASES[case]
    encoder = build_encoder(config, data, WIDE, seed, CPU)
    optimizer = build_optimizer(config, encoder, WIDE, seed)
    encoder_lr = config.encoder_lr
    generator = torch.Generator().manual_seed(seed)
    labels, dim = data.data.num_labels, encoder.dim
    rows = (torch.rand(labels, dim, generator=generator) * 2 - 1) * math.sqrt(6 / (dim + labels))
    share = len(data.train.targets.indices) / (len(data.train) * labels)
    rows[:, -CONSTANTS:] = prior_weight(share)
    order = torch.from_numpy(data.data.label_counts).argsort(descending=True)
    batches = ShuffledBatches(len(data.train), config.batch_size, seed)
    total = steps(config, data)
    for number in range(total):
        rate = rise_and_fall(
            number, total, rising=config.rising_steps(total), final=config.final_lr
        )
        for group in optimizer.param_groups:
            group["lr"] = encoder_lr * rate
        chosen = batches.draw().numpy()
        texts, own = map(torch.from_numpy, data.train.pairs(chosen))
        x = encoder(data.batch(data.train, chosen, CPU))
        gradient = torch.sigmoid(x.detach() @ rows.T)
        gradient[texts, own] -= 1
        x.backward(gradient @ rows / config.batch_size)
        optimizer.step()
        optimizer.zero_grad()
        rows.addmm_(gradient.T, x.detach(), alpha=-config.head_lr * rate)
        where = part(Step(number / total, own.unique(), order))
        if where is not False:
            rows = torch.where(torch.as_tensor(where), rounded(rows, fmt, generator), rows)
    return measure(config, data, encoder, rows)


@torch.no_grad()
def measure(
    config: XMCConfig, data: XMCText, encoder: torch.nn.Module, rows: Tensor
) -> dict[str, float]:
    encoder.eval()
    test = data.data.test
    ranking = RankingMetrics(
        data.data.label_counts, len(data.data.train), PROPENSITIES[config.propensity]
    )
    loss = 0.0
    for start in range(0, len(test), TESTED):
        chosen = np.arange(start, min(start + TESTED, len(test)))
        logits = encoder(data.batch(test, chosen, CPU)) @ rows.T
        texts, own = test.pairs(chosen)
        targets = torch.zeros_like(logits)
        targets[texts, own] = 1
        loss += F.binary_cross_entropy_with_logits(logits, targets, reduction="sum").item()
        ranking.update(logits.topk(5).indices.numpy(), texts, own)
    found = ranking.result()
    return {"log-loss": loss / len(test), **{name: found[name] for name in ("P@1", "P@3", "P@5")}}


@app.default
def noise(*, record: Path, seeds: tuple[int, ...] = (0, 1, 2), threads: int = 1) -> None:
    """Train each case with each seed.

    Args:
        record: JSON file to write.
        seeds: Of initial weights, data order, dropout and rounding.
        threads: CPU threads.
    """
    torch.set_num_threads(threads)
    config = XMCConfig(epochs=4, layers=1)
    data = load(config)
    rows = []
    for seed in seeds:
        for case in CASES:
            rows.append({"case": case, "seed": seed, **train(config, data, case, seed)})
            print(*(f"{k} {v:.2f}" if isinstance(v, float) else v for k, v in rows[-1].items()))
            described = {
                "command": shlex.join(["python", *sys.argv]),
                "machine": describe(()),
                "data": data.data.name,
                "rows": rows,
            }
            record.write_text(json.dumps(described, indent=1) + "\n")


if __name__ == "__main__":
    app()
