"""Embedding tables that are parameters of an optimizer, which keeps extra bits of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ....nn import CachedEmbeddingBags, Embedding, EmbeddingTable
from ....nn.cached_table import CacheMemory
from ....numerics.extra_bits import packed_words


class ParameterTables(nn.Module):
    """Tables whose rows are in 16 bits, one row a category, with extra bits beside them.

    They are stepped by SGD without momentum, under which a row that is not in the batch stays as it
    is. Until :meth:`narrow` is called all rows are in FP32: the first ones are those of
    :class:`subulp.nn.CachedEmbeddingBags`, and an optimizer keeps them more exactly than 16 bits.

    Args:
        tables: Sizes of the tables.
        dtype: Of the rows, those of small tables excepted.
        bits: Extra bits.
        narrow_above: Tables of at most so many rows stay in FP32.
        seed: Of the first rows.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingTable],
        dtype: torch.dtype,
        bits: int,
        narrow_above: int,
        seed: int,
    ) -> None:
        super().__init__()
        self._dtype, self._bits, self._narrow_above = dtype, bits, narrow_above
        wide = [replace(config, storage="fp32", cache_fraction=0.0) for config in tables]
        first = CachedEmbeddingBags(wide, stacked=True, seed=seed)
        self.tables = nn.ModuleList()
        # The rows that an embedding draws for itself would change what is drawn after it.
        with torch.random.fork_rng(devices=[]):
            for i, config in enumerate(tables):
                table = Embedding(config.num_embeddings, config.embedding_dim)
                with torch.no_grad():
                    table.weight.copy_(first.weight_fp32(i))
                self.tables.append(table)

    def narrow(self) -> None:
        """Round the rows of large tables to nearest."""
        for table in self.tables:
            assert isinstance(table, Embedding)
            if table.num_embeddings > self._narrow_above:
                table.to(self._dtype)

    @property
    def features(self) -> list[int]:
        """The table of each feature."""
        return list(range(len(self.tables)))

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        """Look up one row a bag.

        Args:
            values: int64 ``(features * batch,)`` row numbers, feature by feature.
            lengths: int64 of the same shape, all of them 1.

        Returns:
            FP32 ``(batch, features, dim)``.
        """
        rows = values.view(len(self.tables), -1)
        looked_up = [table(own) for table, own in zip(self.tables, rows, strict=True)]
        return torch.stack(looked_up, 1)

    def memory(self) -> CacheMemory:
        """Bytes of all tables, the extra bits included."""
        total = CacheMemory()
        for p in self.parameters():
            narrow = p.dtype != torch.float32
            beside = 4 * packed_words(p.numel(), self._bits) if narrow else 0
            total += CacheMemory(codes=p.nbytes + beside, fp32=4 * p.numel())
        return total
