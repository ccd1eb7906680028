"""``torch.optim.Optimizer`` as it is, but for three seconds at the first call of some methods."""

from __future__ import annotations

from typing import Any

import torch

from ..ops.graph_breaks import untraced


class TorchOptimizer(torch.optim.Optimizer):
    """Torch's base, whose methods import no Dynamo where nothing is compiled."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch.optim."""
        untraced(super().add_param_group)(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch.optim."""
        untraced(super().zero_grad)(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """As in torch.optim."""
        return untraced(super().state_dict)()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch.optim."""
        untraced(super().load_state_dict)(state_dict)
