"""Modules other than ``torch.nn.Linear`` whose products take operands in a mixture.

A module that is converted stays the same object with the same parameters. Its class becomes a
subclass of what it was, made when it is needed, so that ``isinstance`` holds; :func:`subclass`
says how such an object is copied and pickled.
"""

from __future__ import annotations

import inspect
import math
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..ops.graph_breaks import between_graphs
from .mor import MoR
from .mor_linear import MixtureLayer, MoRProduct


class Converted(torch.nn.Module):
    """What subclasses made by :func:`subclass` share."""

    original: type[torch.nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        kind = next(k for k in KINDS if isinstance(self, k))
        state = self.__getstate__()  # type: ignore[no-untyped-call]
        return _empty, (kind, self.original), state


_subclasses: dict[tuple[type[Any], type[Any]], type[Any]] = {}


def subclass(kind: type[Converted], base: type[torch.nn.Module]) -> type[Any]:
    """The class of a converted module: ``kind`` before ``base``."""
    if (kind, base) not in _subclasses:
        contents = {"original": base, "__module__": __name__}
        _subclasses[kind, base] = type(f"MoR{base.__name__}", (kind, base), contents)
    return _subclasses[kind, base]


def _empty(kind: type[Converted], base: type[torch.nn.Module]) -> Converted:
    made: Any = subclass(kind, base)
    empty: Converted = made.__new__(made)
    return empty


# ------------------------------------------------------------------------ Hugging Face's Conv1D


def conv1d_type() -> type[torch.nn.Module] | None:
    """``transformers.pytorch_utils.Conv1D``, the linear layer of GPT-2, if it has been imported."""
    return getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)


class Conv1DProduct(MixtureLayer, Converted):
    """A linear layer whose weight is (in, out)."""

    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """``(..., in)`` to ``(..., out)``, in the dtype of the input."""
        return self.multiply(x, self.weight.t(), self.bias)


# ------------------------------------------------------------------------------------- attention

PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class Attention(Converted):
    """``torch.nn.MultiheadAttention`` whose four projections take operands in a mixture.

    Query, key and value are projected apart, whichever of them are the same tensor. What is between
    the projections is computed as ever.
    """

    embed_dim: int
    num_heads: int
    head_dim: int
    dropout: float
    batch_first: bool
    add_zero_attn: bool
    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    bias_k: Tensor | None
    bias_v: Tensor | None
    out_proj: torch.nn.Module

    def begin(self, mor: MoR) -> None:
        """Add the projections, which have no parameters of their own."""
        for name in PROJECTIONS:
            self.add_module(name, MoRProduct(mor))

    def end(self) -> None:
        """Remove them."""
        for name in PROJECTIONS:
            delattr(self, name)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Arguments and results of :meth:`torch.nn.MultiheadAttention.forward`."""
        if any(x.is_nested for x in (query, key, value)):
            raise ValueError("query, key or value is nested: pad it, and pass key_padding_mask")
        if is_causal and attn_mask is None:
            raise ValueError("is_causal=True needs attn_mask: it is a hint about that mask")
        batched = query.dim() == 3
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            if key_padding_mask is not None:
                key_padding_mask = key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        if len(query) != len(key) or key.shape[:2] != value.shape[:2]:
            raise ValueError(
                f"query, key and value are (batch, length, size) of {tuple(query.shape)}, "
                f"{tuple(key.shape)} and {tuple(value.shape)}: expected one batch size, and one "
                "length of key and value"
            )
        lengths = query.shape[1], key.shape[1]
        q, k, v = (
            x.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)
            for x in self._projected(query, key, value)
        )
        # In the dtype of the scores, which is another one under autocast.
        weight = self._attention_mask(q, lengths, attn_mask, key_padding_mask)
        dropout = self.dropout if self.training else 0.0
        shares = None
        if need_weights:
            scores = q * math.sqrt(1.0 / self.head_dim) @ k.transpose(-2, -1)
            shares = torch.softmax(scores if weight is None else scores + weight, -1)
            shares = F.dropout(shares, dropout) if dropout else shares
            y = shares @ v
            shares = shares.mean(1) if average_attn_weights else shares
        else:
            y = F.scaled_dot_product_attention(q, k, v, weight, dropout)
        y = self.out_proj(y.transpose(1, 2).flatten(-2))
        if not batched:
            return y.squeeze(0), None if shares is None else shares.squeeze(0)
        return y if self.batch_first else y.transpose(0, 1), shares

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """(batch, length, embed_dim) each; keys and values with those that the module adds."""
        if self.in_proj_weight is None:
            weights = [getattr(self, f"{name}_weight") for name in PROJECTIONS]
        else:
            weights = list(self.in_proj_weight.chunk(3))
        biases = [None] * 3 if self.in_proj_bias is None else list(self.in_proj_bias.chunk(3))
        q, k, v = (
            getattr(self, name)(x, weight, bias)
            for name, x, weight, bias in zip(
                PROJECTIONS, (query, key, value), weights, biases, strict=True
            )
        )
        batch = len(query)
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.to(k.dtype).expand(batch, 1, -1)], 1)
            v = torch.cat([v, self.bias_v.to(v.dtype).expand(batch, 1, -1)], 1)
        if self.add_zero_attn:
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        return q, k, v

    def _attention_mask(
        self, q: Tensor, lengths: tuple[int, int], attn_mask: Tensor | None, padding: Tensor | None
    ) -> Tensor | None:
        """What is added to the scores (batch or 1, heads or 1, queries or 1, keys)."""
        batch, (queries, keys) = len(q), lengths
        found: Tensor | None = None
        if attn_mask is not None:
            shapes = (queries, keys), (batch * self.num_heads, queries, keys)
            if tuple(attn_mask.shape) not in shapes:
                raise ValueError(
                    f"attn_mask has shape {tuple(attn_mask.shape)}: expected {shapes[0]} or "
                    f"{shapes[1]}"
                )
            found = _added(attn_mask, "attn_mask", q.dtype)
            found = (
                found[None, None]
                if found.dim() == 2
                else found.view(batch, self.num_heads, queries, keys)
            )
        if padding is not None:
            if tuple(padding.shape) != (batch, keys):
                raise ValueError(
                    f"key_padding_mask has shape {tuple(padding.shape)}: expected {(batch, keys)}"
                )
            of_keys = _added(padding, "key_padding_mask", q.dtype)[:, None, None]
            found = of_keys if found is None else found + of_keys
        more = int(self.bias_k is not None) + int(self.add_zero_attn)
        return found if found is None or not more else F.pad(found, (0, more))


def _added(mask: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """A mask as what is added to scores: a boolean one forbids where it is true."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)
    if not mask.is_floating_point():
        raise ValueError(f"{name} has dtype {mask.dtype}: use a boolean or floating-point mask")
    return mask.to(dtype)


# --------------------------------------------------------------------------------------- experts


def has_experts(module: torch.nn.Module) -> bool:
    """Whether a module is one of Hugging Face's, whose experts are matrices in one tensor."""
    forward = type(module).forward
    return inspect.unwrap(forward) is not forward and bool(expert_parameters(module))


def expert_parameters(module: torch.nn.Module) -> dict[str, Tensor]:
    """The parameters that hold a matrix for each expert."""
    found = dict(module.named_parameters(recurse=False))
    return {name: p for name, p in found.items() if p.dim() == 3 and name.endswith("_proj")}


class Experts(Converted):
    """Experts whose products take operands in a mixture, an expert at a time.

    The module's own definition runs, and what it multiplies by an expert's matrix goes through
    :func:`subulp.nn.mor_linear`: neither a product of groups nor one of batches.
    """

    def begin(self, mor: MoR) -> None:
        """Add the products, which have no parameters of their own."""
        for name in expert_parameters(self):
            self.add_module(f"{name}_product", MoRProduct(mor))

    def end(self) -> None:
        """Remove them."""
        for name in expert_parameters(self):
            delattr(self, f"{name}_product")

    @between_graphs
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Arguments and results of the module."""
        with _ExpertProducts(self) as products:
            result = inspect.unwrap(self.original.forward)(self, *args, **kwargs)
        if products.others:
            raise RuntimeError(
                f"{self.original.__name__} takes its experts' matrices to {products.others[0]}, "
                "which no mixture replaces: leave it out of convert_to_mor by filter="
            )
        return result


class _ExpertProducts(TorchFunctionMode):
    """Sends products with a module's experts through its mixtures."""

    def __init__(self, module: Experts) -> None:
        super().__init__()
        self._of = {
            p.untyped_storage().data_ptr(): getattr(module, f"{name}_product")
            for name, p in expert_parameters(module).items()
        }
        self.others: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            found = self._product(args[1] if len(args) > 1 else kwargs.get("weight"))
            if found is not None:
                return found(*args, **kwargs)
        elif func in (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm):
            found = self._product(args[1])
            if found is not None:
                return found(args[0], args[1].transpose(-2, -1))
        if func.__name__ not in _VIEWS and any(self._product(x) is not None for x in args):
            self.others.append(func.__name__)
        return func(*args, **kwargs)

    def _product(self, weight: Any) -> MoRProduct | None:
        if not isinstance(weight, Tensor):
            return None
        return self._of.get(weight.untyped_storage().data_ptr())


# What may be done with an expert's matrix on the way to its product.
_VIEWS = frozenset(
    {"__get__", "__getitem__", "__len__", "chunk", "dim", "narrow", "numel", "permute", "select"}
    | {"size", "split", "squeeze", "stride", "t", "transpose", "unbind", "unsqueeze", "view"}
    | {"untyped_storage"}
)

KINDS: tuple[type[Converted], ...] = (Conv1DProduct, Attention, Experts)
