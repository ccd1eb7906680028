"""Torch's own optimizers refuse states that are stored in components.

``torch.optim`` loads any state dict whose names fit, and would go on with the first component of
each state as if it were all. No hook of torch sees the load, so the step is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .options import strategy_for
from .torch_optimizer import TorchOptimizer

_OURS = {"precision", "arithmetic"}


def refuse_components(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise unless the groups of one of torch's optimizers are its own; a hook before every step.

    Groups that ``"fp32"`` saved pass: their states mean in torch what they mean here.

    Raises:
        RuntimeError: A state dict of another precision was loaded.
    """
    if isinstance(optimizer, TorchOptimizer):
        return
    for group in optimizer.param_groups:
        if not group.keys() >= _OURS or _is_fp32(group):
            continue
        raise RuntimeError(
            f"the state of this {type(optimizer).__name__} of torch was saved by subulp with "
            f"precision={group['precision']!r}, whose components torch does not know: load what "
            "export_state_dict() of the optimizer that saved it gives"
        )


def _is_fp32(group: dict[str, Any]) -> bool:
    try:
        found = {strategy_for(group["precision"], p.dtype).name for p in group["params"]}
    except ValueError:
        return False
    return found <= {"fp32"}


register_optimizer_step_pre_hook(refuse_components)
