"""MLPs in 16 bits, and tables whose rows have extra bits."""

import json

import pytest
import torch

from subulp.lab.compare import compare
from subulp.lab.engine.ranks import ALONE
from subulp.lab.tasks.ctr import task
from subulp.lab.tasks.ctr.config import CTRConfig
from subulp.lab.tasks.ctr.parameter_tables import ParameterTables
from subulp.lab.tasks.ctr.variant import Variant, grid
from subulp.nn import CachedEmbeddingBags, EmbeddingTable

from .support import SMALL, write_clicks

CPU = torch.device("cpu")
SGD = {
    "optimizer": "sgd",
    "row_optimizer": "sgd",
    "lr": 0.1,
    "row_lr": 1.0,
    "rounding": ("nearest",),
}


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
    return write_clicks(tmp_path_factory.mktemp("clicks"))


@pytest.fixture(scope="module")
def small(clicks):
    return lambda **changes: CTRConfig(**{**SMALL, "data": clicks, **changes})


def test_tables_begin_as_those_without_extra_bits():
    tables = [EmbeddingTable(30, 4, "fp16", 0.0), EmbeddingTable(8, 4, "fp16", 0.0)]
    torch.manual_seed(0)
    made = ParameterTables(tables, torch.float16, 8, narrow_above=10, seed=3)
    after = torch.rand(3)
    first = CachedEmbeddingBags(
        [EmbeddingTable(30, 4, "fp32", 0.0), EmbeddingTable(8, 4, "fp32", 0.0)], seed=3
    )
    torch.manual_seed(0)
    assert torch.equal(torch.rand(3), after)
    rows = torch.tensor([0, 29, 5, 7])
    found = made(rows, torch.ones(4, dtype=torch.int64))
    assert found.shape == (2, 2, 4)
    assert torch.equal(found[:, 0], first.weight_fp32(0)[[0, 29]])
    assert torch.equal(found[:, 1], first.weight_fp32(1)[[5, 7]])
    made.narrow()
    assert [p.dtype for p in made.parameters()] == [torch.float16, torch.float32]
    memory = made.memory()
    # 120 numbers of 2 bytes with 4 groups of 8 words, and 32 numbers of 4 bytes.
    assert memory.codes == 120 * 2 + 4 * 8 * 4 + 32 * 4
    assert memory.fp32 == 4 * 152


def test_thirteen_extra_bits_are_nearly_fp32(small):
    config = small(precision=("fp32", "fp16", "fp16+13"), cache_fraction=(0.0,), steps=30, **SGD)
    data = task.load(config)
    logits = {}
    for variant in config.variants:
        work = task.build(config, data, variant, 0, CPU)
        for _ in range(30):
            work.loss(True).backward()
            work.optimizer.step()
            work.optimizer.zero_grad()
        example = data.encode(next(data.test.in_order(32)))
        with torch.no_grad():
            logits[variant] = task.logits_of(work.model, example, CPU)
    # Both compute with FP16 rows, but one of them goes on from rows of 24 bits.
    apart, near = (
        (logits["fp32"] - logits[other]).abs().max() for other in ("fp16 nearest", "fp16+13")
    )
    assert 0 < near < apart


def test_dense_precisions_are_compared(small, tmp_path):
    config = small(
        precision=("fp32", "fp16+8"),
        dense_precision=("fp32", "nearest", "extra-bits-8"),
        dense_dtype="fp16",
        cache_fraction=(0.0,),
        steps=4,
        **SGD,
    )
    assert config.variants == (
        "fp32",
        "fp32 dense-nearest",
        "fp32 dense-extra-bits-8",
        "fp16+8",
        "fp16+8 dense-nearest",
        "fp16+8 dense-extra-bits-8",
    )
    done = compare(config, out=tmp_path / "run", jobs=1)
    found = {run.name: run for run in done.summaries}
    assert found["fp16+8"].metrics["compression"] < 1
    assert found["fp16+8 dense-nearest"].metrics["hit_rate"] == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    named = [(run["precision"], run.get("dense")) for run in summary["runs"]]
    dense = (None, "nearest", "extra-bits-8")
    assert sorted(named, key=str) == sorted(
        ((precision, name) for precision in ("fp32", "fp16+8") for name in dense), key=str
    )


@pytest.mark.parametrize("dense", ["nearest", "extra-bits-8", "collage-plus"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_mlps_are_stored_narrow(small, dense, optimizer):
    config = small(
        precision=("int8",), dense_precision=(dense,), dense_dtype="bf16", optimizer=optimizer
    )
    data = task.load(config)
    (variant, *_) = config.variants
    work = task.build(config, data, variant, 0, CPU)
    wide = task.build(small(precision=("int8",)), data, variant, 0, CPU)
    mlps = [(n, p) for n, p in work.model.named_parameters() if n.startswith(("bottom", "top"))]
    assert {p.dtype for _, p in mlps} == {torch.bfloat16}
    first = dict(wide.model.named_parameters())
    # The first weights are FP32's, as exactly as a strategy holds them.
    exact = {"nearest": 2.0**-8, "extra-bits-8": 2.0**-16, "collage-plus": 2.0**-16}[dense]
    for name, p in mlps:
        error = (work.optimizer.wide_value(p) - first[name]).abs() / first[name].abs()
        assert error.max() <= exact


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"precision": ("fp16+8",)},
            r"precision=fp16\+8 needs optimizer=sgd and row_optimizer=sgd",
        ),
        (
            {"precision": ("fp16+8",), "optimizer": "sgd"},
            r"precision=fp16\+8 needs optimizer=sgd and row_optimizer=sgd",
        ),
        ({"precision": ("fp16+17",)}, r"precision=fp16\+17 keeps 17 extra bits: give from 1 to 16"),
        ({"precision": ("fp16+K",)}, "precision='fp16.K' has a letter for a number"),
        ({"precision": ("fp32+8",)}, r"precision='fp32\+8' is unknown: use one of fp32, bf16"),
        ({"dense_precision": ("light",)}, "dense_precision=light: precision='light' is unknown"),
        ({"dense_precision": ("fp32", "fp32")}, "dense_precision repeats fp32"),
    ],
)
def test_what_cannot_be_trained_is_refused(small, changes, message):
    with pytest.raises(ValueError, match=message):
        small(**changes)


def test_tables_with_a_precision_of_their_own_are_refused():
    with pytest.raises(ValueError, match="its own precision int4 contradict each other"):
        Variant("fp16+8").table(100, 4, "int4")


def test_ranks_do_not_share_them(small):
    config = small(precision=("bf16+8",), **SGD)
    with pytest.raises(ValueError, match=r"precision=bf16\+8 keeps whole tables as parameters"):
        task.check_ranks(config, ALONE)
    task.check_ranks(small(), ALONE)


def test_extra_bits_need_neither_rounding_nor_cache():
    found = grid(["fp16+8"], ["nearest", "stochastic"], [0, 0.05], ["lfu"], [32])
    assert list(found) == ["fp16+8"]
    assert found["fp16+8"].settings().get("dense") is None
