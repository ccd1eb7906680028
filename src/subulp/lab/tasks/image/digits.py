"""The bundled pictures: the optical recognition of handwritten digits data set."""

from __future__ import annotations

import gzip
import io
from importlib import resources

import numpy as np
import torch
from torch import Tensor

BUNDLED = "digits.csv.gz"
VALIDATION_SHARE = 0.2
_SIDE = 8


def read_digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """1,797 grey pictures of 8 x 8 pixels from 0 to 16.

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
