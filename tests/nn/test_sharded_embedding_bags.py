"""Tables split over ranks: the bits of one process, errors on all ranks, checkpoints."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing import spawn

from subulp import nn, optim
from subulp.nn.lookup_routes import Slots, find_routes
from subulp.nn.placement import place
from subulp.nn.table_part import TablePart, residues, shard_of

from . import sharded_jobs as jobs


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[Any, Any]]:
    """What each of four processes saw."""
    folder = tmp_path_factory.mktemp("ranks")
    spawn(jobs.main, (str(folder),), jobs.WORLD)
    return [torch.load(folder / f"{rank}.pt") for rank in range(jobs.WORLD)]


def one_process(rule: str) -> dict[str, Tensor]:
    """The same tables in one process, whole, on the whole batch."""
    rounding = "nearest" if rule == "adagrad" else "stochastic"
    mode = "mean" if rule == "rowwise" else "sum"
    bags = nn.CachedEmbeddingBags(jobs.tables(rounding), features=jobs.FEATURES, mode=mode, seed=5)
    optimizer = jobs.optimizer_of(rule, bags)
    outputs = jobs.train(bags, 1, 0, range(jobs.STEPS), weighted=mode == "sum")
    return outputs | jobs.state_of(bags, optimizer)


def whole(found: list[dict[Any, Any]], key: tuple[str, int], name: str) -> dict[str, Tensor]:
    """What all ranks saw, as one process would have seen it."""
    ranks = key[1]
    each = [found[rank][key][name] for rank in range(ranks)]
    seen = {}
    for what in each[0]:
        parts = [one[what] for one in each]
        if what.startswith("out"):
            seen[what] = torch.cat(parts)
        elif what.startswith("weights"):
            seen[what] = _in_order(int(what.split()[1]), parts, ranks)
        elif what.startswith("rows"):
            assert all(torch.equal(part, parts[0]) for part in parts)
            seen[what] = parts[0]
        else:
            seen[what] = torch.stack(parts).sum(0)
    return seen


def _in_order(step: int, parts: list[Tensor], ranks: int) -> Tensor:
    """Numbers of each rank's lookups, feature by feature of the whole batch."""
    lengths = jobs.Batch(step).lengths
    pieces = []
    for rank, part in enumerate(parts):
        first, last = jobs.examples(ranks, rank)
        pieces.append(part.split(lengths[:, first:last].sum(1).tolist()))
    return torch.cat([piece for feature in zip(*pieces, strict=True) for piece in feature])


def assert_same(seen: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert seen.keys() == expected.keys()
    for name, value in seen.items():
        bits = [x.contiguous().view(torch.uint8) for x in (value, expected[name])]
        assert torch.equal(*bits), name


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("planned", "rule"), [run for run in jobs.RUNS if run[0] != "columns"])
def test_the_bits_are_those_of_one_process(found, planned, rule, ranks):
    """Outputs, gradients of weights, rows, evictions and hits, of all storages and policies."""
    expected = one_process(rule)
    assert int(expected["evicted"].sum()) > 20
    assert_same(whole(found, ("steps", ranks), f"{planned} {rule}"), expected)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", [*(f"columns {rule}" for rule in jobs.RULES), "bf16", "fp16"])
def test_columns_and_narrow_wires_do_not_depend_on_the_ranks(found, name, ranks):
    assert_same(whole(found, ("steps", ranks), name), whole(found, ("steps", 1), name))


def test_columns_of_floating_point_rows_are_those_of_whole_tables(found):
    """Integer rows and row-wise sums have numbers of their own for each part."""
    for rule in ("sgd", "adagrad"):
        seen, expected = whole(found, ("steps", 4), f"columns {rule}"), one_process(rule)
        floats = [i for i, storage in enumerate(jobs.STORAGES) if storage[:3] != "int"]
        assert len(floats) == 4
        for i in floats:
            assert torch.equal(seen[f"rows {i}"], expected[f"rows {i}"])


@pytest.mark.parametrize("wire", ["bf16", "fp16"])
def test_narrow_wires_are_near_the_wide_one(found, wire):
    exact, narrow = (whole(found, ("steps", 2), n)["out 0"] for n in ("rows sgd", wire))
    assert not torch.equal(exact, narrow)
    torch.testing.assert_close(exact, narrow, rtol=0, atol=0.02)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("planned", ["rows", "tables", "columns"])
def test_saved_on_two_ranks_goes_on_on_any(found, planned, ranks):
    bags = jobs.sharded(None, "stochastic", planned)
    optimizer = jobs.optimizer_of("rowwise", bags)
    outputs = jobs.train(bags, 1, 0, range(jobs.STEPS))
    expected = outputs | jobs.state_of(bags, optimizer)
    seen = whole(found, ("checkpoint", ranks), planned)
    late = [name for name in seen if name.startswith(("out", "weights", "rows"))]
    assert len(late) == 2 + len(jobs.tables())
    assert_same({n: seen[n] for n in late}, {n: expected[n] for n in late})


ERRORS = {
    "no optimizer": "RuntimeError: {}the rows have no optimizer",
    "row": "IndexError: {}row number 1000000 at position",
    "negative row": "IndexError: {}row number -",
    "lengths": "ValueError: {}.* lengths do not divide",
    "dtype": "ValueError: {}values has dtype torch.float32",
    "weights": "RuntimeError: the ranks' tables differ",
    "gradient": "FloatingPointError: {}the gradient of shape .* nothing was updated",
    "factors": "FloatingPointError: {}the per_sample_weights .* nothing was updated",
    "eval": "RuntimeError: the ranks' tables differ",
    "rate": "RuntimeError: the ranks' optimizers or gradient scalers have different options",
    "sums": "ValueError: {}the sums have shape .* nothing was updated",
    "scale": "RuntimeError: the ranks' optimizers or gradient scalers have different options",
    "backward passes in another order": "RuntimeError: the ranks are in the backward passes of",
    "another module": "RuntimeError: the ranks' tables differ in state, options or the call",
    "no such table": "IndexError: there is no table 9: the module has 9",
    "no such table to load": "IndexError: there is no table -10: the module has 9",
    "frozen": "RuntimeError: the ranks' tables differ",
    "arguments": "ValueError: the ranks' arguments differ",
    "seeds": "ValueError: the ranks' arguments differ",
    "rows asked for": "ValueError: the ranks ask for different rows",
    "no such rows": "ValueError: rows 0 to 1000000 are out of range",
}


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_error_on_one_rank_is_one_on_all(found, ranks):
    for rank in range(ranks):
        seen = found[rank]["faults", ranks]
        for name, words in ERRORS.items():
            # Received gradients are at fault where they arrive.
            prefix = r"(rank \d of the mesh: )?"
            assert re.match(words.format(prefix), seen[name]), (rank, name, seen[name])
        assert seen["from the end"] == "True"
        assert seen["rows"] == "unchanged, 0 steps"
        assert seen["afterwards"] == "nothing"
    others = [found[rank]["faults", ranks]["row"] for rank in range(ranks)]
    assert [("rank" in words.split()[1]) for words in others] == [True] * (ranks - 1) + [False]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_seeds_copies_frozen_tables_and_scalers(found, ranks):
    each = [found[rank]["others", ranks] for rank in range(ranks)]
    assert len({seen["seed"] for seen in each}) == 1
    width = sum(jobs.tables()[t].embedding_dim for t in jobs.FEATURES)
    for seen in each:
        for name in ("twin", "weights alone", "frozen", "scaled", "set"):
            assert seen[name] is True, name
        assert seen["empty"] == (0, width)
        assert seen["overflow"] == (1, 512.0)
        assert "DistributedDataParallel would overwrite those" in seen["ddp"]
        words = "nothing" if ranks == 1 else "overwritten with that of rank 0"
        assert words in seen["overwritten"]


def test_meshes_that_would_have_copies_are_refused(found):
    for rank in range(jobs.WORLD):
        seen = found[rank]["meshes"]
        assert "ValueError: mesh has 2 dimensions" in seen["square"]
        assert "a slice of 2 of 4 ranks" in seen["slice"]


# ------------------------------------------------------------------------- in this process alone


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize(("rows", "period"), [(100, 100), (100, 7), (3, 3), (64, 8), (9, 8)])
def test_every_row_is_on_one_rank_in_order(rows, period, ranks):
    numbers = torch.arange(rows)
    rank, local = shard_of(numbers, torch.full_like(numbers, period), ranks)
    for r in range(ranks):
        part = TablePart(rows, period, *residues(period, ranks, r), 4, 0, 4)
        own = numbers[rank == r]
        assert torch.equal(part.numbers(local[rank == r]), own)
        assert local[rank == r].tolist() == list(range(len(own)))
        assert len(own) <= part.rows <= len(own) + part.taken
        for start, stop in ((0, rows), (rows // 3, rows // 2)):
            run, first = part.run(start, stop)
            expected = own[(own >= start) & (own < stop)]
            assert torch.equal(run + start, expected)
            if len(expected):
                assert first == int((own < start).sum())


def test_runs_are_added_in_the_order_of_the_bag():
    config = nn.EmbeddingTable(100, 4, "fp32", 0.0)
    slots = Slots.of([0], place([config], [nn.RowWise()], 2))
    values = torch.tensor([1, 2, 70, 3, 60, 60, 5, 90])
    offsets = torch.tensor([0, 4, 4, 7, 8])
    routes = find_routes(slots, values, offsets, 2, rows_alone=False)
    # Rows 0 to 49 are on rank 0: [1, 2 | 70 | 3], [], [60, 60 | 5], [90].
    assert routes.run_counts == [[3, 3]]
    assert routes.runs.tolist() == [-2, 1, -1, -1, -2, -1]
    assert routes.rows.tolist() == [1, 2, 3, 5, 20, 10, 10, 40]
    assert routes.bags.tolist() == [0, 2, 0, 2, 3]
    assert routes.places.tolist() == [0, 3, 1, 4, 2, 5]
    assert routes.ends.tolist() == [0, 3, 3, 5, 6]
    alone = find_routes(slots, values, offsets, 2, rows_alone=True)
    assert alone.runs.tolist() == [-1, 1, 1, -1, -1, -1, 1, -1]


def test_a_plan_that_does_not_fit_is_refused():
    mixed = nn.EmbeddingTable(3000, 8, hash="mixed")

    def made(*plan, table=None):
        tables = [table or nn.EmbeddingTable(3000, 8)]
        return nn.ShardedCachedEmbeddingBags(tables, None, plan)

    with pytest.raises(ValueError, match=r"hash='mixed' and RowWise\(\)"):
        made(nn.RowWise(), table=mixed)
    with pytest.raises(ValueError, match="2 placements for 1 tables"):
        made(nn.RowWise(), nn.RowWise())
    with pytest.raises(ValueError, match="placed on rank 1: the mesh has 0 to 0"):
        made(nn.TableWise(1))
    with pytest.raises(ValueError, match=r"8 columns: ColumnWise\(9\)"):
        made(nn.ColumnWise(9))
    with pytest.raises(ValueError, match=r"ColumnWise\(2\) names 1 ranks"):
        made(nn.ColumnWise(2, (0,)))
    with pytest.raises(ValueError, match="placement of table 0 is 'row'"):
        made("row")
    with pytest.raises(ValueError, match="wire='int8' is unknown"):
        nn.ShardedCachedEmbeddingBags([mixed], None, wire="int8")


def test_one_process_takes_and_makes_whole_tables():
    whole = nn.CachedEmbeddingBags(jobs.tables(), features=jobs.FEATURES, seed=5)
    optimizer = jobs.optimizer_of("rowwise", whole)
    jobs.train(whole, 1, 0, range(2))
    split = jobs.sharded(None, "stochastic", "rows")
    of_split = jobs.optimizer_of("rowwise", split)
    split.load_state_dict(whole.state_dict())
    of_split.load_state_dict(optimizer.state_dict())
    back = split.unsharded()
    assert_same(back.state_dict(), whole.state_dict())
    for bags, rule in ((whole, optimizer), (split, of_split)):
        jobs.train(bags, 1, 0, range(2, 4))
        assert rule.state_dict()["state"]
    for i in range(len(jobs.tables())):
        assert torch.equal(whole.weight_fp32(i), split.weight_fp32(i))
    with pytest.raises(RuntimeError, match="parts are tables of their own"):
        jobs.sharded(None, "stochastic", "columns").unsharded()


def test_a_table_that_no_feature_looks_up_does_not_count():
    tables = [nn.EmbeddingTable(64, 8, "int4", 0.0)] * 2
    plan = [nn.TableWise(), nn.RowWise()]
    modules = [
        nn.CachedEmbeddingBags(tables, 0, features=[0], seed=1),
        nn.ShardedCachedEmbeddingBags(tables, None, plan, 0, features=[0], seed=1),
    ]
    values, lengths, found = torch.arange(8), torch.full((4,), 2), []
    for bags in modules:
        optim.RowSGD(bags, lr=0.1)
        bags.tables[0].requires_grad_(False)
        assert not bags(values, lengths).requires_grad
        bags.tables[0].requires_grad_(True)
        weights = torch.ones(8, requires_grad=True)
        for _ in range(3):
            bags(values, lengths, None, weights).square().sum().backward()
        assert bags.steps == 3
        found.append((bags.weight_fp32(0), weights.grad))
    for of_one, of_split in zip(*found, strict=True):
        assert torch.equal(of_one, of_split)


def test_a_state_of_other_tables_is_refused():
    split = jobs.sharded(None, "stochastic", "rows")
    state = split.state_dict()
    before = split.weight_fp32(1)
    state["tables.0.table.codes"] = state["tables.0.table.codes"][:, 1:]
    with pytest.raises(RuntimeError, match=r"tables.0.table.codes has shape .* expected"):
        split.load_state_dict(state)
    state = split.state_dict()
    state["tables.1.tags"] = torch.full_like(state["tables.1.tags"], 5000)
    with pytest.raises(RuntimeError, match="names rows that a table"):
        split.load_state_dict(state)
    assert torch.equal(split.weight_fp32(1), before)


def test_default_dtypes_and_meta_do_not_show():
    torch.set_default_dtype(torch.float64)
    try:
        wide = jobs.sharded(None, "stochastic", "rows")
        jobs.optimizer_of("adagrad", wide)
        jobs.train(wide, 1, 0, range(2))
    finally:
        torch.set_default_dtype(torch.float32)
    usual = jobs.sharded(None, "stochastic", "rows")
    jobs.optimizer_of("adagrad", usual)
    jobs.train(usual, 1, 0, range(2))
    meta = jobs.sharded(None, "stochastic", "rows", device="meta").to_empty(device="cpu")
    meta.load_state_dict(usual.state_dict())
    for i in range(len(jobs.tables())):
        assert torch.equal(wide.weight_fp32(i), usual.weight_fp32(i))
        assert torch.equal(meta.weight_fp32(i), usual.weight_fp32(i))
