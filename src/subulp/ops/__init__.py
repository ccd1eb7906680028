"""Fused passes over memory, one folder each, its implementations side by side.

A fused pass is one function that checks its arguments and runs the backend of their device. The
operator of ``torch.library`` is that function, registered for compiled and exported graphs. The
optimizers and modules run outside of graphs and call the function itself, for PyTorch's dispatcher
costs more than a small step: a step of one tensor takes 0.15 ms and 0.56 ms through the operator, a
step of fifty 0.48 ms and 1.25 ms (PyTorch 2.13, 256 elements each).

Steps of Adam and SGD share :mod:`.step`, Triton's kernels :mod:`.triton`. A new precision strategy
begins in :mod:`.strategy`, a new storage of rows in :data:`subulp.numerics.int_rows.ROW_FORMATS`.
"""

from .adam import adam_step
from .all_finite import all_finite
from .sgd import sgd_step
from .strategy import Strategy, parse_strategy

__all__ = ["Strategy", "adam_step", "all_finite", "parse_strategy", "sgd_step"]
