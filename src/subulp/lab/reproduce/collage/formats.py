"""Measurements of number formats and of what optimizers keep: exact, without chance."""

from __future__ import annotations

from fractions import Fraction

import torch

from .... import optim
from ....numerics import format_of
from ..found import Found, Observation
from .rational_adamw import bf16

BETAS = {"0.95": Fraction(95, 100), "0.99": Fraction(99, 100), "0.999": Fraction(999, 1000)}


def expansions() -> Found:
    """The two BF16 components of Adam's usual decays, rounded to nearest one after the other."""
    found = []
    for name, beta in BETAS.items():
        first = bf16(beta)
        found.append(Observation(name, "first component", float(first)))
        found.append(Observation(name, "second component", float(bf16(beta - first))))
    return Found(tuple(found))


def layouts() -> Found:
    """Bits of the formats, and the distance from 1 to the next number, found in the numbers."""
    found = []
    for name, dtype in {
        "FP32": torch.float32,
        "FP16": torch.float16,
        "BF16": torch.bfloat16,
        "E4M3": torch.float8_e4m3fn,
        "E5M2": torch.float8_e5m2,
    }.items():
        format_ = format_of(dtype)
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
        one = torch.ones((), dtype=torch.float32).to(dtype).view(integer)
        after = (one + 1).view(dtype).to(torch.float64)
        found.append(Observation(name, "bits", 8 * one.nbytes))
        found.append(Observation(name, "exponent bits", format_.exponent_bits))
        found.append(Observation(name, "mantissa bits", format_.mantissa_bits))
        found.append(Observation(name, "ulp of 1", float(after) - 1.0))
    return Found(tuple(found))


def bytes_kept(strategies: list[str], dtype: str, elements: int) -> Found:
    """Bytes of one parameter after a step: its own, its gradient's, and all states'.

    Args:
        strategies: Of AdamW.
        dtype: Of the parameter and its gradient, a name in torch.
        elements: Of the parameter.
    """
    found = []
    for strategy in strategies:
        parameter = torch.nn.Parameter(torch.ones(elements, dtype=getattr(torch, dtype)))
        optimizer = optim.AdamW([parameter], precision=strategy)
        parameter.grad = torch.ones(elements).to(parameter.dtype)
        optimizer.step()
        kept = [parameter, parameter.grad, *optimizer.state[parameter].values()]
        # Counters are one number for all elements.
        size = sum(t.nbytes for t in kept if isinstance(t, torch.Tensor) and t.numel() > 1)
        found.append(Observation(strategy, "bytes per parameter", size / elements))
    return Found(tuple(found))


def lost_decay(factors: list[float]) -> Found:
    """Share of the BF16 numbers from 1 to 2 that a decay of the parameter itself leaves unchanged.

    Args:
        factors: Learning rate times weight decay.
    """
    numbers = torch.arange(2**7, dtype=torch.int16) + torch.ones((), dtype=torch.bfloat16).view(
        torch.int16
    )
    p = numbers.view(torch.bfloat16)
    found = []
    for factor in factors:
        # PyTorch's decoupled decay: the parameter is multiplied in its own arithmetic.
        kept = (p * torch.tensor(1 - factor).to(torch.bfloat16) == p).float().mean()
        added = (p - (p.float() * factor).to(torch.bfloat16) == p).float().mean()
        found.append(Observation(f"{factor:g}", "unchanged by a factor", float(kept)))
        found.append(Observation(f"{factor:g}", "unchanged by a difference", float(added)))
    return Found(tuple(found))
