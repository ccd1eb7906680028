"""Optimizers of dense parameters, with a choice of how parameters and states are stored."""

from .adam import Adam, AdamW
from .fuse import fuse_backward
from .fused_backward import FusedBackward
from .precision import ExtraBits, parse_precision
from .row_adagrad import RowAdagrad
from .row_sgd import RowSGD
from .sgd import SGD

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "ExtraBits",
    "FusedBackward",
    "RowAdagrad",
    "RowSGD",
    "fuse_backward",
    "parse_precision",
]
