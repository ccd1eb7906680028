"""Embedding tables with a cache: the paper's emulation bit for bit, torch's modules, bad input."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor

from subulp import nn, optim
from tests.oracles.cached_embedding import FLUSH, Emulation

STORAGES = ("fp32", "bf16", "fp16", "e4m3", "int8", "int4", "int2")
ROWS, DIM = 61, 5
OPTIMIZERS = {
    "sgd": lambda bag: optim.RowSGD(bag, lr=0.3),
    "adagrad": lambda bag: optim.RowAdagrad(bag, lr=0.3, rowwise=False, weight_decay=0.01),
    "rowwise": lambda bag: optim.RowAdagrad(bag, lr=0.3, eps=1e-6),
}


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def skewed(count: int, rows: int, generator: torch.Generator) -> Tensor:
    """Row numbers of which few are frequent, and neighbours are not alike."""
    return ((torch.rand(count, generator=generator) ** 2 * rows).long() * 7) % rows


def batch(rows: int, step: int, bags: int = 20) -> tuple[Tensor, Tensor, Tensor]:
    """Row numbers, offsets (with the end) and weights."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 6, (bags,), generator=generator)
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    values = skewed(int(offsets[-1]), rows, generator)
    return values, offsets, torch.randn(len(values), generator=generator)


def gradient(bags: int, dim: int, step: int) -> Tensor:
    return torch.randn(bags, dim, generator=torch.Generator().manual_seed(1000 + step))


def train(bag: nn.CachedEmbeddingBag, steps: range, weighted: bool = False) -> None:
    for step in steps:
        values, offsets, weights = batch(bag.num_embeddings, step)
        out = bag(values, offsets, weights if weighted else None)
        out.backward(gradient(len(out), bag.embedding_dim, step))


def options(optimizer: torch.optim.Optimizer) -> dict:
    group = optimizer.param_groups[0]
    return {"eps": 0.0, **{k: v for k, v in group.items() if k != "params"}}


def as_bags(values: Tensor, offsets: Tensor, weights: Tensor) -> list:
    pairs = list(zip(values.tolist(), weights.numpy(), strict=True))
    return [pairs[a:b] for a, b in itertools.pairwise(offsets)]


def emulated(bag: nn.CachedEmbeddingBag, initial: Tensor) -> Emulation:
    c, table = bag.table.config, bag.table
    sets_ways = (table.sets, table.ways)
    return Emulation(initial.numpy(), c.storage, c.rounding, c.policy, *sets_ways, c.hash, bag.seed)


def same_as(bag: nn.CachedEmbeddingBag, oracle: Emulation) -> None:
    assert torch.equal(bits(bag.weight_fp32()), bits(torch.from_numpy(oracle.T)))
    residents = [-1 if i is None else i for ways in oracle.IC for i in ways]
    assert bag.table.tags.tolist() == residents
    assert bag.evictions == oracle.evictions
    if bag.table.counts is not None:
        assert bag.access_counts().tolist() == list(oracle.PV.values())


# ---------------------------------------------------------------------- the paper's emulation


def emulations() -> list[tuple[str, str, str, int, str]]:
    """Every table and cache with one of the optimizers, which see a row and nothing else of both.

    They take turns, so that each meets every value of every option.
    """
    options = (STORAGES, ("nearest", "stochastic"), ("lfu", "lru"), (1, 2, 4, 32))
    names = list(OPTIMIZERS)
    numbered = (list(enumerate(values)) for values in options)
    return [
        (*(value for _, value in chosen), names[sum(i for i, _ in chosen) % len(names)])
        for chosen in itertools.product(*numbered)
    ]


@pytest.mark.parametrize(("storage", "rounding", "policy", "ways", "optimizer"), emulations())
def test_the_physical_cache_is_the_emulation(storage, rounding, policy, ways, optimizer):
    bag = nn.CachedEmbeddingBag(
        *(ROWS, DIM, storage, 0.55 if ways == 32 else 0.15, policy, ways),
        rounding=rounding,
        include_last_offset=True,
        seed=11,
    )
    # A set of 32 ways in which rows compete, or more sets of fewer.
    assert bag.table.sets == {1: 9, 2: 4, 4: 2, 32: 1}[ways]
    initial = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(5))
    bag.load_weights(initial)
    opt = OPTIMIZERS[optimizer](bag)
    oracle = emulated(bag, initial)
    for step in range(4):
        values, offsets, weights = batch(ROWS, step)
        grad = gradient(len(offsets) - 1, DIM, step)
        bag(values, offsets, weights).backward(grad)
        oracle.update(optimizer, options(opt), as_bags(values, offsets, weights), grad.numpy())
        same_as(bag, oracle)
    assert bag.evictions or (ways == 32 and policy == "lru")


@pytest.mark.parametrize("storage", ["int8", "int4", "fp16"])
@pytest.mark.parametrize("changes", [{"cache_fraction": 0.0}, {"hash": "mixed"}], ids=str)
def test_without_a_cache_and_with_the_other_hash(storage, changes):
    bag = nn.CachedEmbeddingBag(
        **{"num_embeddings": ROWS, "embedding_dim": 35, "storage": storage, "cache_fraction": 0.2}
        | {"ways": 4, "include_last_offset": True, "seed": 3}
        | changes
    )
    initial = torch.randn(ROWS, 35, generator=torch.Generator().manual_seed(5))
    bag.load_weights(initial)
    opt = optim.RowAdagrad(bag, lr=0.1, weight_decay=0.01)
    oracle = emulated(bag, initial)
    for step in range(2):
        values, offsets, weights = batch(ROWS, step)
        grad = gradient(len(offsets) - 1, 35, step)
        bag(values, offsets, weights).backward(grad)
        oracle.update("rowwise", options(opt), as_bags(values, offsets, weights), grad.numpy())
        same_as(bag, oracle)


# ------------------------------------------------------------------------------ torch's modules


def twins(mode, dim=8, **changes):
    ours = nn.CachedEmbeddingBag(
        **{"num_embeddings": 50, "embedding_dim": dim, "storage": "fp32", "mode": mode}
        | {"cache_fraction": 0.2, "ways": 4, "seed": 1}
        | changes
    )
    last = ours.include_last_offset
    theirs = torch.nn.EmbeddingBag(50, dim, mode=mode or "sum", include_last_offset=last)
    theirs.weight.data.copy_(ours.weight_fp32())
    return ours, theirs


TORCH_OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.3),
}


@pytest.mark.parametrize("optimizer", TORCH_OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_fp32_trains_as_torch(mode, dtype, optimizer):
    ours, theirs = twins(mode)
    mine = {"sgd": optim.RowSGD, "adagrad": lambda m, lr: optim.RowAdagrad(m, lr, rowwise=False)}
    mine[optimizer](ours, lr=0.3)
    opt = TORCH_OPTIMIZERS[optimizer](theirs.parameters())
    for step in range(4):
        values, offsets, _ = batch(50, step)
        values, offsets = values.to(dtype), offsets[:-1].to(dtype)
        grad = gradient(len(offsets), 8, step)
        a, b = ours(values, offsets), theirs(values, offsets)
        torch.testing.assert_close(a, b)
        a.backward(grad)
        opt.zero_grad()
        b.backward(grad)
        opt.step()
        torch.testing.assert_close(ours.weight_fp32(), theirs.weight.data)


def test_weights_have_torchs_gradient():
    ours, theirs = twins("sum", dim=19)
    optim.RowSGD(ours, lr=0.3)
    values, offsets, weights = batch(50, 0)
    w1, w2 = weights.clone().requires_grad_(), weights.clone().requires_grad_()
    grad = gradient(len(offsets) - 1, 19, 0)
    a, b = ours(values, offsets[:-1], w1), theirs(values, offsets[:-1], w2)
    torch.testing.assert_close(a, b)
    a.backward(grad)
    b.backward(grad)
    torch.testing.assert_close(w1.grad, w2.grad)
    # In eval() they have it too, and nothing else moves.
    before = copy.deepcopy(ours.state_dict())
    ours.eval()
    w3 = weights.clone().requires_grad_()
    ours(values, offsets[:-1], w3).backward(grad)
    assert w3.grad is not None
    assert_equal_states(ours.state_dict(), before)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_inputs_of_two_dimensions_are_bags_of_one_length(mode):
    ours, theirs = twins(mode)
    values = torch.randint(50, (7, 3), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(ours.eval()(values), theirs(values))
    none = values[:, :0]
    assert torch.equal(ours(none), torch.zeros(7, 8))


def test_empty_bags_and_no_bags():
    ours, _ = twins("mean")
    optim.RowSGD(ours, lr=0.1)
    empty = torch.zeros(0, dtype=torch.int64)
    out = ours(empty, torch.zeros(3, dtype=torch.int64))
    assert torch.equal(out, torch.zeros(3, 8))
    before = ours.weight_fp32()
    out.sum().backward()
    assert ours(empty, empty).shape == (0, 8)
    ours(empty, empty).sum().backward()
    assert torch.equal(ours.weight_fp32(), before)


def test_without_bags_it_is_an_embedding():
    ours, theirs = twins(None)
    optim.RowSGD(ours, lr=0.3)
    values = torch.randint(50, (4, 3), generator=torch.Generator().manual_seed(2))
    out = ours(values)
    assert torch.equal(out, theirs.weight[values])
    out.sum().backward()
    counts = torch.bincount(values.flatten(), minlength=50).float()
    torch.testing.assert_close(ours.weight_fp32(), theirs.weight.data - 0.3 * counts.unsqueeze(1))
    assert ours(torch.tensor(3)).shape == (8,)


def test_values_beyond_the_last_offset_belong_to_no_bag():
    ours, theirs = twins("sum", include_last_offset=True)
    optim.RowSGD(ours, lr=0.3)
    values, offsets = torch.arange(10), torch.tensor([0, 2, 7])
    out = ours(values, offsets)
    torch.testing.assert_close(out, theirs(values, offsets))
    before = ours.weight_fp32()
    out.sum().backward()
    moved = (ours.weight_fp32() != before).any(1).nonzero().flatten().tolist()
    assert moved == list(range(7))
    assert ours.access_counts().sum() == 7


# --------------------------------------------------------------------------- state and lifetime


def assert_equal_states(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value.view(torch.uint8), b[name].view(torch.uint8)), name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("policy", ["lfu", "lru"])
@pytest.mark.parametrize("storage", ["int4", "bf16", "e4m3"])
def test_a_resumed_run_is_an_uninterrupted_one(storage, policy, optimizer):
    def make(seed):
        bag = nn.CachedEmbeddingBag(
            300, 16, storage, 0.1, policy, 4, include_last_offset=True, seed=seed
        )
        return bag, OPTIMIZERS[optimizer](bag)

    whole, opt = make(1)
    train(whole, range(3))
    saved = copy.deepcopy((whole.state_dict(), opt.state_dict()))
    train(whole, range(3, 6))
    resumed, opt2 = make(2)
    resumed.load_state_dict(saved[0])
    opt2.load_state_dict(saved[1])
    train(resumed, range(3, 6))
    assert_equal_states(resumed.state_dict(), whole.state_dict())
    for mine, theirs in zip(opt2.state.values(), opt.state.values(), strict=True):
        assert mine["sum"].dtype == torch.float32
        assert torch.equal(mine["sum"], theirs["sum"])
    incomplete = {k: v for k, v in saved[0].items() if "cache" not in k}
    with pytest.raises(RuntimeError, match="Missing key"):
        resumed.load_state_dict(incomplete)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("storage", ["int8", "int2", "e4m3", "fp32"])
def test_flush_rounds_cached_rows_into_the_table(storage, rounding):
    bag = nn.CachedEmbeddingBag(
        300, 16, storage, 0.1, "lru", 4, rounding=rounding, include_last_offset=True, seed=1
    )
    optim.RowSGD(bag, lr=0.1)
    train(bag, range(3))
    resident = bag.table.resident()
    assert len(resident) == bag.resident_rows > 20
    before = bag.weight_fp32()
    bag.flush()
    after = bag.weight_fp32()
    assert bag.resident_rows == 0
    moved = (after != before).any(1).nonzero().flatten()
    assert set(moved.tolist()) <= set(resident.tolist())
    assert (storage == "fp32") == (len(moved) == 0)
    span = before.amax(1) - before.amin(1)
    step = {"int8": span / 255, "int2": span / 3, "fp32": 0 * span}
    room = step.get(storage, before.abs().amax(1) / 8 + 2**-9) * (1 + 1e-5) + 1e-7
    assert ((after - before).abs() <= room.unsqueeze(1)).all()
    if rounding == "nearest":
        fresh = nn.CachedEmbeddingBag(300, 16, storage, 0.0, seed=1)
        fresh.load_weights(before)
        assert torch.equal(fresh.weight_fp32()[resident], after[resident])
    train(bag, range(3, 5))
    assert bag.resident_rows > 20


@pytest.mark.parametrize("storage", ["int4", "bf16"])
def test_flush_draws_bits_of_its_own(storage):
    """A row that left the cache at the last step, and is flushed at it, is rounded twice."""
    bag = nn.CachedEmbeddingBag(ROWS, DIM, storage, 0.15, include_last_offset=True, seed=11)
    initial = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(5))
    bag.load_weights(initial)
    opt = optim.RowSGD(bag, lr=0.3)
    oracle = emulated(bag, initial)
    values, offsets, weights = batch(ROWS, 0)
    grad = gradient(len(offsets) - 1, DIM, 0)
    bag(values, offsets, weights).backward(grad)
    oracle.update("sgd", options(opt), as_bags(values, offsets, weights), grad.numpy())
    for row in bag.table.resident().tolist():
        oracle.fake_quantize(row, FLUSH)
    bag.flush()
    assert torch.equal(bits(bag.weight_fp32()), bits(torch.from_numpy(oracle.T)))


@pytest.mark.parametrize("how", ["load", "flush", "state dict"])
def test_an_emptied_cache_forgets_what_it_took_to_enter(how):
    bag = nn.CachedEmbeddingBag(8, 4, "int8", 0.25, "lfu", 2, seed=0)
    optim.RowSGD(bag, lr=0.1)
    before = copy.deepcopy(bag.state_dict())

    def look_up(row, times):
        bag(torch.full((1, times), row)).sum().backward()

    for row, times in ((0, 10), (1, 10), (2, 1)):
        look_up(row, times)
    assert bag.table.resident().tolist() == [0, 1]
    if how == "load":
        bag.load_weights(torch.zeros(8, 4))
    elif how == "flush":
        bag.flush()
    else:
        bag.load_state_dict(before)
    for row, times in ((2, 1), (3, 1), (4, 3)):
        look_up(row, times)
    assert 4 in bag.table.resident().tolist()


@pytest.mark.parametrize("policy", ["lfu", "lru"])
def test_what_does_not_train_changes_nothing(policy):
    bag = nn.CachedEmbeddingBag(300, 16, "int8", 0.1, policy, 4, include_last_offset=True, seed=1)
    optim.RowSGD(bag, lr=0.1)
    train(bag, range(2))
    before = copy.deepcopy(bag.state_dict())
    rate = bag.hit_rate
    values, offsets, _ = batch(300, 7)
    with torch.no_grad():
        first = bag(values, offsets)
    bag.eval()
    second = bag(values, offsets)
    assert not second.requires_grad
    assert torch.equal(first, second)
    assert bag.hit_rate == rate
    bag.train()(values, offsets)  # Without a backward pass.
    assert_equal_states(bag.state_dict(), before)
    assert bag.hit_rate != rate


def test_each_backward_pass_updates_when_it_runs():
    bag, _ = twins("sum")
    optim.RowSGD(bag, lr=0.5)
    before = bag.weight_fp32()
    offsets = torch.tensor([0])
    first = bag(torch.tensor([3, 4]), offsets)
    second = bag(torch.tensor([4, 5]), offsets)
    assert torch.equal(second[0], before[4] + before[5])
    (first.sum() + second.sum()).backward()
    moved = before - bag.weight_fp32()
    torch.testing.assert_close(moved[3:6, 0], torch.tensor([0.5, 1.0, 0.5]))


def test_the_learning_rate_is_live():
    bag, _ = twins("sum")
    opt = optim.RowSGD(bag, lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
    for lr in (1.0, 0.5, 0.25):
        before = bag.weight_fp32()[3]
        bag(torch.tensor([[3]])).sum().backward()
        opt.step()
        scheduler.step()
        torch.testing.assert_close(before - bag.weight_fp32()[3], torch.full((8,), lr))


def test_a_new_optimizer_does_not_turn_back_time():
    bag = nn.CachedEmbeddingBag(300, 16, "int8", 0.1, "lru", 4, include_last_offset=True, seed=1)
    optim.RowSGD(bag, lr=0.1)
    train(bag, range(2))
    bag.row_optimizer = None
    optim.RowAdagrad(bag, lr=0.1)
    train(bag, range(2, 3))
    assert bag.steps == 3
    assert int(bag.table.stamps.max()) == 3


def test_initial_rows_are_dlrms_and_the_same_in_any_storage():
    wide = nn.CachedEmbeddingBag(400, 64, "fp32", seed=3).weight_fp32()
    bound = 400**-0.5
    assert -bound <= wide.min() < -0.99 * bound < 0.99 * bound < wide.max() < bound
    narrow = nn.CachedEmbeddingBag(400, 64, "int8", seed=3).weight_fp32()
    assert (wide - narrow).abs().max() <= bound / 255 * 1.01
    torch.manual_seed(5)
    a = nn.CachedEmbeddingBag(40, 8)
    torch.manual_seed(5)
    b = nn.CachedEmbeddingBag(40, 8)
    assert torch.equal(a.weight_fp32(), b.weight_fp32())


def test_weights_load_by_parts():
    bag = nn.CachedEmbeddingBag(300, 16, "int8", 0.1, "lfu", 4, include_last_offset=True, seed=1)
    optim.RowSGD(bag, lr=0.1)
    train(bag, range(2))
    before, resident = bag.weight_fp32(), bag.table.resident().tolist()
    x = torch.randn(100, 16)
    bag.load_weights(x, 50)
    after = bag.weight_fp32()
    assert torch.equal(after[:50], before[:50])
    assert torch.equal(after[150:], before[150:])
    assert torch.equal(bag.weight_fp32(50, 150), after[50:150])
    assert (after[50:150] - x).abs().max() < 0.02
    left = [i for i in resident if not 50 <= i < 150]
    assert bag.table.resident().tolist() == left
    train(bag, range(2, 4))


# ------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("storage", "fraction", "expected"),
    [
        ("int8", 0, 0.26563),
        ("int4", 0, 0.14063),
        ("int2", 0, 0.07813),
        ("int4", 0.3, 0.45078),
        ("int8", 0.1, 0.37422),
        ("int8", 0.05, 0.32383),
        ("int4", 0.1, 0.24922),
        ("int4", 0.05, 0.19883),
        ("int2", 0.1, 0.18672),
        ("int2", 0.05, 0.13633),
    ],
)
def test_compression_is_the_papers_table_11(storage, fraction, expected):
    bag = nn.CachedEmbeddingBag(6400, 128, storage, fraction, "lfu", 32, seed=0)
    memory = bag.memory()
    # Rounded half up, as the paper does: 0.265625 is 0.26563.
    assert int(memory.compression * 1e5 + 0.5) == round(expected * 1e5)
    storages = [*bag.parameters(), *bag.table.buffers()]
    assert memory.total == sum(t.nbytes for t in storages)
    optim.RowAdagrad(bag)
    assert bag.memory().optimizer == 4 * 6400
    assert bag.memory().compression == memory.compression


def test_direct_mapped_lru_keeps_no_priorities():
    assert nn.CachedEmbeddingBag(640, 8, "int8", 0.1, "lru", 1).memory().counters == 0
    assert nn.CachedEmbeddingBag(640, 8, "int8", 0.1, "lru", 2).memory().counters == 4 * 64
    assert nn.CachedEmbeddingBag(640, 8, "int8", 0.1, "lfu", 1).memory().counters == 4 * 640


def test_a_small_cache_has_one_set_that_fits():
    shapes = {
        (rows, fraction, ways): (bag.table.sets, bag.table.ways)
        for rows, fraction, ways in [
            (100, 0.05, 32),
            (100, 0.001, 32),
            (100, 1.0, 64),
            (1, 1.0, 64),
            (3200, 0.3, 32),
            (100, 0, 8),
        ]
        for bag in [nn.CachedEmbeddingBag(rows, 4, "int8", fraction, "lfu", ways)]
    }
    assert list(shapes.values()) == [(1, 4), (1, 1), (1, 64), (1, 1), (30, 32), (0, 8)]


def test_statistics():
    bag = nn.CachedEmbeddingBag(64, 4, "int8", 0.5, "lfu", 32, seed=0)
    optim.RowSGD(bag, lr=0.1)
    assert bag.hit_rate == 0.0
    for _ in range(4):
        bag(torch.tensor([[1, 2, 2, 3]])).sum().backward()
    assert bag.hit_rate == 0.75
    assert bag.resident_rows == 3
    assert bag.access_counts()[:4].tolist() == [0, 4, 8, 4]
    bag.reset_statistics()
    assert bag.hit_rate == 0.0
    bag(torch.tensor([[1, 5]])).sum().backward()
    assert bag.hit_rate == 0.5


def test_counts_stop_at_the_largest_number():
    bag = nn.CachedEmbeddingBag(64, 4, "int8", 0.5, seed=0)
    optim.RowSGD(bag, lr=0.1)
    bag.table.counts[3] = 2**31 - 2
    bag(torch.tensor([[3, 3, 3, 4]])).sum().backward()
    assert bag.access_counts()[3:5].tolist() == [2**31 - 1, 1]


# ----------------------------------------------------------------------------------- compiled


def test_compiled_is_eager():
    def run(compiled: bool) -> dict:
        torch.manual_seed(0)
        bag = nn.CachedEmbeddingBag(100, 8, "int8", 0.1, ways=4, seed=1)
        model = torch.nn.Sequential(bag, torch.nn.Linear(8, 1))
        optim.RowAdagrad(bag, lr=0.1)
        step = torch.compile(model, backend="aot_eager") if compiled else model
        for i in range(3):
            values = torch.randint(100, (6, 3), generator=torch.Generator().manual_seed(i))
            step(values).sum().backward()
        return bag.state_dict()

    assert_equal_states(run(True), run(False))


# ----------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_embeddings": 0}, "empty"),
        ({"embedding_dim": 0}, "empty"),
        ({"num_embeddings": 2**31}, "tags of the cache"),
        ({"storage": "int3"}, "unknown"),
        ({"storage": (4, 3)}, "simulated"),
        ({"cache_fraction": 1.5}, "all of them"),
        ({"cache_fraction": -0.1}, "out of range"),
        ({"cache_fraction": float("nan")}, "out of range"),
        ({"ways": 3}, "power of two"),
        ({"ways": 0}, "power of two"),
        ({"ways": 128}, "power of two"),
        ({"policy": "fifo"}, "policy"),
        ({"rounding": "up"}, "rounding"),
        ({"hash": "md5"}, "hash"),
        ({"mode": "max"}, "mode"),
        ({"mode": None, "include_last_offset": True}, "mode=None"),
        ({"seed": -1}, "seed"),
    ],
    ids=str,
)
def test_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        nn.CachedEmbeddingBag(**{"num_embeddings": 64, "embedding_dim": 4} | arguments)


LONG = torch.int64


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        (([0, 64], [0]), IndexError, "row number 64 at position 1"),
        (([0, -1], [0]), IndexError, "row number -1"),
        ((torch.tensor([0.5]), [0]), ValueError, "int32 or int64"),
        ((torch.tensor([True]), [0]), ValueError, "int32 or int64"),
        (([0, 1], torch.tensor([0.0])), ValueError, "int32 or int64"),
        (([0, 1, 2], [0, 2, 1]), ValueError, "decrease from 2 to 1"),
        (([0, 1, 2], [1, 2]), ValueError, "begin with 1"),
        (([0, 1, 2], [0, 4]), ValueError, r"decrease|reach"),
        (([0, 1, 2], None), ValueError, "needs offsets"),
        (([0, 1, 2], [[0]]), ValueError, "dimensions"),
        (([[0, 1, 2]], [0]), ValueError, "one bag per row"),
        (([[[0]]], None), ValueError, "dimensions"),
        (([0, 1], [0], torch.ones(3)), ValueError, "shape"),
        (([0, 1], [0], torch.ones(2).double()), ValueError, "FP32"),
    ],
    ids=str,
)
@pytest.mark.parametrize("training", [True, False])
def test_inputs(inputs, error, message, training):
    bag = nn.CachedEmbeddingBag(64, 4).train(training)
    tensors = [torch.tensor(x, dtype=LONG) if isinstance(x, list) else x for x in inputs]
    with pytest.raises(error, match=message):
        bag(*tensors)


def test_weights_need_sums_and_bags_need_a_mode():
    one = torch.tensor([0])
    with pytest.raises(ValueError, match="mode='sum'"):
        nn.CachedEmbeddingBag(64, 4, mode="mean")(one, one, torch.ones(1))
    with pytest.raises(ValueError, match="mode=None"):
        nn.CachedEmbeddingBag(64, 4, mode=None)(one, one)
    with pytest.raises(ValueError, match="include_last_offset"):
        nn.CachedEmbeddingBag(64, 4, include_last_offset=True)(one, one[:0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_update_nothing(bad):
    bag = nn.CachedEmbeddingBag(64, 4, seed=0)
    optim.RowAdagrad(bag)
    bag(torch.tensor([[1, 2]])).sum().backward()
    before = copy.deepcopy(bag.state_dict())
    out = bag(torch.tensor([[1, 2], [3, 4]]))
    with pytest.raises(FloatingPointError, match="nothing was updated"):
        (out * torch.tensor([[1.0], [bad]])).sum().backward()
    weights = torch.tensor([[1.0, bad]])
    out = bag(torch.tensor([[1, 2]]), per_sample_weights=weights)
    with pytest.raises(FloatingPointError, match="per_sample_weights"):
        out.backward(torch.ones(1, 4))
    assert_equal_states(bag.state_dict(), before)


def test_training_needs_an_optimizer():
    bag = nn.CachedEmbeddingBag(64, 4)
    out = bag(torch.tensor([[1, 2]]))
    with pytest.raises(RuntimeError, match="have no optimizer"):
        out.sum().backward()


def test_weights_that_do_not_fit():
    bag = nn.CachedEmbeddingBag(64, 4)
    for weights, start in [(torch.ones(64, 5), 0), (torch.ones(65, 4), 0), (torch.ones(2, 4), 63)]:
        with pytest.raises(ValueError, match=r"rows|weights"):
            bag.load_weights(weights, start)
    with pytest.raises(ValueError, match="FP32"):
        bag.load_weights(torch.ones(64, 4).double())
    with pytest.raises(RuntimeError, match="lfu"):
        nn.CachedEmbeddingBag(64, 4, policy="lru").access_counts()


def test_a_halved_cache_is_refused():
    bag = nn.CachedEmbeddingBag(64, 4)
    bag.table.cache = bag.table.cache.half()
    with pytest.raises(ValueError, match="leave the dtypes"):
        bag(torch.tensor([[1]]))


@pytest.mark.parametrize(("policy", "name"), [("lfu", "counts"), ("lru", "stamps")])
def test_a_policy_without_what_it_counts_by_is_refused(policy, name):
    bag = nn.CachedEmbeddingBag(64, 8, cache_fraction=0.2, ways=4, policy=policy, seed=0)
    optim.RowSGD(bag, lr=0.1)

    def step():
        bag(torch.tensor([1, 2, 2, 5]), torch.tensor([0, 2])).square().sum().backward()

    step()
    kept, before = getattr(bag.table, name), bag.weight_fp32()
    setattr(bag.table, name, None)
    with pytest.raises(ValueError, match=f"policy='{policy}' has no {name}: expected"):
        step()
    setattr(bag.table, name, kept[:0])
    with pytest.raises(ValueError, match=f"policy='{policy}' has no {name}: expected"):
        step()
    assert torch.equal(bag.weight_fp32(), before)
    setattr(bag.table, name, kept)
    step()
    assert bag.steps == 2
