"""SGD with a ``precision=``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..ops import sgd as op
from ..ops.sgd import reference
from ..ops.step.job import StepJob
from .base import Optimizer
from .choices import PrecisionChoice
from .components import States
from .options import (
    AUTO,
    Arithmetic,
    NonFinite,
    check_number,
    check_rate,
    check_torch_options,
)
from .parameters import Bucket, Params

_TORCH_OPTIONS = {"foreach": None, "fused": None, "differentiable": False}


class SGD(Optimizer):
    """SGD with momentum, its parameters and momentum buffer stored in a chosen precision.

    ``"collage-plus"`` and ``"stochastic"`` treat the momentum buffer as AdamW treats the second
    moment: as the state that moves in small steps.

    Args:
        params: Parameters, parameter groups or named parameters.
        lr: Learning rate, a float or a tensor () (default: 1e-3).
        momentum: Decay of the momentum buffer; with 0 there is none (default: 0).
        dampening: Dampening of the gradient that enters the buffer (default: 0).
        weight_decay: L2 penalty (default: 0).
        nesterov: Nesterov momentum; needs momentum and no dampening (default: ``False``).
        maximize: Ascend instead of descend (default: ``False``).
        capturable: See :class:`AdamW`; torch's SGD, which counts nothing, has none (default:
            ``False``).
        precision: See :class:`AdamW` (default: ``"auto"``).
        arithmetic: See :class:`AdamW` (default: ``"wide"``).
        nonfinite: See :class:`AdamW` (default: ``"propagate"``).
        seed: See :class:`AdamW`.
        **torch_options: ``differentiable`` of torch.optim, at its default value; ``foreach`` and
            ``fused``, which change nothing here.

    Raises:
        ValueError: An option is out of range or a parameter cannot have its precision.
    """

    _states = (("momentum_buffer", "slow"),)
    _states_join = True
    _op = "sgd"
    _make_job = staticmethod(op.make_job)
    _roles = (None, "momentum_buffer", "momentum_buffer_low")
    _torch_options = _TORCH_OPTIONS

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        capturable: bool = False,
        precision: PrecisionChoice = AUTO,
        arithmetic: Arithmetic = "wide",
        nonfinite: NonFinite = "propagate",
        seed: int | None = None,
        **torch_options: Any,
    ) -> None:
        check_torch_options("SGD", _TORCH_OPTIONS, torch_options)
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "dampening": dampening,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
                "maximize": maximize,
                "capturable": capturable,
                "precision": precision,
                "arithmetic": arithmetic,
                "nonfinite": nonfinite,
                "seed": seed,
            },
        )

    def _check_options(self, options: dict[str, Any]) -> None:
        check_rate(options["lr"], capturable=options["capturable"])
        for name in ("momentum", "dampening", "weight_decay"):
            check_number(name, options[name])
        if options["nesterov"] and (options["momentum"] <= 0.0 or options["dampening"] != 0.0):
            raise ValueError(
                f"nesterov=True needs momentum > 0 and dampening = 0, got momentum="
                f"{options['momentum']} and dampening={options['dampening']}"
            )

    def _states_of(self, group: dict[str, Any]) -> States:
        return self._states if group["momentum"] != 0.0 else ()

    def _arguments(self, bucket: Bucket) -> dict[str, Any]:
        group = bucket.group
        used = group["momentum"] != 0.0
        # As in torch.optim, a buffer that joins late begins with the gradient, not with zero; in
        # the first step all do.
        states = [self.state.get(p) or {} for p in bucket.params]
        fresh = [used and bool(state) and "momentum_buffer" not in state for state in states]
        common, role = self._common_arguments(bucket)
        return common | {
            # One that a lowered momentum has left unused waits for its return.
            "momentum_buffers": role("momentum_buffer") if used else [],
            "momentum_lows": role("momentum_buffer_low") if used else [],
            "fresh": fresh,
        }

    def _numbers(self, group: dict[str, Any]) -> dict[str, float]:
        return {
            "momentum": float(group["momentum"]),
            "dampening": float(group["dampening"]),
            "weight_decay": float(group["weight_decay"]),
            "nesterov": group["nesterov"],
        }

    def _reference_update(
        self, job: StepJob, i: int, theta: Tensor, moments: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        return reference.update(job, i, theta, moments)

    def _moved_moments(
        self, job: StepJob, i: int, moments: list[Tensor], theta: Tensor | None
    ) -> list[Tensor]:
        return reference.moved(job, i, moments, theta)
