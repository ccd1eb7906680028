"""Steps of a small classifier, for tests."""

from __future__ import annotations

from dataclasses import replace

import torch

from subulp.numerics import E4M3, int_rows, round_to
from subulp.numerics.int_rows import IntFormat
from subulp.ops.head import HeadJob, RandomAddress, exact_sum

B, D, L = 7, 24, 103


def job(fmt=E4M3, *, labels=L, dim=D, batch=B, precise=0, seed=0, **changes) -> HeadJob:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(labels, dim, generator=generator) * 0.1
    if isinstance(fmt, IntFormat):
        quantised = int_rows.encode(weights, fmt.bits)
        rows, stored = int_rows.to_bytes(quantised), int_rows.decode(quantised)
    else:
        rows = round_to(weights, fmt).to(fmt.dtype or torch.float32)
        stored = rows.float()
    remainder = (weights - stored)[:precise].bfloat16() if precise else None
    pairs = torch.unique(torch.randint(labels * batch, (40,), generator=generator))
    made = HeadJob(
        rows=rows,
        format=fmt,
        remainder=remainder,
        x=torch.randn(batch, dim, generator=generator),
        grad_x=torch.randn(batch, dim, generator=generator),
        positive_instances=pairs % batch,
        positive_labels=pairs // batch,
        gain=1.0 / batch,
        lr=0.25,
        weight_decay=0.0,
        rounding="stochastic",
        random=RandomAddress(seed=5, stream=0, step=3, offset=11 * dim),
        loss=exact_sum.new_parts(torch.device("cpu")),
    )
    return replace(made, **changes)
