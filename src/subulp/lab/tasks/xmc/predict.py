"""Labels of new instances, line by line, from a trained model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np

from ...engine.config import check_range
from .preprocessing import Lines
from .saved_model import SavedModel

Form = Literal["jsonl", "tsv"]

TSV_HEADER = "line\trank\tlabel\tscore\tname\n"


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


def predict_file(
    model: SavedModel, path: Path, out: BinaryIO, *, k: int = 5, form: Form = "jsonl", batch: int
) -> int:
    """Write the most probable labels of every line of a file.

    The file is read twice: once to check all of it before anything is written, and once batch by
    batch. Memory holds 8 bytes a line, and one batch.

    Args:
        model: What predicts.
        path: A text a line, UTF-8, plain or ``.gz``; for a model of a bag-of-words data set,
            ``feature:value feature:value ...`` a line.
        out: Where to write, UTF-8.
        k: Labels of a line, at most as many as there are (default: 5).
        form: ``"jsonl"``: an object a line; ``"tsv"``: a header, then a row a label (default:
            ``"jsonl"``).
        batch: Lines at a time. The last bits of scores may depend on it.

    Returns:
        The number of lines.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is empty, not UTF-8 or not whole, a line holds no features where the
            model reads features, or a number is out of range.
    """
    check_range("k", k, 1, model.num_labels)
    check_range("batch", batch, 1)
    if not path.is_file():
        raise FileNotFoundError(f"file={path} is not a file: give a file with one text per line")
    lines = model.preprocessor.lines(path)
    if not len(lines):
        raise ValueError(f"file={path} is empty: give a text a line")
    if form == "tsv":
        out.write(TSV_HEADER.encode())
    for line, labels in enumerate(predict(model, lines, k=k, batch=batch), 1):
        text = _json_line(labels) if form == "jsonl" else _tsv_rows(line, labels)
        # A label's name may come from a JSON file, which can hold halves of characters.
        out.write(text.encode("utf-8", "replace"))
    return len(lines)


def predict(model: SavedModel, lines: Lines[Any], *, k: int, batch: int) -> Iterator[list[Label]]:
    """The k most probable labels of each line, best first."""
    for start in range(0, len(lines), batch):
        chosen = lines.read(range(start, min(start + batch, len(lines))))
        scores, labels = (found.cpu().numpy() for found in model.topk(chosen, k))
        names = model.names(labels.reshape(-1).tolist())
        for row, numbers in enumerate(labels.tolist()):
            row_names = [None] * k if names is None else names[row * k : (row + 1) * k]
            yield [
                Label(*found)
                for found in zip(numbers, map(_shortest, scores[row]), row_names, strict=True)
            ]


def _shortest(score: np.float32) -> float:
    return float(np.format_float_positional(score, unique=True))


def _json_line(labels: list[Label]) -> str:
    found = [
        {name: value for name, value in label._asdict().items() if value is not None}
        for label in labels
    ]
    return json.dumps({"labels": found}, ensure_ascii=False) + "\n"


def _tsv_rows(line: int, labels: list[Label]) -> str:
    return "".join(
        f"{line}\t{rank}\t{label.label}\t{label.score}\t{' '.join((label.name or '').split())}\n"
        for rank, label in enumerate(labels, 1)
    )
