"""``subulp::all_finite`` on every backend, for every format."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from subulp.ops import all_finite

from .support import DTYPES, E4M3, FP32, environment, interpreted, isas, short

BACKENDS = ["reference", "cpu", pytest.param("triton", marks=interpreted)]
NON_FINITE = {
    torch.float32: (0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000, 0xFFFFFFFF),
    torch.bfloat16: (0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0xFFFF),
    torch.float16: (0x7C00, 0xFC00, 0x7C01, 0x7E00, 0xFFFF),
    torch.float8_e4m3fn: (0x7F, 0xFF),
    torch.float8_e5m2: (0x7C, 0xFC, 0x7D, 0x7E, 0xFF),
}
LARGEST = {
    torch.float32: (0x7F7FFFFF, 0xFF7FFFFF),
    torch.bfloat16: (0x7F7F, 0xFF7F),
    torch.float16: (0x7BFF, 0xFBFF),
    torch.float8_e4m3fn: (0x7E, 0xFE),
    torch.float8_e5m2: (0x7B, 0xFB),
}


def holding(dtype: torch.dtype, size: int, index: int, code: int) -> torch.Tensor:
    """A tensor of zeros but for one code."""
    words = np.zeros(size, dtype=f"uint{8 * dtype.itemsize}")
    words[index] = code
    return torch.from_numpy(words).view(dtype)


def verdict(backend: str, tensors: list[torch.Tensor]) -> bool:
    with environment(SUBULP_BACKEND=backend):
        result = all_finite(tensors)
    assert result.dtype == torch.bool
    assert result.shape == ()
    assert result.device == (tensors[0].device if tensors else torch.device("cpu"))
    return bool(result)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_each_code(dtype, backend):
    for code in NON_FINITE[dtype]:
        assert not verdict(backend, [holding(dtype, 3, 1, code)]), hex(code)
    for code in LARGEST[dtype]:
        assert verdict(backend, [holding(dtype, 3, 1, code)]), hex(code)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_each_position(dtype):
    """At the ends of vectors, blocks and shares of threads, for every instruction set."""
    code = NON_FINITE[dtype][0]
    for isa in isas():
        with environment(SUBULP_ISA=isa):
            for size in (1, 7, 64, 65, 70_000):
                for index in {0, size // 2, min(size, 65_536) - 1, size - 1}:
                    assert not verdict("cpu", [holding(dtype, size, index, code)]), (
                        isa,
                        size,
                        index,
                    )


@interpreted
def test_each_position_triton():
    for size in (1, 4096, 5000):
        for index in {0, size // 2, min(size, 4096) - 1, size - 1}:
            assert not verdict("triton", [holding(FP32, size, index, 0x7F800000)]), (size, index)


@pytest.mark.parametrize("backend", BACKENDS)
def test_mixed_lists(backend):
    """Several dtypes, empty tensors, unaligned and strided ones."""
    good = [torch.ones(9, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    good += [torch.zeros(0), torch.ones(6, 4).t(), torch.ones(10)[1:], torch.tensor(2.0)]
    good += [torch.ones(4).to(E4M3)]
    assert verdict(backend, good)
    for i, tensor in enumerate(good):
        if tensor.numel() and tensor.dtype != E4M3:
            # `full_like` keeps the strides.
            bad = [*good[:i], torch.full_like(tensor, float("nan")), *good[i + 1 :]]
            assert not verdict(backend, bad), i


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gap_between_strided_elements_does_not_count(backend):
    x = torch.ones(10)
    x[1::2] = float("nan")
    assert verdict(backend, [x[::2]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_finite(backend):
    assert verdict(backend, [])
    assert verdict(backend, [torch.zeros(0)])


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match="not a format of subulp"):
        all_finite([torch.zeros(2, dtype=torch.float64)])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_gpu(dtype):
    for size in (1, 4096, 100_001):
        for code in LARGEST[dtype]:
            assert verdict("triton", [holding(dtype, size, size - 1, code).cuda()])
        for code in NON_FINITE[dtype]:
            for index in (0, size // 2, size - 1):
                assert not verdict("triton", [holding(dtype, size, index, code).cuda()])
