"""ResNet-18 for small pictures: a 3 x 3 stem without pooling (He et al., section 4.2)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ....nn import BatchNorm2d, Conv2d, Linear

_STAGES = 4
_BLOCKS = 2


class Shape(NamedTuple):
    """Sizes of a :class:`ResNet18`.

    Attributes:
        channels: Channels of a picture.
        classes: Number of them.
        width: Channels of the first of four stages, each twice as wide as the one before.
    """

    channels: int
    classes: int
    width: int

    @property
    def parameters(self) -> int:
        """Numbers of the model."""
        widths = [self.width << stage for stage in range(_STAGES)]
        total = 9 * self.channels * self.width + 2 * self.width
        for inside, outside in zip([self.width, *widths], widths, strict=False):
            # Four convolutions with their norms, and where the width changes a shortcut.
            total += 9 * (inside * outside + 3 * outside**2) + 8 * outside
            total += (inside * outside + 2 * outside) if inside != outside else 0
        return total + (widths[-1] + 1) * self.classes


class ResNet18(torch.nn.Module):
    """Pictures ``(batch, channels, height, width)`` to FP32 logits ``(batch, classes)``.

    Made in FP32 from torch's random generator; ``.to(dtype)`` makes its parameters narrow.
    Activations have the dtype of the input.

    Args:
        channels: Channels of a picture.
        classes: Number of them.
        width: Channels of the first of four stages, each twice as wide as the one before
            (default: 64).
    """

    def __init__(self, channels: int, classes: int, width: int = 64) -> None:
        super().__init__()
        self.stem = _convolution(channels, width)
        self.stem_norm = BatchNorm2d(width)
        self.blocks = torch.nn.ModuleList()
        inside = width
        for stage in range(_STAGES):
            outside = width << stage
            for block in range(_BLOCKS):
                stride = 2 if stage > 0 and block == 0 else 1
                self.blocks.append(Block(inside, outside, stride))
                inside = outside
        self.head = Linear(inside, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the classes."""
        x = F.relu(self.stem_norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.float().mean((2, 3)))
        return logits.float()


class Block(torch.nn.Module):
    """Two 3 x 3 convolutions and a shortcut, which is a 1 x 1 convolution where shapes differ."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = _convolution(inside, outside, stride=stride)
        self.first_norm = BatchNorm2d(outside)
        self.second = _convolution(outside, outside)
        self.second_norm = BatchNorm2d(outside)
        self.shortcut: torch.nn.Module = torch.nn.Identity()
        if stride != 1 or inside != outside:
            self.shortcut = torch.nn.Sequential(
                _convolution(inside, outside, kernel=1, stride=stride), BatchNorm2d(outside)
            )

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, inside, height, width)`` to ``(batch, outside, height / stride, ...)``."""
        y = F.relu(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y))
        return F.relu(y + self.shortcut(x))


def _convolution(inside: int, outside: int, *, kernel: int = 3, stride: int = 1) -> Conv2d:
    layer = Conv2d(inside, outside, kernel, stride, padding=kernel // 2, bias=False)
    torch.nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer
