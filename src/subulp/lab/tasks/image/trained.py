"""Trained image classifiers: they name the classes of pictures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter
from torch import Tensor

from ...data.lines import fail, shown, single_lines, whole_lines
from ...data.regular import open_regular
from ...data.room import check_room
from ...engine.config import check_range
from ...engine.predictions import Label, shortest, write_labels
from ...engine.saved_model import SavedModel, Weights
from ...engine.trained import Form, TrainedModel, labels_wanted
from .config import ImageConfig
from .images import in_batches, load_images, read_images, standardised
from .resnet import ResNet18, Shape
from .task import EVALUATION_BATCH, Computing, evaluate

_MOST_CHANNELS = 16
_LARGEST_SIDE = 1 << 12
_NPY = b"\x93NUMPY"


@dataclass(frozen=True)
class Built:
    """What a model is built from.

    Attributes:
        shape: Its sizes.
        computing: How it computes.
        side: Height and width of a picture.
        mean: Mean of each channel of the training part.
        deviation: Standard deviation of each.
    """

    shape: dict[str, int]
    computing: dict[str, str]
    side: int
    mean: list[float]
    deviation: list[float]


_BUILT = TypeAdapter(Built)


@dataclass(frozen=True, eq=False)
class Trained(TrainedModel):
    """An image classifier.

    Attributes:
        built: What it was built from.
    """

    built: Built

    uses: ClassVar[str] = "predict"

    @classmethod
    def of(cls, saved: SavedModel, weights: Weights, device: torch.device) -> Self:
        """Build a model."""
        built = saved.settings(_BUILT)
        try:
            shape = Shape(**built.shape)
            with torch.device("meta"):
                model = ResNet18(*shape)
            Computing(**built.computing).logits(model, device)  # type: ignore[arg-type]
        except (RuntimeError, TypeError, ValueError, OverflowError, KeyError) as error:
            raise saved.damaged(error) from None
        sizes = {len(built.mean), len(built.deviation), shape.channels}
        if len(sizes) > 1 or not 1 <= shape.channels <= _MOST_CHANNELS:
            raise saved.damaged("its channels contradict each other")
        if not 1 <= built.side <= _LARGEST_SIDE:
            raise saved.damaged(f"its pictures have side={built.side}")
        saved.fill(model, weights)
        if weights == "full":
            built = Built(**{**vars(built), "computing": {"precision": "fp32", "dtype": "bf16"}})
        return cls(saved, model.to(device), device, built)

    def measure(self, config: ImageConfig, data: str | None) -> dict[str, float]:
        """Loss and accuracy: of the validation part of the run's data or of another data set."""
        if data is None:
            images = load_images(config.data)
            batches = images.validation_batches(EVALUATION_BATCH)
        else:
            _, (pictures, labels) = read_images(data)
            self._check(pictures, f"data={data}")
            batches = in_batches(self._standardised(pictures), labels.long(), EVALUATION_BATCH)
        return evaluate(self.model, self._logits, batches)

    def predict_file(
        self,
        path: Path,
        out: BinaryIO,
        *,
        k: int | None = None,
        form: Form = "jsonl",
        batch: int = 256,
    ) -> int:
        """Write the most probable classes of every picture of a file.

        The file is a NumPy array, ``.npy``, of uint8 ``(count, channels, height, width)``; or text,
        a picture a line, its numbers in that order with commas between them; plain or ``.gz``.
        """
        classes = self.built.shape["classes"]
        check_range("batch", batch, 1)
        k = labels_wanted(k, classes)
        pictures = self._read(path)
        return write_labels(self._predict(pictures, k, batch), out, form)

    @torch.no_grad()
    def topk(self, pictures: Tensor, k: int = 5) -> tuple[Tensor, Tensor]:
        """The most probable classes.

        Args:
            pictures: As the data set has them, uint8 or float ``(count, channels, side, side)``.
            k: How many, at most as many as there are (default: 5).

        Returns:
            Probabilities, FP32 ``(count, k)``, descending, and classes, int64 ``(count, k)``.

        Raises:
            ValueError: The pictures have another shape.
        """
        self._check(pictures, "pictures")
        check_range("k", k, 1, self.built.shape["classes"])
        found = self._logits(self._standardised(pictures)).softmax(1).cpu().topk(k)
        return found.values, found.indices

    def _predict(self, pictures: Tensor, k: int, batch: int) -> Iterator[list[Label]]:
        for part in torch.split(pictures, batch):
            scores, classes = self.topk(part, k)
            for row, numbers in zip(scores.numpy(), classes.tolist(), strict=True):
                yield [
                    Label(number, shortest(score), None)
                    for number, score in zip(numbers, row, strict=True)
                ]

    def _logits(self, pictures: Tensor) -> Tensor:
        computing = Computing(**self.built.computing)  # type: ignore[arg-type]
        return computing.logits(self.model, self.device)(pictures)

    def _standardised(self, pictures: Tensor) -> Tensor:
        mean, deviation = (
            torch.tensor(values).view(1, -1, 1, 1)
            for values in (self.built.mean, self.built.deviation)
        )
        return standardised(pictures, mean, deviation)

    @property
    def _shape(self) -> tuple[int, int, int]:
        return self.built.shape["channels"], self.built.side, self.built.side

    def _check(self, pictures: Tensor, what: str) -> None:
        if pictures.dim() != 4 or tuple(pictures.shape[1:]) != self._shape:
            sizes = ", ".join(map(str, self._shape))
            raise ValueError(
                f"{what} has the shape {tuple(pictures.shape)}: the model takes (count, {sizes})"
            )

    def _read(self, path: Path) -> Tensor:
        with open_regular(path) as file:
            is_array = file.read(len(_NPY)) == _NPY
        pictures = _read_array(path) if is_array else _read_lines(path, self._shape)
        if not len(pictures):
            raise ValueError(f"file={path} has no picture: give one a line")
        self._check(pictures, f"file={path}")
        return pictures


def _read_array(path: Path) -> Tensor:
    try:
        # Mapped, and no objects: a header alone allocates nothing and runs nothing.
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"file={path} is not a whole NumPy array: {error}") from None
    if array.dtype != np.uint8:
        raise ValueError(
            f"file={path} has the dtype {array.dtype}: expected uint8, the pixels as the data set "
            "has them"
        )
    check_room(f"file={path}", 2 * array.nbytes, "give fewer pictures at a time")
    return torch.from_numpy(np.array(array))


def _read_lines(path: Path, shape: tuple[int, int, int]) -> Tensor:
    """A picture a line."""
    numbers = int(np.prod(shape))
    found: list[NDArray[np.uint8]] = []
    for line, block in whole_lines(path):
        for place, raw in enumerate(single_lines(block), line):
            text = raw.removesuffix(b"\r")
            if text.strip():
                found.append(_pixels(path, place, text, numbers))
    stacked = np.stack(found) if found else np.zeros((0, numbers), np.uint8)
    return torch.from_numpy(stacked).reshape(-1, *shape)


def _pixels(path: Path, line: int, text: bytes, count: int) -> NDArray[np.uint8]:
    fields = [field.strip() for field in text.split(b",")]
    if len(fields) != count:
        fail(path, line, f"{len(fields)} numbers: expected {count}, separated by commas")
    for field in fields:
        if not field.isdigit() or len(field) > 3 or int(field) > 255:
            fail(path, line, f"expected a number from 0 to 255, found {shown(field)}")
    return np.array([int(field) for field in fields], np.uint8)
