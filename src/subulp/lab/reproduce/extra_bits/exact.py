"""FP32 numbers that a 16-bit float and extra bits restore, and what these take in an optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from .... import optim
from ....numerics import BF16, FP16, Format, extra_bits
from ..found import Found, Observation

LOST = "FP32 numbers that are not restored"
CUT = "16-bit floats that are not the first half of FP32's bits"
TAIL = "bits of a tail"
BYTES = "bytes of a parameter and its copy or extra bits"

_FORMATS: dict[str, Format] = {"BF16": BF16, "FP16": FP16}
# Binary exponents of the normal numbers that both formats' largest number does not end.
_EXPONENTS = {"BF16": range(-126, 127), "FP16": range(-14, 15)}
_MANTISSAS = 1 << 23

_Coding = Literal["truncate", "stochastic"]


def case_of(name: str, k: int, coding: str = "truncate") -> str:
    """What a case is called."""
    return f"{name} and {k} bits, {coding}"


def restored(cases: list[tuple[str, int, _Coding]], binades: int, drawn: int) -> Found:
    """FP32 numbers that change when they are split and joined.

    Args:
        cases: Formats, extra bits and codings.
        binades: Of which all mantissas are split, spread over the format's.
        drawn: Random mantissas of every other binade.
    """
    found = []
    for name, k, coding in cases:
        fmt = _FORMATS[name]
        generator = torch.Generator().manual_seed(0)
        lost = cut = total = 0
        for x in _numbers(name, binades, drawn, generator):
            bits = None
            if coding == "stochastic":
                bits = torch.randint(1 << 32, x.shape, generator=generator)
            head, tail = extra_bits.split(x, fmt, k, coding, bits=bits)
            back = extra_bits.join(head.to(fmt.dtype), tail, fmt, k, coding)
            lost += int((back.view(torch.int32) != x.view(torch.int32)).sum())
            total += len(x)
            if name == "BF16" and coding == "truncate":
                first = x.view(torch.int32) >> 16
                cut += int((head.view(torch.int32) >> 16 != first).sum())
        case = case_of(name, k, coding)
        found += [
            Observation(case, "FP32 numbers", total),
            Observation(case, LOST, lost),
            Observation(case, TAIL, extra_bits.tail_width(k, coding)),
        ]
        if name == "BF16" and coding == "truncate":
            found.append(Observation(case, CUT, cut))
    return Found(tuple(found))


def _numbers(name: str, binades: int, drawn: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Numbers of both signs, a binade at a time."""
    exponents = _EXPONENTS[name]
    whole = {exponents[i * (len(exponents) - 1) // max(1, binades - 1)] for i in range(binades)}
    for exponent in exponents:
        if exponent in whole:
            mantissas = torch.arange(_MANTISSAS, dtype=torch.int32)
        else:
            mantissas = torch.randint(_MANTISSAS, (drawn,), generator=generator, dtype=torch.int32)
        codes = mantissas | (exponent + 127) << 23
        yield codes.view(torch.float32)
        yield -codes.view(torch.float32)


def kept(strategies: list[tuple[str, str]], elements: int) -> Found:
    """Bytes that SGD keeps of a parameter: its own, and those of its FP32 copy or its extra bits.

    Args:
        strategies: Dtypes of the parameter, as torch names them, and strategies of SGD.
        elements: Parameters, a multiple of 32.
    """
    found = []
    for dtype, strategy in strategies:
        p = torch.nn.Parameter(torch.ones(elements, dtype=getattr(torch, dtype)))
        optimizer = optim.SGD([p], lr=0.1, precision=strategy)
        p.grad = torch.ones_like(p)
        optimizer.step()
        states = [t for t in optimizer.state[p].values() if isinstance(t, Tensor) and t.numel() > 1]
        size = sum(t.nbytes for t in (p, *states))
        found.append(Observation(f"{dtype}, {strategy}", BYTES, size / elements))
    return Found(tuple(found))
