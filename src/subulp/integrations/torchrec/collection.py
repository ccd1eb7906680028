"""An ``EmbeddingBagCollection`` of one process, with narrow rows and a cache.

::

    sparse = CachedEmbeddingBagCollection(tables, storage="int4", cache_fraction=0.05)
    optimizer = optim.RowAdagrad(sparse.bags, lr=0.05)
    model = torchrec.models.dlrm.DLRM(sparse, ...)
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Self

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from ...nn.cached_embedding_bag import CachedEmbeddingBags, Mode
from ...nn.cached_table import CachedTable, EmbeddingTable


class CachedEmbeddingBagCollection(EmbeddingBagCollectionInterface):  # type: ignore[misc]
    """``EmbeddingBagCollection`` whose tables are :class:`subulp.nn.CachedEmbeddingBags`.

    ``KeyedJaggedTensor`` in, ``KeyedTensor`` out, of the same keys. The rows update themselves in
    the backward pass, by ``optim.RowAdagrad(collection.bags, lr=...)``; they have no gradients, and
    no other optimizer steps them. For several ranks, see :class:`.sharding.CachedEmbeddingSharder`.

    Rows begin as the tables' ``init_fn`` says, rounded to nearest; where it is not TorchRec's
    default one, a table is made in FP32 for it, one after another.

    Args:
        tables: The tables and their features, as of ``EmbeddingBagCollection``.
        is_weighted: Whether batches have weights, which the rows are multiplied by (default:
            ``False``).
        device: Device of the tables (default: torch's).
        options_of: Options of single tables by name, which take precedence over ``options``.
        narrow_above: Tables of at most this many rows stay in FP32 without a cache (default: 1000).
        seed: Seed of rounding and of initial rows; ``None`` follows ``torch.manual_seed``
            (default: ``None``).
        options: Of all tables: ``storage``, ``cache_fraction``, ``policy``, ``ways``, ``rounding``
            and ``hash`` of :class:`subulp.nn.EmbeddingTable`.

    Attributes:
        bags: The tables.

    Raises:
        ValueError: Tables have equal names or pool in different ways, ``options_of`` names an
            unknown one, or an option is out of range.
    """

    bags: CachedEmbeddingBags

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        *,
        options_of: Mapping[str, Mapping[str, Any]] | None = None,
        narrow_above: int = 1000,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._configs, self._weighted = list(tables), is_weighted
        names = [config.name for config in tables]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"tables share the names {twice}: give each a name of its own")
        if unknown := sorted((options_of or {}).keys() - set(names)):
            raise ValueError(f"options_of names {unknown}: the tables are {names}")
        of_table = {field.name for field in fields(EmbeddingTable)}
        for name, own in (("", options), *(options_of or {}).items()):
            if unknown := sorted(own.keys() - of_table):
                where = f"options_of[{name!r}]" if name else type(self).__name__
                raise ValueError(f"{where} has no option {unknown[0]!r}: see EmbeddingTable")
        for config in tables:
            # As EmbeddingBagCollection has it.
            config.feature_names = config.feature_names or [config.name]
        of_tables = get_embedding_names_by_table(self._configs)
        self._keys = [key for of_table in of_tables for key in of_table]
        self._features = [name for config in tables for name in config.feature_names]
        features = [t for t, config in enumerate(tables) for _ in config.feature_names]
        self._dims = [tables[t].embedding_dim for t in features]
        self.bags = CachedEmbeddingBags(
            [
                EmbeddingTable(
                    config.num_embeddings,
                    config.embedding_dim,
                    **{**options, **(options_of or {}).get(config.name, {})},
                )
                for config in tables
            ],
            narrow_above,
            features=features,
            mode=mode_of(self._configs),
            seed=seed,
            device=device,
        )
        self._fill()

    def reset_parameters(self) -> None:
        """Be as new: initial rows, nothing cached or counted, and no updates."""
        self.bags.reset_parameters()
        self._fill()

    def _fill(self) -> None:
        """Draw the rows of tables that say how, as ``init_fn`` or bounds."""
        for t, config in enumerate(self._configs):
            if self.device.type != "meta" and not _is_default(config):
                shape = config.num_embeddings, config.embedding_dim
                weight = torch.empty(shape, dtype=torch.float32, device=self.device)
                config.init_fn(weight)
                self._table(t).load(weight)

    @classmethod
    def from_embedding_bag_collection(
        cls, collection: EmbeddingBagCollection, **options: Any
    ) -> Self:
        """Make one with the tables and the weights of a collection, rounded to nearest.

        Args:
            collection: The collection; left as it is. If it is on ``"meta"``, so are the tables.
                Tables that are frozen, and ``eval()``, are taken over.
            options: All arguments but the first three.
        """
        configs = collection.embedding_bag_configs()
        # Their initial rows would be lost at once.
        plain = [replace(config, init_fn=None) for config in configs]
        made = cls(plain, collection.is_weighted(), collection.device, **options)
        made._configs = list(configs)
        for t, config in enumerate(configs):
            weight = collection.embedding_bags[config.name].weight
            if not weight.is_meta:
                made._table(t).load(weight.detach().float())
            made._table(t).codes.requires_grad_(weight.requires_grad)
        made.train(collection.training)
        return made

    def to_embedding_bag_collection(self) -> EmbeddingBagCollection:
        """A collection with these tables' rows, cached ones from the cache, as its weights.

        Returns:
            On the same device, in the ``data_type`` of each table.
        """
        # Its initial rows, which are lost at once, are not drawn from the numbers of a training.
        drawn_on = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(drawn_on):
            made = EmbeddingBagCollection(self._configs, self._weighted, self.device)
        if self.device.type != "meta":
            with torch.no_grad():
                for t, config in enumerate(self._configs):
                    rows = self._table(t).weight_slice(0, config.num_embeddings)
                    made.embedding_bags[config.name].weight.copy_(rows)
        return made

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look up the bags of all features.

        Args:
            features: int32 or int64 row numbers by feature; keys in any order, further ones are
                left out.

        Returns:
            FP32 ``(batch, sum of dims)`` by key; zeros for an empty bag.

        Raises:
            ValueError: Features are missing or there twice, keys have batches of different sizes,
                lengths or offsets do not fit the values, or the batch has inverse indices, or no
                weights where it must.
            IndexError: A row number is out of range.
        """
        features = in_order(maybe_td_to_kjt(features, None), self._features)
        sums = self.bags(
            features.values(),
            features.lengths(),
            per_sample_weights=weights_of(features) if self._weighted else None,
        )
        return KeyedTensor(self._keys, self._dims, sums)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables."""
        return self._configs

    def is_weighted(self) -> bool:
        """Whether batches have weights."""
        return self._weighted

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return self.bags.statistics.device

    def _table(self, index: int) -> CachedTable:
        table = self.bags.tables[index]
        assert isinstance(table, CachedTable)
        return table


def in_order(features: KeyedJaggedTensor, names: list[str]) -> KeyedJaggedTensor:
    """The features of these names, in their order.

    Raises:
        ValueError: Some are missing or there twice, bags cannot be told from their lengths, or
            these do not fit the values: permute() would read whatever comes after them in memory.
            The last is not looked at on a GPU.
    """
    if features.variable_stride_per_key() and len(set(features.stride_per_key())) > 1:
        raise ValueError("the keys have batches of different sizes: give all keys the same")
    if features.inverse_indices_or_none() is not None:
        raise ValueError(
            "the batch has inverse indices, which say how to repeat its bags: pass the repeated "
            "batch without them"
        )
    found = features.keys()
    place = {name: i for i, name in enumerate(found)}
    if len(place) < len(found):
        twice = sorted({name for name in names if found.count(name) > 1})
        if twice:
            raise ValueError(f"the features {twice} are there twice: the batch has {found}")
    if missing := [name for name in names if name not in place]:
        raise ValueError(f"the features {missing} are missing: the batch has {found}")
    _check_values(features)
    return features if found == names else features.permute([place[name] for name in names])


def weights_of(features: KeyedJaggedTensor) -> Tensor:
    """The weights that a batch must have.

    Raises:
        ValueError: It has none.
    """
    if features.weights_or_none() is None:
        raise ValueError("is_weighted=True, and the batch has no weights: give it some")
    weights: Tensor = features.weights()
    return weights


def _check_values(features: KeyedJaggedTensor) -> None:
    values = features.values()
    # On a GPU the host would have to wait for them, in every step; and a program has none yet.
    if not values.is_cpu or torch.compiler.is_exporting():
        return
    # Offsets that a batch was made with count from where they please, and lengths follow them.
    lengths = features.lengths()
    count = int(lengths.sum()) if lengths.numel() else 0
    if lengths.numel() and int(lengths.min()) < 0:
        raise ValueError(f"lengths are negative, down to {int(lengths.min())}")
    offsets = features.offsets_or_none()
    if offsets is not None and offsets.numel() and int(offsets[0]) != 0:
        raise ValueError(f"offsets begin at {int(offsets[0])}: expected 0")
    if count != values.numel():
        raise ValueError(f"the bags have {count} row numbers, and there are {values.numel()}")
    weights = features.weights_or_none()
    if weights is not None and weights.numel() < count:
        raise ValueError(f"there are {weights.numel()} weights for {count} row numbers")


def mode_of(configs: Sequence[EmbeddingBagConfig]) -> Mode:
    """How the tables pool.

    Raises:
        ValueError: Not all alike.
    """
    kinds = {config.pooling for config in configs}
    if len(kinds) > 1:
        raise ValueError(
            "tables of one EmbeddingBagCollection pool by sum and by mean: make one for each"
        )
    return "sum" if kinds == {PoolingType.SUM} else "mean"


def _is_default(config: EmbeddingBagConfig) -> bool:
    """Whether rows begin as ours do anyway: uniform in ``[-1 / sqrt(rows), 1 / sqrt(rows))``."""
    given = config.init_fn
    default = replace(config, init_fn=None, weight_init_min=None, weight_init_max=None).init_fn
    return (
        isinstance(given, functools.partial)
        and given.func is default.func
        and (given.args, given.keywords) == (default.args, default.keywords)
    )
