"""What extra bits restore and take, and what hooks do in a step inside the backward pass."""

import pytest
import torch

from subulp.lab.reproduce.extra_bits import clipping, exact
from subulp.numerics import extra_bits


@pytest.mark.parametrize(("name", "k"), [("BF16", 16), ("FP16", 13)])
@pytest.mark.parametrize("coding", ["truncate", "stochastic"])
def test_enough_bits_restore_all(name, k, coding):
    found = exact.restored([(name, k, coding), (name, k - 1, coding)], 0, 16)
    lost = {o.case: o.value for o in found.observations if o.quantity == exact.LOST}
    assert lost[exact.case_of(name, k, coding)] == 0
    assert lost[exact.case_of(name, k - 1, coding)] > 0
    width = found.values(exact.case_of(name, k, coding), exact.TAIL)
    assert width == {None: k + (coding == "stochastic")}


def test_whole_binades_have_all_mantissas():
    generator = torch.Generator().manual_seed(0)
    sizes = [len(x) for x in exact._numbers("FP16", 2, 3, generator)]
    assert sizes == [1 << 23] * 2 + [3] * 2 * 27 + [1 << 23] * 2
    first = next(exact._numbers("FP16", 1, 3, generator))
    assert (float(first.min()), float(first.max())) == (2.0**-14, 2.0**-13 * (1 - 2.0**-24))


def test_a_tail_that_is_lost_is_found_out(monkeypatch):
    split = extra_bits.split
    monkeypatch.setattr(
        extra_bits, "split", lambda *a, **k: (split(*a, **k)[0], split(*a, **k)[1] & ~1)
    )
    found = exact.restored([("BF16", 16, "truncate")], 0, 16)
    assert found.values("BF16 and 16 bits, truncate", exact.LOST)[None] > 0
    assert found.values("BF16 and 16 bits, truncate", exact.CUT) == {None: 0}


def test_bytes_of_a_parameter():
    pairs = [("bfloat16", "master"), ("bfloat16", "extra-bits-16"), ("float16", "extra-bits-13")]
    found = exact.kept(pairs, 64)
    assert [o.value for o in found.observations] == [6.0, 4.0, 2 + 13 / 8]


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_hooks_are_the_usual_loops_clipping(optimizer):
    found = clipping.hooks(optimizer, "extra-bits-8", 16, 3, 0.005, [0])
    for case in (clipping.VALUE, clipping.SCALE, clipping.NORM, clipping.SUM):
        assert found.values(case, clipping.DIFFERENT) == {0: 0}
    assert found.values(clipping.NONE, clipping.DIFFERENT)[0] > 0
    assert found.values("fused", clipping.LEFT) == {0: 0}
    assert 0.1 < found.values(clipping.VALUE, clipping.CLIPPED)[0] < 1


def test_a_hook_that_does_nothing_is_found_out(monkeypatch):
    monkeypatch.setattr(clipping, "_hook", lambda _: lambda model: None)
    found = clipping.hooks("SGD", "extra-bits-8", 16, 3, 0.005, [0])
    assert found.values(clipping.VALUE, clipping.DIFFERENT)[0] > 0
    assert found.values(clipping.SCALE, clipping.DIFFERENT)[0] > 0
