"""Layers whose parameters stay narrow while the arithmetic is wide."""

from .cached_embedding_bag import CachedEmbeddingBag, CachedEmbeddingBags
from .cached_table import CacheMemory, EmbeddingTable
from .conv import Conv2d, narrow_conv2d
from .embedding import Embedding, narrow_embedding
from .extreme_classifier import ExtremeClassifier
from .head_operators import classifier_loss, classifier_topk
from .linear import Linear, narrow_linear
from .mor import MoR
from .mor_convert import Conversion, convert_from_mor, convert_to_mor
from .mor_linear import MoRLinear, mor_linear
from .normalization import BatchNorm2d, LayerNorm
from .placement import ColumnWise, RowWise, TableWise
from .refine import refine
from .row_table import RowTable
from .sharded_embedding_bags import ShardedCachedEmbeddingBags

__all__ = [
    "BatchNorm2d",
    "CacheMemory",
    "CachedEmbeddingBag",
    "CachedEmbeddingBags",
    "ColumnWise",
    "Conv2d",
    "Conversion",
    "Embedding",
    "EmbeddingTable",
    "ExtremeClassifier",
    "LayerNorm",
    "Linear",
    "MoR",
    "MoRLinear",
    "RowTable",
    "RowWise",
    "ShardedCachedEmbeddingBags",
    "TableWise",
    "classifier_loss",
    "classifier_topk",
    "convert_from_mor",
    "convert_to_mor",
    "mor_linear",
    "narrow_conv2d",
    "narrow_embedding",
    "narrow_linear",
    "refine",
]
