"""Parts of a mixture decode to the parts of what the whole decodes to, and multiply like it."""

from __future__ import annotations

import itertools

import pytest
import torch

from subulp.numerics import mixture
from subulp.numerics.mixture import RECIPES
from subulp.ops.mixture import decode
from subulp.ops.mixture import product as products
from subulp.ops.mixture.operand import Operand
from subulp.ops.mixture.tiles import row_tiles

PARTITIONS = ("tensor", "channel", "subchannel-32", "block-128x128", (24, 20))
GROUPS = ("tensor", (48, 40))


def mixed(rows: int, k: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Blocks of every type, some of them not finite."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator)
    x[: rows // 3] *= (12 * torch.randn(rows // 3, 1, generator=generator)).exp2()
    x[:, k // 2 :] *= (8 * torch.randn(k - k // 2, generator=generator)).exp2()
    if rows > 30:
        x[-3, 5], x[20, -1] = torch.inf, torch.nan
    return x.to(dtype)


def patterns(values: torch.Tensor) -> torch.Tensor:
    """The bits, with one NaN for all."""
    return torch.where(values.isnan(), torch.nan, values).view(torch.int32)


@pytest.mark.parametrize("rows", [1, 30, 130, 1000])
@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_parts_are_parts_of_the_whole(recipe, partition, rows):
    cases = itertools.product(GROUPS, (torch.float32, torch.float16), ((261, 150), (5, 70)))
    for group, dtype, shape in cases:
        if group != "tensor" and partition != (24, 20):
            continue
        x = mixed(*shape, dtype=dtype)
        found, _ = mixture.encode(x, RECIPES[recipe], partition, group=group)
        whole = mixture.decode(found)
        end = 0
        for where, part in row_tiles(found, rows):
            assert where.start == end
            end = where.stop
            expected = whole[where]
            for values in (mixture.decode(part), decode(part)):
                assert torch.equal(patterns(values), patterns(expected))
        assert end == shape[0]


def test_there_are_as_many_parts_as_asked_for():
    found, _ = mixture.encode(torch.randn(512, 64), RECIPES["subtensor-2way"], "block-128x128")
    assert [where.stop for where, _ in row_tiles(found, 128)] == [128, 256, 384, 512]
    assert [where.stop for where, _ in row_tiles(found, 300)] == [256, 512]
    found, _ = mixture.encode(torch.randn(50, 64), RECIPES["tensor"], "tensor")
    assert [where.stop for where, _ in row_tiles(found, 20)] == [20, 40, 50]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
def test_a_product_tile_by_tile(partition, transposed, monkeypatch):
    """Each number at most as far from the exact one as sums in FP32 of any order may be."""
    monkeypatch.setattr(products, "TILE_BYTES", 4 * 150 * 40)
    x, w = mixed(30, 150, seed=1), mixed(261, 150, seed=2)
    w[~w.isfinite()] = 1.0
    a, _ = mixture.encode(x, RECIPES["subtensor-3way"], partition)
    b, _ = mixture.encode(w.t() if transposed else w, RECIPES["subtensor-3way"], partition)
    left, right = Operand(a, None), Operand(b, None, transposed)
    found = products.product(left, right, torch.float32)
    exact = left.values().double() @ right.values().double().t()
    size = left.values().double().abs() @ right.values().double().abs().t()
    assert bool(((found.double() - exact).abs() <= 150 * 2.0**-24 * size).all())
