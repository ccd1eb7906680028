"""A state dict says how its rows are to be read, and rows that are read otherwise are refused."""

from __future__ import annotations

import copy

import pytest
import torch

from subulp import nn, optim

HEAD = {"dim": 8, "num_labels": 400, "storage": "e4m3", "seed": 1}
BAG = {"num_embeddings": 64, "embedding_dim": 8, "storage": "int8", "cache_fraction": 0.25}


def head(**changes):
    return nn.ExtremeClassifier(**HEAD | changes)


def bag(**changes):
    return nn.CachedEmbeddingBag(**BAG | {"ways": 4, "seed": 1} | changes)


def trained_bag(**changes):
    module = bag(**changes)
    optim.RowSGD(module, lr=0.1)
    for _ in range(3):
        module(torch.arange(60).view(6, 10)).sum().backward()
    return module


def refused(module, state, message, **options):
    before = {name: t.clone() for name, t in module.state_dict().items()}
    with pytest.raises(RuntimeError, match=message):
        module.load_state_dict(state, **options)
    for name, value in module.state_dict().items():
        assert torch.equal(value.view(torch.uint8), before[name].view(torch.uint8)), name


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize(
    ("saved", "loads", "message"),
    [
        ({"scale": "table"}, {}, "power of two that scales the rows"),
        ({}, {"scale": 0.25}, "power of two that scales the rows"),
        ({"scale": 0.5}, {"scale": 0.25}, "of the saved rows: -1, of these: -2"),
        ({"storage": "bf16"}, {"storage": "fp16"}, "exponent bits of the saved rows: 8, of these"),
        ({"storage": (4, 3)}, {"storage": "fp32"}, "exponent bits of the saved rows: 4, of these"),
        ({"storage": (4, 3)}, {"storage": (4, 2)}, "mantissa bits"),
        ({"storage": (4, 3)}, {"storage": "e4m3"}, "table.codes is saved as torch.float32"),
        ({"storage": "fp32"}, {"storage": "bf16"}, "mantissa bits|saved as torch.float32"),
        # A row of 4 numbers in INT4 takes the bytes of one of 8 in INT2.
        ({"storage": "int4", "dim": 4}, {"storage": "int2", "dim": 8}, "bits of an integer"),
        ({"storage": "int2", "dim": 7}, {"storage": "int2"}, "numbers of a row"),
    ],
    ids=str,
)
def test_heads(saved, loads, message, assign):
    refused(head(**loads), head(**saved).state_dict(), message, assign=assign)


@pytest.mark.parametrize(
    ("saved", "loads", "message"),
    [
        ({"ways": 8}, {}, "number of the cache's sets of the saved rows: 2, of these: 4"),
        ({"hash": "mixed"}, {}, "hash of the row numbers"),
        ({"storage": "int4"}, {"storage": "int8"}, "bits of an integer"),
        ({"storage": "int2", "embedding_dim": 7}, {"storage": "int2"}, "numbers of a row"),
    ],
    ids=str,
)
def test_bags(saved, loads, message):
    state = trained_bag(**saved).state_dict()
    refused(trained_bag(**loads), state, message)


def test_states_that_fit_load():
    for make in (head, lambda: head(scale="table"), lambda: head(storage=(4, 3)), trained_bag):
        module, other = make(), make()
        other.seed = 77
        other.load_state_dict(copy.deepcopy(module.state_dict()))
        assert other.seed == module.seed
        assert other.steps == module.steps


def test_older_states_load_and_are_checked_by_their_tensors():
    """They have a seed and a number of updates only."""
    module = trained_bag()
    state = module.state_dict()
    state["_extra_state"] = state["_extra_state"][:2]
    bag().load_state_dict(state)
    refused(bag(hash="mixed"), state, "tables.0.tags has rows in sets that they do not belong to")
    refused(bag(ways=8), state, "tables.0.tags has rows in sets that they do not belong to")
    older = head(storage="bf16").state_dict()
    older["_extra_state"] = older["_extra_state"][:2]
    refused(head(storage="fp32"), older, "table.codes is saved as torch.bfloat16")
    del older["_extra_state"]
    head(storage="bf16").load_state_dict(older)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_extra_state": torch.tensor([1.0, 2.0])}, "is no tensor of int64"),
        ({"_extra_state": "seed"}, "is no tensor of int64"),
        ({"_extra_state": torch.tensor([1])}, "holds no seed"),
        ({"_extra_state": torch.tensor([-1, 0])}, "seed=-1"),
        ({"_extra_state": torch.tensor([0, 2**40])}, "steps=1099511627776"),
        ({"_extra_state": torch.tensor([0, 0, 3])}, "describes rows by 1 numbers"),
        ({"_extra_state": torch.tensor([0, 0] + [0] * 40)}, "expected|of these|more tables"),
        ({"tables.0.tags": torch.full((16,), 64, dtype=torch.int32)}, "rows that a table of 64"),
        ({"tables.0.tags": torch.full((16,), -2, dtype=torch.int32)}, "rows that a table of 64"),
        ({"tables.0.tags": torch.full((16,), 1, dtype=torch.int32)}, "do not belong to"),
        ({"tables.0.tags": torch.tensor([-1] * 4 + [1, 1] + [-1] * 10).int()}, "names a row twice"),
        ({"tables.0.tags": torch.full((16,), -1)}, "tags is saved as torch.int64"),
        ({"tables.0.cache": torch.zeros(16, 8).half()}, "cache is saved as torch.float16"),
        ({"tables.0.counts": torch.zeros(64)}, "counts is saved as torch.float32"),
        ({"tables.0.table.codes": torch.zeros(64, 16).byte().char()}, "saved as torch.int8"),
    ],
    ids=str,
)
@pytest.mark.parametrize("assign", [True, False])
def test_damaged_states_are_refused(change, message, assign):
    module = trained_bag()
    state = copy.deepcopy(module.state_dict()) | change
    with pytest.raises(RuntimeError, match=message):
        module.load_state_dict(state, assign=assign)
    module.eval()(torch.arange(64).view(8, 8))


@pytest.mark.parametrize(
    "change",
    [
        {"row_of": torch.full((400,), 10**9)},
        {"label_of": torch.arange(400) + 1},
        {"label_of": torch.zeros(400, dtype=torch.int64)},
        {"label_of": torch.arange(399)},
        {"label_of": torch.arange(400.0)},
        {"row_of": None},
    ],
    ids=str,
)
def test_a_damaged_order_of_labels_is_refused(change):
    options = {"head_fraction": 0.2, "label_counts": torch.arange(400)}
    module = head(**options)
    state = {k: v for k, v in (module.state_dict() | change).items() if v is not None}
    refused(head(**options | {"seed": 2}), state, "do not number the 400 labels' rows both ways")


def test_the_second_of_two_tables():
    tables = [nn.EmbeddingTable(64, 4, "int8"), nn.EmbeddingTable(64, 4, "int8", 0.25, ways=4)]
    other = [tables[0], nn.EmbeddingTable(64, 4, "int8", 0.25, ways=4, hash="mixed")]
    refused(
        nn.CachedEmbeddingBags(other, 0, seed=1),
        nn.CachedEmbeddingBags(tables, 0, seed=1).state_dict(),
        "tables.1: the hash of the row numbers",
    )
    fewer = nn.CachedEmbeddingBags(tables[:1], 0, seed=1)
    state = nn.CachedEmbeddingBags(tables, 0, seed=1).state_dict()
    with pytest.raises(RuntimeError, match="describes more tables than the module's 1"):
        fewer.load_state_dict(state, strict=False)


# ------------------------------------------------------------------------------------- meta


@pytest.mark.parametrize("storage", ["int4", "e4m3"])
def test_a_module_on_meta_takes_a_state_and_trains(storage):
    source = trained_bag(storage=storage)
    late = bag(storage=storage, device="meta")
    optim.RowSGD(late, lr=0.1)
    values = torch.arange(60).view(6, 10)
    with pytest.raises(ValueError, match="table 0 lies on meta and the row numbers on cpu"):
        late.eval()(values)
    with pytest.raises(ValueError, match="the table is on 'meta'"):
        late.load_weights(torch.zeros(64, 8))
    late.load_state_dict(copy.deepcopy(source.state_dict()), assign=True)
    for module in (source, late):
        module.reset_statistics()
        module.train()(values).sum().backward()
    assert late.hit_rate == source.hit_rate > 0
    for name, value in source.state_dict().items():
        found = late.state_dict()[name]
        assert torch.equal(found.view(torch.uint8), value.view(torch.uint8)), name
    assert torch.equal(late.eval()(values), source.eval()(values))


def test_memory_that_holds_nothing_holds_no_cached_row():
    late = bag(device="meta").to_empty(device="cpu")
    assert late.resident_rows == 0
    assert late.hit_rate == 0.0
    late.load_weights(torch.ones(64, 8))
    assert torch.equal(late.weight_fp32(), torch.ones(64, 8))


def test_a_head_on_meta_says_so():
    late, x, one = head(device="meta"), torch.ones(2, 8), torch.tensor([1])
    optim.RowSGD(late)
    for call in (lambda: late(x, one, one), lambda: late.topk(x), lambda: late.eval()(x, one, one)):
        with pytest.raises(ValueError, match="the rows are on 'meta'"):
            call()
    with pytest.raises(ValueError, match="embeddings lie on meta and the rows on cpu"):
        head().topk(x.to("meta"))


@pytest.mark.parametrize("storage", ["int8", "int4", "int2", "e4m3", "fp32"])
@pytest.mark.parametrize("fraction", [0.0, 0.25])
def test_a_cache_without_residents_is_flushed(storage, fraction):
    module = bag(storage=storage, cache_fraction=fraction)
    before = module.weight_fp32()
    module.flush()
    assert torch.equal(module.weight_fp32(), before)


def test_a_default_device_is_not_asked():
    """``torch.device("meta")`` as a context, under which a model may run that was made before."""
    module, values = trained_bag(), torch.arange(60).view(6, 10)
    classifier = head(head_fraction=0.2, label_counts=torch.arange(400))
    optim.RowSGD(classifier, lr=0.1)
    x, one = torch.ones(2, 8), torch.tensor([1])
    expected = module.eval()(values), classifier.topk(x)
    with torch.device("meta"):
        assert torch.equal(module(values), expected[0])
        assert torch.equal(classifier.topk(x)[1], expected[1][1])
        module.train()(values).sum().backward()
        assert torch.isfinite(classifier(x, one, one, loss=True))
