"""TorchRec: its collections of embedding tables with narrow rows and a cache, whole or sharded."""

from .collection import CachedEmbeddingBagCollection
from .sharding import (
    CachedEmbeddingSharder,
    CachedStorageEstimator,
    KeyedRowOptimizer,
    ShardedCachedEmbeddingBagCollection,
)

__all__ = [
    "CachedEmbeddingBagCollection",
    "CachedEmbeddingSharder",
    "CachedStorageEstimator",
    "KeyedRowOptimizer",
    "ShardedCachedEmbeddingBagCollection",
]
