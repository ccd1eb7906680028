"""Trained click-through-rate models: they say how probable a click is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import BinaryIO, ClassVar, Self

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.numpy import load_file
from torch import Tensor

from ....numerics.logistic import sigmoid
from ...data.room import check_room
from ...engine.config import check_range
from ...engine.predictions import diverged, shortest
from ...engine.saved_model import SavedModel, Weights
from ...engine.trained import Form, TrainedModel
from .config import CTRConfig
from .dlrm import DLRM
from .readers.example_stream import BadLines, ExampleStream, Span, read_spans
from .readers.examples import Encoder, Examples
from .readers.layout import Layout, Table
from .readers.load import evaluation_spans, fields_of_first_line
from .task import COLUMNS, Built, load, logits_of, measures

TSV_HEADER = "instance\tprobability\n"

_MOST_WIDE = 1 << 24


@dataclass(frozen=True)
class Description(Built):
    """What a model is built from.

    Attributes:
        layout: The columns of its data.
    """

    layout: Layout


@dataclass(frozen=True, eq=False)
class Trained(TrainedModel):
    """A click-through-rate model.

    Attributes:
        built: What it was built from.
        encode: From examples to what it takes.
    """

    built: Description
    encode: Encoder

    uses: ClassVar[str] = "predict"

    @classmethod
    def of(cls, saved: SavedModel, weights: Weights, device: torch.device) -> Self:
        """Build a model."""
        built = saved.settings(_DESCRIPTION)
        try:
            for number in (built.dim, *built.bottom, *built.top):
                check_range("a size", number, 1, _MOST_WIDE)
            encode = Encoder.restored(built.layout, load_file(saved.shared(COLUMNS)))
            tables = _tables(built.layout, encode)
            numbers = len(built.layout.numbers)
            check_room(f"{saved.path}", built.least_memory(tables, numbers), "use another machine")
            model = built.model(tables, numbers, 0)
        except (SafetensorError, ValueError, TypeError, KeyError, RuntimeError) as error:
            raise saved.damaged(error) from None
        saved.fill(model, weights)
        return cls(saved, model.to(device), device, built, encode)

    def measure(self, config: CTRConfig, data: str | None) -> dict[str, float]:
        """Every measure: of the run's test part, or of all examples of other files.

        These have the columns of the run's data; a name may be as in training, ``criteo:FILE``, or
        that of the file alone.
        """
        if data is None:
            part = load(config).test
        else:
            layout = self.built.layout
            blocks = list(read_spans(layout, evaluation_spans(data, layout), BadLines("raise", "")))
            count = sum(map(len, blocks))
            if not count:
                raise ValueError(f"data={data} has no examples")
            part = ExampleStream(lambda: iter(blocks), count, count)
        return measures(part, self.encode, self._dlrm, self.built.positive_share, self.device)

    def predict_file(
        self,
        path: Path,
        out: BinaryIO,
        *,
        k: int | None = None,
        form: Form = "jsonl",
        batch: int = 256,
    ) -> int:
        """Write the probability of a click for every example of a file.

        The file has the columns of the training data; that of the label is ignored, and may be
        missing. All of it is checked before anything is written.
        """
        check_range("batch", batch, 1)
        if k is not None:
            raise ValueError(f"k={k} has no effect on a click model, which has one label")
        layout = self._unlabelled(path)
        if not sum(map(len, _blocks(layout, path))):
            raise ValueError(f"file={path} has no examples: give one a line")
        if form == "tsv":
            out.write(TSV_HEADER.encode())
        count = 0
        for block in _blocks(layout, path):
            for start in range(0, len(block), batch):
                for score in self.probabilities(block.take(slice(start, start + batch))).numpy():
                    count += 1
                    value = shortest(score)
                    if not isfinite(value):
                        raise diverged()
                    line = (
                        json.dumps({"probability": value})
                        if form == "jsonl"
                        else f"{count}\t{value}"
                    )
                    out.write(f"{line}\n".encode())
        return count

    @torch.no_grad()
    def probabilities(self, examples: Examples) -> Tensor:
        """Probabilities of clicks, FP32 ``(count,)``."""
        return sigmoid(logits_of(self._dlrm, self.encode(examples), self.device)).cpu()

    @property
    def _dlrm(self) -> DLRM:
        assert isinstance(self.model, DLRM)
        return self.model

    def _unlabelled(self, path: Path) -> Layout:
        layout = self.built.layout
        found = fields_of_first_line(path, layout)
        bare = layout.unlabelled(column=False)
        if layout.header:
            for each in (bare, layout.unlabelled(column=True)):
                if found == list(each.columns):
                    return each
            raise ValueError(
                f"{path}:1: the header is {','.join(found)}: expected {','.join(layout.columns)}, "
                "with or without the label"
            )
        return bare if len(found) == len(bare.columns) else layout.unlabelled(column=True)


_DESCRIPTION = TypeAdapter(Description)


def _tables(layout: Layout, encode: Encoder) -> list[Table]:
    """The tables with the rows that they need."""
    return [replace(t, rows=rows) for t, rows in zip(layout.tables, encode.rows, strict=True)]


def _blocks(layout: Layout, path: Path) -> Iterator[Examples]:
    return read_spans(layout, [Span(path, int(layout.header))], BadLines("raise", ""))
