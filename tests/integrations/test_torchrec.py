"""TorchRec plans, shards and trains our tables: the bits of one process, the bytes it planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing import spawn

from subulp import nn, optim

from . import torchrec_jobs as jobs


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[tuple[str, str], dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("torchrec")
    spawn(jobs.main, (str(folder),), jobs.WORLD)
    return [torch.load(folder / f"{rank}.pt") for rank in range(jobs.WORLD)]


def one_process(kind: str, storage: str) -> dict[str, Any]:
    """The same steps of one process, with the mean gradient of two ranks."""
    plan = [nn.ColumnWise(2)] * 2 if kind == "column_wise" else None
    configs = [
        nn.EmbeddingTable(rows, jobs.DIM, storage, **jobs.OPTIONS) for rows in jobs.ROWS.values()
    ]
    bags = nn.ShardedCachedEmbeddingBags(configs, None, plan, features=[0, 0, 1], seed=3)
    for t, bag in enumerate(jobs.collection().embedding_bags.values()):
        bags.load_weights(t, bag.weight.detach())
    optim.RowAdagrad(bags, lr=0.1)
    dense = jobs.Model().dense
    seen: dict[str, Any] = {}
    for step in range(jobs.STEPS):
        values, lengths = whole(step)
        out = bags(values, lengths)
        dense(out).sum().div(2).backward()
        with torch.no_grad():
            seen[f"out {step}"] = bags(values, lengths)
    seen["weights"] = {name: bags.weight_fp32(t) for t, name in enumerate(jobs.ROWS)}
    return seen


def whole(step: int) -> tuple[Tensor, Tensor]:
    """The batch of both ranks, features in the order of the collection."""
    values, lengths = jobs.batch(step, 0, 10)
    lengths = lengths.view(3, 10)
    parts = values.split(lengths.sum(1).tolist())
    order = [2, 0, 1]
    return torch.cat([parts[f] for f in order]), lengths[order].flatten()


CASES = [(kind, storage) for kind in jobs.KINDS for storage in ("fp32", "int8")]


@pytest.mark.parametrize(("kind", "storage"), CASES)
def test_a_batch_that_one_rank_has_wrong_is_an_error_on_all(found, kind, storage):
    for rank, seen in enumerate(found):
        fault = seen[kind, storage]["fault"]
        assert "the features ['user', 'friend'] are missing" in fault
        assert fault.startswith("rank 1 of the mesh: ") == (rank == 0)


@pytest.mark.parametrize(("kind", "storage"), CASES)
def test_frozen_tables_stay_frozen(found, kind, storage):
    first = next(iter(jobs.ROWS))
    for seen in found:
        parts = seen[kind, storage]["frozen"]
        assert {name for name, _ in parts} == set(jobs.ROWS)
        assert all(frozen == (name == first) for name, frozen in parts)


@pytest.mark.parametrize(("kind", "storage"), CASES)
def test_the_bits_are_those_of_one_process(found, kind, storage):
    """``KeyedJaggedTensor`` in another order of keys, ``KeyedTensor`` out, three fused steps."""
    seen = [one[kind, storage] for one in found]
    expected = one_process(kind, storage)
    for one in seen:
        assert one["type"] == "ShardedCachedEmbeddingBagCollection"
        assert one["kinds"] == {kind}
        assert one["keys"] == ["user", "friend", "shop"]
    for step in range(jobs.STEPS):
        outs = torch.cat([one[f"out {step}"] for one in seen])
        assert torch.equal(outs, expected[f"out {step}"])
    for one in seen:
        for name, weight in expected["weights"].items():
            assert torch.equal(one["weights"][name], weight)


@pytest.mark.parametrize(("kind", "storage"), CASES)
def test_the_planned_bytes_are_the_real_ones(found, kind, storage):
    # The first rank plans for all.
    planned = found[0][kind, storage]["planned bytes"]
    assert planned == [one[kind, storage]["bytes"] for one in found]
    assert min(planned) > 0


@pytest.mark.parametrize(("kind", "storage"), CASES)
def test_the_optimizer_is_keyed_and_its_rate_counts(found, kind, storage):
    names = {
        "table_wise": [["sparse.users.weight"], ["sparse.shops.weight"]],
        "row_wise": [["sparse.shops.weight", "sparse.users.weight"]] * 2,
        "column_wise": [[f"sparse.{n}.{i}.weight" for n in ("shops", "users")] for i in range(2)],
    }[kind]
    seen = [one[kind, storage] for one in found]
    assert sorted(one["state"] for one in seen) == sorted(names)
    for one in seen:
        assert one["rate"] is True
        assert one["resumed"] is True


def test_dense_layers_are_data_parallel(found):
    for one, other in zip(*(f["row_wise", "fp32"]["dense"] for f in found), strict=True):
        assert torch.equal(one, other)


def test_what_cannot_be_sharded_is_refused():
    from torchrec.distributed.types import ParameterSharding  # noqa: PLC0415
    from torchrec.modules.embedding_configs import (  # noqa: PLC0415
        EmbeddingBagConfig,
        PoolingType,
    )

    from subulp.integrations import torchrec as ours  # noqa: PLC0415
    from subulp.integrations.torchrec import collection, sharding  # noqa: PLC0415

    with pytest.raises(ValueError, match="the plan shards 'a' as 'data_parallel'"):
        sharding.placement_of("a", ParameterSharding("data_parallel", "dense"))
    configs = [
        EmbeddingBagConfig(
            name=str(kind), num_embeddings=9, embedding_dim=4, feature_names=["f"], pooling=kind
        )
        for kind in (PoolingType.SUM, PoolingType.MEAN)
    ]
    with pytest.raises(ValueError, match="pool by sum and by mean"):
        collection.mode_of(configs)
    with pytest.raises(ValueError, match="storage='int3' is unknown"):
        ours.CachedEmbeddingSharder(storage="int3").config(configs[0])
