"""Torch's own optimizers refuse the state dicts of subulp's.

``torch.optim`` loads any state dict whose names fit, and would go on with the first component of
each state as if it were all. No hook of torch sees every load, so the step is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import optimizer as torchs
from torch.optim.optimizer import register_optimizer_step_pre_hook

_OURS = {"precision", "arithmetic"}
_TORCHS = (
    *(torch.optim.Adam, torch.optim.SGD, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adamax, torch.optim.ASGD),
    *(torch.optim.RMSprop, torch.optim.Rprop),
)
"""AdamW is a subclass of Adam."""


def refuse_components(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise unless the groups of one of torch's optimizers are its own; a hook before every step.

    Those of ``"fp32"`` are refused too: torch's AdamW would take them for Adam's, with coupled
    weight decay.

    Raises:
        RuntimeError: A state dict of subulp's was loaded.
    """
    # Not those of others, which may wrap one of subulp's and show its groups.
    if not isinstance(optimizer, _TORCHS):
        return
    for group in optimizer.param_groups:
        if group.keys() >= _OURS:
            raise RuntimeError(
                f"the state of this {type(optimizer).__name__} of torch was saved by subulp with "
                f"precision={group['precision']!r}, and means something else to torch: load what "
                "export_state_dict() of the optimizer that saved it gives"
            )


def are_there_others() -> bool:
    """Whether somebody else has a hook before the steps of all optimizers."""
    return any(
        hook is not refuse_components for hook in torchs._global_optimizer_pre_hooks.values()
    )


register_optimizer_step_pre_hook(refuse_components)
