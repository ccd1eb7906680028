"""Small language models: GPT, one like Llama, and BERT.

Built from :mod:`subulp.nn`, so their parameters may be stored in any floating-point dtype; the
activations are FP32, or BF16 after :func:`use_bf16`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ....nn import Embedding, LayerNorm, Linear

INIT_STD = 0.02


Model = Literal["gpt", "llama", "bert"]

IGNORED = -100
"""Target of a position that is not predicted."""

_ROTATION = 10_000.0
"""Base of the angles of rotary positions (RoFormer)."""

_GATED = 16
"""The hidden width of a gated network is a multiple of it."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model.

    Args:
        vocabulary: Number of different tokens; of BERT with the one that masks.
        context: Longest sequence.
        width: Size of a token's vector; a multiple of ``heads``.
        layers: Number of blocks.
        heads: Attention heads of a block.
        dropout: Share of activations dropped while training (default: 0).
        tie_head: The output layer uses the embedding's table (default: ``False``).
        model: Which model (default: ``"gpt"``).
    """

    vocabulary: int
    context: int
    width: int
    layers: int
    heads: int
    dropout: float = 0.0
    tie_head: bool = False
    model: Model = "gpt"

    @property
    def gated_width(self) -> int:
        """Hidden width of Llama's feed-forward network: its three matrices have as many numbers as
        two that are four times as wide as the model, rounded up.
        """
        return -(-8 * self.width // (3 * _GATED)) * _GATED

    @property
    def parameters(self) -> int:
        """Numbers of the model; a tied table counts once."""
        width, tokens = self.width, self.vocabulary * self.width
        head = 0 if self.tie_head else tokens
        if self.model == "llama":
            block = 4 * width**2 + 3 * width * self.gated_width + 2 * width
            return tokens + self.layers * block + width + head
        # Matrices of 3, 1, 4 and 4 times the width squared, their biases, and two norms.
        block = width * (12 * width + 13)
        positions = self.context * width
        # BERT has another matrix and norm before its output layer.
        before = width * (width + 1) + 2 * width if self.model == "bert" else 0
        return tokens + positions + self.layers * block + 2 * width + before + head


class LanguageModel(torch.nn.Module):
    """Token numbers ``(batch, time)`` to FP32 logits ``(batch, time, vocabulary)``.

    Attributes:
        activations: Dtype of the activations; :func:`use_bf16` changes it.
        tokens: The table of the tokens.
        blocks: The blocks.
        head: The output layer.
    """

    activations: torch.dtype
    tokens: Embedding
    blocks: torch.nn.ModuleList
    head: Linear

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.activations = torch.float32
        self.tokens = Embedding(shape.vocabulary, shape.width)
        self.positions = None if shape.model == "llama" else Embedding(shape.context, shape.width)
        self.dropout = torch.nn.Dropout(shape.dropout)

    def embedded(self, ids: Tensor) -> Tensor:
        """Vectors of tokens and of their positions, in FP32."""
        vectors: Tensor = self.tokens(ids)
        if self.positions is None:
            return vectors
        positions: Tensor = self.positions(torch.arange(ids.shape[1], device=ids.device))
        return vectors + positions

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per predicted token."""
        return token_loss(self(ids), targets)


class GPT(LanguageModel):
    """Pre-norm and causal, with learned positions; or as Llama is: rotary positions, norms by the
    root mean square, gated feed-forward networks and no biases.

    Made in FP32 with GPT-2's initialisation, from torch's random generator; ``.to(dtype)`` makes
    its parameters narrow.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.blocks = torch.nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = _norm(shape)
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
        x = self.dropout(self.embedded(ids).to(self.activations))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits.float()


class BERT(LanguageModel):
    """Post-norm and in both directions: it predicts tokens that are masked.

    Made in FP32 as BERT is, every matrix from a normal distribution of deviation 0.02.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.embedding_norm = Norm(shape.width)
        self.blocks = torch.nn.ModuleList(PostNormBlock(shape) for _ in range(shape.layers))
        self.transform = Linear(shape.width, shape.width)
        self.norm = Norm(shape.width)
        self.head = Linear(shape.width, shape.vocabulary, bias=False)
        self.apply(_initialise)
        if shape.tie_head:
            self.head.weight = self.tokens.weight

    def encoded(self, ids: Tensor) -> Tensor:
        """Vectors ``(batch, time, width)`` of the last block, in the dtype of the activations."""
        x: Tensor = self.embedded(ids).to(self.activations)
        x = self.dropout(self.embedding_norm(x))
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the token at each position."""
        logits: Tensor = self.head(self.norm(F.gelu(self.transform(self.encoded(ids)))))
        return logits.float()


def build(shape: Shape) -> LanguageModel:
    """The model of a shape."""
    return BERT(shape) if shape.model == "bert" else GPT(shape)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per predicted token, of logits ``(batch, time, vocabulary)``.

    Targets of :data:`IGNORED` are not predicted.
    """
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


class Block(torch.nn.Module):
    """Attention and a feed-forward network, each on a normalised copy of the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = _norm(shape)
        self.attention = Attention(shape)
        self.mlp_norm = _norm(shape)
        self.mlp = GatedMLP(shape) if shape.model == "llama" else MLP(shape)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, time, width)`` to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class PostNormBlock(torch.nn.Module):
    """Attention and a feed-forward network, each followed by a normalisation of the sum."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.attention_norm = Norm(shape.width)
        self.mlp = MLP(shape)
        self.mlp_norm = Norm(shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, time, width)`` to the same shape."""
        x = self.attention_norm(x + self.attention(x))
        out: Tensor = self.mlp_norm(x + self.mlp(x))
        return out


class Attention(torch.nn.Module):
    """Multi-head self-attention: causal, or of BERT in both directions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.causal, self.rotary = shape.model != "bert", shape.model == "llama"
        self.in_ = Linear(shape.width, 3 * shape.width, bias=not self.rotary)
        self.out = Linear(shape.width, shape.width, bias=not self.rotary)
        self.dropout = torch.nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, time, width)`` to the same shape."""
        query, key, value = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.in_(x).chunk(3, dim=-1)
        )
        if self.rotary:
            query, key = rotated(query), rotated(key)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        out: Tensor = self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return out


def rotated(x: Tensor) -> Tensor:
    """Rotary positions (RoFormer, equation 34): pairs of numbers turn by angles that grow with the
    place. Computed in FP32, where places far from the start still have angles of their own.

    Args:
        x: Queries or keys ``(batch, heads, time, size)``, of an even size.

    Returns:
        The same shape and dtype.
    """
    size, time = x.shape[-1], x.shape[-2]
    rates = _ROTATION ** (-torch.arange(0, size, 2, device=x.device) / size)
    angles = torch.arange(time, device=x.device)[:, None] * rates
    cos, sin = angles.cos(), angles.sin()
    # Halves, as in Llama, instead of neighbours: another order of the same pairs.
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


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


class GatedMLP(torch.nn.Module):
    """SwiGLU: one linear layer gates another, and a third one brings them back."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = Linear(shape.width, shape.gated_width, bias=False)
        self.up = Linear(shape.width, shape.gated_width, bias=False)
        self.down = Linear(shape.gated_width, shape.width, bias=False)
        self.dropout = torch.nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, time, width)`` to the same shape."""
        out: Tensor = self.dropout(self.down(F.silu(self.gate(x)) * self.up(x)))
        return out


class RMSNorm(torch.nn.Module):
    """Normalisation by the root mean square in the dtype of its input, computed in FP32.

    Args:
        width: Size of the last dimension.
        eps: Added to the mean square (default: 1e-5, as in Llama).
    """

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, input: Tensor) -> Tensor:
        """``(..., width)`` to the same shape and dtype."""
        wide = F.rms_norm(input.float(), self.weight.shape, self.weight.float(), self.eps)
        return wide.to(input.dtype)


def _norm(shape: Shape) -> Norm | RMSNorm:
    return RMSNorm(shape.width) if shape.model == "llama" else Norm(shape.width)


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
    """Give a model, or a block, BF16 activations, in place.

    Layers that multiply mixtures of representations stay as they are: they take any activations.
    """
    if isinstance(model, LanguageModel):
        model.activations = torch.bfloat16
    for module in model.modules():
        if type(module) is Linear:
            module.__class__ = NativeLinear


def _initialise(module: torch.nn.Module) -> None:
    if isinstance(module, Linear | Embedding):
        torch.nn.init.normal_(module.weight, std=INIT_STD)
    if isinstance(module, Linear) and module.bias is not None:
        torch.nn.init.zeros_(module.bias)
