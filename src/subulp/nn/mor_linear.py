"""Linear layers whose matrix products take operands in a mixture of representations.

"MoR", section 3: the operands of all three products of a linear layer are quantised, each along the
dimension that the product contracts, and decided on anew at every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..numerics.mixture import Mixture, Summary
from ..ops.graph_breaks import between_graphs
from ..ops.mixture.product import Operand, product
from .linear import Linear, check_linear, narrow_linear
from .mor import MoR
from .narrow import ACTIVATION_DTYPES, autocast_operands, gradient_dtype, without_autocast

ROLES = ("input", "weight", "output gradient")
"""The operands; the name of a transposed one ends in " transposed" where it has other blocks."""

Note = Callable[[str, Summary], None]
Filter = Callable[[str, torch.nn.Module], bool]
_Module = TypeVar("_Module", bound=torch.nn.Module)


@between_graphs
def mor_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, mor: MoR, note: Note | None = None
) -> Tensor:
    """``F.linear(x, weight, bias)`` with quantised operands, forward and backward.

    With ``q`` quantising a matrix along its last dimension, as ``mor`` says::

        y = q(x) @ q(weight).T + bias
        grad_x = q(grad_y) @ q(weight.T).T
        grad_weight = q(grad_y.T) @ q(x.T).T

    The narrow ``q(x.T)`` and the weight itself are saved for the backward pass. So ``x.T`` is
    quantised in the forward pass, from the activations as they are; where a matrix and its
    transpose have the same blocks (partitions ``"tensor"`` and ``"block-128x128"``), one ``q``
    serves both.

    On GPUs of sm_89 and later, products whose operands are wholly in FP8 run on FP8 units if each
    tensor or channel has a scale, and on Hopper also if 128 values along the contraction share one;
    all others use the decoded values. Under ``torch.autocast``, FP32 operands are first cast to its
    dtype, as in ``F.linear``. ``torch.compile`` leaves the call out of its graph, because what is
    computed depends on the decisions.

    Args:
        x: ``(..., in_features)``, FP32, BF16 or FP16.
        weight: ``(out_features, in_features)``, any floating-point dtype that casts to FP32.
        bias: ``(out_features,)`` or ``None`` (default: ``None``).
        mor: How the operands are represented.
        note: Called with each role and its summary (default: ``None``).

    Returns:
        ``(..., out_features)`` in the dtype of ``x``.

    Raises:
        ValueError: A dtype or a shape does not fit.
        RuntimeError: A gradient is differentiated again: quantising has no derivative.
    """
    check_linear(x, weight, bias)
    if x.numel() == 0:
        return narrow_linear(x, weight, bias)
    x, weight = autocast_operands(x, weight)
    y: Tensor = _MoRLinear.apply(x, weight, bias, mor, note)  # type: ignore[no-untyped-call]
    return y


class MoRLinear(Linear):
    """``torch.nn.Linear`` with operands in a mixture of representations; see :func:`mor_linear`.

    Args:
        in_features: Size of an input.
        out_features: Size of an output.
        bias: Whether there is one (default: ``True``).
        mor: How operands are represented (default: ``MoR()``).
        device: Device of the parameters (default: torch's).
        dtype: Dtype of the parameters (default: torch's).

    Attributes:
        mor: How the operands are represented; may be replaced between steps.
        mix: The last decision on each operand, see :func:`subulp.diagnostics.representation_mix`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        mor: MoR | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self._become(mor or MoR())

    def _become(self, mor: MoR) -> None:
        if not isinstance(mor, MoR):
            raise ValueError(f"mor={mor!r} is not a configuration: pass a subulp.nn.MoR")
        self.mor = mor
        self.mix: dict[str, Summary] = {}
        self.observers: tuple[Note, ...] = ()

    def forward(self, input: Tensor) -> Tensor:
        """``(..., in_features)`` to ``(..., out_features)``, in the dtype of the input."""
        y: Tensor = mor_linear(input, self.weight, self.bias, mor=self.mor, note=self._note)
        return y

    def _note(self, role: str, summary: Summary) -> None:
        self.mix[role] = summary
        for observer in self.observers:
            observer(role, summary)

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        recipe = self.mor.recipe.name
        return f"{super().extra_repr()}, granularity={recipe}, partition={self.mor.partition}"


def convert_to_mor(model: _Module, mor: MoR, *, filter: Filter | None = None) -> _Module:
    """Make linear layers :class:`MoRLinear`, in place.

    A layer stays the same object with the same parameters, hooks and names, so tied weights stay
    tied and optimizers go on updating them. Only ``torch.nn.Linear`` and ``subulp.nn.Linear`` are
    converted, not their subclasses: those compute something else or, as in
    ``torch.nn.MultiheadAttention``, are never called.

    Args:
        model: A module that is or contains linear layers.
        mor: How operands are represented.
        filter: Called with the name and module of each linear layer; only those for which it
            returns true are converted (default: all).

    Returns:
        ``model``.

    Raises:
        ValueError: There is nothing to convert, the filter matches nothing, or it matches a layer
            that is already converted.
    """
    if not isinstance(mor, MoR):
        raise ValueError(f"mor={mor!r} is not a configuration: pass a subulp.nn.MoR")
    found = {
        name: module
        for name, module in model.named_modules()
        if type(module) in (torch.nn.Linear, Linear, MoRLinear)
    }
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no linear layer to convert: torch.nn.Linear and "
            "subulp.nn.Linear can be, subclasses cannot"
        )
    chosen = {n: m for n, m in found.items() if filter is None or filter(n, m)}
    if not chosen:
        raise ValueError(
            f"filter matches none of the {len(found)} linear layers: {', '.join(map(repr, found))}"
        )
    for name, module in chosen.items():
        if isinstance(module, MoRLinear):
            raise ValueError(
                f"layer {name!r} is converted already: exclude it by filter=, or assign its .mor"
            )
    for module in chosen.values():
        module.__class__ = MoRLinear
        assert isinstance(module, MoRLinear)
        module._become(mor)
    return model


class _MoRLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, mor: MoR, note: Note | None
    ) -> Tensor:
        needs_weight = ctx.needs_input_grad[1]
        rows = x.reshape(-1, x.shape[-1])
        with without_autocast(x):
            quantise = _Quantiser(mor, note)
            q = quantise(rows, "input")
            y = product(q, quantise(weight, "weight"), x.dtype)
            if bias is not None:
                y = y + bias.to(y.dtype)
            if needs_weight:
                saved = quantise.transposed(rows, "input", q)
                ctx.save_for_backward(weight, *saved.mixture.tensors)
                ctx.saved_input = _without_tensors(saved)
            else:
                ctx.save_for_backward(weight)
        ctx.mor, ctx.note, ctx.x_shape, ctx.x_dtype = mor, note, x.shape, x.dtype
        ctx.weight_grad_dtype = gradient_dtype(weight)
        ctx.bias_grad_dtype = None if bias is None else gradient_dtype(bias)
        return y.view(*x.shape[:-1], weight.shape[0]).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        weight, *stored = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        rows = grad_y.reshape(-1, weight.shape[0])
        grad_x = grad_weight = grad_bias = None
        with without_autocast(grad_y):
            quantise = _Quantiser(ctx.mor, ctx.note)
            q: Operand | None = None
            if needs_x or (needs_weight and ctx.mor.is_symmetric):
                q = quantise(rows, "output gradient")
            if needs_x:
                assert q is not None
                of_weight = quantise.transposed(weight, "weight")
                grad_x = product(q, of_weight, ctx.x_dtype).to(ctx.x_dtype).view(ctx.x_shape)
            if needs_weight:
                saved = _with_tensors(ctx.saved_input, stored)
                of_grad = quantise.transposed(rows, "output gradient", q)
                grad_weight = product(of_grad, saved, ctx.x_dtype).to(ctx.weight_grad_dtype)
            if needs_bias:
                grad_bias = rows.float().sum(0).to(ctx.bias_grad_dtype)
        return grad_x, grad_weight, grad_bias, None, None


class _Quantiser:
    """Quantises the operands of one call."""

    def __init__(self, mor: MoR, note: Note | None) -> None:
        self.mor, self.note = mor, note

    def __call__(self, matrix: Tensor, role: str) -> Operand:
        """A matrix, quantised along its last dimension."""
        operand, summary = self._encode(matrix)
        if self.note is not None:
            self.note(role, summary)
        return operand

    def _encode(self, matrix: Tensor) -> tuple[Operand, Summary]:
        if matrix.dtype not in ACTIVATION_DTYPES:
            matrix = matrix.float()
        mixture, summary = self.mor.encode(matrix.detach())
        return Operand(mixture, summary.sole), summary

    def transposed(self, matrix: Tensor, role: str, known: Operand | None = None) -> Operand:
        """A matrix, quantised along its first dimension; ``known`` is it along its last."""
        if self.mor.is_symmetric:
            # No note: the decision is the one already noted.
            known = known or self._encode(matrix)[0]
            return Operand(known.mixture, known.sole, transposed=True)
        return self(matrix.t(), f"{role} transposed")


_Saved = tuple[tuple[Any, ...], str | None, bool]


def _without_tensors(operand: Operand) -> _Saved:
    mixture = operand.mixture
    what = mixture.formats, mixture.block, mixture.blocks_of_group
    return what, operand.sole, operand.transposed


def _with_tensors(saved: _Saved, tensors: list[Tensor]) -> Operand:
    what, sole, transposed = saved
    codes, types, mantissa, exponents, wide = tensors
    return Operand(Mixture(codes, types, mantissa, exponents, wide, *what), sole, transposed)
