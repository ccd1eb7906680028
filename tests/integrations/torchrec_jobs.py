"""What two ranks do for the tests of TorchRec: its planner, its DistributedModelParallel."""

from __future__ import annotations

import copy
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

WORLD = 2
KINDS = ("table_wise", "row_wise", "column_wise")
ROWS, DIM = {"users": 1200, "shops": 1031}, 16
STEPS = 3
OPTIONS = {"ways": 4, "cache_fraction": 0.05}


def collection() -> Any:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig  # noqa: PLC0415

    torch.manual_seed(1)
    names = {"users": ["user", "friend"], "shops": ["shop"]}
    configs = [
        EmbeddingBagConfig(
            name=name, num_embeddings=ROWS[name], embedding_dim=DIM, feature_names=features
        )
        for name, features in names.items()
    ]
    return EmbeddingBagCollection(tables=configs)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sparse = collection()
        torch.manual_seed(2)
        self.dense = torch.nn.Linear(3 * DIM, 1)

    def forward(self, features: Any) -> Tensor:
        return self.dense(self.sparse(features).values()).sum()


def batch(step: int, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Row numbers and lengths of examples of ten: of friends, shops and users, in this order."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (3, 10), generator=generator)
    values = []
    for f, rows in enumerate((ROWS["users"], ROWS["shops"], ROWS["users"])):
        drawn = (torch.rand(int(lengths[f].sum()), generator=generator) ** 2 * rows).long()
        ends = [0, *lengths[f].cumsum(0).tolist()]
        values.append(drawn[ends[first] : ends[last]])
    return torch.cat(values), lengths[:, first:last].flatten()


def jagged(step: int, first: int, last: int) -> Any:
    from torchrec import KeyedJaggedTensor  # noqa: PLC0415

    values, lengths = batch(step, first, last)
    return KeyedJaggedTensor(["friend", "shop", "user"], values, lengths=lengths)


def planned(model: torch.nn.Module, sharder: Any, kind: str) -> Any:
    from torchrec.distributed.planner.types import ParameterConstraints, Topology  # noqa: PLC0415

    topology = Topology(world_size=WORLD, compute_device="cpu", local_world_size=WORLD)
    limit = {"min_partition": 8} if kind == "column_wise" else {}
    constraints = {name: ParameterConstraints(sharding_types=[kind], **limit) for name in ROWS}
    planner = sharder.planner(topology, constraints=constraints)
    return planner, planner.collective_plan(model, [sharder], distributed.group.WORLD)


def trained(kind: str, storage: str, rank: int) -> dict[str, Any]:
    from torchrec.distributed.model_parallel import DistributedModelParallel  # noqa: PLC0415

    from subulp import optim  # noqa: PLC0415
    from subulp.integrations.torchrec import CachedEmbeddingSharder  # noqa: PLC0415

    def rule(module: Any) -> optim.RowAdagrad:
        return optim.RowAdagrad(module, lr=0.1)

    sharder = CachedEmbeddingSharder(rule, storage=storage, seed=3, **OPTIONS)
    model = Model()
    planner, plan = planned(model, sharder, kind)
    split = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan, sharders=[sharder]
    )
    sparse = split.module.sparse
    first, last = ((0, 6), (6, 10))[rank]
    seen: dict[str, Any] = {"type": type(sparse).__name__, "keys": []}
    seen["kinds"] = {p.sharding_type for p in plan.get_plan_for_module("sparse").values()}
    for step in range(STEPS):
        features = jagged(step, first, last)
        split(features).backward()
        with torch.no_grad():
            seen[f"out {step}"] = sparse(features).values()
    keyed = sparse(features)
    seen["keys"] = keyed.keys()
    options = [
        option
        for option in planner._enumerator.last_stored_search_space or []
        if option.sharding_type == kind
    ]
    seen["planned bytes"] = [
        sum(
            shard.storage.ddr
            for option in options
            for shard, at in zip(
                option.shards, _ranks(plan, option.name, len(option.shards)), strict=True
            )
            if at == r
        )
        for r in range(WORLD)
    ]
    memory = sparse.bags.memory()
    seen["bytes"] = memory.total + memory.optimizer
    seen["state"] = sorted(split.fused_optimizer.state_dict()["state"])
    back = collection()
    sparse.copy_weights_to(back)
    seen["weights"] = {name: bag.weight.detach() for name, bag in back.embedding_bags.items()}
    seen["dense"] = [p.grad for p in model.dense.parameters()]
    saved, optimizer = copy.deepcopy((split.state_dict(), split.fused_optimizer.state_dict()))
    resumed = []
    for _ in range(2):
        # A copy: TorchRec renames the keys of what it is given.
        split.load_state_dict(dict(saved))
        split.fused_optimizer.load_state_dict(optimizer)
        split(jagged(8, first, last)).backward()
        resumed.append([sparse.bags.weight_fp32(t) for t in range(2)])
    seen["resumed"] = all(torch.equal(a, b) for a, b in zip(*resumed, strict=True))
    for group in split.fused_optimizer.param_groups:
        group["lr"] = 0.0
    split(jagged(9, first, last)).backward()
    again = [sparse.bags.weight_fp32(t) for t in range(2)]
    exact = all(torch.equal(a, w) for a, w in zip(again, resumed[-1], strict=True))
    seen["rate"] = exact or storage != "fp32"
    wrong = jagged(9, first, last)
    if rank:
        wrong = type(wrong)(["shop"], wrong["shop"].values(), lengths=wrong["shop"].lengths())
    try:
        split(wrong)
    except ValueError as error:
        seen["fault"] = str(error)
    frozen = Model()
    frozen.sparse.embedding_bags[next(iter(ROWS))].weight.requires_grad_(False)
    _, plan = planned(frozen, sharder, kind)
    split = DistributedModelParallel(
        frozen, device=torch.device("cpu"), plan=plan, sharders=[sharder]
    )
    bags = split.module.sparse.bags
    seen["frozen"] = [
        (list(ROWS)[placed.table], rows.frozen)
        for placed, rows in zip(bags.placed, bags.row_parameters, strict=True)
    ]
    return seen


def _ranks(plan: Any, name: str, count: int) -> list[int]:
    found = plan.get_plan_for_module("sparse")[name].ranks
    return found or list(range(count))


def main(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=120),
    )
    found = {
        (kind, storage): trained(kind, storage, rank)
        for kind in KINDS
        for storage in ("fp32", "int8")
    }
    torch.save(found, Path(folder) / f"{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()
