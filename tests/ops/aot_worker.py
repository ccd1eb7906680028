"""Compiles kernels in a process of its own: Triton cannot compile where it interprets."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from triton import knobs

from subulp.nn.cached_table import CachedTable, EmbeddingTable
from subulp.numerics import format_of
from subulp.numerics.random_bits import WHOLE, Region
from subulp.ops import adam, sgd
from subulp.ops.adam import triton as adam_triton
from subulp.ops.all_finite import triton as all_finite_triton
from subulp.ops.embedding import TableUpdate
from subulp.ops.embedding import triton as embedding_triton
from subulp.ops.head import triton as head_triton
from subulp.ops.head import triton_logistic
from subulp.ops.mixture import triton as mixture_triton
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


def compile_step(setup: Setup, capability: int, whole: bool, sharded: bool = False) -> Compiled:
    param = torch.zeros(32, dtype=setup.dtype)
    grad = param.to(setup.grad_dtype or setup.dtype)
    # Four columns of eight rows of sixteen.
    region = Region.of((8, 4), (16, 1), 0) if sharded else WHOLE
    args = arguments(setup, fresh_state(setup, [param]), [grad], 1, runs=region.runs)
    if setup.op == "adam":
        return _inspect(adam_triton.compile_for(capability, adam.make_job(**args), whole=whole))
    return _inspect(sgd_triton.compile_for(capability, sgd.make_job(**args), whole=whole))


def compile_all_finite(dtype: torch.dtype, capability: int, whole: bool) -> Compiled:
    return _inspect(all_finite_triton.compile_for(capability, dtype, whole=whole))


def compile_head(dtype: torch.dtype, capability: int, aligned: bool) -> Compiled:
    job = head_job(format_of(dtype), weight_decay=0.1)
    return _inspect(head_triton.compile_for(capability, job, aligned=aligned))


def compile_logistic(capability: int, loss: bool, narrow: bool) -> list[Compiled]:
    return [_inspect(k) for k in triton_logistic.compile_for(capability, loss=loss, narrow=narrow)]


def compile_embedding(
    storage: str, rule: str, policy: str, capability: int, dim: int
) -> dict[str, Compiled]:
    cached = CachedTable(EmbeddingTable(640, dim, storage, 0.1, policy, 8))  # type: ignore[arg-type]
    none = torch.empty(0, dtype=torch.int32)
    roles = [none if t is None else t for t in (cached.counts, cached.stamps, cached.floors)]
    shapes = {"sgd": (0,), "adagrad": (640, dim), "rowwise": (640,)}
    update = TableUpdate(*roles, torch.zeros(shapes[rule]), True, 0, 0.1, 0.1, 1e-6)
    table = cached.as_op()
    return {
        "pool": _inspect(embedding_triton.compile_lookup(capability, table, pool=True)),
        "weight-grad": _inspect(embedding_triton.compile_lookup(capability, table, pool=False)),
        "update": _inspect(embedding_triton.compile_update(capability, table, update)),
    }


def compile_mixture(
    kernel: str, block: tuple[int, int], dtype: torch.dtype, capability: int
) -> Compiled:
    return _inspect(mixture_triton.compile_for(capability, kernel, block, dtype))


def compile_mixture_product(
    capability: int,
    dtype: torch.dtype,
    rows: int,
    transposed: tuple[bool, bool],
    constant: bool,
) -> Compiled:
    return _inspect(
        mixture_triton.compile_product(
            capability, dtype, rows=rows, transposed=transposed, constant=constant
        )
    )


def _inspect(kernel: Any) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return Compiled(
        kernel.asm["ptx"], {k: int(v) for k, v in re.findall(r"\b([A-Z]+):(\d+)", usage)}
    )
