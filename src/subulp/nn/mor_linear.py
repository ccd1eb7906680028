"""Linear layers whose matrix products take operands in a mixture of representations.

The operands of all three products of a linear layer are quantised, each along the dimension that
the product contracts ("MoR", section 3), and decided on anew at every step.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..numerics.mixture import Mixture, Summary, summarise, wide_format_of
from ..ops.graph_breaks import between_graphs
from ..ops.mixture import KeptEncoding
from ..ops.mixture.operand import Operand
from ..ops.mixture.product import product
from .derivatives import check_no_tangent, once_differentiable
from .kept_weight import KeptWeight, keeps_in_training
from .linear import Linear, check_linear, narrow_linear
from .mor import MoR
from .narrow import ACTIVATION_DTYPES, autocast_operands, gradient_dtype, without_autocast

ROLES = ("input", "weight", "output gradient")
"""The operands; the name of a transposed one ends in " transposed" where it has other blocks."""

Note = Callable[[str, Summary], None]


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

    On GPUs of sm_89 and later, FP8 units multiply where both operands are in E4M3; all else is
    decoded. Under ``torch.autocast``, FP32 operands are first cast to its
    dtype, as in ``F.linear``. In a graph of ``torch.compile`` the call is one operation, because
    what is computed depends on the decisions; with ``note`` the graph breaks here.

    Args:
        x: ``(..., in_features)``, FP32, BF16 or FP16.
        weight: ``(out_features, in_features)``, any floating-point dtype that casts to FP32.
        bias: ``(out_features,)`` or ``None`` (default: ``None``).
        mor: How the operands are represented.
        note: Called with each role and its summary (default: ``None``).

    Returns:
        ``(..., out_features)`` in the dtype of ``x``.

    Raises:
        ValueError: A dtype or a shape does not fit; or ``torch.compile`` makes a graph of it, and
            the weight or the bias has a ``grad_dtype`` of its own.
        RuntimeError: A gradient is differentiated again: quantising has no derivative.
    """
    check_mor(mor)
    if torch.compiler.is_compiling() and note is None:
        return graph_linear(x, weight, bias, mor.text, "")
    return eager_linear(x, weight, bias, mor=mor, note=note)


@between_graphs
def eager_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    mor: MoR,
    note: Note | None,
    kept: KeptWeight | None = None,
) -> Tensor:
    """:func:`mor_linear` outside of graphs, its encoded weight ``kept``."""
    check_linear(x, weight, bias)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(
                f"{name} is on {tensor.device} and x on {x.device}: move one to the other"
            )
    if x.is_meta:
        # Shapes are all that there is.
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    if x.numel() == 0:
        return narrow_linear(x, weight, bias)
    x, weight = autocast_operands(x, weight)
    if not torch.is_grad_enabled():
        check_no_tangent("x", x)
        return forward_product(x, weight, bias, mor, note, save=False, kept=kept)[0]
    y: Tensor = _MoRLinear.apply(x, weight, bias, mor, note, kept)  # type: ignore[no-untyped-call]
    return y


class MixtureLayer(torch.nn.Module):
    """What layers with operands in a mixture share: how they are represented, and what was decided.

    Attributes:
        mor: How the operands are represented; may be replaced between steps.
        mix: The last decision on each operand, see :func:`subulp.diagnostics.representation_mix`.
        observers: Called with each role and its summary.
        owns_weight: Whether every call multiplies by one weight, which may be kept encoded.
    """

    owns_weight = True
    mor: MoR
    mix: dict[str, Summary]
    observers: tuple[Note, ...]
    original_class: type[torch.nn.Module] | None
    kept: KeptWeight
    ticket: str

    def become(self, mor: MoR, original: type[torch.nn.Module] | None = None) -> None:
        """Begin with this representation: what a module does that turns into this kind of layer.

        Args:
            mor: The representation.
            original: The module's class before; ``None`` if it was made like this (default:
                ``None``).

        Raises:
            ValueError: ``mor`` is no configuration.
        """
        check_mor(mor)
        self.mor = mor
        self.mix = {}
        self.observers = ()
        self.original_class = original
        self.kept = KeptWeight()
        self.ticket = issue(self)

    def leave(self) -> None:
        """Forget all that :meth:`become` added."""
        for name in ("mor", "mix", "observers", "original_class", "kept", "ticket"):
            delattr(self, name)

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """:func:`mor_linear` of this layer, its decisions noted.

        Args:
            x: The input.
            weight: The layer's weight.
            bias: Its bias.
        """
        check_mor(self.mor)
        if torch.compiler.is_compiling():
            return graph_linear(x, weight, bias, self.mor.text, self.ticket)
        evaluates = not self.training and not torch.is_grad_enabled()
        kept = self.kept_at(weight.device, evaluates=evaluates)
        return eager_linear(x, weight, bias, mor=self.mor, note=self.note, kept=kept)

    def kept_at(self, device: torch.device, *, evaluates: bool) -> KeptWeight | None:
        """What keeps the encoded weight of a call, if anything does: of C++, in evaluation."""
        if self.owns_weight and (evaluates or keeps_in_training(device)):
            return self.kept
        self.kept.clear()
        return None

    def note(self, role: str, summary: Summary) -> None:
        """Remember a decision, and tell the observers."""
        self.mix[role] = summary
        for observer in self.observers:
            observer(role, summary)

    def get_extra_state(self) -> Tensor:
        """The representation as part of a state dict: JSON in bytes, a tensor as all the rest."""
        return torch.tensor(list(self.mor.text.encode()), dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Check that a state dict is of this representation.

        Raises:
            ValueError: It is of another one.
        """
        if not isinstance(state, Tensor) or state.dtype != torch.uint8 or state.is_meta:
            raise ValueError(f"_extra_state={state!r} is no representation: expected uint8 numbers")
        saved = MoR.from_text(bytes(state.tolist()).decode(errors="replace"))
        if saved != self.mor:
            raise ValueError(
                f"this state dict is of a layer with {saved}, and this layer has {self.mor}: "
                "convert the model with the same one, or assign .mor first"
            )

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        # Weights that were trained without mixtures may be loaded into a converted layer: whoever
        # converted it said what it multiplies.
        state_dict.setdefault(f"{prefix}_extra_state", self.get_extra_state())
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def __getstate__(self) -> dict[str, Any]:
        # Observers belong to this layer: a copy's decisions are not what they watch.
        return self.__dict__ | {"observers": ()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.ticket = issue(self)


def check_mor(mor: MoR) -> None:
    """Raise ValueError unless ``mor`` is a configuration."""
    if not isinstance(mor, MoR):
        raise ValueError(f"mor={mor!r} is not a configuration: pass a subulp.nn.MoR")


class MoRLinear(MixtureLayer, Linear):
    """``torch.nn.Linear`` with operands in a mixture of representations; see :func:`mor_linear`.

    Its state dict holds the representation too: a plain layer refuses it as an unexpected key, and
    a layer with another representation by name. The state dict of a plain layer can be loaded.

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
        Linear.__init__(self, in_features, out_features, bias, device=device, dtype=dtype)
        self.become(MoR() if mor is None else mor)

    def forward(self, input: Tensor) -> Tensor:
        """``(..., in_features)`` to ``(..., out_features)``, in the dtype of the input."""
        return self.multiply(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return f"{super().extra_repr()}, {_shown(self.mor)}"


class MoRProduct(MixtureLayer):
    """A product with a weight that belongs to another module, such as a projection of attention.

    Args:
        mor: How operands are represented.
    """

    # Those of experts take turns here.
    owns_weight = False

    def __init__(self, mor: MoR) -> None:
        super().__init__()
        self.become(mor)

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``F.linear(input, weight, bias)``, in the dtype of the input."""
        return self.multiply(input, weight, bias)

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return _shown(self.mor)


def _shown(mor: MoR) -> str:
    shown = f"granularity={mor.recipe.name}, partition={mor.partition}"
    return shown + "".join(f", {role}: {_shown(own)}" for role, own in dict(mor.roles).items())


# ------------------------------------------------------------------------------------ the products


class _MoRLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        mor: MoR,
        note: Note | None,
        kept: KeptWeight | None,
    ) -> Tensor:
        needs_weight = ctx.needs_input_grad[1]
        y, saved, of_weight = forward_product(
            x, weight, bias, mor, note, save=needs_weight, kept=kept
        )
        if saved is None:
            ctx.save_for_backward(weight)
        else:
            ctx.save_for_backward(weight, *saved.mixture.tensors)
            ctx.saved_input = _without_tensors(saved)
        ctx.mor, ctx.note, ctx.x_shape, ctx.x_dtype = mor, note, x.shape, x.dtype
        # What is kept takes no memory of this pass.
        ctx.kept, ctx.of_weight = kept, None if kept is None else of_weight
        ctx.weight_grad_dtype = gradient_dtype(weight)
        ctx.bias_grad_dtype = None if bias is None else gradient_dtype(bias)
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor | None) -> tuple[Tensor | None, ...]:
        # None passes where fuse_backward(keep_bytes=) has the gradients below already.
        if grad_y is None:
            return None, None, None, None, None, None
        weight, *stored = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        saved = _with_tensors(ctx.saved_input, stored) if needs_weight else None
        grad_x, grad_weight = backward_products(
            *(grad_y, weight, saved, ctx.mor, ctx.note, ctx.x_dtype),
            needs_x=needs_x,
            kept=ctx.kept,
            of_weight=ctx.of_weight,
        )
        if grad_x is not None:
            grad_x = grad_x.view(ctx.x_shape)
        if grad_weight is not None:
            grad_weight = grad_weight.to(ctx.weight_grad_dtype)
        grad_bias = None
        if needs_bias:
            rows = grad_y.reshape(-1, weight.shape[0])
            grad_bias = rows.sum(0, dtype=torch.float32).to(ctx.bias_grad_dtype)
        return grad_x, grad_weight, grad_bias, None, None, None


def forward_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mor: MoR,
    note: Note | None,
    *,
    save: bool,
    kept: KeptWeight | None = None,
) -> tuple[Tensor, Operand | None, Operand]:
    """The layer's output in the dtype of ``x``, ``x`` as the weight's gradient needs it, and the
    weight as it was multiplied.
    """
    rows = x.reshape(-1, x.shape[-1])
    with without_autocast(x):
        quantise = _Quantiser(mor, note)
        q = quantise.first(rows, "input", both=save)
        of_weight = quantise(weight, "weight", kept)
        y = product(q, of_weight, x.dtype, bias)
        saved = quantise.transposed(rows, "input", q) if save else None
    return y.view(*x.shape[:-1], weight.shape[0]).to(x.dtype), saved, of_weight


def backward_products(
    grad_y: Tensor,
    weight: Tensor,
    saved: Operand | None,
    mor: MoR,
    note: Note | None,
    dtype: torch.dtype,
    *,
    needs_x: bool,
    kept: KeptWeight | None = None,
    of_weight: Operand | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the input ``(rows, in_features)``, and of the weight if ``saved`` is given;
    ``of_weight`` is what the forward pass multiplied by.
    """
    rows = grad_y.reshape(-1, weight.shape[0])
    grad_x = grad_weight = None
    with without_autocast(grad_y):
        quantise = _Quantiser(mor, note)
        q: Operand | None = None
        if needs_x or (saved is not None and mor.of("output gradient").is_symmetric):
            q = quantise.first(rows, "output gradient", both=saved is not None)
        if needs_x:
            assert q is not None
            if of_weight is not None and not (kept and kept.is_latest(of_weight)):
                # The layer has met other bytes, and these may be there again.
                of_weight = None
            turned = quantise.transposed(weight, "weight", of_weight, kept)
            grad_x = product(q, turned, dtype).to(dtype)
        if saved is not None:
            of_grad = quantise.transposed(rows, "output gradient", q)
            grad_weight = product(of_grad, saved, dtype)
    return grad_x, grad_weight


_TRANSPOSED = " transposed"


class _Quantiser:
    """Quantises the operands of one call."""

    def __init__(self, mor: MoR, note: Note | None) -> None:
        self.mor, self.note = mor, note
        # Of a matrix whose other direction has been quantised.
        self._ahead: tuple[Tensor, tuple[Operand, Summary]] | None = None

    def __call__(self, matrix: Tensor, role: str, kept: KeptWeight | None = None) -> Operand:
        """A matrix, quantised along its last dimension, or ``kept`` from an earlier call."""
        return self._noted(role, *self._kept(matrix, role, kept))

    def first(self, matrix: Tensor, role: str, *, both: bool) -> Operand:
        """A matrix, quantised along its last dimension; ``both`` if it will be transposed too."""
        mor = self.mor.of(role)
        if not both or mor.is_symmetric:
            return self(matrix, role)
        given = matrix.detach()
        along_rows, along_columns = (
            (Operand(mixture, summary), summary) for mixture, summary in mor.encode_both(given)
        )
        self._ahead = matrix, along_columns
        return self._noted(role, *along_rows)

    def _noted(self, role: str, operand: Operand, summary: Summary) -> Operand:
        if self.note is not None:
            self.note(role, summary)
        return operand

    @staticmethod
    def _encode(
        mor: MoR, matrix: Tensor, kept: KeptEncoding | None = None
    ) -> tuple[Operand, Summary]:
        if matrix.dtype not in ACTIVATION_DTYPES:
            matrix = matrix.float()
        mixture, summary = mor.encode(matrix.detach(), kept)
        return Operand(mixture, summary), summary

    def transposed(
        self,
        matrix: Tensor,
        role: str,
        known: Operand | None = None,
        kept: KeptWeight | None = None,
    ) -> Operand:
        """A matrix, quantised along its first dimension; ``known`` is it along its last."""
        if self.mor.of(role).is_symmetric:
            # No note: the decision is the one already noted.
            known = known or self._kept(matrix, role, kept)[0]
            return Operand(known.mixture, known.summary, transposed=True)
        role = f"{role}{_TRANSPOSED}"
        if self._ahead is not None and self._ahead[0] is matrix:
            return self._noted(role, *self._ahead[1])
        return self(matrix.t(), role, kept)

    def _kept(self, matrix: Tensor, role: str, kept: KeptWeight | None) -> tuple[Operand, Summary]:
        mor = self.mor.of(role.removesuffix(_TRANSPOSED))
        encode = functools.partial(self._encode, mor)
        return encode(matrix) if kept is None else kept.get(matrix, mor, encode, role)


_Saved = tuple[tuple[Any, ...], Summary | None, bool]


def _without_tensors(operand: Operand) -> _Saved:
    mixture = operand.mixture
    what = mixture.formats, mixture.block, mixture.blocks_of_group, mixture.wide_format
    return what, operand.summary, operand.transposed


def _with_tensors(saved: _Saved, tensors: list[Tensor]) -> Operand:
    what, summary, transposed = saved
    codes, types, mantissa, exponents, wide = tensors
    return Operand(Mixture(codes, types, mantissa, exponents, wide, *what), summary, transposed)


# -------------------------------------------------------------------------------------- in a graph

_layers: weakref.WeakValueDictionary[str, MixtureLayer] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def issue(layer: MixtureLayer) -> str:
    """A name of the layer for operations in graphs, which take no Python objects."""
    ticket = str(next(_numbers))
    _layers[ticket] = layer
    return ticket


def _note_of(ticket: str) -> Note | None:
    layer = _layers.get(ticket)
    return None if layer is None else layer.note


def _kept_of(ticket: str, device: torch.device, *, trains: bool) -> KeptWeight | None:
    layer = _layers.get(ticket)
    if layer is None:
        return None
    return layer.kept_at(device, evaluates=not (layer.training or trains))


def _check_grad_dtype(name: str, tensor: Tensor | None) -> None:
    if tensor is not None and gradient_dtype(tensor) != tensor.dtype:
        raise ValueError(
            f"{name} has grad_dtype {gradient_dtype(tensor)}, and a graph of torch.compile gives "
            f"gradients in {tensor.dtype}: leave grad_dtype as it is, or leave the layer out of "
            "the graph with torch.compiler.disable"
        )


def graph_linear(x: Tensor, weight: Tensor, bias: Tensor | None, mor: str, ticket: str) -> Tensor:
    """:func:`mor_linear` as one operation of a graph; ``mor`` is its text."""
    check_linear(x, weight, bias)
    if x.numel() == 0:
        return narrow_linear(x, weight, bias)
    x, weight = autocast_operands(x, weight)
    save = torch.is_grad_enabled() and weight.requires_grad
    y: Tensor = mor_linear_op(x, weight, bias, mor, ticket, save)[0]
    return y


_Stored = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("subulp::mor_linear", mutates_args=())
def mor_linear_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, mor: str, ticket: str, save: bool
) -> _Stored:
    """:func:`mor_linear`, and what it saves for the backward pass.

    Args:
        x: ``(..., in_features)``.
        weight: ``(out_features, in_features)``.
        bias: ``(out_features,)`` or ``None``.
        mor: :attr:`MoR.text`.
        ticket: Which layer's decisions these are.
        save: Whether the weight needs a gradient; if not, all but the output is empty.

    Returns:
        The output; the five tensors of the saved mixture, and the numbers of its summary.
    """
    config = MoR.from_text(mor)
    if save:
        _check_grad_dtype("weight", weight)
        _check_grad_dtype("bias", bias)
    kept = _kept_of(ticket, weight.device, trains=save)
    y, saved, _ = forward_product(x, weight, bias, config, _note_of(ticket), save=save, kept=kept)
    if saved is None:
        return y, *_nothing(x)
    assert saved.summary is not None
    codes, types, mantissa, exponents, wide = saved.mixture.tensors
    return y, codes, types, mantissa, exponents, wide, saved.summary.numbers


@mor_linear_op.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, mor: str, ticket: str, save: bool) -> _Stored:
    y = x.new_empty(*x.shape[:-1], weight.shape[0])
    if not save:
        return y, *_nothing(x)
    config = MoR.from_text(mor).of("input")
    rows, columns = x.numel() // x.shape[-1], x.shape[-1]
    shape = (rows, columns) if config.is_symmetric else (columns, rows)
    return y, *config.stored_like(shape, x.device)


def _nothing(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtypes = torch.uint8, torch.uint8, torch.float32, torch.int8, torch.uint8, torch.float64
    codes, types, mantissa, exponents, wide, numbers = (
        torch.empty(0, dtype=dtype, device=x.device) for dtype in dtypes
    )
    return codes, types, mantissa, exponents, wide, numbers


@torch.library.custom_op("subulp::mor_linear_backward", mutates_args=())
def mor_linear_backward(
    grad_y: Tensor,
    weight: Tensor,
    stored: Sequence[Tensor],
    mor: str,
    ticket: str,
    x_dtype: torch.dtype,
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of the input's rows and of the weight; empty where they are not needed."""
    config = MoR.from_text(mor)
    saved = _restored(stored, config.of("input"), x_dtype) if needs_weight else None
    # The weight as it is now: other bytes than the forward pass met are encoded anew.
    kept = _kept_of(ticket, weight.device, trains=True)
    grad_x, grad_weight = backward_products(
        grad_y, weight, saved, config, _note_of(ticket), x_dtype, needs_x=needs_x, kept=kept
    )
    none = grad_y.new_empty(0)
    return (
        none.to(x_dtype) if grad_x is None else grad_x,
        none.to(weight.dtype).clone() if grad_weight is None else grad_weight.to(weight.dtype),
    )


@mor_linear_backward.register_fake
def _(
    grad_y: Tensor,
    weight: Tensor,
    stored: Sequence[Tensor],
    mor: str,
    ticket: str,
    x_dtype: torch.dtype,
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    rows = grad_y.numel() // weight.shape[0]
    return (
        grad_y.new_empty((rows, weight.shape[1]) if needs_x else 0, dtype=x_dtype),
        weight.new_empty(weight.shape if needs_weight else 0),
    )


def _restored(stored: Sequence[Tensor], mor: MoR, x_dtype: torch.dtype) -> Operand:
    codes, types, mantissa, exponents, wide, numbers = stored
    block, groups = mor.sizes((codes.shape[0], codes.shape[1]))
    mixture = Mixture(
        *(codes, types, mantissa, exponents, wide),
        mor.recipe.formats,
        block,
        groups,
        wide_format_of(x_dtype),
    )
    summary = summarise(mor.recipe, numbers, wide_format_of(x_dtype))
    return Operand(mixture, summary, transposed=mor.is_symmetric)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, ctx.mor, ctx.ticket, ctx.save = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(weight, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.x_shape, ctx.x_dtype = x.shape, x.dtype


def _differentiate(ctx: Any, grad_y: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    weight, *stored = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    if needs_weight and not ctx.save:
        raise RuntimeError("the weight needs a gradient, and nothing was saved for it: save=True")
    grad_x = grad_weight = grad_bias = None
    if needs_x or needs_weight:
        of_x, of_weight = mor_linear_backward(
            grad_y, weight, stored, ctx.mor, ctx.ticket, ctx.x_dtype, needs_x, needs_weight
        )
        grad_x = of_x.view(ctx.x_shape) if needs_x else None
        grad_weight = of_weight if needs_weight else None
    if needs_bias:
        rows = grad_y.reshape(-1, weight.shape[0])
        grad_bias = rows.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
    return grad_x, grad_weight, grad_bias, None, None, None


mor_linear_op.register_autograd(_differentiate, setup_context=_save)
