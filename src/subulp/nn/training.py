"""Where tables that update their own rows may train."""

from __future__ import annotations

import torch
from torch import distributed


def check_one_process(name: str, remedy: str) -> None:
    """Refuse to train rows that other processes have copies of.

    Nothing sums the updates of the copies up, so they would drift apart; and
    ``DistributedDataParallel`` would now and then overwrite one with another.

    Args:
        name: What trains.
        remedy: What to do instead.

    Raises:
        RuntimeError: The process group has several processes.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    if (processes := distributed.get_world_size()) > 1:
        raise RuntimeError(
            f"{name} updates its own rows, and its copies in {processes} processes would drift "
            f"apart: DistributedDataParallel does not know of these updates. {remedy}, "
            "or freeze the rows with requires_grad_(False); nothing was updated"
        )


def inside_backward() -> bool:
    """Whether a backward pass is running: then a forward pass repeats an earlier one.

    ``torch.utils.checkpoint`` computes again what it did not keep.
    """
    return torch._C._current_graph_task_id() != -1
