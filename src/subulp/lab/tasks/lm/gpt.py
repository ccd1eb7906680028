"""A small GPT: pre-norm, causal attention, learned positions.

Built from :mod:`subulp.nn`, so its parameters may be stored in any floating-point dtype; the
activations are FP32, or BF16 after :func:`use_bf16`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ....nn import Embedding, LayerNorm, Linear

INIT_STD = 0.02


@dataclass(frozen=True)
class Shape:
    """Sizes of a :class:`GPT`.

    Args:
        vocabulary: Number of different tokens.
        context: Longest sequence.
        width: Size of a token's vector; a multiple of ``heads``.
        layers: Number of blocks.
        heads: Attention heads of a block.
        dropout: Share of activations dropped while training (default: 0).
        tie_head: The output layer uses the embedding's table (default: ``False``).
    """

    vocabulary: int
    context: int
    width: int
    layers: int
    heads: int
    dropout: float = 0.0
    tie_head: bool = False

    @property
    def parameters(self) -> int:
        """Numbers of the model; a tied table counts once."""
        embeddings = (self.vocabulary + self.context) * self.width
        head = 0 if self.tie_head else self.vocabulary * self.width
        # Matrices of 3, 1, 4 and 4 times the width squared, their biases, and two norms.
        block = self.width * (12 * self.width + 13)
        return embeddings + self.layers * block + 2 * self.width + head


class GPT(torch.nn.Module):
    """Token numbers ``(batch, time)`` to FP32 logits ``(batch, time, vocabulary)``.

    Made in FP32 with GPT-2's initialisation, from torch's random generator; ``.to(dtype)`` makes
    its parameters narrow.

    Attributes:
        activations: Dtype of the activations; :func:`use_bf16` changes it.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.activations = torch.float32
        self.tokens = Embedding(shape.vocabulary, shape.width)
        self.positions = Embedding(shape.context, shape.width)
        self.dropout = torch.nn.Dropout(shape.dropout)
        self.blocks = torch.nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.width)
        self.head = Linear(shape.width, shape.vocabulary, bias=False)
        self.apply(_initialise)
        # Each block adds to the residual stream twice: keep its variance at any depth.
        residual_std = INIT_STD / math.sqrt(2 * shape.layers)
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.down.weight")):
                torch.nn.init.normal_(parameter, std=residual_std)
        if shape.tie_head:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the token after each position."""
        time = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout((self.tokens(ids) + self.positions(time)).to(self.activations))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits.float()

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token."""
        return token_loss(self(ids), targets)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token, of logits ``(batch, time, vocabulary)``."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Block(torch.nn.Module):
    """Attention and a feed-forward network, each on a normalised copy of the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = Norm(shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = Norm(shape.width)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, time, width)`` to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Attention(torch.nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.in_ = Linear(shape.width, 3 * shape.width)
        self.out = Linear(shape.width, shape.width)
        self.dropout = torch.nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, time, width)`` to the same shape."""
        query, key, value = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.in_(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return out


class MLP(torch.nn.Module):
    """Two linear layers, four times as wide in between, with a GELU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = Linear(shape.width, 4 * shape.width)
        self.down = Linear(4 * shape.width, shape.width)
        self.dropout = torch.nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, time, width)`` to the same shape."""
        out: Tensor = self.dropout(self.down(F.gelu(self.up(x))))
        return out


class Norm(LayerNorm):
    """Layer normalisation in the dtype of its input, with statistics in FP32."""

    def forward(self, input: Tensor) -> Tensor:
        """``(..., width)`` to the same shape and dtype."""
        # Gain and bias in that dtype too: on a GPU, torch takes no mixture.
        gain, shift = self.weight.to(input.dtype), self.bias.to(input.dtype)
        return F.layer_norm(input, self.normalized_shape, gain, shift, self.eps)


class NativeLinear(Linear):
    """A linear layer that multiplies in the dtype of its input, by the processor's own units.

    Its parent multiplies in FP32 on a CPU, whatever the input is.
    """

    def forward(self, input: Tensor) -> Tensor:
        """``(..., in_features)`` to ``(..., out_features)``, in the dtype of the input."""
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.linear(input, self.weight.to(input.dtype), bias)


def use_bf16(model: torch.nn.Module) -> None:
    """Give a :class:`GPT`, or a block, BF16 activations, in place.

    Layers that multiply mixtures of representations stay as they are: they take any activations.
    """
    if isinstance(model, GPT):
        model.activations = torch.bfloat16
    for module in model.modules():
        if type(module) is Linear:
            module.__class__ = NativeLinear


def _initialise(module: torch.nn.Module) -> None:
    if isinstance(module, Linear | Embedding):
        torch.nn.init.normal_(module.weight, std=INIT_STD)
    if isinstance(module, Linear) and module.bias is not None:
        torch.nn.init.zeros_(module.bias)
