"""The C++ kernels' shared library: loading, checks, and the argument types, declared once."""

from __future__ import annotations

import ctypes
import os
import platform
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path

import numpy as np
import torch

from .job import SCALARS

ABI = 5
ISAS = {"plain": 0, "avx2": 1, "avx512": 2}
_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_REMEDY = (
    "Reinstall the package with a C++17 compiler at hand (pip install --force-reinstall --no-deps "
    ".), or set SUBULP_BACKEND=reference to run in plain PyTorch, slowly."
)


class Step(ctypes.Structure):
    """``subulp_step`` of csrc/subulp.h."""

    _fields_ = (
        ("count", c_int64),
        ("numel", c_void_p),
        ("param", c_void_p),
        ("grad", c_void_p),
        ("fast", c_void_p),
        ("slow", c_void_p),
        ("extra", c_void_p),
        ("slow_low", c_void_p),
        ("scalars", c_void_p),
        ("strategy", c_int32),
        ("param_dtype", c_int32),
        ("grad_dtype", c_int32),
        ("extra_bits", c_int32),
        ("seed", c_uint32),
        ("threads", c_int32),
        ("isa", c_int32),
        ("maximize", c_int32),
        ("decoupled", c_int32),
        ("nesterov", c_int32),
        ("beta1", c_float),
        ("one_minus_beta1", c_float),
        ("beta2", c_float),
        ("one_minus_beta2", c_float),
        ("eps", c_float),
        ("weight_decay", c_float),
    )


class Lookups(ctypes.Structure):
    """``subulp_lookups`` of csrc/subulp.h."""

    _fields_ = (
        ("features", c_int64),
        ("batch", c_int64),
        ("stride", c_int64),
        ("table", c_void_p),
        ("column", c_void_p),
        ("values", c_void_p),
        ("offsets", c_void_p),
        ("weights", c_void_p),
    )


class Mixture(ctypes.Structure):
    """``subulp_mixture`` of csrc/subulp.h."""

    _fields_ = (
        ("x", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("block_rows", c_int64),
        ("block_columns", c_int64),
        ("group_rows", c_int64),
        ("group_columns", c_int64),
        ("codes", c_void_p),
        ("types", c_void_p),
        ("mantissa", c_void_p),
        ("exponents", c_void_p),
        ("numbers", c_void_p),
        ("dtype", c_int32),
        ("recipe", c_int32),
        ("scaling", c_int32),
        ("threshold", c_float),
        ("threads", c_int32),
        ("isa", c_int32),
    )


TABLE = np.dtype(
    [
        ("codes", "u8"),
        ("cache", "u8"),
        ("tags", "u8"),
        ("counts", "u8"),
        ("stamps", "u8"),
        ("floors", "u8"),
        ("accumulator", "u8"),
        ("rows", "i8"),
        ("row_bytes", "i8"),
        ("dim", "i8"),
        ("sets", "i8"),
        ("dtype", "i4"),
        ("ways", "i4"),
        ("mixed", "i4"),
        ("stochastic", "i4"),
        ("rule", "i4"),
        ("stream", "u4"),
        ("lr", "f4"),
        ("weight_decay", "f4"),
        ("eps", "f4"),
        ("reserved", "i4"),
    ]
)
"""``subulp_table`` of csrc/subulp.h; addresses are 0 for absent roles."""


def library_path() -> Path:
    """Where the package keeps its shared library."""
    name = {"Windows": "subulp.dll", "Darwin": "libsubulp.dylib"}.get(
        platform.system(), "libsubulp.so"
    )
    return Path(__file__).parent.parent / "_native" / name


@cache
def library() -> ctypes.CDLL:
    """The loaded library, its ABI checked.

    Raises:
        RuntimeError: It is missing, does not load, or was built from other sources.
    """
    path = library_path()
    if not path.exists():
        raise RuntimeError(
            f"The C++ kernels are missing: no file {path.name} beside the package. {_REMEDY}"
        )
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise RuntimeError(f"The C++ kernels do not load: {error}. {_REMEDY}") from error
    lib.subulp_abi.restype = c_int
    lib.subulp_sizeof_step.restype = c_int64
    lib.subulp_sizeof_scalars.restype = c_int64
    built = [lib.subulp_abi(), lib.subulp_sizeof_step(), lib.subulp_sizeof_scalars()]
    expected = [ABI, ctypes.sizeof(Step), SCALARS.itemsize]
    # Libraries before ABI 3 and 5 lack these, and fail by that number.
    if hasattr(lib, "subulp_sizeof_table"):
        lib.subulp_sizeof_table.restype = c_int64
        built.append(lib.subulp_sizeof_table())
        expected.append(TABLE.itemsize)
    if hasattr(lib, "subulp_sizeof_mixture"):
        lib.subulp_sizeof_mixture.restype = c_int64
        built.append(lib.subulp_sizeof_mixture())
        expected.append(ctypes.sizeof(Mixture))
    if built != expected:
        raise RuntimeError(
            f"The C++ kernels have ABI {built}, the package expects {expected}: they come from "
            f"another version. {_REMEDY}"
        )
    for name in ("subulp_adam", "subulp_sgd"):
        getattr(lib, name).argtypes = [POINTER(Step)]
        getattr(lib, name).restype = c_int
    lib.subulp_has_isa.argtypes = [c_int]
    lib.subulp_has_isa.restype = c_int
    lib.subulp_best_isa.restype = c_int
    lib.subulp_all_finite.argtypes = [c_int64, c_void_p, c_void_p, c_void_p, c_int32, c_int32]
    lib.subulp_all_finite.restype = c_int
    for name in ("subulp_decode", "subulp_encode"):
        convert = getattr(lib, name)
        convert.argtypes = [c_int32, c_void_p, c_void_p, c_int64, c_float, c_int32, c_int32]
        convert.restype = c_int
    lib.subulp_logistic.argtypes = [
        *(c_void_p, c_int64, c_int64, c_float, c_int32, c_void_p, c_int32, c_int32)
    ]
    lib.subulp_logistic.restype = c_int
    for name in ("subulp_decode_rows", "subulp_encode_rows"):
        rows = getattr(lib, name)
        rows.argtypes = [c_int32, c_void_p, c_void_p, c_int64, c_int64, c_int32, c_int32]
        rows.restype = c_int
    lib.subulp_encode_rows_randomly.argtypes = [
        *(c_int32, c_void_p, c_void_p, c_int64, c_int64),
        *(c_uint32, c_uint32, c_uint32, c_uint64, c_int32, c_int32),
    ]
    lib.subulp_encode_rows_randomly.restype = c_int
    lookups = POINTER(Lookups)
    lib.subulp_embedding_pool.argtypes = [c_void_p, lookups, c_void_p, c_void_p, c_int32, c_int32]
    lib.subulp_embedding_pool.restype = c_int64
    lib.subulp_embedding_weight_grad.argtypes = [
        *(c_void_p, lookups, c_void_p, c_void_p, c_int32, c_int32)
    ]
    lib.subulp_embedding_weight_grad.restype = c_int
    lib.subulp_embedding_update.argtypes = [
        *(c_void_p, c_int64, lookups, c_void_p, c_void_p, c_uint32, c_uint32, c_int32, c_int32)
    ]
    lib.subulp_embedding_update.restype = c_int
    mixture = POINTER(Mixture)
    lib.subulp_mixture_encode.argtypes = [mixture]
    lib.subulp_mixture_encode.restype = c_int64
    lib.subulp_mixture_wide.argtypes = [mixture, c_void_p]
    lib.subulp_mixture_wide.restype = c_int
    lib.subulp_mixture_decode.argtypes = [mixture, c_void_p, c_void_p]
    lib.subulp_mixture_decode.restype = c_int
    return lib


def isa() -> int:
    """Instruction set of the kernels: ``SUBULP_ISA`` if set, else the widest that runs here.

    Raises:
        ValueError: ``SUBULP_ISA`` is unknown or does not run on this processor.
    """
    name = os.environ.get("SUBULP_ISA")
    if not name:
        return int(library().subulp_best_isa())
    if name not in ISAS or not library().subulp_has_isa(ISAS[name]):
        have = ", ".join(n for n, code in ISAS.items() if library().subulp_has_isa(code))
        raise ValueError(f"SUBULP_ISA={name!r} is not available here: use one of {have}")
    return ISAS[name]


def pointers(tensors: list[torch.Tensor] | tuple[torch.Tensor, ...]) -> np.ndarray | None:
    """Addresses of a role's tensors, ``None`` for an absent role."""
    if not tensors:
        return None
    return np.array([t.data_ptr() for t in tensors], dtype=np.uintp)


def address(array: np.ndarray | None) -> int | None:
    """Address of an array's data, ``None`` for no array."""
    return None if array is None else array.ctypes.data
