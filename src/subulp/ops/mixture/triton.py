# mypy: allow-untyped-calls
"""Mixtures in Triton: encoding (triton_encode.py) and decoding (triton_decode.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...numerics import format_of
from ...numerics.metrics import RELATIVE_ERROR
from ...numerics.mixture import THREE_WAY, Recipe, wide_format_of
from ..triton import launch
from ..triton.choices import Configuration
from . import triton_decode, triton_encode, triton_product, triton_recipe
from .job import DecodeJob, Job
from .operand import ProductJob, steps_of
from .triton_tiles import layout_of, warps_of


def run(job: Job | ProductJob) -> tuple[Tensor, ...] | Tensor:
    """Run ``job``: return the stored tensors and the numbers of a summary, the decoded matrix, or
    the product.

    Raises:
        RuntimeError: The kernels do not run on the device of the tensors.
    """
    launch.check_device(triton_encode.measure_kernel, job.device)
    if isinstance(job, ProductJob):
        return triton_product.multiply(job)
    if isinstance(job, DecodeJob):
        return triton_decode.decode(job)
    return triton_encode.encode(job)


KERNELS = "measure", "blocks", "candidates", "chunks", "write", "decode"


def compile_for(
    target: launch.Target,
    kernel: str,
    block: tuple[int, int],
    dtype: torch.dtype,
    recipe: Recipe = THREE_WAY,
) -> Any:
    """Compile a kernel ahead of time, see :func:`subulp.ops.triton.launch.compile_for`.

    Args:
        target: Which GPU.
        kernel: One of :data:`KERNELS`.
        block: Rows and columns of a block.
        dtype: Dtype of the matrix, or of the decoded one.
        recipe: What decides (default: in three ways).
    """
    module = triton_decode if kernel == "decode" else triton_encode
    compiled = getattr(module, f"{kernel}_kernel")
    layout = layout_of(block)
    known: dict[str, Any] = {
        **layout,
        "FORMAT": format_of(dtype).name,
        "TO": format_of(dtype).name,
        "RECIPE": triton_recipe.name_of(recipe),
        "METRIC": RELATIVE_ERROR,
        "SCALING": "gam",
        "GROUPS": "many",
        "WIDE": wide_format_of(dtype).name,
        **{"TILES": 1, "BLOCKS": 128, "PART": 128, "IS_BLOCK": True},
        "CHUNKS": "few",
        "OF_TENSOR": False,
        "LOW": True,
    }
    word = {2: "*i16", 4: "*i32"}[dtype.itemsize]
    types = {"x": word, "out": word, "threshold": "fp32"}
    types |= {name: kind for kind, names in _POINTERS.items() for name in names}
    constants = {compiled.arg_names[i] for i in compiled.constexprs}
    signature = {n: types.get(n, "i32") for n in compiled.arg_names if n not in constants}
    options = {name: value for name, value in known.items() if name in constants}
    options["num_warps"] = warps_of(layout) if "ROWS" in constants else 4
    return launch.compile_for(compiled, target, signature, **options)


def compile_product(
    target: launch.Target,
    dtype: torch.dtype,
    *,
    rows: int,
    transposed: tuple[bool, bool],
    constant: bool = False,
    configuration: Configuration | None = None,
) -> Any:
    """Compile the product ahead of time, with units of FP8 where a GPU has them.

    Args:
        target: Which GPU.
        dtype: Dtype of the result.
        rows: Rows of the result.
        transposed: Whether the contraction runs over the rows of each mixture.
        constant: Whether no scale changes along it.
        configuration: One of :func:`.triton_product.configurations` (default: the first).
    """
    table = triton_product.configurations(rows, constant=constant)
    constants: dict[str, Any] = {
        **{
            "TO": format_of(dtype).name,
            "BIAS": True,
            "UNITS": isinstance(target, int) and target >= 89,
        },
        **{"STEP": steps_of(transposed)[0], "CONSTANT": constant, "INTERPRETED": False},
        **triton_product.order_of(rows),
        **(configuration or table[0]),
    }
    for factor, turned in zip("ab", transposed, strict=True):
        constants |= {
            f"{factor.upper()}_RECIPE": triton_decode.name_of(THREE_WAY.formats),
            f"{factor.upper()}_OF_TENSOR": False,
            f"{factor.upper()}_WIDE": wide_format_of(dtype).name,
            f"{factor.upper()}_LOW": True,
            f"{factor.upper()}_TURNED": turned,
        }
    word = {torch.bfloat16: "*bf16", torch.float16: "*fp16"}[dtype]
    types = {"bias": word, "out": word}
    types |= {f"{f}_{n}": kind for kind, names in _POINTERS.items() for n in names for f in "ab"}
    kernel = triton_product.product_kernel
    signature = {n: types.get(n, "i32") for n in kernel.arg_names if n not in constants}
    return launch.compile_for(kernel, target, signature, **constants)


_POINTERS = {
    "*u8": ("codes", "low", "types"),
    "*i8": ("exponents",),
    "*i32": ("largest", "smallest", "counts", "groups"),
    "*i64": ("whole", "counted"),
    "*fp32": ("amax", "least", "sums", "of_chunks", "mantissa"),
    "*fp64": ("numbers",),
}
