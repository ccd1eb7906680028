"""What layers with narrow weights share: dtypes, and ``torch.autocast``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

ACTIVATION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NATIVE_ON_GPU = (torch.bfloat16, torch.float16)


def check_activations(layer: str, x: Tensor) -> None:
    """Raise ValueError unless a layer can compute with activations of this dtype."""
    if x.dtype not in ACTIVATION_DTYPES:
        raise ValueError(
            f"input has dtype {x.dtype}: {layer} takes FP32, BF16 or FP16 activations; cast it"
        )


def autocast_operands(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The operands of a matrix product as ``torch.autocast`` would hand them to torch's own layers.

    FP32 tensors are cast to the dtype of the surrounding ``torch.autocast``, if there is one, by a
    cast that autograd sees, so that FP32 parameters get FP32 gradients.
    """
    device = tensors[0].device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t.dtype == torch.float32 else t for t in tensors)


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """Context that disables autocast on the device of ``tensor``; the meta device has none."""
    device = tensor.device.type
    if not torch.amp.is_autocast_available(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


def draw_wide(layer: torch.nn.Module, draw: Callable[[], None]) -> None:
    """Initial parameters of a layer; those in FP8, of which torch draws none, in FP32 and rounded.

    Args:
        layer: The layer.
        draw: Fills its parameters, whatever their dtype.
    """
    narrow = [
        (parameter, parameter.dtype)
        for parameter in layer.parameters(recurse=False)
        if parameter.is_floating_point() and parameter.dtype.itemsize == 1
    ]
    for parameter, _ in narrow:
        parameter.data = parameter.data.float()
    draw()
    for parameter, dtype in narrow:
        parameter.data = parameter.data.to(dtype)


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Storage dtype of the gradient of ``parameter``: its ``grad_dtype``, else its own dtype."""
    # Only leaves have a grad_dtype: torch raises RuntimeError for the others.
    declared = getattr(parameter, "grad_dtype", None) if parameter.is_leaf else None
    return declared or parameter.dtype
