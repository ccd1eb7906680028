"""The model, one run, the whole grid."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from subulp.lab.compare import compare
from subulp.lab.engine.loop import run
from subulp.lab.tasks.ctr import task
from subulp.lab.tasks.ctr.config import CTRConfig
from subulp.lab.tasks.ctr.dlrm import DLRM
from subulp.lab.tasks.ctr.variant import Variant
from subulp.nn import CachedEmbeddingBags, EmbeddingTable

from .support import SMALL, write_clicks

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
    return write_clicks(tmp_path_factory.mktemp("clicks"))


@pytest.fixture(scope="module")
def small(clicks):
    return lambda **changes: CTRConfig(**{**SMALL, "data": clicks, **changes})


@pytest.fixture(scope="module")
def data(small):
    return task.load(small())


def timeless(summary):
    return dataclasses.replace(
        summary, seconds_per_step=0.0, seconds_per_epoch=0.0, peak_bytes={}, category_peak_bytes={}
    )


def test_dlrm_is_products_of_all_pairs():
    torch.manual_seed(0)
    tables = CachedEmbeddingBags([EmbeddingTable(9, 4, "fp32", 0.0)] * 3, stacked=True, seed=0)
    model = DLRM(2, tables, 4, (5,), (6,)).eval()
    numbers, rows = torch.randn(7, 2), torch.randint(0, 9, (7, 3))
    found = model(numbers, rows)
    for example in range(7):
        dense = model.bottom(numbers[example])
        vectors = [dense, *(tables.weight_fp32(t)[rows[example, t]] for t in range(3))]
        products = [vectors[i] @ vectors[j] for i in range(4) for j in range(i)]
        expected = model.top(torch.cat([dense, torch.stack(products)]))[0]
        torch.testing.assert_close(found[example], expected, rtol=1e-5, atol=1e-6)
    assert tuple(model.top[0].weight.shape) == (6, 4 + 6)


@pytest.mark.parametrize("variant", ["fp32", "int4 stochastic lfu 5%"])
def test_the_same_seed_gives_the_same_bits(small, data, variant):
    config = small()
    runs = [timeless(run(config, data, variant, seed)) for seed in (0, 0, 1)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert runs[0].variant == (None if variant == "fp32" else variant)


@pytest.mark.parametrize("policy", ["lfu", "lru"])
def test_a_cache_over_fp32_rows_changes_nothing(small, data, policy):
    config, states = small(), []
    for variant in (Variant("fp32"), Variant("fp32", None, 0.1, policy, 4)):
        model = task.Built.of(config, data, variant).model(data.tables, data.numbers, 0)
        task.build_rows(config, model.tables)
        for examples, _ in zip(data.train.batches(32, 0), range(6), strict=False):
            batch = data.encode(examples)
            logits = model(torch.from_numpy(batch.numbers), torch.from_numpy(batch.rows))
            labels = torch.from_numpy(batch.labels)
            torch.nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()
        states.append([model.tables.weight_fp32(t) for t in range(26)])
    assert all(map(torch.equal, *states))


@pytest.mark.parametrize("optimizer", ["rowwise-adagrad", "adagrad", "sgd"])
def test_every_optimizer_of_rows_learns(small, data, optimizer):
    row_lr = 5.0 if optimizer == "sgd" else 0.1
    config = small(row_optimizer=optimizer, row_lr=row_lr, lr=1e-2, epochs=12)
    summary = run(config, data, "int8 stochastic lfu 5%", 0)
    # The label is a function of one category.
    assert summary.metrics["AUC"] > 0.7
    state = {"rowwise-adagrad": 1 / 4, "adagrad": 1, "sgd": 0}[optimizer]
    assert summary.bytes_per_parameter["optimizer"] == 4 * state
    assert summary.peak_bytes["states"] > 4 * state * 26 * 2000 * 4


@pytest.mark.parametrize("max_norm", [None, 1e-3])
def test_a_fused_run_gives_the_same_numbers(small, data, max_norm):
    """With a second backward pass too, in which rows do not step again."""
    config = small(max_norm=max_norm)
    fused = dataclasses.replace(config, fuse_backward=True)
    runs = [timeless(run(c, data, "int4 stochastic lfu 5%", 0)) for c in (config, fused)]
    assert runs[0] == runs[1]


def test_small_tables_stay_in_fp32(small, data):
    config = small(narrow_above=2000)
    summary = run(config, data, "int2 nearest", 0)
    assert summary.metrics["compression"] == 1.0
    assert summary.metrics["hit_rate"] == 0.0
    wide = run(config, data, "fp32", 0)
    assert summary.metrics == wide.metrics


def test_the_whole_grid(small, tmp_path):
    config = small(
        precision=("fp32", "int2"), rounding=("stochastic",), policy=("lfu", "lru"), seeds=(0, 1)
    )
    found = compare(config, out=tmp_path / "run", jobs=1)
    assert {path.name for path in found.directory.iterdir()} == {
        ".lock",
        "SHA256SUMS",
        "models",
        "checkpoints",
        "config.json",
        "metrics.jsonl",
        "summary.json",
        "report.html",
        "loss.png",
        "descent_quality.png",
        "compression.png",
        "accesses.png",
    }
    saved = json.loads((found.directory / "summary.json").read_text())
    assert saved["data"]["train"] == 360
    assert saved["data"]["rows"] == 26 * 2000
    runs = saved["runs"]
    assert len(runs) == 4 * 2
    for entry in runs:
        assert {
            *("precision", "cache_fraction", "policy", "rounding", "ways", "seed", "AUC"),
            *("accuracy", "normalised_entropy", "accuracy_drop", "compression", "hit_rate"),
            *("log_loss", "peak_bytes"),
        } <= set(entry)
    wide, narrow, lfu, lru = (runs[2 * i] for i in range(4))
    assert (wide["precision"], wide["accuracy_drop"], wide["compression"]) == ("fp32", 0.0, 1.0)
    assert wide["policy"] is None
    assert "variant" not in wide
    assert (narrow["cache_fraction"], narrow["ways"], narrow["hit_rate"]) == (0.0, None, 0.0)
    assert (lfu["policy"], lfu["cache_fraction"], lfu["ways"]) == ("lfu", 0.05, 32)
    assert lfu["hit_rate"] > 0.1
    drop = 100 * (wide["accuracy"] - lru["accuracy"]) / wide["accuracy"]
    assert lru["accuracy_drop"] == pytest.approx(drop)
    # 4 numbers in 2 bits, scale and bias; 100 of 2,000 rows and their tags; LFU's counts.
    assert narrow["compression"] == (1 + 8) / 16
    assert lru["compression"] == pytest.approx((9 + 0.048 * 16 + 0.048 * 4 + 0.048 * 4) / 16)
    assert lfu["compression"] == pytest.approx((9 + 0.048 * 16 + 0.048 * 4 + 4) / 16)
    assert {entry["parameters"] for entry in runs} == {wide["parameters"]}


def test_accesses_are_those_of_the_training_part(data):
    counts, examples = task.access_counts(data, 1000)
    assert examples == len(data.train) == 360
    assert list(counts) == [f"C{i}" for i in range(1, 27)]
    assert all(count.sum() == 360 for count in counts.values())
    assert (np.sort(counts["C20"])[-1], len(counts["C20"])) == (360, 2000)


def test_too_few_examples_for_a_batch(small):
    with pytest.raises(ValueError, match="batch_size=500 is above half of the 360 training"):
        task.load(small(batch_size=500))


def test_a_precision_in_a_description_is_checked(tmp_path):
    (tmp_path / "a.csv").write_text("y,x,c\n" + "0,1,a\n1,2,b\n" * 8)
    (tmp_path / "a.toml").write_text(
        '[label]\ncolumn = "y"\n[numeric]\ncolumns = ["x"]\n'
        '[[cross]]\ncolumns = ["c"]\nrows = 10\nstorage = "int3"\n'
    )
    config = CTRConfig(data=f"csv:{tmp_path / 'a.csv'}", columns=tmp_path / "a.toml", batch_size=2)
    with pytest.raises(ValueError, match=r"a\.toml:8: expected cross\[0\]\.storage to be 'fp32',"):
        task.load(config)
