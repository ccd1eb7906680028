"""Compiles kernels in a process of its own: Triton cannot compile where it interprets."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from triton import knobs

from subulp.numerics import format_of
from subulp.ops import adam, sgd
from subulp.ops.adam import triton as adam_triton
from subulp.ops.all_finite import triton as all_finite_triton
from subulp.ops.head import triton as head_triton
from subulp.ops.sgd import triton as sgd_triton

from .head_jobs import job as head_job
from .support import Setup, arguments, fresh_state


@dataclass(frozen=True)
class Compiled:
    """What the assembler and the disassembler say about a kernel."""

    ptx: str
    resources: dict[str, int]


def start() -> None:
    """Nothing: by then this module is imported."""


def compile_step(setup: Setup, capability: int, whole: bool) -> Compiled:
    param = torch.zeros(32, dtype=setup.dtype)
    grad = param.to(setup.grad_dtype or setup.dtype)
    args = arguments(setup, fresh_state(setup, [param]), [grad], 1)
    if setup.op == "adam":
        return _inspect(adam_triton.compile_for(capability, adam.make_job(*args), whole=whole))
    return _inspect(sgd_triton.compile_for(capability, sgd.make_job(*args), whole=whole))


def compile_all_finite(dtype: torch.dtype, capability: int, whole: bool) -> Compiled:
    return _inspect(all_finite_triton.compile_for(capability, dtype, whole=whole))


def compile_head(dtype: torch.dtype, capability: int, aligned: bool) -> Compiled:
    job = head_job(format_of(dtype), weight_decay=0.1)
    return _inspect(head_triton.compile_for(capability, job, aligned=aligned))


def _inspect(kernel: Any) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return Compiled(
        kernel.asm["ptx"], {k: int(v) for k, v in re.findall(r"\b([A-Z]+):(\d+)", usage)}
    )
