"""Labelled pictures: data sets, bundled, drawn and read, and their training batches."""

from __future__ import annotations

import gzip
import io
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...data.batches import ShuffledBatches
from ...data.drawn import NAME
from .cifar10 import read_cifar10
from .generated import Generated

BUNDLED = "digits.csv.gz"
VALIDATION_SHARE = 0.2
_SIDE = 8


@dataclass(frozen=True)
class Images:
    """A data set of pictures, standardised.

    Attributes:
        name: What it is called in messages.
        train: FP32 ``(count, channels, height, width)``, mean 0 and variance 1 per channel.
        train_labels: int64 ``(count,)``.
        validation: As ``train``, with the mean and variance of ``train``.
        validation_labels: int64 ``(count,)``.
        classes: Number of classes.
        shift: Pixels by which a picture may be shifted without leaving its frame by much.
        mirror: Whether a mirrored picture has the same class.
        width: Channels that the first stage of a ResNet needs for them.
        mean: That of each channel of the training part before it was standardised, FP32
            ``(1, channels, 1, 1)``.
        deviation: The standard deviations, likewise.
    """

    name: str
    train: Tensor
    train_labels: Tensor
    validation: Tensor
    validation_labels: Tensor
    classes: int
    shift: int
    mirror: bool
    width: int
    mean: Tensor
    deviation: Tensor

    @property
    def channels(self) -> int:
        """Channels of a picture: 1 if grey, 3 in colour."""
        return self.train.shape[1]

    def validation_batches(self, size: int) -> list[tuple[Tensor, Tensor]]:
        """All validation pictures once, in their order."""
        return in_batches(self.validation, self.validation_labels, size)


def in_batches(pictures: Tensor, labels: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    """Pictures and their labels in their order."""
    return list(zip(torch.split(pictures, size), torch.split(labels, size), strict=True))


def standardised(pictures: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """Pictures of any dtype as a model takes them."""
    return (pictures.float() - mean) / deviation


def load_images(source: str) -> Images:
    """Read a data set.

    Args:
        source: ``"digits"``, ``"cifar10:DIR"``, or ``"generated"`` with the options of
            :class:`~.generated.Generated` behind a colon.

    Raises:
        ValueError: The source or an option is unknown, or a file is not what it should be.
        FileNotFoundError: A file is missing.
    """
    train, validation = read_images(source)
    if source == "digits":
        return _standardised(source, train, validation, shift=1, mirror=False, width=32)
    return _standardised(source, train, validation, shift=4, mirror=True, width=64)


Part = tuple[Tensor, Tensor]
"""Pictures, uint8 ``(count, channels, height, width)``, and labels, uint8 ``(count,)``."""


def read_images(source: str) -> tuple[Part, Part]:
    """The pictures of a data set as they are: to train, and to validate.

    Raises:
        ValueError, FileNotFoundError: See :func:`load_images`.
    """
    if source == "digits":
        return read_digits()
    scheme, _, place = source.partition(":")
    if scheme == NAME:
        return Generated.parse(place).draw()
    if scheme != "cifar10":
        raise ValueError(
            f"data={source} is unknown: use digits, {NAME}, or cifar10:DIR with the folder of "
            "CIFAR-10's binary version"
        )
    if not place:
        raise ValueError("data=cifar10: names no folder: give cifar10:DIR")
    return read_cifar10(Path(place))


def read_digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The bundled handwritten digits: 1,797 grey pictures of 8 x 8 pixels from 0 to 16.

    They stand in the order of their 13 writers, so the last fifth, which validates, is mostly by
    hands that the training part has not seen.

    Returns:
        Pictures, uint8 ``(count, 1, 8, 8)``, and labels from 0 to 9, uint8 ``(count,)``: to train,
        and to validate.
    """
    raw = gzip.decompress(resources.files(__package__).joinpath(BUNDLED).read_bytes())
    table = torch.from_numpy(np.loadtxt(io.BytesIO(raw), delimiter=",", dtype=np.uint8))
    pictures, labels = table[:, :-1].reshape(-1, 1, _SIDE, _SIDE), table[:, -1]
    cut = len(table) - int(len(table) * VALIDATION_SHARE)
    return (pictures[:cut], labels[:cut]), (pictures[cut:], labels[cut:])


def _standardised(
    name: str,
    train: Part,
    validation: Part,
    *,
    shift: int,
    mirror: bool,
    width: int,
) -> Images:
    deviation, mean = torch.std_mean(train[0].float(), (0, 2, 3), keepdim=True)
    return Images(
        name,
        standardised(train[0], mean, deviation),
        train[1].long(),
        standardised(validation[0], mean, deviation),
        validation[1].long(),
        10,
        shift,
        mirror,
        width,
        mean,
        deviation,
    )


class Batches:
    """Training batches of pictures, shuffled and perhaps augmented, as the seed alone decides.

    Args:
        images: What to draw from.
        batch_size: Pictures of a batch.
        seed: Seed of the generator that draws order and augmentation.
        augment: Shift and mirror at random.

    Attributes:
        shuffled: The order, which alone has a state.
    """

    def __init__(self, images: Images, batch_size: int, seed: int, *, augment: bool) -> None:
        self._images = images
        self._augment = augment
        self.shuffled = ShuffledBatches(len(images.train), batch_size, seed)

    def draw(self) -> tuple[Tensor, Tensor]:
        """The next FP32 pictures ``(batch_size, channels, height, width)`` and int64 labels."""
        chosen = self.shuffled.draw()
        pictures = self._images.train[chosen]
        if self._augment:
            pictures = self._moved(pictures)
        return pictures, self._images.train_labels[chosen]

    def _moved(self, pictures: Tensor) -> Tensor:
        count, channels, height, width = pictures.shape
        shift = self._images.shift
        offsets = torch.randint(2 * shift + 1, (2, count, 1), generator=self.shuffled.generator)
        rows = offsets[0] + torch.arange(height)
        columns = offsets[1] + torch.arange(width)
        if self._images.mirror:
            mirrored = torch.rand(count, generator=self.shuffled.generator) < 0.5
            columns[mirrored] = columns[mirrored].flip(1)
        # What comes into the frame looks like the frame's edge.
        padded = F.pad(pictures, [shift] * 4, mode="replicate")
        return padded[
            torch.arange(count)[:, None, None, None],
            torch.arange(channels)[:, None, None],
            rows[:, None, :, None],
            columns[:, None, None, :],
        ]
