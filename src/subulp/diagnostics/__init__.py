"""What was lost and what it costs: descent quality, lost updates, exponents, memory."""

from .exponents import ExponentHistogram, exponent_histogram
from .memory import track_memory
from .watch import Descent, Watch, watch

__all__ = [
    "Descent",
    "ExponentHistogram",
    "Watch",
    "exponent_histogram",
    "track_memory",
    "watch",
]
