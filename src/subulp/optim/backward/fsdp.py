"""What FSDP2 (``torch.distributed.fsdp.fully_shard``) asks of the step inside the backward pass.

FSDP2 reduces gradients itself and then calls the hooks of the sharded parameters, on the stream
that reduces. The leaves of the graph are unsharded copies, which no optimizer sees.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def is_in(model: nn.Module) -> bool:
    """Whether FSDP2 shards any part of a model."""
    return any(True for _ in _modules(model))


def has_unreduced_gradients(model: nn.Module) -> bool:
    """Whether a pass without ``set_requires_gradient_sync`` has left gradients on this rank."""
    # torch has no public name for them.
    for param in (p for group in _groups(model) for p in group.fsdp_params):
        unsharded: Any = getattr(param, "_unsharded_param", None)
        if param.unsharded_accumulated_grad is not None:
            return True
        if isinstance(unsharded, torch.Tensor) and unsharded.grad is not None:
            return True
    return False


def has_partly_reduced_gradients(model: nn.Module) -> bool:
    """Whether a pass without ``set_requires_all_reduce`` has left sums of some replicas."""
    return any(group._partial_reduce_output is not None for group in _groups(model))


def _groups(model: nn.Module) -> Iterator[Any]:
    """FSDP2's groups of parameters."""
    for module in _modules(model):
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        yield from (group for group in groups if group is not None)


def _modules(model: nn.Module) -> Iterator[Any]:
    # Nobody has sharded one unless this has been imported.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        yield from (m for m in model.modules() if isinstance(m, fsdp.FSDPModule))
