"""Optimizers of dense parameters, with a choice of how parameters and states are stored."""

from . import torch_guard  # noqa: F401
from .adam import Adam, AdamW
from .average import AveragedModel
from .backward import FusedBackward, fuse_backward
from .options import ExtraBits, parse_precision
from .rows import RowAdagrad, RowSGD
from .sgd import SGD

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "AveragedModel",
    "ExtraBits",
    "FusedBackward",
    "RowAdagrad",
    "RowSGD",
    "fuse_backward",
    "parse_precision",
]
