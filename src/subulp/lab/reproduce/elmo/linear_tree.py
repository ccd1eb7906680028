"""A linear tree of labels, by Omikuji, on the terms that a bag encoder reads."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...tasks.xmc.config import XMCConfig
from ...tasks.xmc.encoder import Bags
from ...tasks.xmc.metrics import MISSING, PROPENSITIES, RankingMetrics
from ...tasks.xmc.readers.dataset import Split
from ...tasks.xmc.task import EVALUATION_BATCH, XMCText, load
from ..found import Found, Observation

TREE = "omikuji"

_CPU = torch.device("cpu")


def quality(config: XMCConfig, case: str, seeds: Sequence[int]) -> Found:
    """Every measure of trees that are trained with Omikuji's defaults: three, as Parabel's.

    Args:
        config: Data and encoder: a bag, whose terms and weights it takes.
        case: What the numbers are called.
        seeds: How many times it is trained. Its chance cannot be seeded: each time is another draw.

    Raises:
        RuntimeError: omikuji is missing.
    """
    if importlib.util.find_spec("omikuji") is None:
        raise RuntimeError(
            "claims=elmo-table2-sampling needs omikuji: pip install 'subulp[omikuji]'"
        )
    import omikuji  # noqa: PLC0415 - optional

    data = load(config)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.txt"
        with path.open("w", encoding="ascii") as file:
            file.writelines(_lines(data))
        for seed in seeds:
            with _silent():
                model = omikuji.Model.train_on_data(str(path), n_threads=1)
            measures = _measured(model, data, config)
            found += [Observation(case, name, value, seed) for name, value in measures.items()]
    return Found(tuple(found))


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Nothing on standard output and error, where Omikuji draws bars without being asked."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = {number: os.dup(number) for number in (1, 2)}
    with open(os.devnull, "wb") as nothing:
        for number in kept:
            os.dup2(nothing.fileno(), number)
    try:
        yield
    finally:
        for number, file in kept.items():
            os.dup2(file, number)
            os.close(file)


def _lines(data: XMCText) -> list[str]:
    """The training part as the Extreme Classification Repository's files have it."""
    terms = 1 + max(int(bags.ids.max()) for _, bags in _bags(data, data.train) if len(bags.ids))
    lines = []
    for chosen, bags in _bags(data, data.train):
        rows, cols = data.train.pairs(chosen)
        for i, features in enumerate(_features(bags)):
            labels = ",".join(map(str, cols[rows == i]))
            # Omikuji reads no line that ends with its labels, and learns nothing of one without.
            if labels and features:
                values = " ".join(f"{term}:{value:.6g}" for term, value in features)
                lines.append(f"{labels} {values}\n")
    return [f"{len(lines)} {terms} {data.data.num_labels}\n", *lines]


def _bags(data: XMCText, part: Any) -> Iterator[tuple[np.ndarray, Bags]]:
    for start in range(0, len(part), EVALUATION_BATCH):
        chosen = np.arange(start, min(start + EVALUATION_BATCH, len(part)))
        bags = data.batch(part, chosen, _CPU)
        assert isinstance(bags, Bags)
        yield chosen, bags


def _features(bags: Bags) -> Iterator[list[tuple[int, float]]]:
    """Terms of each instance, in order and each once, of length 1 together."""
    for begin, end in zip(bags.offsets[:-1].tolist(), bags.offsets[1:].tolist(), strict=True):
        ids, place = torch.unique(bags.ids[begin:end], return_inverse=True)
        values = torch.zeros(len(ids)).index_add_(0, place, bags.weights[begin:end])
        values /= values.norm().clamp(min=1e-12)
        yield list(zip(ids.tolist(), values.tolist(), strict=True))


def _measured(model: Any, data: XMCText, config: XMCConfig) -> dict[str, float]:
    test: Split = data.data.test
    if test.filter_pairs is not None:
        raise ValueError(f"data={data.data.name} has filter pairs, which a tree does not leave out")
    measures = RankingMetrics(
        data.data.label_counts, len(data.data.train), PROPENSITIES[config.propensity]
    )
    for chosen, bags in _bags(data, test):
        best = np.full((len(chosen), measures.longest), MISSING)
        for row, features in zip(best, _features(bags), strict=True):
            ranked = [label for label, _ in model.predict(features, top_k=measures.longest)]
            row[: len(ranked)] = ranked
        measures.update(best, *test.pairs(chosen))
    return measures.result()
