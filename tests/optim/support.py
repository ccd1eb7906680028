"""What the tests of optimizers share: the table of cases, one runner, equality of bits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from subulp import optim
from subulp.ops.strategy import all_names, parse_strategy

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
E4M3 = torch.float8_e4m3fn

OPTIMIZERS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "adamw": (optim.AdamW, torch.optim.AdamW, {"weight_decay": 0.1}),
    "adam": (optim.Adam, torch.optim.Adam, {"weight_decay": 0.1}),
    "sgd": (optim.SGD, torch.optim.SGD, {"weight_decay": 0.1}),
    "sgd-momentum": (optim.SGD, torch.optim.SGD, {"momentum": 0.9}),
    "sgd-nesterov": (optim.SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "sgd-dampening": (optim.SGD, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3}),
}
# One number of bits that does not divide a word.
PRECISIONS = all_names(5)
HALVES = tuple(name for name in PRECISIONS if torch.bfloat16 in parse_strategy(name).dtypes)
"""Strategies of 16-bit parameters."""
# Every way to keep states and update them; the other optimizers differ in arithmetic alone.
SOME = ("adamw", "sgd", "sgd-momentum")
# Scalars and tensors without elements among them; more than one group of 32 packed tails.
SHAPES = ((6, 7), (33,), (), (0, 3))


@dataclass(frozen=True)
class Case:
    """One optimizer over parameters of one dtype in one precision."""

    optimizer: str
    precision: str
    dtype: torch.dtype
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.optimizer}-{self.precision}-{str(self.dtype).removeprefix('torch.')}"

    @property
    def stochastic(self) -> bool:
        return parse_strategy(self.precision).stochastic

    def make(self, params: Any, **changes: Any) -> optim.AdamW | optim.SGD:
        cls, _, options = OPTIMIZERS[self.optimizer]
        chosen = {"lr": 0.01, "precision": self.precision, "seed": 3} | options | self.options
        return cls(params, **(chosen | changes))

    def fresh(self, shapes: Sequence[tuple[int, ...]] = SHAPES, **changes: Any) -> Run:
        params = parameters(self.dtype, shapes)
        return Run(params, self.make(params, **changes))


def cases(
    optimizers: Sequence[str] = tuple(OPTIMIZERS),
    precisions: Sequence[str] = PRECISIONS,
    dtypes: Sequence[torch.dtype] = (FP32, BF16, FP16, E4M3),
) -> list[Any]:
    """Every optimizer under each strategy, for every dtype that can have it."""
    return [
        pytest.param(case, id=str(case))
        for optimizer in optimizers
        for precision in precisions
        for dtype in parse_strategy(precision).dtypes
        if dtype in dtypes
        for case in [Case(optimizer, precision, dtype)]
    ]


def parameters(
    dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] = SHAPES, seed: int = 1
) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def gradient(p: Tensor, t: int, index: int) -> Tensor:
    """The gradient that parameter ``index`` has at step ``t`` in every run, row-major values."""
    generator = torch.Generator().manual_seed(1000 * t + index)
    return (0.1 * torch.randn(p.shape, generator=generator)).to(p.dtype)


@dataclass
class Run:
    """Parameters and their optimizer; steps counted as the gradients are."""

    params: list[nn.Parameter]
    optimizer: Any
    t: int = 0

    def train(self, steps: int = 3, change: Callable[[Tensor], Tensor] = lambda g: g) -> Run:
        for _ in range(steps):
            self.t += 1
            for i, p in enumerate(self.params):
                p.grad = change(gradient(p, self.t, i))
            self.optimizer.step()
        return self

    def bits(self) -> dict[str, Tensor]:
        """Clones of the parameters and of every state, by name."""
        found = {}
        for i, p in enumerate(self.params):
            found[f"parameter {i}"] = p.detach().clone()
            for name, value in self.optimizer.state.get(p, {}).items():
                found[f"{name} {i}"] = value.clone()
        return found


def assert_same(actual: Run | dict[str, Tensor], expected: Run | dict[str, Tensor]) -> None:
    """The same tensors with the same dtypes and bits."""
    actual = actual.bits() if isinstance(actual, Run) else actual
    expected = expected.bits() if isinstance(expected, Run) else expected
    assert set(actual) == set(expected)
    for name, want in expected.items():
        got = actual[name]
        assert got.dtype == want.dtype, name
        assert torch.equal(patterns(got), patterns(want)), f"{name}: {got} is not {want}"


def patterns(x: Tensor) -> Tensor:
    """Bits of each value as integers, in row-major order."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.detach().contiguous().view(whole)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(patterns(a), patterns(b))


@contextlib.contextmanager
def unchanged(*runs: Run) -> Iterator[None]:
    """Nothing of these runs is different afterwards: bits, counters, groups."""

    def groups(run: Run) -> list[dict[str, Any]]:
        return [
            {k: v for k, v in g.items() if k != "params"} | {"ids": [id(p) for p in g["params"]]}
            for g in run.optimizer.param_groups
        ]

    before = [(run.bits(), groups(run)) for run in runs]
    yield
    for run, (bits, described) in zip(runs, before, strict=True):
        assert_same(run, bits)
        assert groups(run) == described


class Net(nn.Module):
    """A small model with a bias, a buffer and two layers of one weight."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6, bias=False)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("count", torch.tensor(7))
        for p in self.parameters():
            p.data = (0.4 * torch.randn(p.shape, generator=generator)).to(dtype)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def batch(t: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(t))


def train_net(net: Net, optimizer: torch.optim.Optimizer, steps: Sequence[int]) -> None:
    """Gradients that depend on the weights: a difference in one bit stays one."""
    dtype = net.first.weight.dtype
    for t in steps:
        net(batch(t).to(dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
