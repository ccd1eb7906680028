"""The linear layers of an encoder: as they are, with a mixture of representations, or torchao's.

ELMO, section 4.3, has torchao's: weights, activations and gradients of a linear layer are cast to
FP8 for its products, with a scale for each tensor; what is stored and what flows between layers
is as before.
"""

from __future__ import annotations

from typing import Any

import torch

from ....ops.head import fp8
from ...engine.linear_operands import TORCHAO, Variant
from ...engine.mixture_log import MixtureLog, convert
from .preprocessing import Encoder
from .transformer import TransformerEncoder

# What FP8 units want of a layer's sizes.
_MULTIPLE = 16


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


def check_torchao() -> None:
    """Check that the package is installed.

    Raises:
        ValueError: It is not installed; the message names the remedy.
    """
    _torchao()


def multiply_in_fp8(encoder: TransformerEncoder, device: torch.device) -> None:
    """Replace the transformer's linear layers, in place; parameters stay the same objects.

    FP8 units multiply on a GPU of sm_89 or later. Elsewhere torchao emulates them: operands are
    rounded to FP8, and products computed as wide as activations are. Layers whose sizes are not
    multiples of 16 stay as they are.

    Args:
        encoder: What to change.
        device: Where it computes.

    Raises:
        ValueError: torchao is not installed, or there is no layer to replace.
    """
    torchao = _torchao()
    layers = [m for m in encoder.transformer.modules() if _fits(m)]
    if not layers:
        raise ValueError(
            f"linear={TORCHAO} finds no linear layer in the transformer whose sizes are "
            f"multiples of {_MULTIPLE}: use bf16"
        )
    config = torchao.Float8LinearConfig(
        emulate=not fp8.units_at(device),
        # The number of tokens in a batch is no multiple of anything.
        pad_inner_dim=True,
    )
    torchao.convert_to_float8_training(
        encoder.transformer, module_filter_fn=lambda module, _: _fits(module), config=config
    )
    encoder.train(encoder.training)


def _fits(module: torch.nn.Module) -> bool:
    return (
        isinstance(module, torch.nn.Linear)
        and module.in_features % _MULTIPLE == 0
        and module.out_features % _MULTIPLE == 0
    )


def _torchao() -> Any:
    try:
        import torchao.float8  # noqa: PLC0415 - optional, and slow to import
    except ImportError as error:
        raise ValueError(
            f"linear={TORCHAO} needs the package torchao ({error}): pip install torchao"
        ) from None
    return torchao.float8
