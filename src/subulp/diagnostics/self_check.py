"""Every op against its reference, on small tensors of a device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..numerics import BF16, E4M3, int_rows, round_to, simulated
from ..numerics.int_rows import ROW_FORMATS, IntFormat, RowFormat
from ..numerics.metrics import KNOWN, RELATIVE_ERROR
from ..numerics.mixture import (
    RECIPES,
    Entry,
    Mixture,
    Recipe,
    below_threshold,
    better_than,
    to_text,
    wide_format_of,
)
from ..numerics.random_bits import RandomAddress
from ..ops import adam, all_finite, sgd
from ..ops.embedding import Lookups, Table, TableUpdate, calls
from ..ops.head import HeadJob, Products, exact_sum, head_step
from ..ops.mixture import mixture_decode, mixture_encode
from ..ops.step import storage
from ..ops.strategy import Strategy, all_names, parse_strategy

Case = tuple[str, bool]
"""What was compared, and whether it agrees."""
State = dict[str, list[Tensor]]

_NUMEL = 1000


@dataclass(frozen=True)
class Check:
    """One comparison of an op with its reference.

    Attributes:
        name: The op.
        cases: Cases that agree.
        error: The first case that differs or cannot run; ``None`` if there is none.
    """

    name: str
    cases: int
    error: str | None


def self_check(op: str, device: str) -> Check:
    """Compare an op with its reference, in every format that it knows.

    What is stored must have the same bits. A classifier's sums, which backends add up in different
    orders, must be close.

    Args:
        op: A name of ``subulp.ops.backend.OPS``.
        device: Where the tensors lie.
    """
    cases = 0
    try:
        for name, agrees in _CASES[op](device):
            if not agrees:
                return Check(op, cases, f"{name} differs from its reference")
            cases += 1
    except Exception as error:
        what = "" if type(error) in (RuntimeError, ValueError) else f"{type(error).__name__}: "
        return Check(op, cases, f"{what}{error or 'no reason given'}")
    return Check(op, cases, None)


def _same(found: State, expected: State) -> bool:
    return all(
        torch.equal(_bytes(a), _bytes(b))
        for role, tensors in found.items()
        for a, b in zip(tensors, expected[role], strict=True)
    )


def _bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float32)


# ------------------------------------------------------------------------------------------- steps


def _adam_cases(device: str) -> Iterator[Case]:
    return _step_cases(_adam, device, has_fast=True)


def _sgd_cases(device: str) -> Iterator[Case]:
    return _step_cases(_sgd, device, has_fast=False)


def _step_cases(
    step: Callable[[Strategy, State, int], None], device: str, *, has_fast: bool
) -> Iterator[Case]:
    for name in all_names(8, 16):
        strategy = parse_strategy(name)
        for dtype in strategy.dtypes:
            found, expected = (_fresh(strategy, dtype, device, has_fast=has_fast) for _ in range(2))
            for t in (1, 2):
                step(strategy, found, t)
                with _forced("reference"):
                    step(strategy, expected, t)
            yield f"{name} with {dtype}", _same(found, expected)


def _fresh(strategy: Strategy, dtype: torch.dtype, device: str, *, has_fast: bool) -> State:
    drawn = _normal(2, _NUMEL)
    param = (drawn[0] * 0.1).to(dtype).to(device)
    extra = storage.new_extra(strategy, param)
    slow = torch.zeros(_NUMEL, dtype=strategy.slow_format(dtype).dtype, device=device)
    fast = torch.zeros(_NUMEL, dtype=strategy.fast_format(dtype).dtype, device=device)
    scaled = not strategy.wide_states and dtype.itemsize == 1
    return {
        "params": [param],
        "grads": [(drawn[1] * 1e-2).to(dtype).to(device)],
        "fast": [fast] if has_fast else [],
        "slow": [slow],
        "extras": [] if extra is None else [extra],
        "lows": [torch.zeros_like(slow)] if strategy.slow_state == "expansion" else [],
        "amaxes": [torch.zeros((), dtype=torch.float32, device=device)] if scaled else [],
    }


def _adam(strategy: Strategy, state: State, t: int) -> None:
    adam.step(
        params=state["params"],
        grads=state["grads"],
        exp_avgs=state["fast"],
        exp_avg_sqs=state["slow"],
        extras=state["extras"],
        exp_avg_sq_lows=state["lows"],
        amaxes=state["amaxes"],
        steps=[torch.tensor(float(t), dtype=torch.float32)],
        lr=torch.tensor(1e-2, dtype=torch.float64),
        beta1=0.9,
        beta2=0.999,
        eps=1e-8,
        weight_decay=0.1,
        decoupled=True,
        maximize=False,
        precision=strategy.name,
        arithmetic="wide",
        seed=7,
        streams=[0],
        offsets=[0],
    )


def _sgd(strategy: Strategy, state: State, t: int) -> None:
    sgd.step(
        params=state["params"],
        grads=state["grads"],
        momentum_buffers=state["slow"],
        extras=state["extras"],
        momentum_lows=state["lows"],
        amaxes=state["amaxes"],
        steps=[torch.tensor(float(t), dtype=torch.float32)],
        lr=torch.tensor(1e-2, dtype=torch.float64),
        momentum=0.9,
        dampening=0.0,
        weight_decay=0.01,
        nesterov=True,
        maximize=False,
        precision=strategy.name,
        arithmetic="wide",
        seed=7,
        streams=[0],
        offsets=[0],
    )


# ------------------------------------------------------------------------------------- finiteness


def _finite_cases(device: str) -> Iterator[Case]:
    for bad in (None, float("nan"), float("inf")):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn):
            if dtype == torch.float8_e4m3fn and bad == float("inf"):
                # It has none.
                continue
            values = _normal(_NUMEL)
            if bad is not None:
                values[_NUMEL // 2] = bad
            x = values.to(dtype).to(device)
            found = all_finite([x])
            with _forced("reference"):
                expected = all_finite([x])
            agrees = bool(found) == bool(expected) == (bad is None)
            yield f"all_finite of {dtype} with {bad}", agrees


# ------------------------------------------------------------------------------- tables of rows


def _stored(values: Tensor, fmt: RowFormat) -> Tensor:
    if isinstance(fmt, IntFormat):
        return int_rows.to_bytes(int_rows.encode(values, fmt.bits))
    assert fmt.dtype is not None
    return round_to(values, fmt).to(fmt.dtype)


def _head_cases(device: str) -> Iterator[Case]:
    kinds: list[tuple[RowFormat, int, Products]] = [
        *((fmt, precise, "fp32") for fmt in ROW_FORMATS.values() for precise in (0, 20)),
        *((fmt, 0, "bf16") for fmt in (BF16, E4M3)),
        (E4M3, 0, "fp8"),
    ]
    for fmt, precise, products in kinds:
        found = replace(_head_job(fmt, precise, device), products=products)
        kept = (found.rows, found.grad_x, found.loss, found.remainder)
        rows, grad_x, loss, remainder = (t.clone() if isinstance(t, Tensor) else None for t in kept)
        assert rows is not None
        assert grad_x is not None
        expected = replace(found, rows=rows, grad_x=grad_x, loss=loss, remainder=remainder)
        head_step(found)
        with _forced("reference"):
            head_step(expected)
        yield (
            f"a classifier of {fmt} rows, {precise} of them precise, products in {products}",
            _heads_agree(found, expected),
        )


def _head_job(fmt: RowFormat, precise: int, device: str) -> HeadJob:
    labels, dim = 70, 24
    weights = _normal(labels, dim) * 0.1
    # One instance of two powers of two: a product has two terms, and one order.
    x = torch.zeros(1, dim, dtype=torch.float32)
    x[0, 1], x[0, dim - 2] = 1.0, -0.5
    positive = torch.arange(0, labels, 9, device=device)
    return HeadJob(
        rows=_stored(weights, fmt).to(device),
        format=fmt,
        remainder=torch.zeros(precise, dim, dtype=torch.bfloat16, device=device)
        if precise
        else None,
        x=x.to(device),
        grad_x=torch.zeros(1, dim, dtype=torch.float32, device=device),
        positive_instances=torch.zeros_like(positive),
        positive_labels=positive,
        gain=1.0,
        lr=0.25,
        weight_decay=0.125,
        rounding="stochastic",
        random=RandomAddress(seed=7, stream=1, step=2, offset=3 * dim),
        loss=exact_sum.new_parts(x.device),
    )


def _heads_agree(found: HeadJob, expected: HeadJob) -> bool:
    assert isinstance(found.loss, Tensor)
    assert isinstance(expected.loss, Tensor)
    # As numbers: of two zeros, a sum's order decides.
    stored = all(
        a is None or b is None or torch.equal(a.float(), b.float())
        for a, b in ((found.rows, expected.rows), (found.remainder, expected.remainder))
    )
    sums = torch.allclose(found.grad_x, expected.grad_x, rtol=1e-5, atol=1e-6)
    return stored and sums and torch.allclose(found.loss.sum(), expected.loss.sum(), rtol=1e-12)


def _embedding_cases(device: str) -> Iterator[Case]:
    for fmt in ROW_FORMATS.values():
        for policy in ("lfu", "lru"):
            found = _train_table(fmt, policy, device)
            with _forced("reference"):
                expected = _train_table(fmt, policy, device)
            yield f"a table of {fmt} rows with a cache ({policy})", _same(found, expected)


def _train_table(fmt: RowFormat, policy: str, device: str) -> State:
    """Three steps of a table: all that they give, and what the table holds after them."""
    rows, dim, sets, ways, bags = 150, 21, 5, 4, 16
    kept = torch.int32
    counts, floors = (rows, sets) if policy == "lfu" else (0, 0)
    table = Table(
        codes=_stored(_normal(rows, dim), fmt).to(device),
        cache=torch.zeros(sets * ways, dim, dtype=torch.float32, device=device),
        tags=torch.full((sets * ways,), -1, dtype=kept, device=device),
        bits=fmt.bits if isinstance(fmt, IntFormat) else 0,
        ways=ways,
        mixed=policy == "lfu",
    )
    update = TableUpdate(
        counts=torch.zeros(counts, dtype=kept, device=device),
        stamps=torch.zeros(0 if counts else sets * ways, dtype=kept, device=device),
        floors=torch.zeros(floors, dtype=kept, device=device),
        accumulator=torch.zeros(rows if counts else 0, dtype=torch.float32, device=device),
        stochastic=True,
        stream=3,
        lr=0.1,
        weight_decay=0.01,
        eps=1e-8,
    )
    statistics = torch.zeros(1, 2, dtype=torch.int64, device=device)
    evictions = torch.zeros(1, dtype=torch.int64, device=device)
    given = []
    for t in (1, 2, 3):
        values = (torch.arange(64) ** 2 * t % rows).to(device)
        offsets = torch.arange(0, 65, 64 // bags, device=device)
        lookups = Lookups([0], values, offsets, _normal(64).to(device))
        grad = (_normal(bags, dim) * t).to(device)
        given.append(calls.pool([table], lookups, statistics))
        given.append(calls.weight_grad([table], lookups, grad))
        calls.update([table], [update], lookups, grad, evictions, seed=7, step=t)
    held = [table.codes, table.cache, table.tags, update.counts, update.stamps, update.accumulator]
    return {"given": [*given, statistics, evictions], "held": held}


# --------------------------------------------------------------------------------------- mixtures


def _mixture_cases(device: str) -> Iterator[Case]:
    x = _normal(40, 70)
    x[:, ::2] *= (5 * _normal(40, 35) - 7).exp2()
    for recipe in (*RECIPES.values(), _SIMULATED):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            matrix = x.to(dtype).to(device)
            for metric in KNOWN if recipe is _SIMULATED else (RELATIVE_ERROR,):
                found = _mixed(matrix, recipe, metric)
                with _forced("reference"):
                    expected = _mixed(matrix, recipe, metric)
                yield f"{recipe.name} of {dtype} by {metric}", _same(found, expected)


_E3M4 = simulated(3, 4)
_SIMULATED = Recipe(
    "a recipe with e3m4",
    (Entry(_E3M4, better_than(_E3M4, E4M3)), Entry(E4M3, below_threshold(E4M3))),
)


def _mixed(x: Tensor, recipe: Recipe, metric: str) -> State:
    """What is stored, wherever wide numbers' lower bytes lie, and what that decodes to."""
    block, groups, wide = (1, 32), (40, 3), wide_format_of(x.dtype)
    *stored, _ = mixture_encode(x, to_text(recipe), block, groups, "gam", 0.045, metric)
    values = mixture_decode(*stored, to_text(recipe), block, groups, wide.name)
    codes, types, mantissa, exponents, lower = stored
    kept = codes, types, mantissa, exponents, lower, recipe.formats, block, groups, wide
    found = Mixture(*kept).trimmed()
    return {"stored": list(found.tensors), "values": [values]}


_CASES: dict[str, Callable[[str], Iterator[Case]]] = {
    "adam": _adam_cases,
    "sgd": _sgd_cases,
    "all_finite": _finite_cases,
    "head": _head_cases,
    "embedding": _embedding_cases,
    "mixture": _mixture_cases,
}


class _forced:  # noqa: N801 - reads as a keyword
    """Run with ``SUBULP_BACKEND`` set."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._saved = os.environ.get("SUBULP_BACKEND")
        os.environ["SUBULP_BACKEND"] = self._name

    def __exit__(self, *_: object) -> None:
        if self._saved is None:
            del os.environ["SUBULP_BACKEND"]
        else:
            os.environ["SUBULP_BACKEND"] = self._saved
