"""What every stored bit means: formats, rounding, random bits and narrow representations.

Plain PyTorch without state: this package is the oracle of every kernel in :mod:`subulp.ops`.
"""

from . import (
    expansion,
    extra_bits,
    ieee,
    int_rows,
    metrics,
    mixture,
    partition,
    random_bits,
    scaling,
)
from .formats import BF16, E4M3, E5M2, FP16, FP32, Format, format_of, simulated
from .rounding import Rounding, round_to

__all__ = [
    "BF16",
    "E4M3",
    "E5M2",
    "FP16",
    "FP32",
    "Format",
    "Rounding",
    "expansion",
    "extra_bits",
    "format_of",
    "ieee",
    "int_rows",
    "metrics",
    "mixture",
    "partition",
    "random_bits",
    "round_to",
    "scaling",
    "simulated",
]
