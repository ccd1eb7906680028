"""Gradient clipping, with the same bits as ``torch.nn.utils``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from .. import shards

# What torch.nn.utils.clip_grad_norm_ adds to a norm.
_EPS = 1e-6


@dataclass(frozen=True)
class Clipping:
    """One way to clip gradients, or none.

    Args:
        max_norm: Largest norm of all gradients together.
        parameter_norm: Largest norm of each parameter's gradient.
        value: Largest magnitude of an element.
        norm_type: Order p of the norm.

    Raises:
        ValueError: A limit is no positive number, more than one is set, or the order is no number.
    """

    max_norm: float | None = None
    parameter_norm: float | None = None
    value: float | None = None
    norm_type: float = 2.0

    def __post_init__(self) -> None:
        limits = {
            "max_norm": self.max_norm,
            "clip_parameter_norm": self.parameter_norm,
            "clip_value": self.value,
        }
        chosen = {name: limit for name, limit in limits.items() if limit is not None}
        for name, limit in chosen.items():
            if not (_is_number(limit) and limit > 0):
                raise ValueError(f"{name}={limit!r} is out of range: use a positive number or None")
        if len(chosen) > 1:
            described = " and ".join(f"{name}={limit}" for name, limit in chosen.items())
            raise ValueError(f"{described} are both set: clip one way")
        # "inf" is a name of torch's for one.
        if not (str(self.norm_type) == "inf" or _is_number(self.norm_type)):
            raise ValueError(
                f"norm_type={self.norm_type!r} is out of range: use a number, the order of a norm"
            )
        object.__setattr__(self, "norm_type", float(self.norm_type))

    @property
    def active(self) -> bool:
        """Whether gradients are clipped at all."""
        return (self.max_norm, self.parameter_norm, self.value) != (None, None, None)

    def alone(self, p: Tensor, grad: Tensor) -> Tensor:
        """The gradient of a parameter, clipped as far as that needs no other gradient."""
        if self.value is not None:
            return widened(grad).clamp(-self.value, self.value)
        if self.parameter_norm is not None:
            _, coefficient = self.coefficient([self.norm(p, grad)], self.parameter_norm)
            return scaled(grad, coefficient)
        return grad

    def each_alone(self, params: Sequence[Tensor], grads: list[Tensor]) -> list[Tensor]:
        """:meth:`alone` of several parameters, in a few calls of torch where that is as good.

        Args:
            params: The parameters.
            grads: Their gradients, dense and plain.
        """
        limit: Any = self.parameter_norm if self.value is None else self.value
        if limit is None:
            return grads
        # What a tensor () widens to: one norm, and not several.
        if isinstance(limit, Tensor) or not _are_many_alike(grads):
            return [self.alone(p, grad) for p, grad in zip(params, grads, strict=True)]
        if self.value is not None:
            return list(torch._foreach_clamp_max(torch._foreach_clamp_min(grads, -limit), limit))
        norms = torch._foreach_norm(grads, self.norm_type)
        # The joint norm of one is a norm again: that of order 0 counts it.
        totals = torch.stack(torch._foreach_norm(norms, self.norm_type))
        coefficients = torch.clamp(limit / (totals + _EPS), max=1.0)
        return list(torch._foreach_mul(grads, coefficients.unbind()))

    def norm(self, p: Tensor, grad: Tensor) -> Tensor:
        """The norm of the gradient of a parameter; for a DTensor a DTensor, not yet reduced."""
        whole = widened(grad)
        if not shards.is_sharded(whole):
            whole = shards.part_of(p, whole)
        norm: Tensor = torch.linalg.vector_norm(whole, self.norm_type)
        return norm

    def norms(self, params: Sequence[Tensor], grads: list[Tensor]) -> list[Tensor]:
        """:meth:`norm` of several parameters, dense and plain, in one call if that is as good."""
        if not _are_many_alike(grads):
            return [self.norm(p, grad) for p, grad in zip(params, grads, strict=True)]
        return list(torch._foreach_norm(grads, self.norm_type))

    def coefficient(self, norms: Sequence[Tensor], limit: float) -> tuple[Tensor, Tensor]:
        """The joint norm of gradients with these norms, and the factor that clips them."""
        total = shards.joint_norm(norms, self.norm_type)
        return total, torch.clamp(limit / (total + _EPS), max=1.0)


def _is_number(value: object) -> bool:
    """Whether it is a number, NumPy's and a tensor of one too, and not NaN."""
    if isinstance(value, bool) or not isinstance(value, (Real, Tensor)):
        return False
    return float(value) == float(value)


def scaled(grad: Tensor, coefficient: Tensor) -> Tensor:
    """A gradient times a coefficient, which may lie on another device."""
    coefficient = coefficient.to(grad.device)
    if shards.is_sharded(grad):
        # In place: a gradient that is not reduced yet stays so.
        return widened(grad).mul_(coefficient)
    return widened(grad) * coefficient


def each_scaled(grads: list[Tensor], coefficient: Tensor) -> list[Tensor]:
    """:func:`scaled` of several gradients, dense and plain, in one call where that is as good."""
    if not _are_many_alike((*grads, coefficient)):
        return [scaled(grad, coefficient) for grad in grads]
    return list(torch._foreach_mul(grads, [coefficient] * len(grads)))


def _are_many_alike(tensors: Sequence[Tensor]) -> bool:
    """Whether torch's calls for many tensors have the bits of its calls for one.

    On the CPU they are loops over those; of other devices, nobody says so.
    """
    kinds = {(tensor.dtype, tensor.device) for tensor in tensors}
    return len(kinds) == 1 and tensors[0].is_cpu and tensors[0].dtype.itemsize > 1


def widened(grad: Tensor) -> Tensor:
    """A gradient in a dtype that torch can compute with: FP8 becomes FP32."""
    return grad.to(torch.float32) if grad.dtype.itemsize == 1 else grad
