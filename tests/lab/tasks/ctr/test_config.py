"""The grid, presets, and options that contradict each other."""

from pathlib import Path

import numpy as np
import pytest

from subulp.lab.engine.config_json import config_of, plain_fields
from subulp.lab.tasks.ctr.config import CTRConfig
from subulp.lab.tasks.ctr.presets import PRESETS, preset
from subulp.lab.tasks.ctr.task import load
from subulp.lab.tasks.ctr.variant import grid
from tests.lab.tasks.ctr.readers.support import criteo_lines

CRITEO = "criteo:train.txt"


def test_the_default_grid():
    assert CTRConfig().variants == (
        "fp32",
        *(
            f"{precision} {rounding}{cache}"
            for precision in ("int8", "int4", "int2")
            for cache in ("", " lfu 5%")
            for rounding in ("nearest", "stochastic")
        ),
    )


def test_what_does_not_matter_makes_no_run():
    found = grid(["fp32", "int4"], ["nearest"], [0, 0.05, 0.3], ["lfu", "lru"], [1, 32])
    names = ["fp32", "int4 nearest"] + [
        f"int4 nearest {policy} {size}% {ways}-way"
        for size in (5, 30)
        for policy in ("lfu", "lru")
        for ways in (1, 32)
    ]
    assert list(found) == names
    assert found["fp32"].settings() == {
        "precision": "fp32",
        "rounding": None,
        "cache_fraction": 0.0,
        "policy": None,
        "ways": None,
    }
    assert found["int4 nearest lru 30% 1-way"].settings() == {
        "precision": "int4",
        "rounding": "nearest",
        "cache_fraction": 0.3,
        "policy": "lru",
        "ways": 1,
    }


def test_a_table_may_have_a_precision_of_its_own():
    found = grid(["fp32", "fp8"], ["stochastic"], [0.1], ["lru"], [4])
    narrow = found["fp8 stochastic lru 10%"]
    assert narrow.table(100, 8).storage == "e4m3"
    own = narrow.table(100, 8, "int2")
    assert (own.storage, own.cache_fraction, own.policy, own.ways) == ("int2", 0.1, "lru", 4)
    assert found["fp32"].table(100, 8, "int2").storage == "fp32"


def test_presets_are_the_published_sizes():
    # Table 1 of the cache paper, which sorts them.
    sizes = sorted(PRESETS["criteo-kaggle"].rows)
    assert sizes[:8] == [4, 4, 11, 16, 18, 24, 28, 105]
    assert sizes[-5:] == [2_202_608, 5_461_306, 7_046_547, 8_351_593, 10_131_227]
    # 4.3 billion parameters, says the paper.
    assert sum(sizes) * 128 == pytest.approx(4.3e9, rel=0.01)
    assert {len(p.rows) for p in PRESETS.values()} == {26}
    config = CTRConfig(preset="criteo-kaggle", data=CRITEO, dim=64)
    assert (config.dim, config.bottom, config.top) == (64, (512, 256, 64), (512, 256))
    assert config.rows == preset("criteo-kaggle").rows


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": ("int3",)}, "precision='int3' is unknown: use one of fp32, bf16"),
        ({"rounding": ("up",)}, "rounding='up' is unknown: use"),
        ({"policy": ("fifo",)}, "policy='fifo' is unknown: use"),
        ({"ways": (3,)}, "ways=3 is not a power of two"),
        ({"cache_fraction": (1.5,)}, "cache_fraction=1.5 is out of range"),
        ({"cache_fraction": (0.1, 0.1)}, "cache_fraction repeats 0.1"),
        ({"preset": "criteo"}, "preset='criteo' is unknown: use one of"),
        ({"preset": "criteo-kaggle", "data": None}, "preset=criteo-kaggle and data=adult contra"),
        ({"rows": (5,), "data": "csv:x"}, "rows=.*data=csv:x contradict"),
        ({"columns": Path("x.toml")}, "columns=x.toml and data=criteo:train.txt contradict"),
        ({"dim": 0}, "dim=0 is out of range"),
        ({"top": (8, 0)}, "top=0 is out of range"),
        ({"rows": ()}, "rows is empty"),
        ({"test_share": 1.0}, "test_share=1.0 is out of range"),
        ({"test_share": 0.0}, "test_share=0.0 is out of range"),
        ({"precision": ("fp16+08",), "optimizer": "sgd"}, r"precision='fp16\+08' is unknown"),
        ({"min_count": -1}, "min_count=-1 is out of range"),
        ({"nonfinite": "skip"}, "nonfinite=skip is not available: tables update their rows"),
        ({"row_lr": -1.0}, "row_lr=-1.0 is out of range"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        CTRConfig(**{"data": CRITEO, **options})


@pytest.mark.parametrize(
    ("given", "more", "message"),
    [
        ({"cache_fraction": (0.1,)}, {"precision": ("fp32",)}, "cache_fraction=0.1 .* no cache"),
        ({"rounding": ("stochastic",)}, {"precision": ("fp32",)}, "rounding=stochastic has no eff"),
        ({"policy": ("lru",)}, {"precision": ("fp32",)}, "policy=lru has no effect on tables with"),
        ({"policy": ("lru", "lfu")}, {"cache_fraction": (0.0,)}, "policy=lru,lfu has no effect on"),
        (
            {"ways": (1,)},
            {"cache_fraction": (0.0,)},
            "ways=1 has no effect on tables without a",
        ),
        (
            {"on_bad_line": "skip"},
            {"data": "generated"},
            "on_bad_line=skip .* data=generated, wh",
        ),
        (
            {"on_bad_line": "skip"},
            {"data": "flights"},
            "on_bad_line=skip has no effect on data=f",
        ),
    ],
)
def test_what_would_change_nothing_is_refused_of_new_runs_alone(given, more, message):
    with pytest.raises(ValueError, match=message):
        CTRConfig(**given, **more)
    # Of a file that an earlier version wrote it is taken.
    (name,) = given
    saved = {**plain_fields(CTRConfig(**more)), name: plain_fields(CTRConfig(**given))[name]}
    assert getattr(config_of("ctr", saved), name) == given[name]


def test_what_is_so_anyway_may_be_said():
    CTRConfig(precision=("fp32",), rounding=("nearest",), cache_fraction=(0.0,), narrow_above=5)
    CTRConfig(dense_precision=("fp32",), dense_dtype="fp16")


def test_a_preset_gives_every_category_a_row_of_its_own(tmp_path):
    lines = [line.split("\t") for line in criteo_lines(60)]
    # One column has as many categories as examples.
    lines = ["\t".join([*line[:14], f"{i:08x}", *line[15:]]) for i, line in enumerate(lines)]
    (tmp_path / "clicks").write_text("\n".join(lines) + "\n")
    data = f"criteo:{tmp_path / 'clicks'}"
    config = CTRConfig(data=data, preset="criteo-kaggle", batch_size=8, precision=("int8",))
    assert config.min_count == 1
    found = load(config)
    (chunk,) = found.train.chunks()
    rows = found.encode(chunk).rows[:, 0]
    assert len(set(rows.tolist())) == len(chunk) == found.tables[0].rows - 1
    assert 0 not in rows
    hashed = CTRConfig(data=data, preset="criteo-kaggle", min_count=0, batch_size=8)
    assert load(hashed).tables[0].rows == 1461
    rare = CTRConfig(data=data, preset="criteo-kaggle", min_count=2, batch_size=8)
    assert load(rare).tables[0].rows == 1
    assert CTRConfig(data=data).min_count is None


def test_hashing_to_as_many_rows_as_there_are_categories_leaves_a_third_empty():
    """Why a preset does not hash: the share of used rows is 1 - 1/e."""
    keys = np.random.default_rng(0).integers(0, 2**32, 70_465, dtype=np.uint32)
    used = len(np.unique(keys % 70_465)) / 70_465
    assert used == pytest.approx(1 - np.exp(-1), abs=0.01)
