"""TorchRec: its planner and its DistributedModelParallel, with narrow rows and a cache.

A model with TorchRec's ``EmbeddingBagCollection`` stays as it is; :class:`CachedEmbeddingSharder`
takes the place of ``EmbeddingBagCollectionSharder``, and the tables become
:class:`subulp.nn.ShardedCachedEmbeddingBags`::

    sharder = CachedEmbeddingSharder(storage="int4", cache_fraction=0.05)
    planner = sharder.planner(topology)
    plan = planner.collective_plan(model, [sharder], distributed.group.WORLD)
    model = DistributedModelParallel(model, plan=plan, sharders=[sharder])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding_types import BaseEmbeddingSharder, EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    ShardEstimator,
    ShardingOption,
    Storage,
    Topology,
)
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    LazyNoWait,
    NoWait,
    ParameterSharding,
    ShardedModule,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    get_embedding_names_by_table,
)
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import KeyedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from ...nn.cached_embedding_bag import bag_configs
from ...nn.cached_lookup import CachedLookup
from ...nn.cached_table import EmbeddingTable
from ...nn.placement import ColumnWise, PlacedPart, Placement, RowWise, TableWise
from ...nn.sharded_embedding_bags import ShardedCachedEmbeddingBags, Wire
from ...optim.rows.adagrad import RowAdagrad
from ...optim.rows.base import RowOptimizer
from .collection import in_order, mode_of, weights_of

_TYPES = (
    ShardingType.TABLE_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.COLUMN_WISE.value,
    ShardingType.TABLE_COLUMN_WISE.value,
)


class CachedEmbeddingSharder(BaseEmbeddingSharder[EmbeddingBagCollection]):  # type: ignore[misc]
    """Shards an ``EmbeddingBagCollection`` into narrow rows with an FP32 cache.

    Tables are placed whole, by rows or by columns, on the CPU too. Where a plan splits columns, a
    part is a table of its own, and the planner's number of parts decides the bits.

    Args:
        optimizer: Makes the optimizer of the rows (default: ``RowAdagrad``).
        tables: Options of single tables by name, which take precedence over ``options``.
        narrow_above: Tables of at most this many rows stay in FP32 without a cache (default:
            1000).
        wire: See :class:`subulp.nn.ShardedCachedEmbeddingBags` (default: ``"fp32"``).
        seed: Seed of rounding, and of initial rows where the collection is on ``"meta"``; ``None``
            follows rank 0's ``torch.manual_seed`` (default: ``None``).
        options: Of all tables: ``storage``, ``cache_fraction``, ``policy``, ``ways``, ``rounding``
            and ``hash`` of :class:`subulp.nn.EmbeddingTable`.
    """

    def __init__(
        self,
        optimizer: Callable[[Any], RowOptimizer] = RowAdagrad,
        tables: Mapping[str, Mapping[str, Any]] | None = None,
        narrow_above: int = 1000,
        wire: Wire = "fp32",
        seed: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.optimizer, self.wire, self.seed = optimizer, wire, seed
        self._tables, self._options = dict(tables or {}), options
        self._narrow_above = narrow_above

    @property
    def module_type(self) -> Any:
        """What it shards."""
        return EmbeddingBagCollection

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Table-wise, row-wise and column-wise."""
        return list(_TYPES)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Fused: the rows update themselves in the backward pass."""
        return [EmbeddingComputeKernel.FUSED.value]

    def shardable_parameters(self, module: EmbeddingBagCollection) -> dict[str, torch.nn.Parameter]:
        """The tables by name."""
        named = module.embedding_bags.named_parameters()
        return {name.split(".")[0]: weight for name, weight in named}

    def config(self, table: EmbeddingBagConfig) -> EmbeddingTable:
        """How a table is stored, cached and rounded.

        Raises:
            ValueError: An option is out of range.
        """
        options = {**self._options, **self._tables.get(table.name, {})}
        made = EmbeddingTable(table.num_embeddings, table.embedding_dim, **options)
        return bag_configs([made], self._narrow_above, None, "sum", False)[0][0]

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedCachedEmbeddingBagCollection:
        """The tables of a collection, as a plan places them; its weights are rounded into them."""
        return ShardedCachedEmbeddingBagCollection(module, params, env, device, self)

    def shard_bytes(self, option: ShardingOption, ranks: int) -> list[int]:
        """Bytes of each shard of an option of a plan: rows, cache and the optimizer's state."""
        configs = option.module[1].embedding_bag_configs()
        config = self.config(next(c for c in configs if c.name == option.name))
        if option.sharding_type == ShardingType.ROW_WISE.value:
            whole = PlacedPart(0, config, 0, config.embedding_dim, None)
            parts = [whole.on(rank, ranks) for rank in range(ranks)]
        else:
            columns = [(shard.offset[1], shard.size[1]) for shard in option.shards]
            parts = [PlacedPart(0, config, at, dim, 0).on(0, 1) for at, dim in columns]
        found = []
        for part in parts:
            lookup = CachedLookup([config], [0], 0, "meta", [(0, part)])
            # The module refers to it.
            self.optimizer(lookup)
            memory = lookup.memory()
            found.append(memory.total + memory.optimizer)
        return found

    def planner(
        self,
        topology: Topology,
        batch_size: int = 512,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        **options: Any,
    ) -> EmbeddingShardingPlanner:
        """TorchRec's planner, whose storage estimate is what the tables take.

        Args:
            topology: The devices.
            batch_size: Examples of a rank (default: 512).
            constraints: Of single tables, by name.
            options: Further arguments of ``EmbeddingShardingPlanner``.
        """
        estimators = [
            EmbeddingPerfEstimator(topology=topology, constraints=constraints),
            CachedStorageEstimator(topology, self),
        ]
        enumerator = EmbeddingEnumerator(
            topology=topology, batch_size=batch_size, constraints=constraints, estimator=estimators
        )
        return EmbeddingShardingPlanner(
            topology=topology,
            batch_size=batch_size,
            enumerator=enumerator,
            constraints=constraints,
            **options,
        )


class CachedStorageEstimator(ShardEstimator):  # type: ignore[misc]
    """The bytes of each shard of tables that :class:`CachedEmbeddingSharder` shards.

    What is kept: rows, scales and biases, cache, tags, counters and the optimizer's state. Buffers
    of lookups on their way are not counted.

    Args:
        topology: The devices.
        sharder: The sharder.
    """

    def __init__(self, topology: Topology, sharder: CachedEmbeddingSharder) -> None:
        self._topology, self._sharder = topology, sharder

    def estimate(
        self, sharding_options: list[ShardingOption], sharder_data_map: object = None
    ) -> None:
        """Set the storage of all shards."""
        on_host = self._topology.compute_device == "cpu"
        for option in sharding_options:
            sizes = self._sharder.shard_bytes(option, self._topology.world_size)
            for shard, size in zip(option.shards, sizes, strict=True):
                shard.storage = Storage(hbm=0 if on_host else size, ddr=size if on_host else 0)


class ShardedCachedEmbeddingBagCollection(ShardedModule, FusedOptimizerModule):  # type: ignore[misc]
    """``KeyedJaggedTensor`` in, ``KeyedTensor`` out; the rows update themselves.

    Made by :class:`CachedEmbeddingSharder`. As TorchRec does unless
    ``set_gradient_division(False)`` was called, gradients of rows are divided by the number of
    ranks, to go with ``DistributedDataParallel``'s mean.

    Args:
        module: The collection.
        params: The plan, by table.
        env: The process group.
        device: Device of the tables.
        sharder: The options.

    Attributes:
        bags: The tables, see :class:`subulp.nn.ShardedCachedEmbeddingBags`.

    Raises:
        ValueError: Tables pool in different ways, or the plan cannot be followed.
    """

    bags: ShardedCachedEmbeddingBags

    def __init__(
        self,
        module: EmbeddingBagCollection,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None,
        sharder: CachedEmbeddingSharder,
    ) -> None:
        super().__init__()
        configs = module.embedding_bag_configs()
        names = get_embedding_names_by_table(configs)
        self._keys = [name for of_table in names for name in of_table]
        self._features = [f for config in configs for f in config.feature_names]
        self._weighted = module.is_weighted()
        tables = [t for t, config in enumerate(configs) for _ in config.feature_names]
        self._dims = [configs[t].embedding_dim for t in tables]
        self._names = [config.name for config in configs]
        device = torch.device("cpu") if device is None else device
        self.bags = ShardedCachedEmbeddingBags(
            [sharder.config(config) for config in configs],
            DeviceMesh.from_group(env.process_group, device.type),
            [placement_of(config.name, params[config.name]) for config in configs],
            0,
            features=tables,
            mode=mode_of(configs),
            wire=sharder.wire,
            seed=sharder.seed,
        )
        weights = [module.embedding_bags[config.name].weight for config in configs]
        for t, weight in enumerate(weights):
            if not weight.is_meta:
                self.bags.load_weights(t, weight.detach().float())
        for placed, rows in zip(self.bags.placed, self.bags.row_parameters, strict=True):
            rows.requires_grad_(weights[placed.table].requires_grad)
        self.train(module.training)
        self._optimizer = KeyedRowOptimizer(self.bags, sharder.optimizer(self.bags), self._names)
        for rows in self.bags.row_parameters:
            # So that TorchRec's in_backward_optimizer_filter leaves them out.
            rows._in_backward_optimizers = [self._optimizer]  # type: ignore[attr-defined]

    def create_context(self) -> None:
        """Nothing is kept between the stages."""

    def input_dist(
        self, ctx: None, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """The features as they are: lookups and sums travel together, in :meth:`compute`."""
        return NoWait(NoWait(features))

    def compute(self, ctx: None, dist_input: KeyedJaggedTensor) -> Tensor:
        """The sums of this rank's bags.

        Raises:
            ValueError: See :meth:`.CachedEmbeddingBagCollection.forward`; on any rank.
        """
        try:
            features = in_order(dist_input, self._features)
            weights = weights_of(features) if self._weighted else None
        except Exception as fault:
            # The other ranks are about to exchange their lookups.
            self.bags.refuse(fault)
        out: Tensor = self.bags(features.values(), features.lengths(), per_sample_weights=weights)
        ranks = self.bags.ranks.size
        if out.requires_grad and ranks > 1 and get_gradient_division():
            out.register_hook(lambda grad: grad / ranks)  # type: ignore[no-untyped-call]
        return out

    def output_dist(self, ctx: None, output: Tensor) -> LazyAwaitable[KeyedTensor]:
        """The sums by key."""
        return LazyNoWait(KeyedTensor(self._keys, self._dims, output))

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizer of the rows, its state by table."""
        return self._optimizer

    @property
    def unsharded_module_type(self) -> Any:
        """What was sharded."""
        return EmbeddingBagCollection

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """What ``DistributedDataParallel`` must leave alone: rows, and the caches with them."""
        yield from (name for name, _ in self.named_parameters(prefix))
        yield from (name for name, _ in self.named_buffers(prefix))

    def copy_weights_to(self, module: EmbeddingBagCollection) -> None:
        """Write the FP32 rows, cached ones from the cache, into a collection; called by all ranks.

        Args:
            module: The collection, whole on every rank.
        """
        with torch.no_grad():
            for t, name in enumerate(self._names):
                module.embedding_bags[name].weight.copy_(self.bags.weight_fp32(t))


class KeyedRowOptimizer(KeyedOptimizer):  # type: ignore[misc]
    """The optimizer of the rows by the names of the tables.

    Args:
        bags: The tables.
        optimizer: Their optimizer.
        names: Names of the tables; the parts of one that is split by columns are numbered.
    """

    def __init__(
        self, bags: ShardedCachedEmbeddingBags, optimizer: RowOptimizer, names: list[str]
    ) -> None:
        self._rows, self._split = optimizer, bags
        tables = [placed.table for placed in bags.placed]
        parameters: dict[str, Tensor] = {}
        for p, (t, rows) in enumerate(zip(tables, bags.row_parameters, strict=True)):
            several = tables.count(t) > 1
            name = f"{names[t]}.{p - tables.index(t)}" if several else names[t]
            parameters[f"{name}.weight"] = rows
        super().__init__(parameters, self.state, optimizer.param_groups)

    # TorchRec reads and writes what these are made of when it combines optimizers.
    @property
    def state(self) -> Mapping[Any, Any]:
        """What is kept of each table here: of split tables as DTensors, which share its memory."""
        found = {}
        for rows in self._split.row_parameters:
            kept = self._rows.state.get(rows, {})
            shown = {name: self._split.save_rows(rows, tensor) for name, tensor in kept.items()}
            if of_table := {name: tensor for name, tensor in shown.items() if tensor is not None}:
                found[rows] = of_table
        return found

    @state.setter
    def state(self, value: object) -> None:
        pass

    @property
    def param_groups(self) -> Any:
        """The options of the rows' optimizer; a learning rate set here counts."""
        return self._rows.param_groups

    @param_groups.setter
    def param_groups(self, value: object) -> None:
        pass

    def step(self, closure: object = None) -> None:
        """Do nothing: the rows were updated in the backward pass."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Do nothing: rows have no gradients."""


def placement_of(name: str, plan: ParameterSharding) -> Placement:
    """Where a plan places a table.

    Raises:
        ValueError: It shards it in another way than this sharder can.
    """
    kind, ranks = plan.sharding_type, plan.ranks
    if kind == ShardingType.ROW_WISE.value:
        return RowWise()
    if kind == ShardingType.TABLE_WISE.value:
        return TableWise(ranks[0])
    if kind in _TYPES:
        widths = tuple(shard.shard_sizes[1] for shard in plan.sharding_spec.shards)
        return ColumnWise(widths, tuple(ranks))
    raise ValueError(f"the plan shards {name!r} as {kind!r}: this sharder has {', '.join(_TYPES)}")
