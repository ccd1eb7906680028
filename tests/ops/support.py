"""What the tests of ops share: states of every strategy, steps by a backend, equality of bits."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from subulp.ops import adam_step, facts, native, parse_strategy, sgd_step
from subulp.ops.step import storage

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = (FP32, BF16, FP16, E4M3, E5M2)
SIZES = (0, 1, 31, 33, 127, 128, 129, 5000)

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles here: see pytest -m gpu"
)

DEVICES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
"""Where the Triton kernels run."""


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Setup:
    """One way to call a step: everything but the tensors."""

    op: str
    precision: str
    dtype: torch.dtype
    grad_dtype: torch.dtype | None = None
    maximize: bool = False
    decoupled: bool = True
    weight_decay: float = 0.1
    momentum: float | None = 0.9
    nesterov: bool = False
    lr: float = 3e-3

    @property
    def operator(self):
        return {"adam": adam_step, "sgd": sgd_step}[self.op]

    @property
    def strategy(self):
        return parse_strategy(self.precision)

    def __str__(self) -> str:
        return f"{self.op}-{self.precision}-{short(self.dtype)}"


def setups(precisions: Sequence[str], **options) -> list[Setup]:
    """Both steps under each strategy, for every dtype that can have it."""
    return [
        Setup(op, precision, dtype, **options)
        for op in ("adam", "sgd")
        for precision in precisions
        for dtype in parse_strategy(precision).dtypes
    ]


@dataclass
class State:
    """The tensors that a step updates."""

    params: list[Tensor]
    fast: list[Tensor]
    slow: list[Tensor]
    extras: list[Tensor]
    lows: list[Tensor]
    amaxes: list[Tensor] = field(default_factory=list)

    def roles(self) -> dict[str, list[Tensor]]:
        return vars(self)

    def map(self, change) -> State:
        return State(**{name: [change(t) for t in role] for name, role in self.roles().items()})


def fresh_state(setup: Setup, params: Sequence[Tensor]) -> State:
    """What an optimizer holds before the first step."""
    strategy, dtype = setup.strategy, setup.dtype
    extras = [storage.new_extra(strategy, p) for p in params]
    slow_dtype = strategy.slow_format(dtype).dtype
    has_slow = setup.op == "adam" or setup.momentum is not None
    slow = [torch.zeros_like(p, dtype=slow_dtype) for p in params] if has_slow else []
    return State(
        params=[p.clone() for p in params],
        fast=[torch.zeros_like(p, dtype=strategy.fast_format(dtype).dtype) for p in params]
        if setup.op == "adam"
        else [],
        slow=slow,
        extras=[] if extras[0] is None else extras,
        lows=[torch.zeros_like(s) for s in slow] if strategy.slow_state == "expansion" else [],
        amaxes=[torch.zeros((), device=p.device) for p in params] if dtype == E4M3 else [],
    )


def parameters(setup: Setup, sizes: Sequence[int]) -> list[Tensor]:
    """Weights over many binades, zeros among them."""
    generator = torch.Generator().manual_seed(1)

    def one(size: int) -> Tensor:
        x = torch.randn(size, generator=generator) * torch.randn(size, generator=generator).exp()
        x[::7] = 0.0
        x[3::7] *= -0.0
        return (0.05 * x).to(setup.dtype)

    return [one(size) for size in sizes]


def gradients(setup: Setup, sizes: Sequence[int], t: int) -> list[Tensor]:
    """Gradients of step ``t``, over many binades; a fifth of them zero in the third step."""
    generator = torch.Generator().manual_seed(100 + t)

    def one(size: int) -> Tensor:
        x = torch.randn(size, generator=generator)
        x *= (2 * torch.randn(size, generator=generator)).exp()
        if t == 3:
            x[::5] = 0.0
        return (0.01 * x).to(setup.grad_dtype or setup.dtype)

    return [one(size) for size in sizes]


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def isas() -> list[str]:
    """Instruction sets whose kernels run here."""
    return [name for name, code in facts.ISAS.items() if native.library().subulp_has_isa(code)]


def arguments(
    setup: Setup,
    state: State,
    grads: list[Tensor],
    t: int,
    offsets: Sequence[int] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Arguments of the op for step ``t``."""
    count = len(grads)
    common = {
        "params": state.params,
        "grads": grads,
        "extras": state.extras,
        "amaxes": state.amaxes,
        "steps": [torch.tensor(float(t)) for _ in grads],
        "lr": torch.tensor(setup.lr, dtype=torch.float64),
        "weight_decay": setup.weight_decay,
        "maximize": setup.maximize,
        "precision": setup.precision,
        "arithmetic": "wide",
        "seed": 7,
        "streams": list(range(count)),
        "offsets": list(offsets or [0] * count),
        **options,
    }
    if setup.op == "adam":
        return common | {
            "exp_avgs": state.fast,
            "exp_avg_sqs": state.slow,
            "exp_avg_sq_lows": state.lows,
            "beta1": 0.9,
            "beta2": 0.999,
            "eps": 1e-8,
            "decoupled": setup.decoupled,
        }
    return common | {
        "momentum_buffers": state.slow,
        "momentum_lows": state.lows,
        "momentum": setup.momentum or 0.0,
        "dampening": 0.1,
        "nesterov": setup.nesterov,
    }


def take_step(setup: Setup, *args, backend: str, **kwargs) -> None:
    # The interpreter computes in numpy, which warns of NaN.
    with environment(SUBULP_BACKEND=backend), np.errstate(all="ignore"):
        setup.operator(**arguments(setup, *args, **kwargs))


def train(
    setup: Setup,
    backend: str,
    sizes: Sequence[int] = SIZES,
    *,
    steps: int = 4,
    offsets: Sequence[int] | None = None,
    device: str = "cpu",
) -> State:
    """The state after some steps, on the CPU."""
    state = fresh_state(setup, parameters(setup, sizes)).map(lambda t: t.to(device))
    for t in range(1, steps + 1):
        grads = [g.to(device) for g in gradients(setup, sizes, t)]
        take_step(setup, state, grads, t, offsets, backend=backend)
    return state.map(lambda t: t.cpu())


def patterns(x: Tensor) -> np.ndarray:
    """Bits of each value; all NaNs are one."""
    x = x.detach().contiguous()
    bits = x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]).numpy().copy()
    if x.is_floating_point():
        bits[x.float().isnan().numpy()] = 0x7F
    return bits


def assert_same(actual: State, expected: State) -> None:
    for (name, got), want in zip(actual.roles().items(), expected.roles().values(), strict=True):
        assert len(got) == len(want), name
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert a.dtype == b.dtype
            wrong = np.flatnonzero(patterns(a) != patterns(b))
            assert wrong.size == 0, (
                f"{name}[{i}]: {wrong.size} of {a.numel()} differ, first at {wrong[:5]}: "
                f"{a.flatten()[wrong[:5]]}, expected {b.flatten()[wrong[:5]]}"
            )
