"""Embedding ops: the same bits whoever computes, and the promises of torch.library."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from subulp.nn.cached_table import EmbeddingTable
from subulp.numerics import int_rows as numerics
from subulp.ops import big_memory, rows
from subulp.ops.embedding import embedding_pool, embedding_update, embedding_weight_grad
from subulp.ops.embedding.job import GRADIENT_SPAN
from subulp.ops.embedding.rows import row_sum

from . import embedding_jobs
from .embedding_jobs import STORAGES, batch, make, train
from .support import environment, interpreted, isas, patterns, threads


def same(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        x, y = value, b[name]
        if value.dtype == torch.int64:
            assert torch.equal(x, y), name
        else:
            assert np.array_equal(patterns(x), patterns(y)), name


def run(backend: str, *arguments, steps=3, bags=9, weighted=True, longest=8, **named) -> dict:
    with environment(SUBULP_BACKEND=backend), np.errstate(all="ignore"):
        return train(make(*arguments, **named), steps, bags, weighted, longest)


@pytest.mark.parametrize(
    ("rule", "dim"), [("sgd", 1), ("adagrad", 35), ("rowwise", 35), ("rowwise", 64)]
)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("storage", STORAGES)
def test_the_kernels_are_the_reference(storage, rounding, rule, dim):
    expected = run("reference", storage, rule, dim=dim, rounding=rounding)
    assert int(expected["evictions"].sum()) > 0
    for isa in isas():
        with environment(SUBULP_ISA=isa):
            same(run("cpu", storage, rule, dim=dim, rounding=rounding), expected)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("storage", ["int4", "fp16"])
def test_long_bags_of_wide_rows(storage, weighted):
    """More rows, columns, ways and lookups than a kernel takes at a time."""
    sizes = {"dim": 200, "rows": 400, "ways": 32, "bags": 4, "longest": 150, "steps": 2}
    expected = run("reference", storage, "rowwise", weighted=weighted, **sizes)
    for isa in isas():
        with environment(SUBULP_ISA=isa), threads(2):
            same(run("cpu", storage, "rowwise", weighted=weighted, **sizes), expected)


HOT = {"rows": 12, "ways": 2, "bags": 4, "longest": 150, "steps": 2}


@pytest.mark.parametrize("dim", [1, 35, 200])
def test_rows_that_many_lookups_share(dim):
    """Their gradients are summed in spans."""
    expected = run("reference", "int8", "rowwise", dim=dim, **HOT)
    for isa in isas():
        with environment(SUBULP_ISA=isa), threads(2):
            same(run("cpu", "int8", "rowwise", dim=dim, **HOT), expected)


def test_a_gradient_is_summed_in_spans():
    """What an order of sums is shows where a span's sum is rounded to what a row's is not."""
    terms = torch.full((GRADIENT_SPAN * 2,), 2.0**-24)
    terms[0] = 1.0
    one, ahead = torch.ones(()), torch.full((), GRADIENT_SPAN * 2.0**-24)
    tables = embedding_jobs.of([EmbeddingTable(3, 1, "fp32", 0.0)], "sgd", [0])
    before = tables.tables[0].table.stored[1].clone()
    values, offsets = torch.ones(len(terms), dtype=torch.int64), torch.arange(len(terms) + 1)
    embedding_update(*tables.update(values, offsets, None, terms.view(-1, 1), 1))
    # One after the other, each of them is lost.
    assert one + ahead > one
    assert torch.equal(tables.tables[0].table.stored[1], before - (one + ahead) * 0.1)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("rule", embedding_jobs.RULES)
@pytest.mark.parametrize("dim", [16, 35, 64])
def test_a_gradient_alone_is_a_sum(dim, rule, decay):
    """A sum begins with zero, so it is never -0, which would turn a row's -0 into 0."""
    states = []
    for isa in ("reference", *isas()):
        backend = "reference" if isa == "reference" else "cpu"
        tables = embedding_jobs.of([EmbeddingTable(8, dim, "fp32", 0.0)], rule, [0])
        tables.tables[0].table.codes.data.fill_(-0.0)
        tables.tables[0].table.codes.data[5] = 0.5
        values, offsets = torch.tensor([2, 5, 5, 7]), torch.arange(5)
        grad = torch.full((4, dim), -0.0)
        grad[1:, ::3] = torch.randn(
            3, len(range(0, dim, 3)), generator=torch.Generator().manual_seed(0)
        )
        call = list(tables.update(values, offsets, None, grad, 1))
        call[14] = [decay]
        environ = {
            "SUBULP_BACKEND": backend,
            **({} if backend == "reference" else {"SUBULP_ISA": isa}),
        }
        with environment(**environ):
            embedding_update(*call)
        states.append(tables.state())
    for state in states[1:]:
        same(state, states[0])
    assert torch.signbit(states[0]["0.table.codes"][2]).all()


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("storage", ["int4", "fp16"])
def test_threads_do_not_show(storage, weighted):
    results = []
    for count in (1, 2, 3):
        with threads(count):
            results.append(run("cpu", storage, "rowwise", rows=3000, bags=200, weighted=weighted))
    for result in results[1:]:
        same(result, results[0])
    same(run("reference", storage, "rowwise", rows=3000, bags=200, weighted=weighted), results[0])


@pytest.mark.parametrize("weighted", [True, False])
def test_bags_without_lookups(weighted):
    """None at all, and none of one feature."""
    for longest in (0, 1):
        sizes = {"bags": 1, "longest": longest, "weighted": weighted, "steps": 2}
        expected = run("reference", "int8", "rowwise", **sizes)
        same(run("cpu", "int8", "rowwise", **sizes), expected)


@pytest.mark.parametrize("features", [[2, 0, 1, 0, 2], [1, 1, 1], [0]])
def test_features_of_a_table_lie_anywhere(features):
    """Of tables without a feature too, and of more threads than some features have bags."""
    configs = [EmbeddingTable(900, 16, "int8", 0.1), *[EmbeddingTable(70, 33, "int4")] * 2]
    results = []
    for backend, count in (("reference", 1), ("cpu", 1), ("cpu", 2), ("cpu", 7)):
        tables = embedding_jobs.of(configs, "rowwise", features)
        with environment(SUBULP_BACKEND=backend), threads(count):
            results.append(train(tables, 2, 3, True, 400))
    for result in results[1:]:
        same(result, results[0])


SMALL = {"dim": 17, "rows": 40, "bags": 2, "steps": 2}
# Every storage, rule and rounding; the interpreter is too slow for all their combinations.
TRITON = [
    ("fp32", "sgd", "nearest"),
    ("bf16", "adagrad", "stochastic"),
    ("fp16", "rowwise", "nearest"),
    ("e4m3", "sgd", "stochastic"),
    ("int8", "rowwise", "stochastic"),
    ("int4", "adagrad", "nearest"),
    ("int2", "sgd", "stochastic"),
]


@interpreted
@pytest.mark.parametrize(("storage", "rule", "rounding"), TRITON)
def test_triton_is_the_reference(storage, rule, rounding):
    expected = run("reference", storage, rule, rounding=rounding, **SMALL)
    assert int(expected["evictions"].sum()) > 0
    same(run("triton", storage, rule, rounding=rounding, **SMALL), expected)


@interpreted
@pytest.mark.parametrize("weighted", [True, False])
def test_triton_sums_rows_that_many_lookups_share(weighted):
    configs = [EmbeddingTable(2, 3, "fp32", 0.0), EmbeddingTable(3, 3, "int8", 0.5, "lfu", 1)]
    results = []
    for backend in ("reference", "triton"):
        tables = embedding_jobs.of(configs, "adagrad", [0, 1])
        with environment(SUBULP_BACKEND=backend), np.errstate(all="ignore"):
            results.append(train(tables, 1, 1, weighted, 400))
    same(*results)


@interpreted
def test_triton_says_what_is_wrong():
    tables = make("int8", "sgd")
    values, offsets, weights, grad = batch(tables, 1)

    def changed(tensor, at, value):
        other = tensor.clone()
        other.view(-1)[at] = value
        return other

    inside = int(offsets[9]) + 1
    calls = [
        (IndexError, r"153 .*feature 1", (changed(values, inside, 153), offsets, weights, grad)),
        (IndexError, "row number -1", (changed(values, inside, -1), offsets, weights, grad)),
        (ValueError, "begin with 1", (values, changed(offsets, 0, 1), weights, grad)),
        (ValueError, "decrease from", (values, changed(offsets, 9, 0), weights, grad)),
        (ValueError, "reach", (values, changed(offsets, -1, len(values) + 1), weights, grad)),
        (FloatingPointError, "gradient", (values, offsets, weights, changed(grad, 7, torch.nan))),
        (
            FloatingPointError,
            "per_sample_weights",
            (values, offsets, changed(weights, 3, torch.inf), grad),
        ),
    ]
    before = {name: t.clone() for name, t in tables.state().items()}
    for backend in ("reference", "triton"):
        for error, message, call in calls:
            with environment(SUBULP_BACKEND=backend), pytest.raises(error, match=message):
                embedding_update(*tables.update(*call, 1))
            if error is not FloatingPointError:
                with environment(SUBULP_BACKEND=backend), pytest.raises(error, match=message):
                    embedding_pool(*tables.pool(*call[:3]))
    same(tables.state(), before)


@interpreted
def test_triton_finds_tags_of_no_row():
    tables = embedding_jobs.of([EmbeddingTable(4, 3, "int8", 0.5, "lru", 1)], "sgd", [0])
    tables.tables[0].tags.fill_(77)
    values, offsets, grad = torch.arange(4), torch.arange(5), torch.ones(4, 3)
    with environment(SUBULP_BACKEND="triton"), pytest.raises(ValueError, match="tags of a cache"):
        embedding_update(*tables.update(values, offsets, None, grad, 1))


def test_triton_is_tested_with_every_storage():
    assert {storage for storage, _, _ in TRITON} == set(STORAGES)


@pytest.mark.parametrize("dim", [1, 15, 16, 17, 100])
def test_row_sum_is_sixteen_lanes(dim):
    x = torch.randn(3, dim, generator=torch.Generator().manual_seed(0))
    for row, total in zip(x.numpy(), row_sum(x), strict=True):
        lanes = [np.float32(0)] * 16
        for i, value in enumerate(row):
            lanes[i % 16] = lanes[i % 16] + value
        while len(lanes) > 1:
            half = len(lanes) // 2
            lanes = [a + b for a, b in zip(lanes[:half], lanes[half:], strict=True)]
        assert float(total) == lanes[0]


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("dim", [1, 5, 16, 33, 200])
def test_rows_are_converted_as_numerics_says(bits, dim, isa):
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn(301, dim, generator=generator)
    x *= (12 * torch.randn(301, 1, generator=generator)).exp2()
    x[7], x[8, 0], x[9, -1], x[10] = 0.0, torch.nan, -torch.inf, -0.0
    x[11, :] = torch.finfo(torch.float32).max
    x[12] *= 2.0**-140
    if dim > 1:
        x[11, 0] *= -1
    expected = numerics.to_bytes(numerics.encode(x, bits))
    with environment(SUBULP_BACKEND="cpu", SUBULP_ISA=isa):
        stored = rows.encode_rows(x, torch.empty_like(expected), bits)
        values = rows.decode_rows(stored, torch.empty_like(x), bits)
    assert torch.equal(stored, expected)
    want = numerics.decode(numerics.from_bytes(expected, bits, dim))
    assert np.array_equal(patterns(values), patterns(want))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_row_number_out_of_range_is_named(backend):
    tables = make("int8", "sgd")
    values, offsets, weights, _ = batch(tables, 1)
    bad = values.clone()
    bad[int(offsets[9]) + 1] = 153
    bad[-1] = -1
    refused = pytest.raises(IndexError, match=r"153 .*feature 1")
    for isa in isas() if backend == "cpu" else ["plain"]:
        with environment(SUBULP_BACKEND=backend, SUBULP_ISA=isa), refused:
            embedding_pool(*tables.pool(bad, offsets, weights))


DEFAULT = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize("storage", ["int8", "bf16"])
def test_the_ops_keep_their_promises(storage):
    tables = make(storage, "rowwise")
    values, offsets, weights, grad = batch(tables, 1)
    check = torch.library.opcheck
    check(embedding_pool, tables.pool(values, offsets, weights), test_utils=DEFAULT)
    check(embedding_weight_grad, tables.weight_grad(values, offsets, grad), test_utils=DEFAULT)
    check(embedding_update, tables.update(values, offsets, None, grad, 1), test_utils=DEFAULT)


def test_shapes_that_do_not_fit():
    tables = make("int8", "sgd")
    values, offsets, weights, grad = batch(tables, 1)
    with pytest.raises(ValueError, match="do not divide"):
        embedding_pool(*tables.pool(values, offsets[:-1], weights))
    with pytest.raises(ValueError, match="int64"):
        embedding_pool(*tables.pool(values.int(), offsets, weights))
    with pytest.raises(ValueError, match="weights"):
        embedding_pool(*tables.pool(values, offsets, weights[1:]))
    with pytest.raises(ValueError, match="grad"):
        embedding_update(*tables.update(values, offsets, None, grad[1:], 1))
    tables.tables[1].tags = tables.tables[1].tags[1:]
    with pytest.raises(ValueError, match="whole sets"):
        embedding_pool(*tables.pool(values, offsets, weights))


def test_big_memory_is_zeros():
    for shape in ((3,), (1 << 21, 3)):
        assert not big_memory.zeros(shape, torch.uint8).any()
        assert (big_memory.full(shape, -1, torch.int32) == -1).all()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_tables_without_rows_and_without_numbers_are_refused(monkeypatch, backend, dtype):
    monkeypatch.setenv("SUBULP_BACKEND", backend)
    tags, bounds = torch.empty(0, dtype=torch.int32), torch.tensor([0, 0, 1])

    def pool(rows, dim, ends):
        own = [torch.zeros(rows, dim).to(dtype)], [torch.empty(0, dim)], [tags]
        options = [0], [1], [False], [0]
        return embedding_pool(*own, *options, torch.tensor([0]), ends, None)[0]

    with pytest.raises(IndexError, match="row number 0 at position 0"):
        pool(0, 8, bounds)
    assert torch.equal(pool(0, 8, torch.zeros(3, dtype=torch.int64)), torch.zeros(2, 8))
    with pytest.raises(ValueError, match="with a dim of 1 or more"):
        pool(4, 0, bounds)
