"""The C++ kernels' shared library: loading, checks, and the argument types, declared once."""

from __future__ import annotations

import ctypes
import os
import platform
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from . import facts
from .environment import variable
from .step.job import SCALARS

ABI = 15
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
        ("count", c_int64),
        ("table", c_void_p),
        ("column", c_void_p),
        ("values", c_void_p),
        ("offsets", c_void_p),
        ("weights", c_void_p),
    )


class Table(ctypes.Structure):
    """``subulp_table`` of csrc/subulp.h; absent roles are null."""

    _fields_ = (
        ("codes", c_void_p),
        ("cache", c_void_p),
        ("tags", c_void_p),
        ("counts", c_void_p),
        ("stamps", c_void_p),
        ("floors", c_void_p),
        ("accumulator", c_void_p),
        ("rows", c_int64),
        ("row_bytes", c_int64),
        ("dim", c_int64),
        ("sets", c_int64),
        ("period", c_int64),
        ("first", c_int64),
        ("taken", c_int64),
        ("whole_dim", c_int64),
        ("column", c_int64),
        ("dtype", c_int32),
        ("ways", c_int32),
        ("mixed", c_int32),
        ("stochastic", c_int32),
        ("rule", c_int32),
        ("stream", c_uint32),
        ("lr", c_float),
        ("weight_decay", c_float),
        ("eps", c_float),
        ("reserved", c_int32),
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
        ("to_dtype", c_int32),
        ("reserved", c_int32),
    )


class Blocks(ctypes.Structure):
    """``subulp_blocks`` of csrc/subulp.h."""

    _fields_ = (
        ("x", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("block_rows", c_int64),
        ("block_columns", c_int64),
        ("formats", c_void_p),
        ("amax", c_void_p),
        ("smallest", c_void_p),
        ("counts", c_void_p),
        ("factors", c_void_p),
        ("sums", c_void_p),
        ("codes", c_void_p),
        ("types", c_void_p),
        ("offsets", c_void_p),
        ("wide", c_void_p),
        ("count", c_int32),
        ("metric", c_int32),
        ("dtype", c_int32),
        ("threads", c_int32),
        ("isa", c_int32),
        ("reserved", c_int32),
    )


class ProductBlocks(ctypes.Structure):
    """``subulp_product_blocks`` of csrc/subulp.h."""

    _fields_ = (
        ("exponents", c_void_p),
        ("types", c_void_p),
        ("lines", c_int64),
        ("inner", c_int64),
        ("across", c_int64),
    )


class Product(ctypes.Structure):
    """``subulp_product`` of csrc/subulp.h."""

    _fields_ = (
        ("a", c_void_p),
        ("b", c_void_p),
        ("c", c_void_p),
        ("bias", c_void_p),
        ("m", c_int64),
        ("n", c_int64),
        ("k", c_int64),
        ("a_stride", c_int64),
        ("b_stride", c_int64),
        ("c_stride", c_int64),
        ("a_dtype", c_int32),
        ("b_dtype", c_int32),
        ("a_k_inner", c_int32),
        ("b_k_inner", c_int32),
        ("a_scale", c_float),
        ("b_scale", c_float),
        ("c_dtype", c_int32),
        ("c_scale", c_float),
        ("threads", c_int32),
        ("isa", c_int32),
        ("a_blocks", ProductBlocks),
        ("b_blocks", ProductBlocks),
    )


class Positives(ctypes.Structure):
    """``subulp_positives`` of csrc/subulp.h."""

    _fields_ = (
        ("count", c_int64),
        ("rows", c_void_p),
        ("columns", c_void_p),
        ("first", c_int64),
    )


class Head(ctypes.Structure):
    """``subulp_head`` of csrc/subulp.h."""

    _fields_ = (
        ("rows", c_void_p),
        ("labels", c_int64),
        ("dim", c_int64),
        ("batch", c_int64),
        ("tile_rows", c_int64),
        ("x_logits", c_void_p),
        ("x", c_void_p),
        ("grad_x", c_void_p),
        ("positive_logits", c_void_p),
        ("sums", c_void_p),
        ("step", POINTER(Step)),
        ("scratch", c_void_p),
        ("positives", Positives),
        ("dtype", c_int32),
        ("x_dtype", c_int32),
        ("gain", c_float),
        ("scale", c_float),
        ("threads", c_int32),
        ("isa", c_int32),
    )


NARROW = np.dtype([("first_normal", "i4"), ("mantissa_bits", "i4"), ("sign_bit", "i4")])
"""``subulp_narrow`` of csrc/subulp.h."""


def library_path() -> Path:
    """``SUBULP_LIBRARY`` if set, else where the package keeps its shared library."""
    if chosen := os.environ.get("SUBULP_LIBRARY"):
        return Path(chosen)
    name = {"Windows": "subulp.dll", "Darwin": "libsubulp.dylib"}.get(
        platform.system(), "libsubulp.so"
    )
    return Path(__file__).parent.parent / "_native" / name


_CONVERT = (c_int, (c_int32, c_void_p, c_void_p, c_int64, c_float, c_int32, c_int32))
_ROWS = (c_int, (c_int32, c_void_p, c_void_p, c_int64, c_int64, c_int32, c_int32))
_LOOKED_UP = (c_void_p, POINTER(Lookups), c_void_p, c_void_p, c_int32, c_int32)

# Result and arguments of each function, as csrc/subulp.h declares them.
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "subulp_has_isa": (c_int, (c_int,)),
    "subulp_best_isa": (c_int, ()),
    "subulp_adam": (c_int, (POINTER(Step),)),
    "subulp_sgd": (c_int, (POINTER(Step),)),
    "subulp_gather": (None, (c_int64, c_void_p, c_void_p)),
    "subulp_count": (None, (c_int64, c_void_p)),
    "subulp_all_finite": (c_int, (c_int64, c_void_p, c_void_p, c_void_p, c_int32, c_int32)),
    "subulp_fingerprint": (c_uint64, (c_void_p, c_int64, c_int32, c_int32)),
    "subulp_decode": _CONVERT,
    "subulp_encode": _CONVERT,
    "subulp_bf16_product": (c_int, (POINTER(Product),)),
    "subulp_head_step": (c_int, (POINTER(Head),)),
    "subulp_head_scratch": (c_int64, (POINTER(Head),)),
    "subulp_logistic": (
        c_int,
        (
            *(c_void_p, c_int64, c_int64, c_float, c_int32, c_int32),
            *(POINTER(Positives), c_void_p, c_int32, c_int32),
        ),
    ),
    "subulp_decode_rows": _ROWS,
    "subulp_encode_rows": _ROWS,
    "subulp_encode_rows_randomly": (
        c_int,
        (
            *(c_int32, c_void_p, c_void_p, c_int64, c_int64),
            *(c_uint32, c_uint32, c_uint32, c_uint64, c_int32, c_int32),
        ),
    ),
    "subulp_embedding_pool": (c_int64, _LOOKED_UP),
    "subulp_embedding_weight_grad": (c_int64, _LOOKED_UP),
    "subulp_embedding_update": (
        c_int64,
        (
            *(c_void_p, c_int64, POINTER(Lookups), c_void_p, c_void_p),
            *(c_uint32, c_uint32, c_int32, c_int32),
        ),
    ),
    "subulp_mixture_encode": (c_int64, (POINTER(Mixture),)),
    "subulp_mixture_wide": (c_int, (POINTER(Mixture), c_void_p)),
    "subulp_mixture_decode": (c_int, (POINTER(Mixture), c_void_p, c_void_p)),
    "subulp_blocks_measure": (c_int, (POINTER(Blocks),)),
    "subulp_blocks_errors": (c_int, (POINTER(Blocks),)),
    "subulp_blocks_encode": (c_int, (POINTER(Blocks),)),
    "subulp_blocks_decode": (c_int, (POINTER(Blocks), c_void_p, c_void_p)),
}
_SIZES = {
    "step": ctypes.sizeof(Step),
    "scalars": SCALARS.itemsize,
    "table": ctypes.sizeof(Table),
    "lookups": ctypes.sizeof(Lookups),
    "mixture": ctypes.sizeof(Mixture),
    "blocks": ctypes.sizeof(Blocks),
    "narrow": NARROW.itemsize,
    "product": ctypes.sizeof(Product),
    "product_blocks": ctypes.sizeof(ProductBlocks),
    "positives": ctypes.sizeof(Positives),
    "head": ctypes.sizeof(Head),
}


def _check_abi(lib: ctypes.CDLL) -> None:
    lib.subulp_abi.restype = c_int
    built = lib.subulp_abi()
    if built != ABI:
        raise RuntimeError(
            f"The C++ kernels have ABI {built}, the package expects {ABI}: they come from another "
            f"version. {_REMEDY}"
        )
    lib.subulp_facts.restype = ctypes.c_char_p
    found, expected = lib.subulp_facts().decode().splitlines(), facts.expected(_SIZES)
    if found != expected:
        pairs = zip_longest(found, expected, fillvalue="nothing")
        theirs, ours = next(pair for pair in pairs if pair[0] != pair[1])
        raise RuntimeError(
            f"The C++ kernels have {theirs!r} where the package has {ours!r}: they come from "
            f"another version. {_REMEDY}"
        )


@cache
def library() -> ctypes.CDLL:
    """The loaded library, its ABI checked.

    Raises:
        RuntimeError: It is missing, does not load, or was built from other sources.
    """
    path = library_path()
    if not path.exists():
        raise RuntimeError(f"The C++ kernels are missing: there is no file {path}. {_REMEDY}")
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise RuntimeError(f"The C++ kernels do not load: {error}. {_REMEDY}") from error
    _check_abi(lib)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, list(arguments)
    return lib


def isa() -> int:
    """Instruction set of the kernels: ``SUBULP_ISA`` if set, else the widest that runs here.

    Raises:
        ValueError: ``SUBULP_ISA`` is unknown or does not run on this processor.
    """
    name = variable("SUBULP_ISA")
    if not name:
        return _widest_isa()
    if name not in facts.ISAS or not library().subulp_has_isa(facts.ISAS[name]):
        have = ", ".join(n for n, code in facts.ISAS.items() if library().subulp_has_isa(code))
        raise ValueError(f"SUBULP_ISA={name!r} is not available here: use one of {have}")
    return facts.ISAS[name]


def isa_name() -> str:
    """The instruction set of :func:`isa`, by its name."""
    code = isa()
    return next(name for name, known in facts.ISAS.items() if known == code)


@cache
def _widest_isa() -> int:
    return int(library().subulp_best_isa())


def address(array: np.ndarray | None) -> int | None:
    """Address of an array's data, ``None`` for no array."""
    return None if array is None else array.ctypes.data
