"""Steps against a scalar definition: one element at a time, FP32 scalars, exact rational rounding.

Nothing here comes from ``subulp.ops`` but the ops themselves and their names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import pytest
import torch

from subulp.ops.strategy import all_names, parse_strategy
from tests.oracles import extra_bits, philox
from tests.oracles.grid import Grid
from tests.oracles.rounding import round_float

from .support import BF16, FP16, Setup, fresh_state, gradients, parameters, take_step

SIZE, STEPS, OFFSET, SEED = 37, 3, 11, 7
GRID = {BF16: Grid(8, 7), FP16: Grid(5, 10)}
# FP16 would lose the squares of small gradients.
STATES = {BF16: GRID[BF16], FP16: GRID[BF16]}
RANDOM_WIDTH = {BF16: 16, FP16: 32}
BETA1, BETA2, EPS, DAMPENING = 0.9, 0.999, 1e-8, 0.1
F = np.float32


@dataclass
class Element:
    """What is stored of one parameter, as floats; components that a strategy lacks stay 0."""

    param: float
    extra: float = 0.0
    tail: int = 0
    fast: float = 0.0
    slow: float = 0.0
    low: float = 0.0


@dataclass
class Scalar:
    """One step of one element."""

    setup: Setup
    index: int
    t: int
    bits: int = field(init=False)

    def __post_init__(self):
        self.name = self.setup.precision
        self.grid = GRID[self.setup.dtype]
        width = RANDOM_WIDTH[self.setup.dtype]
        at = OFFSET + self.index
        self.bits = philox.draw(at, seed=SEED, stream=0, step=self.t, width=width)
        digits = format(self.bits >> (32 - width), f"0{width // 4}x")
        middle = width // 8
        # The golden ratio's fraction of 2^32, and thirds of it apart.
        self.dither = [(self.t * 2654435769 + role * 1431655765) % 2**32 for role in range(3)]
        self.swapped = int(digits[middle:] + digits[:middle], 16) << (32 - width)

    def nearest(self, x: float) -> float:
        return round_float(float(x), self.grid)

    def store_state(self, x: F) -> float:
        wide = self.setup.strategy.wide_states
        return float(x) if wide else round_float(float(x), STATES[self.setup.dtype])

    def store_last(self, x: F, role: int, grid: Grid) -> float:
        """What no other component refines: these strategies round it by the step's dither."""
        if self.name not in ("stochastic", "collage-plus"):
            return self.store_state(x) if role < 2 else self.nearest(x)
        return round_float(float(x), grid, "stochastic", self.dither[role])

    def theta(self, e: Element) -> F:
        if self.name == "master":
            return F(e.extra)
        if self.name.startswith("collage"):
            return F(e.param) + F(self.believed(e))
        if self.setup.strategy.k:
            k, coding = self.setup.strategy.k, self.setup.strategy.coding
            return F(float(extra_bits.join(e.param, e.tail, self.grid, k, coding)))
        return F(e.param)

    def believed(self, e: Element) -> float:
        """A second component above half an ulp cannot be the parameter's own."""
        code, _ = self.grid.locate(abs(Fraction(e.param)))
        ulp = self.grid.value(code + 1) - self.grid.value(code)
        return e.extra if abs(Fraction(e.extra)) <= ulp / 2 else 0.0

    def run(self, e: Element, gradient: float) -> None:
        theta, g = self.theta(e), F(gradient)
        decay = self.setup.weight_decay
        slow = F(e.slow) + F(e.low)
        if self.setup.op == "adam":
            m = F(e.fast) * F(BETA1) + g * F(1 - BETA1)
            slow = slow * F(BETA2) + (g * F(1 - BETA2)) * g
            root = np.sqrt(slow) * F(1 / math.sqrt(1 - BETA2**self.t))
            delta = (m * F(self.setup.lr / (1 - BETA1**self.t))) / (root + F(EPS))
            delta = delta + theta * F(self.setup.lr * decay)
            e.fast = self.store_last(m, 0, STATES[self.setup.dtype])
        else:
            g = g + theta * F(decay)
            slow = g if self.t == 1 else slow * F(BETA1) + g * F(1 - DAMPENING)
            delta = (g + slow * F(BETA1)) * F(self.setup.lr)
        self.store_slow(e, slow)
        self.store_parameter(e, theta, delta)

    def store_slow(self, e: Element, x: F) -> None:
        if self.name == "stochastic":
            e.slow = round_float(float(x), STATES[self.setup.dtype], "stochastic", self.swapped)
            return
        e.slow = self.store_state(x)
        if self.name == "collage-plus":
            e.low = self.store_last(x - F(e.slow), 1, STATES[self.setup.dtype])

    def store_parameter(self, e: Element, theta: F, delta: F) -> None:
        strategy = self.setup.strategy
        if self.name == "kahan":
            change = F(self.believed(e)) - delta
            e.param = self.nearest(theta + change)
            e.extra = self.nearest(change - (F(e.param) - theta))
            return
        wide = theta - delta
        if strategy.k:
            bits = self.bits if strategy.stochastic else None
            e.param, e.tail = extra_bits.split(
                float(wide), self.grid, strategy.k, strategy.coding, bits
            )
        elif self.name == "stochastic":
            e.param = round_float(float(wide), self.grid, "stochastic", self.bits)
        else:
            e.param = self.nearest(wide)
            if self.name == "master":
                e.extra = float(wide)
            elif self.name.startswith("collage"):
                e.extra = self.store_last(wide - F(e.param), 2, self.grid)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("op", ["adam", "sgd"])
@pytest.mark.parametrize(
    "precision",
    [name for name in all_names(5, 8, 13) if BF16 in parse_strategy(name).dtypes],
)
def test_step(precision, op, dtype, backend):
    setup = Setup(op, precision, dtype, nesterov=True)
    (param,) = parameters(setup, [SIZE])
    state = fresh_state(setup, [param])
    elements = [Element(float(p), extra=float(p) * (precision == "master")) for p in param]
    for t in range(1, STEPS + 1):
        grads = gradients(setup, [SIZE], t)
        take_step(setup, state, grads, t, [OFFSET], backend=backend)
        for i, e in enumerate(elements):
            Scalar(setup, i, t).run(e, float(grads[0][i]))

    def check(role: list[torch.Tensor], expected: list[float]) -> None:
        if role:
            want = torch.tensor(expected, dtype=role[0].dtype)
            assert torch.equal(role[0], want)
            assert torch.equal(role[0].signbit(), want.signbit())

    check(state.params, [e.param for e in elements])
    check(state.fast, [e.fast for e in elements])
    check(state.slow, [e.slow for e in elements])
    check(state.lows, [e.low for e in elements])
    if setup.strategy.k:
        tails = [e.tail for e in elements]
        assert state.extras[0].tolist() == extra_bits.pack(tails, setup.strategy.tail_width)
    else:
        check(state.extras, [e.extra for e in elements])
