"""Trained classifiers over very many labels: they name the labels of texts or features."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Self

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn
from typing_extensions import TypedDict

from ....numerics.logistic import sigmoid
from ...data.lines import TextLines
from ...data.room import check_room
from ...engine.config import check_range
from ...engine.linear_operands import Variant
from ...engine.predictions import Label, shortest, write_labels
from ...engine.saved_model import SavedModel, Weights
from ...engine.trained import Form, TrainedModel, labels_wanted
from .config import XMCConfig
from .linear_layers import change_layers
from .preprocessing import SETTINGS, Lines, Preprocessor, load_preprocessor, to_device
from .readers.dataset import BagSplit, Texts
from .saved_parts import LABELS, LEFT_OUT, Head, head_of
from .task import XMCText, evaluate, load, read_data


class Description(TypedDict):
    """What a model is built from, beside what all models of its directory share."""

    head: dict[str, Any]
    encoder: Variant


_DESCRIPTION = TypeAdapter(Description)

_NAMES_AT_A_TIME = 4096


@dataclass(frozen=True, eq=False)
class Trained(TrainedModel):
    """A trained encoder and classifier.

    Attributes:
        modules: ``encoder`` and ``head``.
        preprocessor: Texts, or given features, to the encoder's input.
        label_texts: Text of each label as JSON, if the data set had any.
    """

    modules: nn.ModuleDict
    preprocessor: Preprocessor[Any]
    label_texts: TextLines | None

    uses: ClassVar[str] = "predict"

    @classmethod
    def of(cls, saved: SavedModel, weights: Weights, device: torch.device) -> Self:
        """Build a model."""
        description = saved.settings(_DESCRIPTION)
        saved.shared(SETTINGS)
        preprocessor = load_preprocessor(saved.folder)
        for name in preprocessor.files(saved.folder):
            saved.shared(name)
        check_room(f"the encoder of {saved.path}", 4 * preprocessor.sizes()[1], "train again")
        try:
            head = head_of(description["head"])
        except (RuntimeError, TypeError, ValueError, KeyError, OverflowError) as error:
            raise saved.damaged(error) from None
        encoder = preprocessor.encoder(device)
        change_layers(encoder, description["encoder"], device)
        model = nn.ModuleDict({"encoder": encoder, "head": head})
        _fill(saved, model, weights)
        texts = TextLines(saved.shared(LABELS)) if LABELS in saved.files else None
        if texts is not None and len(texts) != head.num_labels:
            raise saved.damaged(f"{LABELS} has {len(texts)} lines for {head.num_labels} labels")
        return cls(saved, model.to(device), device, model, preprocessor, texts)

    @property
    def num_labels(self) -> int:
        """Number of labels."""
        return self._head.num_labels

    def measure(self, config: XMCConfig, data: str | None) -> dict[str, float]:
        """Every measure, in percent: of the run's test part, or of that of another data set.

        That one has the same labels; propensities are those of its own training part.
        """
        if data is None:
            text = load(config)
        else:
            found = read_data(Path(data))
            if found.num_labels != self.num_labels:
                raise ValueError(
                    f"data={data} has {found.num_labels} labels, and the model {self.num_labels}: "
                    "give data with the same labels"
                )
            if found.label_texts is not None:
                self._check_names(data, found.label_texts)
            if isinstance(found.test, BagSplit) != self.preprocessor.reads_features:
                raise ValueError(
                    f"data={data} has {'features' if isinstance(found.test, BagSplit) else 'texts'}"
                    ", which the model does not read"
                )
            text = XMCText(found, found.train, self.preprocessor)
        return evaluate(config, text, self.modules)

    def predict_file(
        self,
        path: Path,
        out: BinaryIO,
        *,
        k: int | None = None,
        form: Form = "jsonl",
        batch: int = 256,
    ) -> int:
        """Write the most probable labels of every line of a file.

        A line is a text; for a model of a bag-of-words data set ``feature:value ...``. The file is
        read twice: once to check all of it before anything is written, and once batch by batch.
        Memory holds 8 bytes a line, and one batch. The last bits of scores may depend on ``batch``.
        """
        k = labels_wanted(k, self.num_labels)
        check_range("batch", batch, 1)
        if not path.is_file():
            raise FileNotFoundError(
                f"file={path} is not a file: give a file with one text per line"
            )
        lines = self.preprocessor.lines(path)
        if not len(lines):
            raise ValueError(f"file={path} is empty: give a text a line")
        return write_labels(self._predict(lines, k, batch), out, form)

    @torch.no_grad()
    def topk(self, instances: Any, k: int) -> tuple[Tensor, Tensor]:
        """The most probable labels of some instances.

        Args:
            instances: ``batch`` of them, as ``preprocessor`` reads them: texts or features.
            k: How many labels, at most ``num_labels``.

        Returns:
            Probabilities, FP32 ``(batch, k)``, descending: logistic functions of the logits, each
            label on its own; and labels, int64 ``(batch, k)``.
        """
        batch = to_device(self.preprocessor.read(instances), self.device)
        logits, labels = self._head.topk(self.modules["encoder"](batch), k)
        return sigmoid(logits), labels

    def names(self, labels: Sequence[int]) -> list[str] | None:
        """Texts of labels; ``None`` if the data set had none."""
        if self.label_texts is None:
            return None
        return [json.loads(text) for text in self.label_texts.read(labels)]

    def _check_names(self, data: str, texts: Texts) -> None:
        """Raise ValueError if other data calls a label otherwise."""
        for start in range(0, self.num_labels, _NAMES_AT_A_TIME):
            labels = range(start, min(start + _NAMES_AT_A_TIME, self.num_labels))
            pairs = zip(self.names(labels) or (), texts.read(labels), strict=False)
            for label, (mine, its) in zip(labels, pairs, strict=False):
                if mine != its:
                    raise ValueError(
                        f"data={data} calls label {label} {its!r:.80}, and the model "
                        f"{mine!r:.80}: give data with the same labels"
                    )

    @property
    def _head(self) -> Head:
        head = self.modules["head"]
        assert isinstance(head, Head)
        return head

    def _predict(self, lines: Lines[Any], k: int, batch: int) -> Iterator[list[Label]]:
        for start in range(0, len(lines), batch):
            chosen = lines.read(range(start, min(start + batch, len(lines))))
            scores, labels = (found.cpu().numpy() for found in self.topk(chosen, k))
            names = self.names(labels.reshape(-1).tolist())
            for row, numbers in enumerate(labels.tolist()):
                own = [None] * k if names is None else names[row * k : (row + 1) * k]
                found = zip(numbers, map(shortest, scores[row]), own, strict=True)
                yield [Label(*label) for label in found]


def _fill(saved: SavedModel, model: nn.ModuleDict, weights: Weights) -> None:
    """Give a model its tensors, all of them but what only training needs."""
    tensors, kept = saved.tensors(weights), set(model.state_dict())
    # They are made anew: a transformer has positions there.
    for name in {name for name, _ in model.named_buffers()} - kept:
        tensors.pop(name, None)
    try:
        model.load_state_dict(tensors, strict=False, assign=True)
    except (RuntimeError, ValueError) as error:
        raise saved.damaged(error) from None
    head = model["head"]
    for name, buffer in head.named_buffers():
        if buffer.is_meta:
            # What only training needs, which a module has nevertheless.
            setattr(head, name, torch.zeros(buffer.shape, dtype=buffer.dtype))
    wanted = set(model.state_dict()) - set(LEFT_OUT)
    found = set(tensors)
    if wanted != found:
        raise saved.damaged(f"wrong or missing tensors: {', '.join(sorted(wanted ^ found))}")
    model.requires_grad_(False).eval()
