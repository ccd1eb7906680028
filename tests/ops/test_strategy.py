"""The table of strategies, and the tables of the pages and docstrings that follow it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from subulp.ops import facts, native, parse_strategy
from subulp.ops.strategy import CODES, TABLE, all_names
from subulp.optim import AdamW

ROOT = Path(__file__).parents[2]
# What a table says of a strategy: its name, and bytes of parameter, gradient and states.
ROWS = {
    "README": (ROOT / "README.md", r'^\| `"(\S+)"` \| (.+?) \|'),
    "optimizers": (ROOT / "docs" / "optimizers.md", r'^\| `"(\S+)"` \|(?:[^|]*\|){3} (.+?) \|'),
    "AdamW": (None, r'^ *``"(\S+)"`` +(\S+) '),
}


def total(name: str, dtype: torch.dtype | None = None) -> float:
    strategy = parse_strategy(name)
    dtype = dtype or strategy.dtypes[0]
    return dtype.itemsize + strategy.stored_bytes(dtype)


@pytest.mark.parametrize("place", ROWS)
def test_tables_name_every_strategy_and_its_bytes(place):
    path, row = ROWS[place]
    text = (AdamW.__doc__ or "") if path is None else path.read_text()
    found = dict(re.findall(row, text, re.MULTILINE))
    # The other roundings of extra bits are explained below the tables.
    others = {s.name for s in TABLE if s.coding and s.name != "extra-bits-K"}
    assert set(found) == {s.name for s in TABLE} - others
    for name, size in found.items():
        if "K" in name:
            least, share = size.replace(" ", "").split("+")
            assert share == "K/8"
            for k in (1, 8, 16):
                assert total(name.replace("K", str(k))) == float(least) + k / 8
        else:
            assert total(name) == float(size)


@pytest.mark.parametrize("place", ["optimizers", "AdamW"])
def test_fp8_strategies_and_their_bytes(place):
    path, _ = ROWS[place]
    text = (AdamW.__doc__ or "") if path is None else path.read_text()
    listed = re.search(r"parameters can have\s+(.*?)\.", text, re.DOTALL)
    found = {
        name.removeprefix("collage-"): int(size)
        for name, size in re.findall(r"([\w-]+)\s+\((\d+)\)", listed[1])
    }
    fp8 = torch.float8_e4m3fn
    have = [name for name in all_names(8) if fp8 in parse_strategy(name).dtypes]
    assert found == {name.removeprefix("collage-"): total(name, fp8) for name in have}


@pytest.mark.parametrize("name", all_names(1, 5, 16))
def test_a_name_is_its_strategy(name):
    strategy = parse_strategy(name)
    assert strategy.name == name
    row = TABLE[CODES[strategy.family]]
    assert (row.weight, row.stochastic) == (strategy.weight, strategy.stochastic)


def test_a_library_with_another_table_is_refused(monkeypatch):
    monkeypatch.setattr(facts, "TABLE", TABLE[:-1])
    native.library.cache_clear()
    try:
        with pytest.raises(
            RuntimeError, match=r"have 'strategy extra-bits-K-stochastic .* another"
        ):
            native.library()
    finally:
        native.library.cache_clear()
