"""Many embedding tables in one call: each is what it would be alone."""

from __future__ import annotations

import copy

import pytest
import torch

from subulp import nn, optim
from subulp.nn import EmbeddingTable

CONFIGS = [
    EmbeddingTable(60, 8, "int8"),
    EmbeddingTable(300, 8, "int8", 0.1, "lfu", 4),
    EmbeddingTable(200, 12, "int4", 0.2, "lru", 8, "nearest", "mixed"),
    EmbeddingTable(150, 4, "e4m3", 0.0),
]


def batch(bags, rows, size=7, step=0):
    """Row numbers, lengths, feature by feature."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 5, (len(rows) * size,), generator=generator)
    limits = torch.tensor(rows).repeat_interleave(size).repeat_interleave(lengths)
    values = (torch.rand(len(limits), generator=generator) ** 2 * limits).long()
    return values, lengths


def alone(bags: nn.CachedEmbeddingBags, t: int) -> nn.CachedEmbeddingBag:
    """A module of one table, with the same random bits."""
    c = bags.table(t).config
    bag = nn.CachedEmbeddingBag(
        *(c.num_embeddings, c.embedding_dim, c.storage, c.cache_fraction, c.policy, c.ways),
        rounding="nearest",
        hash=c.hash,
        mode=bags.mode,
        include_last_offset=True,
        seed=0,
    )
    bag.table.load_state_dict(bags.table(t).state_dict())
    return bag


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("rowwise", [True, False])
def test_each_table_is_what_it_would_be_alone(mode, rowwise):
    configs = [EmbeddingTable(**vars(c) | {"rounding": "nearest"}) for c in CONFIGS]
    bags = nn.CachedEmbeddingBags(configs, 100, mode=mode, seed=3)
    singles = [alone(bags, t) for t in range(4)]
    optim.RowAdagrad(bags, lr=0.1, rowwise=rowwise)
    for single in singles:
        optim.RowAdagrad(single, lr=0.1, rowwise=rowwise)
    size = 7
    for step in range(3):
        values, lengths = batch(bags, [60, 300, 200, 150], size, step)
        out = bags(values, lengths)
        assert out.shape == (size, 32)
        offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
        assert torch.equal(bags(values, offsets=offsets), out)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(step))
        columns = [8, 8, 12, 4]
        for t, (part, g) in enumerate(
            zip(out.split(columns, 1), grad.split(columns, 1), strict=True)
        ):
            mine = offsets[t * size : (t + 1) * size + 1]
            single = singles[t](values[mine[0] : mine[-1]], mine - mine[0])
            assert torch.equal(part, single)
            single.backward(g)
        out.backward(grad)
        for t in range(4):
            assert torch.equal(bags.weight_fp32(t), singles[t].weight_fp32())
            assert torch.equal(bags.table(t).tags, singles[t].table.tags)


def test_small_tables_stay_in_fp32():
    bags = nn.CachedEmbeddingBags(CONFIGS, 100)
    assert [str(bags.table(t).table.storage) for t in range(4)] == ["fp32", "int8", "int4", "e4m3"]
    assert bags.table(0).sets == 0
    default = nn.CachedEmbeddingBags([EmbeddingTable(1000, 4), EmbeddingTable(1001, 4)])
    assert [str(default.table(t).table.storage) for t in range(2)] == ["fp32", "int8"]


def test_features_share_a_table():
    config = EmbeddingTable(50, 4, "fp32", 0.2, ways=4)
    bags = nn.CachedEmbeddingBags([config, config], 0, features=[1, 0, 1], stacked=True, seed=1)
    optim.RowSGD(bags, lr=1.0)
    before = [bags.weight_fp32(t) for t in range(2)]
    values, lengths = torch.tensor([3, 4, 3, 3, 7]), torch.tensor([1, 1, 1, 0, 1, 1])
    out = bags(values, lengths)
    assert out.shape == (2, 3, 4)
    assert torch.equal(out[0], torch.stack((before[1][3], before[0][3], before[1][3])))
    assert torch.equal(out[1, 1], torch.zeros(4))
    out.backward(torch.ones(2, 3, 4))
    moved = [b - bags.weight_fp32(t) for t, b in enumerate(before)]
    torch.testing.assert_close(moved[1][[3, 4, 7], 0], torch.tensor([2.0, 1.0, 1.0]))
    torch.testing.assert_close(moved[0][3], torch.ones(4))
    assert bags.access_counts(1).sum() == 4


def test_state_goes_round_and_resumes():
    def make(seed):
        bags = nn.CachedEmbeddingBags(CONFIGS, 100, seed=seed)
        return bags, optim.RowAdagrad(bags, lr=0.1)

    def train(bags, steps):
        for step in steps:
            bags(*batch(bags, [60, 300, 200, 150], 7, step)).square().sum().backward()

    whole, opt = make(1)
    train(whole, range(3))
    saved = copy.deepcopy((whole.state_dict(), opt.state_dict()))
    train(whole, range(3, 6))
    resumed, other = make(2)
    resumed.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    train(resumed, range(3, 6))
    for name, value in whole.state_dict().items():
        mine = resumed.state_dict()[name]
        assert torch.equal(value.view(torch.uint8), mine.view(torch.uint8)), name


def test_what_one_can_ask():
    bags = nn.CachedEmbeddingBags(CONFIGS, 100, seed=1)
    optim.RowAdagrad(bags, lr=0.1)
    for step in range(4):
        bags(*batch(bags, [60, 300, 200, 150], 30, step)).square().sum().backward()
    assert len(bags.hit_rates) == 4
    assert bags.hit_rates[0] == bags.hit_rates[3] == 0.0
    assert 0 < bags.hit_rate < max(bags.hit_rates) < 1
    assert bags.evictions > 0
    assert bags.resident_rows == 28 + 40
    memory = bags.memory()
    assert memory.codes == 60 * 8 * 4 + 300 * 8 + 200 * 6 + 150 * 4
    assert memory.quantisation == 8 * 500
    assert memory.cache == 4 * (28 * 8 + 40 * 12)
    assert memory.counters == 4 * (300 + 40)
    assert memory.optimizer == 4 * (60 + 300 + 200 + 150)
    bags.flush()
    assert bags.resident_rows == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tables": []}, "tables is empty"),
        ({"mode": None}, "mode"),
        ({"features": [4]}, "features"),
        ({"features": []}, "features"),
        ({"stacked": True}, "equal dims"),
    ],
    ids=str,
)
def test_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        nn.CachedEmbeddingBags(**{"tables": CONFIGS} | arguments)


def test_inputs():
    bags = nn.CachedEmbeddingBags(CONFIGS)
    values, four = torch.tensor([0, 1, 2, 3]), torch.ones(4, dtype=torch.int64)
    assert bags(values.int(), four.int()).shape == (1, 32)
    with pytest.raises(ValueError, match="either lengths or offsets"):
        bags(values)
    with pytest.raises(ValueError, match="either lengths or offsets"):
        bags(values, four, four)
    with pytest.raises(ValueError, match="do not divide"):
        bags(values, four[:3])
    with pytest.raises(ValueError, match="do not divide"):
        bags(values, offsets=four)
    with pytest.raises(ValueError, match="negative"):
        bags(values, torch.tensor([1, -1, 1, 1]))
    with pytest.raises(ValueError, match="reach 5"):
        bags(values, torch.tensor([2, 1, 1, 1]))
    with pytest.raises(ValueError, match="decrease"):
        bags(values, offsets=torch.tensor([0, 2, 1, 3, 4]))
    with pytest.raises(IndexError, match=r"300 at position 1 .*feature 1.* 0 to 299"):
        bags(torch.tensor([0, 300, 2, 3]), four)
    with pytest.raises(ValueError, match="mode='mean'"):
        nn.CachedEmbeddingBags(CONFIGS, mode="mean")(values, four, None, torch.ones(4))
