"""Tables of rows of integers do what tables of floating-point rows do."""

from __future__ import annotations

import pytest
import torch

from subulp import nn
from subulp.numerics import int_rows


@pytest.mark.parametrize("bits", int_rows.WIDTHS)
@pytest.mark.parametrize("dim", [1, 7, 32])
def test_rows_of_integers(bits, dim):
    table = nn.RowTable(50, dim, f"int{bits}")
    assert table.codes.shape == (50, 8 + -(-dim * bits // 8))
    assert (table.rows, table.dim) == (50, dim)
    packed = 50 * -(-dim * bits // 8)
    assert table.nbytes() == {"codes": packed, "quantisation": 400}
    assert torch.equal(table.decode(0, 50), torch.zeros(50, dim))
    x = torch.randn(50, dim, generator=torch.Generator().manual_seed(0))
    table.store(0, x[:20])
    table.store(20, x[20:])
    expected = int_rows.decode(int_rows.encode(x, bits))
    assert torch.equal(table.decode(0, 50), expected)
    assert torch.equal(table.wide(3, 9), expected[3:9])
    rows = torch.tensor([49, 0, 3, 3])
    assert torch.equal(table.gather(rows), expected[rows])
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    table.permute(order)
    assert torch.equal(table.decode(0, 50), expected[order])


@pytest.mark.parametrize("bits", int_rows.WIDTHS)
def test_precise_rows_have_what_rounding_took(bits):
    table = nn.RowTable(50, 16, f"int{bits}", precise_rows=20)
    x = torch.randn(50, 16, generator=torch.Generator().manual_seed(0))
    table.store(0, x)
    # The remainder is BF16: half an ulp of the largest remainder, half a step.
    room = (x.amax(1) - x.amin(1)).max() / (2**bits - 1) * 2.0**-9
    assert (table.wide(0, 20) - x[:20]).abs().max() <= room
    assert torch.equal(table.gather(torch.tensor([5, 30])), table.wide(0, 50)[[5, 30]])


def test_initial_rows_are_the_same_in_any_storage():
    wide, narrow = nn.RowTable(90, 40, "fp32"), nn.RowTable(90, 40, "int8")
    for table in (wide, narrow):
        table.fill_uniform(0.5, torch.Generator().manual_seed(3))
    assert (wide.decode(0, 90) - narrow.decode(0, 90)).abs().max() <= 0.5 / 255 * 1.01


def test_rows_that_do_not_exist():
    head, bag = nn.ExtremeClassifier(4, 20), nn.CachedEmbeddingBag(20, 4, "int8", 0.5)
    for rows in ([-1], [20], [0, 3, 99]):
        index = torch.tensor(rows)
        for read in (head.weight, head.table.gather, bag.table.weight):
            with pytest.raises(IndexError, match="the table has 0 to 19"):
                read(index)
    for start, stop in ((-1, 3), (0, 21), (5, 4)):
        with pytest.raises(ValueError, match=f"rows {start} to {stop} are out of range"):
            bag.weight_fp32(start, stop)
    assert head.weight(torch.zeros(0, dtype=torch.int64)).shape == (0, 4)
    assert bag.weight_fp32(20, 20).shape == (0, 4)


def test_bad_input():
    with pytest.raises(ValueError, match="have theirs"):
        nn.RowTable(4, 4, "int8", scale=0.5)
    with pytest.raises(ValueError, match="no floating-point format"):
        nn.RowTable(4, 4, "int8").format  # noqa: B018
