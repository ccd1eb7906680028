"""A matrix and its transpose, encoded together: each as by itself, from one read a launch."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from subulp.numerics import E4M3, E5M2, mixture, simulated
from subulp.numerics.mixture import RECIPES, THREE_WAY, Entry, Recipe
from subulp.ops.mixture import EncodeBothJob, EncodeJob, encode, encode_both
from subulp.ops.mixture import triton_both as kernels

from .support import environment, interpreted, threads
from .test_mixture import matrices

E3M4 = simulated(3, 4)
THREE_FORMATS = Recipe(
    "with-e3m4",
    (
        Entry(E3M4, mixture.better_than(E3M4, E4M3)),
        Entry(E4M3, mixture.no_worse_than(E4M3, E5M2)),
        Entry(E5M2, mixture.fits_range(E5M2)),
    ),
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with threads(1):
        yield


@pytest.fixture
def together(monkeypatch) -> list[EncodeBothJob]:
    """Jobs of the kernels for both."""
    found, run = [], kernels.encode

    def noted(job: EncodeBothJob) -> Any:
        found.append(job)
        return run(job)

    monkeypatch.setattr(kernels, "encode", noted)
    return found


def check(x: torch.Tensor, recipe: Recipe, size: Any, **options: Any) -> None:
    """Encode both, and compare with each by itself in the reference."""
    with environment(SUBULP_BACKEND="triton"), np.errstate(all="ignore"):
        pair = encode_both(x, recipe, size, **options)
    for matrix, (found, summary) in zip((x, x.t()), pair, strict=True):
        with environment(SUBULP_BACKEND="reference"):
            wanted, of_wanted = encode(matrix, recipe, size, **options)
        where = recipe.name, size, options, tuple(matrix.shape), matrix.dtype
        assert (found.block, found.blocks_of_group) == (wanted.block, wanted.blocks_of_group)
        for mine, one in zip(found.trimmed().tensors, wanted.trimmed().tensors, strict=True):
            assert mine.shape == one.shape, where
            assert torch.equal(*(t.contiguous().view(torch.uint8) for t in (mine, one))), where
        assert summary.sole == of_wanted.sole
        # Sums that no decision depends on.
        mine, one = (s.numbers for s in (summary, of_wanted))
        torch.testing.assert_close(mine[:, :-2].sum(0), one[:, :-2].sum(0), rtol=1e-12, atol=0)
        assert mine[:, -2].max() == one[:, -2].max()
        assert mine[:, -1].min() == one[:, -1].min()


@interpreted
@pytest.mark.parametrize("size", ["subchannel-32", "subchannel-128", (1, 16)], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_both_are_the_reference(recipe, size, together):
    """Ragged blocks of each type, some with infinities, of all that a kernel distinguishes."""
    x = list(matrices((50, 140)))
    width = 96 if size == "subchannel-32" else 384
    check(x[2], RECIPES[recipe], size, group=(2, width))
    check(x[3], RECIPES[recipe], size, scaling="e8m0")
    check(x[4], RECIPES[recipe], size, scaling="amax")
    assert len(together) == 3


@interpreted
@pytest.mark.parametrize("shape", [(1, 1), (130, 20), (3, 200)], ids=str)
def test_ends_of_matrices(shape, together):
    x = list(matrices(shape))[2]
    check(x, THREE_WAY, "subchannel-128")
    check(x.half(), RECIPES["tensor"], "subchannel-128")
    assert len(together) == 2


@interpreted
def test_recipes_of_three_formats(together):
    x = list(matrices((40, 50)))[3]
    check(x, THREE_FORMATS, "subchannel-32", metric="squared-relative-error")
    assert len(together) == 1


@interpreted
def test_transposed_matrices(together):
    x = list(matrices((40, 50)))[2]
    check(x.t(), THREE_WAY, "subchannel-32")
    # Every second row and column.
    check(x[::2, ::2], THREE_WAY, "subchannel-32")
    assert len(together) == 2


@interpreted
@pytest.mark.parametrize("many", [False, True])
def test_chunks_of_blocks_are_added_in_order(many, together, monkeypatch):
    """A tensor of more blocks than are added up at once, in one of the directions."""
    if many:
        recipes = importlib.import_module("subulp.ops.mixture.triton_recipe")
        monkeypatch.setattr(recipes, "FEW", 1)
    x = torch.randn((4, 4100), generator=torch.Generator().manual_seed(0))
    check(x, RECIPES["tensor"], (1, 16), threshold=0.02)
    assert len(together) == 1


@interpreted
def test_other_blocks_are_encoded_one_after_the_other(together):
    x = list(matrices((6, 140)))[2]
    for size in ("channel", (2, 16), (1, 24)):
        check(x, THREE_WAY, size)
    assert together == []


@pytest.mark.parametrize(
    ("blocks", "side"),
    [
        (((1, 128), (1, 128)), 128),
        (((1, 32), (1, 32)), 32),
        (((1, 8), (1, 8)), None),
        (((1, 48), (1, 48)), None),
        (((1, 256), (1, 256)), None),
        (((2, 32), (2, 32)), None),
        # As long as the matrix, which the other one's blocks are longer than.
        (((1, 128), (1, 100)), 128),
        (((1, 100), (1, 60)), None),
    ],
    ids=str,
)
def test_blocks_that_a_tile_holds(blocks, side):
    x = torch.zeros(100, 300)
    jobs = [
        EncodeJob(matrix, THREE_WAY, block, (1, 1), "amax", 0.045)
        for matrix, block in zip((x, x.t()), blocks, strict=True)
    ]
    assert EncodeBothJob(*jobs).side == side
