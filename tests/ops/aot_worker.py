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
from subulp.ops.embedding import Job, Lookups, TableUpdate
from subulp.ops.embedding import triton as embedding_triton
from subulp.ops.head import triton as head_triton
from subulp.ops.head import triton_dropout, triton_logistic, triton_sum
from subulp.ops.head.exact_sum import LOWEST, PARTS, WIDTH
from subulp.ops.mixture import triton as mixture_triton
from subulp.ops.sgd import triton as sgd_triton
from subulp.ops.step import triton_scales

from .head_jobs import job as head_job
from .support import Setup, arguments, fresh_state


@dataclass(frozen=True)
class Compiled:
    """What the assembler and the disassembler say about a kernel."""

    ptx: str
    resources: dict[str, int]


def start() -> None:
    """Nothing: by then this module is imported."""


def compile_step(setup: Setup, capability: int, sharded: bool = False) -> Compiled:
    param = torch.zeros(32, dtype=setup.dtype)
    grad = param.to(setup.grad_dtype or setup.dtype)
    # Four columns of eight rows of sixteen.
    region = Region.of((8, 4), (16, 1), 0) if sharded else WHOLE
    args = arguments(setup, fresh_state(setup, [param]), [grad], 1, runs=region.runs)
    if setup.op == "adam":
        return _inspect(adam_triton.compile_for(capability, adam.make_job(**args)))
    return _inspect(sgd_triton.compile_for(capability, sgd.make_job(**args)))


def compile_scales(
    op: str, grad_dtype: torch.dtype, capability: int, given: bool = False
) -> Compiled:
    setup = Setup(op, "nearest", torch.float8_e4m3fn, grad_dtype=grad_dtype)
    param = torch.zeros(32, dtype=setup.dtype)
    found = torch.zeros(1) if given else None
    grads = [param.to(grad_dtype)]
    args = arguments(setup, fresh_state(setup, [param]), grads, 1, gradient_amaxes=found)
    job = adam.make_job(**args) if op == "adam" else sgd.make_job(**args)
    return _inspect(triton_scales.compile_for(capability, job))


def compile_all_finite(dtype: torch.dtype, capability: int) -> Compiled:
    return _inspect(all_finite_triton.compile_for(capability, dtype))


def compile_head(
    dtype: torch.dtype, capability: int, aligned: bool, products: str = "fp32"
) -> Compiled:
    job = head_job(format_of(dtype), weight_decay=0.1, products=products)
    return _inspect(head_triton.compile_for(capability, job, aligned=aligned))


def compile_dropout(dtype: torch.dtype, capability: int) -> list[Compiled]:
    """The update of rows with a remainder and dropout, and the weights that are kept."""
    job = head_job(format_of(dtype), weight_decay=0.1, dropout=0.5, precise=9)
    update = head_triton.compile_for(capability, job, aligned=True, precise=True)
    return [_inspect(k) for k in (update, triton_dropout.compile_for(capability, dtype))]


def compile_logistic(capability: int, loss: bool, narrow: bool) -> list[Compiled]:
    kernels = [triton_logistic.compile_for(capability, loss=loss, narrow=narrow)]
    if loss:
        kernels.append(triton_sum.compile_for(capability, PARTS, LOWEST, WIDTH))
    return [_inspect(kernel) for kernel in kernels]


def compile_embedding(
    storage: str, rule: str, policy: str, capability: int, dim: int
) -> dict[str, Compiled]:
    cached = CachedTable(EmbeddingTable(640, dim, storage, 0.1, policy, 8))  # type: ignore[arg-type]
    none = torch.empty(0, dtype=torch.int32)
    roles = [none if t is None else t for t in (cached.counts, cached.stamps, cached.floors)]
    shapes = {"sgd": (0,), "adagrad": (640, dim), "rowwise": (640,)}
    update = TableUpdate(*roles, torch.zeros(shapes[rule]), True, 0, 0.1, 0.1, 1e-6)
    # As models have them, beside a small table of another kind.
    small = TableUpdate(none, none, none, update.accumulator[:9], False, 1, 0.1, 0.1, 1e-6)
    tables = [cached.as_op(), CachedTable(EmbeddingTable(9, dim, "fp32")).as_op()]
    lookups = Lookups([0, 1], none.long(), none.long(), None)
    job = Job("update", tables, lookups, updates=[update, small])
    compiled = {
        "pool": embedding_triton.compile_lookup(capability, job, pool=True),
        "weight-grad": embedding_triton.compile_lookup(capability, job, pool=False),
        **embedding_triton.compile_update(capability, job),
    }
    return {name: _inspect(kernel) for name, kernel in compiled.items()}


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
