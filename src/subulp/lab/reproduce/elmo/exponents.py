"""Exponents of a classifier's gradients, weights and inputs at the end of a training in FP32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ....diagnostics.exponents import ExponentHistogram, exponent_histogram
from ....numerics import E4M3, E5M2
from ...tasks.xmc.config import XMCConfig
from ...tasks.xmc.task import XMCText, build, load
from ..found import Curve, Found, Observation

SHARE = "percent of the values by exponent"


def exponents(config: dict[str, object], seed: int, batches: int) -> Found:
    """Histograms, and shares outside and inside the ranges of the FP8 formats.

    Args:
        config: Options of ``subulp train xmc``; the precision is FP32.
        seed: Seed of the training.
        batches: Batches whose inputs and gradients are counted.
    """
    data = config.get("data")
    own = {**config, "data": None if data is None else Path(str(data))}
    chosen = XMCConfig(precision=("fp32",), seeds=(seed,), layers=1, **own)  # type: ignore[arg-type]
    threads = torch.get_num_threads()
    if chosen.threads is not None:
        torch.set_num_threads(chosen.threads)
    try:
        histograms_ = histograms(chosen, load(chosen), seed, batches)
    finally:
        torch.set_num_threads(threads)
    observations, curves = [], []
    for name, histogram in histograms_.items():
        for fmt in (E4M3, E5M2):
            shares = histogram.under(fmt)
            # Zeros lose nothing in any format, and are not gradients that become zero.
            nonzero = 1 - shares.zero
            for quantity, share in (("below", shares.below), ("inside", shares.inside)):
                observations.append(
                    Observation(name, f"percent {quantity} {fmt.name}", 100 * share / nonzero, seed)
                )
        by_exponent = histogram.shares()
        curves.append(
            Curve(
                name,
                SHARE,
                tuple(by_exponent),
                tuple(100 * share for share in by_exponent.values()),
                seed,
            )
        )
    return Found(tuple(observations), tuple(c.thinned() for c in curves))


def histograms(
    config: XMCConfig, data: XMCText, seed: int, batches: int
) -> dict[str, ExponentHistogram]:
    """After a training in FP32: the classifier's weights, and what batches bring to it.

    The gradient of the weights, which training never stores, is computed from that of the logits.
    """
    torch.manual_seed(seed)
    config = replace(config, precision=("fp32",))
    work = build(config, data, "fp32", seed, torch.device("cpu"))
    assert work.rows is not None
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, work.learning_rate)
        for optimizer in (work.optimizer, work.rows)
    ]
    for _ in range(work.steps):
        work.loss(False).backward()  # type: ignore[no-untyped-call]
        work.optimizer.step()
        work.rows.step()
        work.optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    encoder, head = work.model["encoder"], work.model["head"]  # type: ignore[index]
    weight = head.weight(torch.arange(head.num_labels))
    found = {"weights": exponent_histogram(head)}
    for number in range(batches):
        chosen = np.arange(number * config.batch_size, (number + 1) * config.batch_size)
        with torch.no_grad():
            x = encoder(data.batch(data.train, chosen, weight.device))
            logits = (x @ weight.t()).sigmoid_()
            instances, labels = data.train.pairs(chosen)
            logits[instances, labels] -= 1
            counted = {
                "inputs": exponent_histogram(x),
                "gradients of logits": exponent_histogram(logits),
                "gradients of weights": exponent_histogram(logits.t() @ x),
            }
        for name, histogram in counted.items():
            found[name] = found[name] + histogram if name in found else histogram
    return found
