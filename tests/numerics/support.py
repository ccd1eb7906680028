"""What the tests of numerics share: comparison of bits, inputs around every boundary."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from subulp.numerics import BF16, E4M3, E5M2, FP16, Format
from tests.oracles.grid import Grid

NARROW = (BF16, FP16, E4M3, E5M2)
FP8 = (E4M3, E5M2)
FP32_MAX = torch.finfo(torch.float32).max
INF, NAN = float("inf"), float("nan")


@cache
def grid_of(fmt: Format) -> Grid:
    """The oracle's format; one object for each, so that its enumeration is made once."""
    return Grid(fmt.exponent_bits, fmt.mantissa_bits, fmt.has_infinity)


def numpy_dtype(fmt: Format) -> Any:
    """The format as numpy and ml_dtypes have it, which only those tests need that ask them."""
    import ml_dtypes  # noqa: PLC0415 - missing beside a GPU, whose tests take boundaries

    names = {E4M3: "float8_e4m3fn", E5M2: "float8_e5m2", BF16: "bfloat16"}
    return np.float16 if fmt == FP16 else getattr(ml_dtypes, names[fmt])


def fp32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def from_patterns(patterns: object) -> Tensor:
    """FP32 values of 32-bit patterns."""
    return torch.from_numpy(np.asarray(patterns, dtype=np.uint32).view(np.float32))


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal as FP32 bit patterns: -0 is not 0; any NaN equals any NaN."""
    assert actual.dtype == expected.dtype == torch.float32
    assert actual.shape == expected.shape
    actual, expected = actual.contiguous(), expected.contiguous()
    same = actual.view(torch.int32) == expected.view(torch.int32)
    wrong = ~(same | (actual.isnan() & expected.isnan())).flatten()
    where = wrong.nonzero().flatten()[:5]
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} differ, first at {where.tolist()}: "
        f"got {actual.flatten()[where].tolist()}, expected {expected.flatten()[where].tolist()}"
    )


def all_codes(fmt: Format) -> Tensor:
    """The value of every code of a stored format, NaN and infinities included, in code order."""
    return torch.from_numpy(_codes(fmt).view(numpy_dtype(fmt)).astype(np.float32))


def _codes(fmt: Format) -> np.ndarray:
    bits = 1 + fmt.exponent_bits + fmt.mantissa_bits
    return np.arange(2**bits, dtype=np.uint8 if bits == 8 else np.uint16)


def every_value(fmt: Format) -> Tensor:
    """The same for any format small enough to enumerate, from the oracle's grid."""
    finite = [float(v) for v in grid_of(fmt).values]
    special = [INF, NAN] if fmt.has_infinity else [NAN]
    return fp32([*finite, *(-v for v in finite), *special, -special[0]])


def boundaries(fmt: Format) -> Tensor:
    """Every code, the midpoint to the next magnitude, and the FP32 neighbours of all of them.

    After the largest value, the next is where the next one would lie.
    """
    codes = torch.from_numpy(_codes(fmt)).view(fmt.dtype).float().numpy()
    magnitudes = codes[np.isfinite(codes) & ~np.signbit(codes)]
    assert (np.diff(magnitudes) > 0).all()
    steps = np.diff(magnitudes)
    # Half steps of these formats are FP32 values, the last one's beyond BF16's largest included.
    midpoints = magnitudes + np.append(steps, steps[-1]) / np.float32(2)
    midpoints = np.concatenate((midpoints, -midpoints))
    up, down = np.float32(np.inf), np.float32(-np.inf)
    with np.errstate(invalid="ignore"):  # NaN among the codes
        points = [
            np.nextafter(points, direction) if direction is not None else points
            for points in (codes, midpoints)
            for direction in (None, up, down)
        ]
    return torch.from_numpy(np.concatenate(points))


def stored_cast(x: Tensor, fmt: Format) -> Tensor:
    """The nearest-even cast of numpy or ml_dtypes, with saturation where theirs overflows."""
    with np.errstate(over="ignore", invalid="ignore"):
        cast = torch.from_numpy(x.numpy().astype(numpy_dtype(fmt)).astype(np.float32))
    overflowed = x.isfinite() & ~cast.isfinite()
    return torch.where(overflowed, torch.copysign(fp32(fmt.max), x), cast)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
