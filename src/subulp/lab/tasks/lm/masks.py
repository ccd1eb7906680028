"""Masked tokens: which ones BERT predicts, and what it sees in their places."""

from __future__ import annotations

import torch
from torch import Tensor

from .models import IGNORED
from .text import Batches

SHARE = 0.15
"""Share of a sequence's tokens that are predicted."""

_HIDDEN, _OTHER = 0.8, 0.9
"""Of these, 80 % are seen as the mask, 10 % as any token, and 10 % as they are."""


def masked(tokens: Tensor, mask: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """What is seen, and what is to be predicted.

    Args:
        tokens: Sequences, int64 ``(batch, time)``.
        mask: The token that masks: the highest one.
        generator: Draws the places.

    Returns:
        Inputs and targets of the same shape; a target that is not predicted is ``IGNORED``. Every
        sequence has as many that are, so that a mean over sequences is one over them.
    """
    count = max(1, round(SHARE * tokens.shape[1]))
    order = torch.rand(tokens.shape, generator=generator).argsort(dim=1)
    predicted = torch.zeros(tokens.shape, dtype=torch.bool).scatter_(1, order[:, :count], True)
    kind = torch.rand(tokens.shape, generator=generator)
    others = torch.randint(mask, tokens.shape, generator=generator)
    seen = torch.where(kind < _HIDDEN, mask, torch.where(kind < _OTHER, others, tokens))
    return torch.where(predicted, seen, tokens), torch.where(predicted, tokens, IGNORED)


class MaskedBatches(Batches):
    """Batches whose masks are drawn anew each time, as RoBERTa's are.

    Args:
        tokens: The training part.
        batch_size: Sequences of a batch.
        context: Tokens of a sequence.
        seed: Seed of what is drawn.
        mask: The token that masks.
    """

    def __init__(self, tokens: Tensor, batch_size: int, context: int, seed: int, mask: int) -> None:
        # Targets are in the sequence itself, not one place further.
        super().__init__(tokens, batch_size, context - 1, seed)
        self._mask = mask

    def draw(self) -> tuple[Tensor, Tensor]:
        """The next inputs and targets, int64 ``(batch_size, context)`` each."""
        return masked(self.sequences(), self._mask, self._generator)


def masked_evaluation_batches(
    tokens: Tensor, batch_size: int, context: int, mask: int
) -> list[tuple[Tensor, Tensor]]:
    """All of ``tokens`` once, in consecutive sequences with the same masks in every evaluation.

    Returns:
        Inputs and targets, int64 ``(at most batch_size, context)`` each.
    """
    generator = torch.Generator().manual_seed(0)
    count = tokens.numel() // context
    sequences = tokens[: count * context].long().view(count, context)
    inputs, targets = masked(sequences, mask, generator)
    return list(zip(torch.split(inputs, batch_size), torch.split(targets, batch_size), strict=True))
