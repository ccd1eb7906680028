"""The linear layers of an encoder: as they are, torchao's, or with a mixture of representations."""

from __future__ import annotations

import torch

from ...engine.linear_operands import TORCHAO, Variant
from ...engine.mixture_log import MixtureLog, convert
from .fp8_encoder import multiply_in_fp8
from .reader import Encoder
from .transformer import TransformerEncoder


def change_layers(encoder: Encoder, variant: Variant, device: torch.device) -> MixtureLog | None:
    """Give an encoder the linear layers of a variant, in place; parameters stay the same objects.

    Args:
        encoder: What to change.
        variant: What its linear layers multiply.
        device: Where it computes.

    Returns:
        What mixtures decide from now on; ``None`` where there are none.

    Raises:
        ValueError: torchao is needed and not installed, or there is no layer to change.
    """
    if variant.linear == TORCHAO:
        assert isinstance(encoder, TransformerEncoder)
        multiply_in_fp8(encoder, device)
        return None
    return convert(encoder, variant)
