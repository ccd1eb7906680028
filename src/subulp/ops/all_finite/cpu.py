"""Finiteness in C++ (csrc/all_finite.h)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .. import facts, native, pointers
from . import FiniteJob


def run(job: FiniteJob) -> Tensor:
    """Bool tensor (): every value of every tensor is finite.

    Raises:
        TypeError: A tensor wraps others, as DTensor does.
        ValueError: A tensor has no memory.
    """
    # A kept contiguous copy lives as long as the call needs its address.
    dense = [(t if t.is_contiguous() else t.contiguous()).resolve_neg() for t in job.tensors]
    addresses = np.array(pointers.dense_ptrs("tensors", dense), dtype=np.uintp)
    numel = np.array([t.numel() for t in dense], dtype=np.int64)
    dtypes = np.array([facts.DTYPES[t.dtype] for t in dense], dtype=np.int32)
    result = native.library().subulp_all_finite(
        len(dense),
        native.address(numel),
        native.address(addresses),
        native.address(dtypes),
        torch.get_num_threads(),
        native.isa(),
    )
    return torch.tensor(result == 1, device=job.device)
