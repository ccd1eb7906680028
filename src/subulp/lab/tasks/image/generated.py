"""Pictures that are drawn, in CIFAR-10's shape: bright lobed figures before dim clouds.

A figure's outline is a circle whose radius waves two to six times around it; it is filled, or a
ring. These ten are the classes. Place, size, proportions, angle and colours say nothing of them,
and a mirrored figure is one of its class.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...data.drawn import Drawn

_SIDE = 32
_LOBES = 5
_DEPTH = 0.35
"""Waves of the outline, as a share of the radius."""
_HOLE = 0.55
"""A ring's inner radius, as a share of the outer one."""
_CLOUDS = 4
"""Points of a cloud's grid along a side: colours between them are interpolated."""
_BLOCK = 1000
"""Pictures that are drawn at a time: they take a hundred megabytes."""

Array = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Generated(Drawn):
    """What is drawn.

    Attributes:
        pictures: All of them; the last sixth validates, as of CIFAR-10 (default: 6,000).
        noise: Standard deviation of what is added to each pixel, as a share of the whole range of
            colours (default: 0.3).
        seed: Of the draws (default: 0).

    Raises:
        ValueError: A number is out of range.
    """

    pictures: int = 6000
    noise: float = 0.3
    seed: int = 0

    _RANGES: ClassVar = {"pictures": (60, 10**6), "noise": (0, 10), "seed": (0, 2**32 - 1)}

    def draw(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Draw all pictures.

        Returns:
            Pictures, uint8 ``(count, 3, 32, 32)``, and labels from 0 to 9, uint8 ``(count,)``: to
            train, and to validate.
        """
        source = np.random.default_rng(self.seed)
        labels = source.integers(2 * _LOBES, size=self.pictures, dtype=np.uint8)
        drawn = np.concatenate(list(self._blocks(source, labels)))
        cut = self.pictures - self.pictures // 6
        pictures, classes = torch.from_numpy(drawn), torch.from_numpy(labels)
        return (pictures[:cut], classes[:cut]), (pictures[cut:], classes[cut:])

    def _blocks(
        self, source: np.random.Generator, labels: npt.NDArray[np.uint8]
    ) -> Iterator[npt.NDArray[np.uint8]]:
        for start in range(0, len(labels), _BLOCK):
            block = labels[start : start + _BLOCK]
            figure = _figures(source, block)[:, None]
            bright = 0.5 + 0.5 * source.random((len(block), 3, 1, 1), dtype=np.float32)
            dim = 0.5 * _clouds(source, len(block))
            pictures = figure * bright + (1 - figure) * dim
            pictures += self.noise * source.standard_normal(pictures.shape, dtype=np.float32)
            yield (255 * pictures.clip(0, 1)).round().astype(np.uint8)


def _figures(source: np.random.Generator, labels: npt.NDArray[np.uint8]) -> Array:
    """How much of each pixel a figure covers, ``(count, 32, 32)``."""

    def uniform(low: float, high: float) -> Array:
        return source.uniform(low, high, (len(labels), 1, 1)).astype(np.float32)

    lobes = (2 + labels % _LOBES)[:, None, None].astype(np.float32)
    ring = (labels >= _LOBES)[:, None, None]
    radius, stretch = uniform(8, 12), uniform(0.85, 1.15)
    pixels = np.arange(_SIDE, dtype=np.float32) - (_SIDE - 1) / 2
    down = (pixels[:, None] - uniform(-4, 4)) * stretch
    across = (pixels[None, :] - uniform(-4, 4)) / stretch
    angle = np.arctan2(down, across) + uniform(0, 2 * np.pi)
    outline = radius * (1 + _DEPTH * np.cos(lobes * angle)) / (1 + _DEPTH)
    distance = np.hypot(down, across)
    inside = (outline - distance + 0.5).clip(0, 1)
    hole = (_HOLE * outline - distance + 0.5).clip(0, 1)
    covered: Array = np.where(ring, inside - hole, inside).astype(np.float32)
    return covered


def _clouds(source: np.random.Generator, count: int) -> Array:
    """Colours that change slowly, ``(count, 3, 32, 32)``."""
    grid = torch.from_numpy(source.random((count, 3, _CLOUDS, _CLOUDS), dtype=np.float32))
    wide = torch.nn.functional.interpolate(
        grid, size=(_SIDE, _SIDE), mode="bilinear", align_corners=True
    )
    colours: Array = wide.numpy()
    return colours
