"""Adam and AdamW with a ``precision=`` (Collage, Algorithm 2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops import adam as op
from ..ops.adam import reference
from ..ops.step.counts import check_betas
from ..ops.step.job import StepJob
from .base import Optimizer
from .choices import PrecisionChoice
from .options import (
    AUTO,
    Arithmetic,
    NonFinite,
    check_number,
    check_rate,
    check_torch_options,
)
from .parameters import Bucket, Params
from .pending import Pending

# Odd, so that its multiples are distinct seeds; 2**32 over the golden ratio, so that they are far
# from those that people choose.
_SEED_STRIDE = 0x9E3779B9

_TORCH_OPTIONS = {
    "amsgrad": False,
    "foreach": None,
    "fused": None,
    "differentiable": False,
}


class Adam(Optimizer):
    """Adam with L2 weight decay: the decay is added to the gradient.

    Arguments, errors and methods are those of :class:`AdamW`; ``weight_decay`` defaults to 0.
    """

    _states = (("exp_avg", "fast"), ("exp_avg_sq", "slow"))
    _op = "adam"
    _make_job = staticmethod(op.make_job)
    _roles = ("exp_avg", "exp_avg_sq", "exp_avg_sq_low")
    _torch_options = _TORCH_OPTIONS

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        capturable: bool = False,
        precision: PrecisionChoice = AUTO,
        arithmetic: Arithmetic = "wide",
        nonfinite: NonFinite = "propagate",
        seed: int | None = None,
        **torch_options: Any,
    ) -> None:
        check_torch_options(type(self).__name__, _TORCH_OPTIONS, torch_options)
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
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
        if options.get("decoupled_weight_decay", self._decoupled) != self._decoupled:
            other = "Adam" if self._decoupled else "AdamW"
            raise ValueError(
                f"decoupled_weight_decay={options['decoupled_weight_decay']!r} is what subulp has "
                f"{other} for: use that"
            )
        betas = options["betas"]
        try:
            beta1, beta2 = map(float, betas)
        except (TypeError, ValueError):
            raise ValueError(
                f"betas={betas!r} is not a pair of numbers: use for example (0.9, 0.999)"
            ) from None
        if not 0.0 <= beta1 < 1.0 or not 0.0 <= beta2 < 1.0:
            raise ValueError(f"betas={betas} is out of range: use two numbers in [0, 1)")
        if options["capturable"]:
            check_betas(beta1, beta2)
        for name in ("eps", "weight_decay"):
            check_number(name, options[name])

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        eps = torch.tensor(float(group["eps"]), dtype=torch.float32, device="cpu")
        for p in group["params"]:
            # Zero gradients would divide zero by zero.
            if group["arithmetic"] == "strict" and eps > 0.0 == eps.to(p.dtype):
                raise ValueError(
                    f"eps={group['eps']} rounds to zero in {p.dtype}, and arithmetic='strict' "
                    "rounds it: use for example eps=1e-6"
                )

    def _arguments(self, bucket: Bucket) -> dict[str, Any]:
        common, role = self._common_arguments(bucket)
        return common | {
            "exp_avgs": role("exp_avg"),
            "exp_avg_sqs": role("exp_avg_sq"),
            "exp_avg_sq_lows": role("exp_avg_sq_low"),
            "decoupled": self._decoupled,
            "folded": bucket.folded,
        }

    def _numbers(self, group: dict[str, Any]) -> dict[str, float]:
        beta1, beta2 = map(float, group["betas"])
        eps, decay = float(group["eps"]), float(group["weight_decay"])
        return {"beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": decay}

    @torch.no_grad()
    def fold(self, bucket: Bucket, number: int) -> None:
        """Add one of several gradients of the next step to the moments.

        In plain PyTorch; the step itself takes the last gradient, and the weight decay with it.

        Args:
            bucket: Parameters and their gradients.
            number: The gradient's number in the step, from 0.
        """
        arguments = self._arguments(bucket)
        arguments["steps"] = [step + 1 for step in arguments["steps"]]
        # A moment that is rounded several times in a step takes fresh random bits each time.
        arguments["seed"] = (arguments["seed"] + (number + 1) * _SEED_STRIDE) & 0xFFFFFFFF
        job = self._make_job(**arguments)
        for observer in self.observers:
            observer.fold(Pending(self._op, bucket, job, None))
        reference.fold(job)

    def _reference_update(
        self, job: StepJob, i: int, theta: Tensor, moments: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        return reference.update(job, i, theta, moments)

    def _moved_moments(
        self, job: StepJob, i: int, moments: list[Tensor], theta: Tensor | None
    ) -> list[Tensor]:
        return reference.moved(job, i, moments, theta)


class AdamW(Adam):
    """AdamW with parameters and states stored in a chosen precision.

    For each group and dtype, one fused pass decodes the stored components to FP32, computes ::

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        root = sqrt(v / (1 - beta2**t)) + eps
        p = p - lr * (m / (1 - beta1**t) / root + weight_decay * p)

    (Collage, Algorithm 2, lines 8 to 12) and encodes the result once. Weight decay is part of the
    update, so it is not lost in narrow formats as it would be in ``p * (1 - lr * weight_decay)``.

    Args:
        params: Parameters, parameter groups or named parameters, DTensors too. A group may set
            every option below, ``precision`` included. Random bits are drawn by a parameter's name
            if it is given, so that ranks with some of the parameters draw alike; else by position.
        lr: Learning rate, a float or a tensor () (default: 1e-3).
        betas: Decay of the first and second moment (default: (0.9, 0.999)).
        eps: Added to the root of the second moment (default: 1e-8).
        weight_decay: Decoupled weight decay (default: 1e-2).
        maximize: Ascend instead of descend (default: ``False``).
        capturable: Count steps on the device, so that a CUDA graph can hold a step; a tensor ``lr``
            is read there too, in FP32 or FP64. For parameters on GPUs, with
            ``nonfinite="propagate"`` and ``arithmetic="wide"`` (default: ``False``).
        precision: How parameter and states are stored (default: ``"auto"``, which is ``"fp32"``
            for FP32 parameters and ``"collage-plus"`` for others). Bytes a parameter for BF16 and
            FP16, gradient included:

            ===================  ======  =====================================================
            ``"fp32"``               16  FP32 parameters only
            ``"nearest"``             8  option A: every result rounded to nearest
            ``"stochastic"``          8  parameter and second moment rounded stochastically
            ``"kahan"``              10  Kahan summation of the updates
            ``"collage-light"``      10  option B: the parameter is a length-2 expansion
            ``"collage-plus"``       12  option C: so is the second moment
            ``"fp32-states"``        12  option D without master weights
            ``"master"``             16  option D: FP32 states and master weights
            ``"extra-bits-K"``   12+K/8  FP32 states; K more mantissa bits of the parameter
            ===================  ======  =====================================================

            ``float8_e4m3fn`` parameters can have nearest (4), stochastic (4), collage-light (5) and
            collage-plus (6).

            Or one for each dtype, ``{torch.bfloat16: "collage-light", torch.float32: "fp32"}``; for
            patterns of the names of named parameters, ``{"*norm*": "fp32", "*": "master"}``, the
            first that matches; or a function of name and parameter. The last two make of each
            group one for each precision.
        arithmetic: ``"wide"`` computes in FP32; ``"strict"`` rounds every operation to the narrow
            format, as the paper does: in plain PyTorch, slowly, and for nearest, kahan,
            collage-light and collage-plus only (default: ``"wide"``).
        nonfinite: What a NaN or infinity in a gradient does: ``"propagate"`` lets it through, as
            torch.optim does; ``"raise"`` and ``"skip"`` check all gradients first, so a step is
            taken whole or not at all (default: ``"propagate"``).
        seed: Seed of the random bits, 0 to 2**32 - 1. By default from ``torch.manual_seed``; where
            there are several ranks and a group draws random bits, rank 0's, by a collective of all
            ranks.
        **torch_options: ``amsgrad`` and ``differentiable`` of torch.optim, at their default values;
            ``foreach`` and ``fused``, which change nothing here.

    Raises:
        ValueError: An option is out of range or a parameter cannot have its precision.
    """

    _decoupled = True

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        capturable: bool = False,
        precision: PrecisionChoice = AUTO,
        arithmetic: Arithmetic = "wide",
        nonfinite: NonFinite = "propagate",
        seed: int | None = None,
        **torch_options: Any,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            maximize=maximize,
            capturable=capturable,
            precision=precision,
            arithmetic=arithmetic,
            nonfinite=nonfinite,
            seed=seed,
            **torch_options,
        )
