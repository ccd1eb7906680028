"""Fingerprints: equal for equal bytes, whatever computes them, and different for any other."""

from __future__ import annotations

import pytest
import torch

from subulp.ops.fingerprint import fingerprint

from .support import environment, isas, threads


def numbers(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, columns, generator=generator).to(dtype)


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (64, 32), (300, 401), (1000, 1000)], ids=str)
def test_equal_for_equal_bytes(shape):
    x = numbers(*shape)
    found = set()
    for isa in isas():
        for count in (1, 2, 3):
            with environment(SUBULP_ISA=isa), threads(count):
                found |= {fingerprint(x), fingerprint(x.clone())}
    assert len(found) == 1


def test_no_two_of_many_changes_are_equal():
    """Every single bit, every pair of neighbours exchanged, and every row with every other."""
    x = numbers(24, 20)
    found = {fingerprint(x)}
    flat = x.view(torch.int16).view(-1)
    for i in range(flat.numel()):
        for bit in range(16):
            flat[i] ^= torch.tensor(1 << bit, dtype=torch.int32).to(torch.int16)
            found.add(fingerprint(x))
            flat[i] ^= torch.tensor(1 << bit, dtype=torch.int32).to(torch.int16)
    expected = 1 + flat.numel() * 16
    assert len(found) == expected
    for i in range(24):
        for j in range(i):
            y = x.clone()
            y[[i, j]] = y[[j, i]]
            found.add(fingerprint(y))
    assert len(found) == expected + 24 * 23 // 2


def test_zeros_of_every_length_differ():
    found = {fingerprint(torch.zeros(1, n, dtype=torch.uint8)) for n in range(1, 300)}
    found |= {fingerprint(torch.zeros(1, n * 65536, dtype=torch.uint8)) for n in range(1, 5)}
    assert len(found) == 303


def test_what_is_read_is_part_of_it():
    x = numbers(8, 8)
    assert len({fingerprint(x), fingerprint(x.t()), fingerprint(x.view(torch.float16))}) == 3
    assert fingerprint(x.view(4, 16)) != fingerprint(x)
    assert fingerprint(x.t()) is not None


def test_there_is_none_where_no_kernel_runs():
    x = numbers(8, 8)
    assert fingerprint(x[:, ::2]) is None
    assert fingerprint(x.to("meta")) is None
    with environment(SUBULP_BACKEND="reference"):
        assert fingerprint(x) is None
