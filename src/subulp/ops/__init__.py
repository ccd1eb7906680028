"""Fused passes over memory, one folder each, its implementations side by side."""

from .adam import adam_step
from .all_finite import all_finite
from .sgd import sgd_step
from .strategy import Strategy, parse_strategy

__all__ = ["Strategy", "adam_step", "all_finite", "parse_strategy", "sgd_step"]
