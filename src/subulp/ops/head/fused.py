"""A chunk's step in one call of C++ (csrc/head.h): products of BF16 operands as they are stored."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .. import facts, native
from ..pointers import data_ptr
from ..step import cpu as cpu_step
from . import HeadJob, tiles
from .fp8 import to_bf16_
from .tiles import Products


def run(job: HeadJob, tile_rows: int) -> bool:
    """Run ``job`` with the bits of :func:`subulp.ops.head.tiles.run`, if it is of that kind.

    Threads take whole tiles: with fewer tiles than threads the products themselves are shared.

    Args:
        job: The chunk's step.
        tile_rows: Rows of a tile.

    Returns:
        Whether it was: else nothing has happened.

    Raises:
        TypeError: A tensor wraps others, as DTensor does.
        ValueError: A tensor is not contiguous or has no memory, or a positive is outside.
        RuntimeError: The library is missing.
    """
    products = Products.of(job)
    threads = torch.get_num_threads()
    if not (products.bf16 and products.stored) or job.precise or job.before or job.after:
        return False
    if job.rows.dtype not in _STORED or job.rows.shape[0] <= (threads - 1) * tile_rows:
        return False
    if not job.rows.numel() or not job.x.numel():
        return False
    _call(job, products.x, tile_rows, threads)
    return True


_STORED = (torch.bfloat16, torch.float8_e4m3fn)


def _call(job: HeadJob, x_logits: Tensor, tile_rows: int, threads: int) -> None:
    (labels, dim), batch = job.rows.shape, job.x.shape[0]
    x_logits, x = x_logits.contiguous(), job.x.bfloat16().float().contiguous()
    positives = (
        (job.positive_labels - job.first_label).contiguous(),
        job.positive_instances.contiguous(),
    )
    count = positives[0].numel()
    logits = torch.empty(count, dtype=torch.float32, device="cpu")
    sums = None if job.loss is None else torch.empty(labels, dtype=torch.float64, device="cpu")
    call = native.Head(
        rows=data_ptr("rows", job.rows, job.rows.dtype, (labels, dim)),
        labels=labels,
        dim=dim,
        batch=batch,
        tile_rows=tile_rows,
        x_logits=data_ptr("x", x_logits, x_logits.dtype, (batch, dim)),
        x=data_ptr("x", x, torch.float32, (batch, dim)),
        positive_logits=data_ptr("logits", logits, torch.float32),
        sums=None if sums is None else data_ptr("sums", sums, torch.float64),
        positives=native.Positives(
            count,
            data_ptr("positive_labels", positives[0], torch.int64, (count,)),
            data_ptr("positive_instances", positives[1], torch.int64, (count,)),
            0,
        ),
        dtype=facts.DTYPES[job.rows.dtype],
        x_dtype=facts.DTYPES[x_logits.dtype],
        gain=job.gain,
        scale=job.scale,
        threads=threads,
        isa=native.isa(),
    )
    # Like inputs of any layout, their gradient need not be one run of memory.
    grad_x = job.grad_x.contiguous()
    if job.train or job.gradient:
        call.grad_x = data_ptr("grad_x", grad_x, torch.float32, (batch, dim))
    if job.train:
        # The addresses of rows and gradients are the kernel's to fill in.
        step = tiles.sgd_job(job, job.rows, torch.empty(0, dtype=torch.float32, device="cpu"), 0)
        call.step = ctypes.pointer(cpu_step.arguments(step))
    lib = native.library()
    size = lib.subulp_head_scratch(ctypes.byref(call))
    scratch = torch.empty(size, dtype=torch.uint8, device="cpu")
    call.scratch = data_ptr("scratch", scratch, torch.uint8)
    failed = lib.subulp_head_step(ctypes.byref(call))
    if failed == facts.BAD_POSITIVES:
        raise ValueError(
            f"a positive is outside of the {labels} labels x {batch} instances, or labels do not "
            "ascend"
        )
    if failed:
        raise RuntimeError(f"subulp_head_step has no kernel for {job.rows.dtype}")
    if grad_x is not job.grad_x:
        job.grad_x.copy_(grad_x)
    if sums is not None:
        loss = tiles.exact_loss(job)
        assert loss is not None
        loss.add(torch.cat([sums, -to_bf16_(logits).double()]))
        if loss is not job.loss:
            loss.flush()
