"""Hugging Face Transformers: ``Trainer`` with our optimizers, mixtures in models' configs."""

from .mixtures import MoRConfig, convert_to_mor
from .optimizer import optimizer_cls_and_kwargs
from .trainer import FusedBackwardCallback

__all__ = ["FusedBackwardCallback", "MoRConfig", "convert_to_mor", "optimizer_cls_and_kwargs"]
