"""Optimizers of tables whose rows update themselves."""

from .adagrad import RowAdagrad
from .sgd import RowSGD

__all__ = ["RowAdagrad", "RowSGD"]
