"""Layers whose parameters stay narrow while the arithmetic is wide."""

from .embedding import Embedding, narrow_embedding
from .layer_norm import LayerNorm
from .linear import Linear, narrow_linear

__all__ = ["Embedding", "LayerNorm", "Linear", "narrow_embedding", "narrow_linear"]
