"""The rational AdamW rounds as torch does, and tells other arithmetic from Algorithm 2's."""

from fractions import Fraction

import pytest
import torch

from subulp import optim
from subulp.lab.reproduce.collage.rational_adamw import DIFFERENT, bf16, bf16_root, compare


def positive_numbers():
    """But the largest ones, whose sums FP32 does not hold."""
    return torch.arange(1, 0x7F00, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def test_numbers_between_bf16s_are_rounded_as_torch_rounds_them():
    codes = positive_numbers().float()
    ties = (codes[:-1] + codes[1:]) / 2
    x = torch.cat([codes, ties, torch.nextafter(ties, ties * 2), torch.nextafter(ties, ties * 0)])
    x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:20_000]]
    wanted = x.bfloat16().tolist()
    assert [float(bf16(Fraction(v))) for v in x.tolist()] == wanted
    assert [float(bf16(Fraction(-v))) for v in x.tolist()] == [-v for v in wanted]
    assert bf16(Fraction()) == 0


def test_roots_are_torchs():
    # A root in FP64 is no tie of BF16 unless it is exact.
    x = positive_numbers()[::7].double()
    wanted = x.sqrt().bfloat16().tolist()
    assert [float(bf16_root(Fraction(v))) for v in x.tolist()] == wanted
    assert bf16_root(Fraction()) == 0


@pytest.mark.parametrize("strategy", ["nearest", "collage-light", "collage-plus"])
def test_the_library_is_the_algorithm(strategy):
    found = compare([strategy], [0.99], elements=16, steps=10)
    assert found.values(f"{strategy}, β2 0.99", DIFFERENT) == {None: 0}


@pytest.mark.parametrize("strategy", ["collage-light", "collage-plus"])
def test_arithmetic_of_another_kind_differs(strategy, monkeypatch):
    class Wide(optim.AdamW):
        def __init__(self, *args, arithmetic, **options):
            super().__init__(*args, **options)

    monkeypatch.setattr(optim, "AdamW", Wide)
    found = compare([strategy], [0.99], elements=16, steps=10)
    assert found.values(f"{strategy}, β2 0.99", DIFFERENT)[None] > 0
