# mypy: allow-untyped-calls, allow-untyped-decorators
"""Many tensors in one Triton launch: which program handles which blocks of which tensor.

A launch reads tables: a row for each program (tensor, first block, one past the last), and rows for
each tensor with its address, size and numbers. What stays from call to call is kept on the device;
what a call brings travels in one copy.

Blocks come in two classes, and a program takes them one class after the other. A *whole* block has
all its elements, and its tensor is aligned: it is read without masks at full width. A *ragged* one
is the end of a tensor, or belongs to an unaligned tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget

from .. import capture
from ..pointers import dense_ptrs

ALIGNMENT = 16
"""Bytes of the widest load."""

# Enough programs to fill any device several times over; more would only lengthen the table.
_PROGRAMS = 4096

# Calls whose tables stay on their device: more than a model has buckets, also where its step is
# fused into the backward pass.
_KEPT = 256

VARYING = ("count", "first", "step")
"""Arguments that change from call to call: what kernels know of them would be another kernel, to be
compiled in the midst of a training, for 1 and for multiples of 16."""

# A fused multiply-add rounds once where the reference rounds twice.
_ARITHMETIC = {"enable_fp_fusion": False}


TRITON_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))


def check_device(kernel: Any, device: torch.device) -> None:
    """Raise RuntimeError unless ``kernel`` runs on tensors of ``device``, with the right bits."""
    interpreted = not isinstance(kernel, triton.JITFunction)
    if device.type == "cpu" and not interpreted:
        raise RuntimeError(
            "The Triton kernels got CPU tensors: move them to CUDA, unset SUBULP_BACKEND to use "
            "the C++ kernels, or set TRITON_INTERPRET=1 before Python starts to have them "
            "interpreted, slowly"
        )
    if device.type != "cpu" and interpreted:
        raise RuntimeError(
            f"The Triton kernels are interpreted, which takes CPU tensors, and got tensors on "
            f"{device}: unset TRITON_INTERPRET before Python starts"
        )
    if device.type != "cpu" and torch.version.hip is not None:
        refuse_amd(TRITON_VERSION)
        # With the features of the chip after colons.
        name = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
        if not _has_wide_waves(name):
            raise RuntimeError(
                f"The Triton kernels got tensors on {device}, which is {name}: of AMD's GPUs, "
                "there are kernels for gfx9 alone; set SUBULP_BACKEND=reference to compute in "
                "plain PyTorch"
            )


def _has_wide_waves(name: str) -> bool:
    """Whether one of AMD's GPUs has the waves of 64 lanes that the kernels are compiled for."""
    return name.startswith("gfx9")


def refuse_amd(version: tuple[int, ...]) -> None:
    """Raise RuntimeError where Triton compiles other arithmetic than ours for AMD's GPUs."""
    if version < (3, 7):
        raise RuntimeError(
            f"Triton {'.'.join(map(str, version))} computes square roots on AMD's GPUs from "
            "reciprocal ones, which lose what lies below the normal range: install Triton 3.7 or "
            "later"
        )


def addresses(tensors: Sequence[Tensor], count: int) -> np.ndarray:
    """Addresses of a role's tensors, 0 for each of ``count`` tensors if the role is absent."""
    if not tensors:
        return np.zeros(count, dtype=np.int64)
    return np.array(dense_ptrs("tensors", tensors), dtype=np.int64)


def plan(numel: np.ndarray, block: int) -> np.ndarray:
    """Divide tensors into programs.

    Args:
        numel: Elements of each tensor, int64.
        block: Elements of one block.

    Returns:
        Rows (tensor, first block, end block) of the programs.
    """
    blocks = -(-numel // block)
    share = max(1, -(-int(blocks.sum()) // _PROGRAMS))
    programs = -(-blocks // share)
    tensor = np.repeat(np.arange(len(numel)), programs)
    place = np.arange(len(tensor)) - np.repeat(programs.cumsum() - programs, programs)
    start = place * share
    return np.stack((tensor, start, np.minimum(start + share, blocks[tensor])), axis=1)


def refuse_capture(device: torch.device) -> None:
    """Raise RuntimeError if a CUDA graph is being captured: it would replay a call's numbers."""
    if capture.is_under_way(device):
        raise capture.refusal_of_call()


def upload(
    device: torch.device, *tables: np.ndarray, held: capture.Held | None = None
) -> list[Tensor]:
    """Copies of tables on ``device``, flattened, each aligned, in one transfer.

    Args:
        device: Where they are to lie.
        tables: What they hold.
        held: What keeps the memory that is copied, where a graph that is being captured copies it
            at every replay (default: ``None``, no graph may).

    Raises:
        RuntimeError: A CUDA graph is being captured, and there is no ``held``.
    """
    if held is None:
        refuse_capture(device)
    ends = np.cumsum([-(-t.nbytes // ALIGNMENT) * ALIGNMENT for t in tables])
    starts = [0, *ends[:-1].tolist()]
    buffer = torch.empty(int(ends[-1]), dtype=torch.uint8, pin_memory=device.type == "cuda")
    memory = buffer.numpy()
    for start, table in zip(starts, tables, strict=True):
        memory[start : start + table.nbytes] = (
            np.ascontiguousarray(table).reshape(-1).view(np.uint8)
        )
    if held is not None:
        held.keep(device, (buffer,))
    there = buffer.to(device, non_blocking=True)
    return [
        there[start : start + table.nbytes].view(torch.from_numpy(np.empty(0, table.dtype)).dtype)
        for start, table in zip(starts, tables, strict=True)
    ]


Make = Callable[[np.ndarray], tuple[np.ndarray, ...]]
"""From a table to all that is made of it, and of nothing else."""


def kept(
    device: torch.device, table: np.ndarray, make: Make, held: capture.Held | None = None
) -> tuple[Tensor, ...]:
    """What ``make`` makes of a table, on ``device``: uploaded unless it is there already.

    It is found by what the table holds, addresses among it, so a tensor that has moved or been
    replaced is never taken for another.

    Args:
        device: Of the launch.
        table: int64, two dimensions.
        make: What is to be uploaded; the same function for the same use.
        held: What keeps the tables of an optimizer, for graphs (default: ``None``, they are kept
            until others are used more).

    Returns:
        The tables, flattened. They are not to be written to.

    Raises:
        RuntimeError: As for :func:`upload`, kept or not: without ``held``, a graph would outlive
            what is kept.
    """
    shape, content = table.shape, table.tobytes()
    if held is not None:
        return held.find(
            device,
            (make, device, shape, content),
            lambda: tuple(upload(device, *make(table), held=held)),
        )
    refuse_capture(device)
    # Memory is reused in the order of its stream: there, no kernel still reads what was dropped.
    return _made(make, device, capture.stream_of(device), shape, content)


@lru_cache(maxsize=_KEPT)
def _made(
    make: Make, device: torch.device, stream: int, shape: tuple[int, ...], content: bytes
) -> tuple[Tensor, ...]:
    return tuple(upload(device, *make(np.frombuffer(content, dtype=np.int64).reshape(shape))))


def layout(*tables: dict[str, int]) -> str:
    """A constexpr argument for kernels that look up columns or constants by name.

    Triton finds what it has compiled by source and arguments: without it, a kernel would be found
    that was compiled for other numbers.
    """
    return ";".join(",".join(f"{k}={v}" for k, v in table.items()) for table in tables)


def launch(kernel: Any, device: torch.device, programs: Tensor, *args: Any, **options: Any) -> None:
    """Run a kernel once for each row of ``programs``."""
    if programs.numel() == 0:
        return
    # Triton launches on the current device.
    scope = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with scope:
        kernel[(programs.numel() // 3,)](programs, *args, **options, **_ARITHMETIC)


def registers(most: int) -> dict[str, int]:
    """The option of a launch that a thread has at most so many registers, on NVIDIA's GPUs.

    Where it is told nothing, their assembler aims at a number of programs of its own choice, and
    rather puts a few numbers on the stack than miss it.
    """
    return {} if torch.version.hip is not None else {"maxnreg": most}


Target = int | str
"""A GPU that need not be there: 90 for NVIDIA's sm_90, and so on; AMD's by name, as gfx942."""

Arguments = Mapping[str, int | str]
"""Run-time arguments: numbers of integers, Triton types of all others."""


def specialised(value: int | str, parameter: Any) -> tuple[str, str]:
    """For what a kernel is compiled when it is launched with an argument.

    Args:
        value: An integer, or the Triton type of anything else: see :func:`source_for`.
        parameter: The kernel's ``KernelParam``.

    Returns:
        The type, ``"constexpr"`` if the number itself is compiled in; and what a back end may know
        of it: ``"D"``, 16 divides it; ``"S"``, 32 bits hold any place in the tensor.
    """
    aligns = "" if parameter.do_not_specialize_on_alignment else "D"
    if isinstance(value, str):
        type_, known = value, aligns + "S" if value.startswith("*") else ""
    elif value == 1 and not parameter.do_not_specialize:
        type_, known = "constexpr", ""
    else:
        type_ = "i32" if -(2**31) <= value < 2**31 else "i64" if value < 2**63 else "u64"
        known = "" if value % ALIGNMENT else aligns
    return type_, "" if parameter.do_not_specialize else known


def source_for(kernel: Any, target: Target, arguments: Arguments, **options: Any) -> Any:
    """What a launch with some arguments compiles.

    Args:
        kernel: Kernel, not interpreted.
        target: For which GPU.
        arguments: Of pointers and floats the Triton type, of integers the number: see
            :func:`specialised`. Pointers are aligned, to tensors of less than 2 GiB. A type of
            integers stands for any number.
        options: Constexpr arguments.

    Returns:
        The ``triton.compiler.ASTSource``.
    """
    assert isinstance(kernel, triton.JITFunction), "interpreted kernels have no code"
    backend = triton.compiler.make_backend(gpu_of(target))
    signature, constants, attributes = {}, {}, {}
    for i, (name, parameter) in enumerate(zip(kernel.arg_names, kernel.params, strict=True)):
        known = ""
        if name not in arguments:
            signature[name], constants[name] = "constexpr", options[name]
        else:
            signature[name], known = specialised(arguments[name], parameter)
            if signature[name] == "constexpr":
                constants[name] = arguments[name]
        if found := backend.parse_attr(known):
            attributes[i,] = found
    return triton.compiler.ASTSource(kernel, signature, constants, attributes)


def compile_for(kernel: Any, target: Target, arguments: Arguments, **options: Any) -> Any:
    """Compile a kernel as :func:`launch` would, for a GPU that need not be there.

    Args:
        kernel: Kernel, not interpreted.
        target: Which GPU.
        arguments: The run-time arguments, see :func:`source_for`.
        options: Constexpr arguments and compiler options, as for ``launch``.

    Returns:
        The ``triton.compiler.CompiledKernel``.
    """
    source = source_for(kernel, target, arguments, **options)
    compiler = {name: value for name, value in options.items() if name not in kernel.arg_names}
    return triton.compile(source, target=gpu_of(target), options=compiler | _ARITHMETIC)


def gpu_of(target: Target) -> GPUTarget:
    """Triton's name for a GPU.

    Raises:
        ValueError: It is none of AMD's with waves of 64 lanes, ``gfx9``.
        RuntimeError: This Triton compiles other arithmetic for AMD's, see :func:`refuse_amd`.
    """
    if isinstance(target, int):
        return GPUTarget("cuda", target, 32)
    if not _has_wide_waves(target):
        raise ValueError(f"target is {target!r}: of AMD's GPUs, there are kernels for gfx9 alone")
    refuse_amd(TRITON_VERSION)
    return GPUTarget("hip", target, 64)


# The first that converts to FP8: Ada.
_CONVERTS = 89


def converts(target: Target) -> bool:
    """Whether a GPU converts FP32 to E4M3 and E5M2, as :func:`.codec.converted` has it do."""
    return isinstance(target, int) and target >= _CONVERTS


def converts_at(device: torch.device) -> bool:
    """Whether kernels on a device may use :func:`.codec.converted`; never interpreted ones."""
    interpreted = not isinstance(work, triton.JITFunction)
    if interpreted or device.type != "cuda" or torch.version.hip is not None:
        return False
    major, minor = torch.cuda.get_device_capability(device)
    return converts(10 * major + minor)


@triton.jit
def work(programs):  # type: ignore[no-untyped-def]
    """Tensor, first block and end block of this program."""
    row = programs + tl.program_id(0) * 3
    return tl.load(row), tl.load(row + 1), tl.load(row + 2)
