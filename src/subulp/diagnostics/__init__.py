"""What was lost and what it costs: descent quality, lost updates, exponents, mixes, memory."""

from .exponents import ExponentHistogram, exponent_histogram
from .memory import track_memory
from .representation_mix import (
    MeanMix,
    MixRecord,
    OperandMix,
    RepresentationMix,
    record_mix,
    representation_mix,
)
from .watch import Descent, Watch, watch

__all__ = [
    "Descent",
    "ExponentHistogram",
    "MeanMix",
    "MixRecord",
    "OperandMix",
    "RepresentationMix",
    "Watch",
    "exponent_histogram",
    "record_mix",
    "representation_mix",
    "track_memory",
    "watch",
]
