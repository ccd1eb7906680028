"""``subulp::mixture_encode``: scales, errors, decision and codes of every block of a matrix."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor

from ...numerics import Format
from ...numerics import mixture as definition
from ...numerics.metrics import KNOWN, RELATIVE_ERROR, terms_of
from ...numerics.mixture import (
    ALWAYS_E4M3,
    DEFAULT_THRESHOLD,
    TENSOR,
    WIDE_FORMATS,
    Entry,
    Mixture,
    Recipe,
    Summary,
    always,
    from_text,
    mantissa_rows,
    to_text,
    wide_format_of,
)
from ...numerics.partition import (
    Partition,
    block_of,
    blocks_of_group,
    grid_of,
    sizes_of_blocks,
)
from ...numerics.scaling import Scaling, check_matrix
from .. import backend
from .job import DecodeJob, EncodeBothJob, EncodeJob, part_of
from .kept import KeptEncoding

__all__ = [
    "DecodeJob",
    "EncodeBothJob",
    "EncodeJob",
    "KeptEncoding",
    "decode",
    "encode",
    "encode_both",
    "mixture_decode",
    "mixture_encode",
    "stored_like",
]


def encode(
    x: Tensor,
    recipe: Recipe,
    partition: Partition = "tensor",
    *,
    scaling: Scaling = "gam",
    group: Partition = "tensor",
    threshold: float = DEFAULT_THRESHOLD,
    metric: str = RELATIVE_ERROR,
    kept: KeptEncoding | None = None,
) -> tuple[Mixture, Summary]:
    """:func:`subulp.numerics.mixture.encode` at the speed of the device.

    Recipes are data, and the metrics of ``numerics.metrics.KNOWN`` are compiled: whatever is made
    of them runs in the device's kernels, the paper's recipes with its metric in one fused pass.
    Arguments and errors are those of the definition, but for ``kept``: what Triton's kernels leave
    as it is while ``x`` has the same bytes; the mixture's tensors are then those of the call before
    (default: nothing).

    Warns:
        UserWarning: The metric is a registered Python function, which runs in plain PyTorch.

    Raises:
        RuntimeError: The same where ``SUBULP_BACKEND`` asks for kernels.
        ValueError: ``x`` is a DTensor, or has no values.
    """
    _check_values(x)
    block = block_of(partition, x.shape)
    groups = (1, 1) if scaling == "amax" else blocks_of_group(group, block, x.shape)
    if metric not in KNOWN:
        terms_of(metric)
        _warn_of_python(metric, x.device)
        return definition.encode(
            x,
            recipe,
            partition,
            scaling=scaling,
            group=group,
            threshold=threshold,
            metric=metric,
        )
    recipe, threshold = _with_fused_pass(recipe, threshold, metric)
    dense = x if _takes_any_strides(x.device) else x.contiguous()
    arguments = dense, to_text(recipe), block, groups, scaling, threshold, metric
    # A graph has the operator.
    if torch.compiler.is_compiling():
        *stored, numbers = mixture_encode(*arguments)
    else:
        *stored, numbers = _encode_stored(*arguments, kept)
    found = _mixture(stored, recipe, block, groups, scaling, wide_format_of(x.dtype))
    return found, definition.summarise(recipe, numbers, found.wide_format)


def encode_both(
    x: Tensor,
    recipe: Recipe,
    partition: Partition = "tensor",
    *,
    scaling: Scaling = "gam",
    group: Partition = "tensor",
    threshold: float = DEFAULT_THRESHOLD,
    metric: str = RELATIVE_ERROR,
) -> tuple[tuple[Mixture, Summary], tuple[Mixture, Summary]]:
    """:func:`encode` of ``x``, and of ``x.t()``.

    Triton's kernels read ``x`` once for both where blocks are a row of at most 128 numbers; all
    else is encoded one after the other. Arguments and errors are those of :func:`encode`.
    """
    _check_values(x)
    matrices = x, x.t()
    if _leaves_places(x.device) and metric in KNOWN and not torch.compiler.is_compiling():
        known, bound = _with_fused_pass(recipe, threshold, metric)
        parts = []
        for matrix in matrices:
            block = block_of(partition, matrix.shape)
            groups = (1, 1) if scaling == "amax" else blocks_of_group(group, block, matrix.shape)
            parts.append(
                _encode_job(matrix, to_text(known), block, groups, scaling, bound, metric, None)
            )
        job = EncodeBothJob(*parts)
        if job.side is not None:
            found: tuple[Tensor, ...] = backend.run("mixture", job)
            wide = wide_format_of(x.dtype)
            mixtures = []
            for part, (*stored, numbers) in zip(parts, (found[:6], found[6:]), strict=True):
                mixture = _mixture(stored, known, part.block, part.groups, scaling, wide)
                mixtures.append((mixture, definition.summarise(known, numbers, wide)))
            return mixtures[0], mixtures[1]
    first, second = (
        encode(
            matrix,
            recipe,
            partition,
            scaling=scaling,
            group=group,
            threshold=threshold,
            metric=metric,
        )
        for matrix in matrices
    )
    return first, second


def _check_values(x: Tensor) -> None:
    check_matrix(x)
    if hasattr(x, "device_mesh"):
        raise ValueError(
            "x is a DTensor, whose blocks may lie on several devices: pass x.full_tensor(), or "
            "x.to_local() where blocks of a shard are meant"
        )
    if x.is_meta:
        raise ValueError("x is on the meta device and has no values: move it to a real one")


def _with_fused_pass(recipe: Recipe, threshold: float, metric: str) -> tuple[Recipe, float]:
    """What decides the same, and has a fused pass in C++ if anything does."""
    if recipe.rules == ALWAYS_E4M3.rules and metric == RELATIVE_ERROR:
        return TENSOR, math.inf
    return recipe, threshold


def decode(mixture: Mixture) -> Tensor:
    """:func:`subulp.numerics.mixture.decode` at the speed of the device: FP32 (rows, k)."""
    call = mixture_decode if torch.compiler.is_compiling() else decode_stored
    values: Tensor = call(
        *(mixture.codes, mixture.types, mixture.mantissa, mixture.exponents, mixture.wide),
        _spelled(mixture.formats),
        mixture.block,
        mixture.blocks_of_group,
        mixture.wide_format.name,
    )
    return values


@functools.cache
def _spelled(formats: tuple[Format, ...]) -> str:
    """A recipe of these formats: what chose among them does not matter any more."""
    return to_text(Recipe("decoded", tuple(Entry(fmt, always) for fmt in formats)))


def _warn_of_python(metric: str, device: torch.device) -> None:
    choice = backend.choose(device)
    if choice.backend == "reference":
        return
    what = (
        f"metric={metric!r} is a registered Python function, which no kernel can run: use one of "
        f"{', '.join(map(repr, KNOWN))}"
    )
    if backend.is_forced():
        raise RuntimeError(f"{what}, or leave SUBULP_BACKEND unset to run it in plain PyTorch")
    warnings.warn(f"{what}; it runs in plain PyTorch, 30 to 1,000 times slower", stacklevel=3)


def encode_stored(
    x: Tensor,
    recipe: str,
    block: Sequence[int],
    groups: Sequence[int],
    scaling: str,
    threshold: float,
    metric: str = RELATIVE_ERROR,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The stored tensors of :class:`subulp.numerics.mixture.Mixture`, and its summary's numbers.

    Args:
        x: FP32, BF16 or FP16 (rows, k), contiguous where C++ reads it.
        recipe: ``"tensor"``, ``"subtensor-2way"``, ``"subtensor-3way"``, or any other as
            :func:`subulp.numerics.mixture.to_text` spells it.
        block: Rows and columns of a block.
        groups: Rows and columns of blocks in a group.
        scaling: ``"gam"``, ``"amax"`` or ``"e8m0"``.
        threshold: The tensor's error must stay below it, for ``"tensor"``.
        metric: One of ``numerics.metrics.KNOWN`` (default: ``"relative-error"``).

    Returns:
        Codes, types, mantissas, exponents, lower bytes of wide numbers; FP64 numbers. Triton leaves
        lower bytes at the places of their numbers, see :class:`subulp.numerics.mixture.Mixture`.

    Raises:
        ValueError: ``x`` is no matrix, or not contiguous where C++ reads it, or an argument is
            unknown or cannot apply.
    """
    return _encode_stored(x, recipe, block, groups, scaling, threshold, metric, None)


mixture_encode = torch.library.custom_op("subulp::mixture_encode", encode_stored, mutates_args=())
"""The operator: :func:`encode_stored` for compiled and exported graphs."""


@mixture_encode.register_fake
def _(
    x: Tensor,
    recipe: str,
    block: Sequence[int],
    groups: Sequence[int],
    scaling: str,
    threshold: float,
    metric: str = RELATIVE_ERROR,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    known = from_text(recipe)
    if scaling == "e8m0":
        groups = grid_of(x.shape, block)
    shape = x.shape[0], x.shape[1]
    return *stored_like(shape, known, block, groups, x.device), numbers_like(
        shape, known, block, x.device
    )


def stored_like(
    shape: tuple[int, int],
    recipe: Recipe,
    block: Sequence[int],
    groups: Sequence[int],
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tensors like those of a mixture, inside of a fake kernel: how many numbers will be wide is
    unknown, unless each has its place.
    """
    down, across = grid_of(shape, block)
    whole = recipe.granularity == "tensor"
    rows = 1 + max(mantissa_rows(recipe.formats))
    if _leaves_places(device):
        wide = torch.empty(shape, dtype=torch.uint8, device=device)
    else:
        count = torch.library.get_ctx().new_dynamic_size(min=0)
        wide = torch.empty(count, dtype=torch.uint8, device=device)
    return (
        torch.empty(shape, dtype=torch.uint8, device=device),
        torch.empty((1, 1) if whole else (down, across), dtype=torch.uint8, device=device),
        torch.empty((rows, *grid_of((down, across), groups)), dtype=torch.float32, device=device),
        torch.empty((down, across), dtype=torch.int8, device=device),
        wide,
    )


def numbers_like(
    shape: tuple[int, int], recipe: Recipe, block: Sequence[int], device: torch.device
) -> Tensor:
    """The numbers of a summary, inside of a fake kernel."""
    down, across = grid_of(shape, block)
    part = part_of((block[0], block[1]))
    parts = -(-down * across // part) if _leaves_places(device) else 1
    return torch.empty(parts, 2 * len(recipe.formats) + 8, dtype=torch.float64, device=device)


def decode_stored(
    codes: Tensor,
    types: Tensor,
    mantissa: Tensor,
    exponents: Tensor,
    wide: Tensor,
    recipe: str,
    block: Sequence[int],
    groups: Sequence[int],
    wide_format: str = WIDE_FORMATS[0].name,
) -> Tensor:
    """The matrix, FP32, of what :func:`encode_stored` returned for the same last arguments.

    Raises:
        ValueError: The tensors are not those of a mixture.
    """
    if codes.dim() != 2 or codes.numel() == 0:
        raise ValueError(f"codes have shape {tuple(codes.shape)}: expected (rows, k)")
    if not codes.is_contiguous():
        raise ValueError(f"codes have strides {codes.stride()}: call codes.contiguous()")
    known = _check(recipe, block, groups, "gam")
    wide_formats = {fmt.name: fmt for fmt in WIDE_FORMATS}
    if wide_format not in wide_formats:
        choices = ", ".join(wide_formats)
        raise ValueError(f"wide_format={wide_format!r} is unknown: use one of {choices}")
    found = Mixture(
        codes,
        types,
        mantissa,
        exponents,
        wide,
        known.formats,
        *_sizes(codes.shape, block, groups),
        wide_formats[wide_format],
    )
    _check_stored(found)
    result: Tensor = backend.run("mixture", DecodeJob(found))
    return result


mixture_decode = torch.library.custom_op("subulp::mixture_decode", decode_stored, mutates_args=())
"""The operator: :func:`decode_stored` for compiled and exported graphs."""


@mixture_decode.register_fake
def _(
    codes: Tensor,
    types: Tensor,
    mantissa: Tensor,
    exponents: Tensor,
    wide: Tensor,
    recipe: str,
    block: Sequence[int],
    groups: Sequence[int],
    wide_format: str = WIDE_FORMATS[0].name,
) -> Tensor:
    return torch.empty(codes.shape, dtype=torch.float32, device=codes.device)


def _encode_stored(
    x: Tensor,
    recipe: str,
    block: Sequence[int],
    groups: Sequence[int],
    scaling: str,
    threshold: float,
    metric: str,
    kept: KeptEncoding | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    job = _encode_job(x, recipe, block, groups, scaling, threshold, metric, kept)
    result: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor] = backend.run("mixture", job)
    return result


def _encode_job(
    x: Tensor,
    recipe: str,
    block: Sequence[int],
    groups: Sequence[int],
    scaling: str,
    threshold: float,
    metric: str,
    kept: KeptEncoding | None,
) -> EncodeJob:
    check_matrix(x)
    if not (x.is_contiguous() or _takes_any_strides(x.device)):
        raise ValueError(f"x has strides {x.stride()}: the kernels read rows; call x.contiguous()")
    found = _check(recipe, block, groups, scaling)
    if scaling == "amax" and tuple(groups) != (1, 1):
        raise ValueError(f"groups={tuple(groups)} cannot apply to scaling='amax': use (1, 1)")
    if metric not in KNOWN:
        raise ValueError(f"metric={metric!r} is unknown: use one of {', '.join(KNOWN)}")
    sizes = _sizes(x.shape, block, groups)
    return EncodeJob(x, found, *sizes, _scaling(scaling), threshold, metric, kept)


def _mixture(
    stored: Sequence[Tensor],
    recipe: Recipe,
    block: tuple[int, int],
    groups: tuple[int, int],
    scaling: Scaling,
    wide_format: Format,
) -> Mixture:
    codes, types, mantissa, exponents, wide = stored
    if scaling == "e8m0":
        groups = exponents.shape[0], exponents.shape[1]
    tensors = codes, types, mantissa, exponents, wide
    return Mixture(*tensors, recipe.formats, block, groups, wide_format)


def _takes_any_strides(device: torch.device) -> bool:
    """Whether a matrix may be the transpose of another one."""
    return backend.choose(device).backend != "cpu"


def _leaves_places(device: torch.device) -> bool:
    """Whether lower bytes of wide numbers lie at the places of the numbers."""
    return backend.choose(device).backend == "triton"


def _check(recipe: str, block: Sequence[int], groups: Sequence[int], scaling: str) -> Recipe:
    found = from_text(recipe)
    for name, sizes in (("block", block), ("groups", groups)):
        if len(sizes) != 2 or min(sizes) < 1:
            raise ValueError(f"{name}={tuple(sizes)} cannot apply: expected two positive sizes")
    _scaling(scaling)
    return found


def _check_stored(m: Mixture) -> None:
    """Raise ValueError unless the tensors are those of a mixture: kernels trust their sizes."""
    grid = grid_of(m.shape, m.block)
    shapes = {
        "exponents": grid,
        "mantissa": (1 + max(mantissa_rows(m.formats)), *grid_of(grid, m.blocks_of_group)),
        "types": (1, 1) if m.types.numel() == 1 else grid,
    }
    dtypes = {
        "codes": torch.uint8,
        "types": torch.uint8,
        "mantissa": torch.float32,
        "exponents": torch.int8,
        "wide": torch.uint8,
    }
    for name, dtype in dtypes.items():
        tensor: Tensor = getattr(m, name)
        if tensor.dtype != dtype or tensor.device != m.codes.device:
            raise ValueError(
                f"{name} have dtype {tensor.dtype} on {tensor.device}: expected {dtype} on "
                f"{m.codes.device}"
            )
        if name in shapes and tuple(tensor.shape) != shapes[name]:
            raise ValueError(f"{name} have shape {tuple(tensor.shape)}: expected {shapes[name]}")
    if m.codes.device.type != "cpu":
        # The values are on the device, and the host must not wait for them.
        return
    types, last = m.types, len(m.formats)
    if int(types.max()) > last:
        raise ValueError(f"types reach {int(types.max())}: {last} formats and a wide one are known")
    if m.wide.dim() == 2 and m.wide.shape == m.shape:
        return
    wide = 0
    if m.wide.numel() or bool((types == last).any()):
        wide = int((sizes_of_blocks(m.shape, m.block) * (types == last)).sum())
    if tuple(m.wide.shape) != (wide,):
        raise ValueError(f"wide has shape {tuple(m.wide.shape)}: expected ({wide},)")


def _scaling(name: str) -> Scaling:
    for known in get_args(Scaling):
        if name == known:
            found: Scaling = known
            return found
    raise ValueError(f"scaling={name!r} is unknown: use one of {', '.join(get_args(Scaling))}")


def _sizes(
    shape: torch.Size, block: Sequence[int], groups: Sequence[int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Sizes no larger than the matrix and its blocks: kernels have room for all of a block."""
    of_block = min(block[0], shape[0]), min(block[1], shape[1])
    grid = grid_of(shape, of_block)
    return of_block, (min(groups[0], grid[0]), min(groups[1], grid[1]))
