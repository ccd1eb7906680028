"""Predicted labels as lines of JSON or as a table."""

from __future__ import annotations

import json
from collections.abc import Iterable
from math import isfinite
from typing import BinaryIO, NamedTuple

import numpy as np

from .trained import Form

TSV_HEADER = "instance\trank\tlabel\tscore\tname\n"


class Label(NamedTuple):
    """A predicted label.

    Attributes:
        label: Its number, from 0.
        score: Its probability; the shortest decimal number that FP32 rounds to the computed one.
        name: Its text; ``None`` if the data set had none.
    """

    label: int
    score: float
    name: str | None


def shortest(score: np.float32) -> float:
    """The shortest decimal number that FP32 rounds to a number."""
    return float(np.format_float_positional(score, unique=True))


def diverged() -> ValueError:
    """The error for a model whose scores are no numbers, which JSON has no word for."""
    return ValueError("the model's scores are not finite: its training diverged; choose another")


def write_labels(found: Iterable[list[Label]], out: BinaryIO, form: Form) -> int:
    """Write the labels of each instance, best first; returns how many instances there were."""
    if form == "tsv":
        out.write(TSV_HEADER.encode())
    count = 0
    for count, labels in enumerate(found, 1):
        if not all(isfinite(label.score) for label in labels):
            raise diverged()
        text = _json_line(labels) if form == "jsonl" else _tsv_rows(count, labels)
        # A label's name may come from a JSON file, which can hold halves of characters.
        out.write(text.encode("utf-8", "replace"))
    return count


def _json_line(labels: list[Label]) -> str:
    found = [
        {name: value for name, value in label._asdict().items() if value is not None}
        for label in labels
    ]
    return json.dumps({"labels": found}, ensure_ascii=False) + "\n"


def _tsv_rows(instance: int, labels: list[Label]) -> str:
    return "".join(
        f"{instance}\t{rank}\t{label.label}\t{label.score}\t"
        f"{' '.join((label.name or '').split())}\n"
        for rank, label in enumerate(labels, 1)
    )
