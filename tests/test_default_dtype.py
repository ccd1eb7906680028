"""Whatever torch's default dtype is, every part of the library computes the same bits.

A selection for every day. ``make nightly`` runs all tests of these parts under each other default
dtype, with ``--default-dtype``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from subulp import nn, numerics, optim
from subulp.numerics import BF16, E4M3, expansion, int_rows, mixture, scaling
from subulp.ops import all_finite
from subulp.ops import mixture as fast_mixture
from subulp.ops.strategy import TABLE
from tests.default_dtype import DTYPES, library_default
from tests.ops.support import environment

STORAGES = ("fp32", "bf16", "fp16", "e4m3", "int8", "int4", "int2")
BACKENDS = ("cpu", "reference")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def arithmetic() -> Iterator[Tensor]:
    x = random(8, 48) * 3
    bits = numerics.random_bits.draw((8, 48), seed=1)
    yield bits
    for fmt in (BF16, E4M3, numerics.formats.simulated(3, 2)):
        yield numerics.round_to(x, fmt)
        yield numerics.round_to(x, fmt, "stochastic", bits=bits)
    pair = expansion.encode(x, BF16)
    yield from pair
    yield from expansion.grow(*pair, numerics.round_to(x * 0.01, BF16), BF16)
    for width in int_rows.WIDTHS:
        rows = int_rows.encode(x, width, "stochastic", random=bits)
        yield from (rows.codes, rows.scale, rows.bias, int_rows.decode(rows))
    scales = scaling.group_amax_mantissa(x, E4M3, block=(4, 16))
    yield from (scales.mantissa, scales.exponents, scales.per_block())


def mixtures() -> Iterator[Tensor]:
    x = random(40, 70) * torch.exp(4 * random(40, 1, seed=1))
    for recipe in mixture.RECIPES.values():
        for encode, decode in (
            (mixture.encode, mixture.decode),
            (fast_mixture.encode, fast_mixture.decode),
        ):
            found, summary = encode(x, recipe, (16, 16))
            yield from found.tensors
            yield decode(found)
            yield torch.tensor([summary.error, summary.amax], dtype=torch.float64)
    layer = torch.nn.Sequential(torch.nn.Linear(70, 8, dtype=torch.float32))
    layer.load_state_dict({"0.weight": random(8, 70), "0.bias": random(8)})
    nn.convert_to_mor(layer, nn.MoR())
    out = layer(x)
    out.sum().backward()
    yield from (out, *(p.grad for p in layer.parameters()))


def optimizers() -> Iterator[Tensor]:
    for strategy in TABLE:
        name = strategy.name.replace("K", "8")
        for dtype in strategy.dtypes:
            for make in (
                lambda p, n: optim.AdamW(p, lr=1e-2, precision=n, seed=1),
                lambda p, n: optim.SGD(p, lr=1e-2, momentum=0.9, precision=n, seed=1),
            ):
                p = torch.nn.Parameter(random(40).to(dtype))
                optimizer = make([p], name)
                for step in range(2):
                    p.grad = random(40, seed=step).to(dtype)
                    optimizer.step()
                yield p.detach()
                state = optimizer.state_dict()["state"][0]
                yield from (value for value in state.values() if isinstance(value, Tensor))
    # An eps that BF16 holds and FP16 does not.
    optim.AdamW([torch.nn.Parameter(random(4).bfloat16())], precision="kahan", arithmetic="strict")
    yield all_finite([random(40), random(40).bfloat16()])


def bags() -> Iterator[Tensor]:
    for storage in STORAGES:
        bag = nn.CachedEmbeddingBag(100, 8, storage, 0.1, "lru", 4, seed=1)
        optim.RowAdagrad(bag, lr=0.1)
        for step in range(4):
            values = torch.arange(12).view(4, 3) * (step + 1) % 100
            weights = random(4, 3, seed=step).requires_grad_()
            bag(values, per_sample_weights=weights).square().sum().backward()
            yield weights.grad
        bag.flush()
        yield from bag.state_dict().values()
        yield bag.weight_fp32()
    tables = [nn.EmbeddingTable(50, 4), nn.EmbeddingTable(2000, 6, "int4")]
    many = nn.CachedEmbeddingBags(tables, mode="mean", seed=2)
    optim.RowSGD(many, lr=0.1)
    for _ in range(3):
        out = many(torch.arange(9), torch.tensor([1, 3, 0, 5]))
        out.square().sum().backward()
        yield out
    yield from many.state_dict().values()


def heads() -> Iterator[Tensor]:
    for storage in (*STORAGES, (4, 2)):
        counts = torch.arange(60) % 7
        head = nn.ExtremeClassifier(
            8, 60, storage=storage, seed=1, dropout=0.1, head_fraction=0.2, label_counts=counts
        )
        optim.RowSGD(head, lr=0.1)
        x = random(5, 8).requires_grad_()
        for _ in range(3):
            yield head(x, torch.arange(5), torch.arange(5) * 9, loss=True)
            head(x, torch.arange(5), torch.arange(5) * 9).backward()
        yield x.grad
        yield head.eval()(x, torch.arange(5), torch.arange(5) * 9)
        yield from head.topk(x, 4)
        yield from head.state_dict().values()
        refined = nn.refine(head, [(x.detach(), torch.arange(5), torch.arange(5))], lr=0.1)
        yield refined.weight(torch.arange(60))


def layers() -> Iterator[Tensor]:
    made = [
        (torch.nn.Linear(16, 8, dtype=torch.float32), nn.narrow_linear, random(4, 16)),
        (torch.nn.Conv2d(2, 3, 3, dtype=torch.float32), nn.narrow_conv2d, random(1, 2, 6, 6)),
    ]
    for layer, function, x in made:
        torch.nn.init.constant_(layer.weight, 0.3)
        weight = layer.weight.detach().bfloat16().requires_grad_()
        bias = random(len(weight)).bfloat16().requires_grad_()
        y = function(x, weight, bias)
        y.square().sum().backward()
        yield from (y, weight.grad, bias.grad)
    table = random(30, 4).bfloat16().requires_grad_()
    y = nn.narrow_embedding(torch.tensor([3, 3, 7]), table)
    y.square().sum().backward()
    yield from (y, table.grad)


PARTS = (arithmetic, mixtures, optimizers, bags, heads, layers)
_EXPECTED: dict[tuple[str, str], list[Tensor]] = {}


def results(part: Callable[[], Iterator[Tensor]], backend: str) -> list[Tensor]:
    with environment(SUBULP_BACKEND=backend):
        return [tensor.detach().clone() for tensor in part()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("part", PARTS)
def test_the_default_dtype_changes_no_bit(part, backend, dtype):
    key = (part.__name__, backend)
    if key not in _EXPECTED:
        _EXPECTED[key] = results(part, backend)
    with library_default(dtype):
        found = results(part, backend)
    assert len(found) == len(_EXPECTED[key])
    for i, (a, b) in enumerate(zip(found, _EXPECTED[key], strict=True)):
        assert a.dtype == b.dtype, i
        assert a.shape == b.shape, i
        same = a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
        assert torch.equal(*same), i


def test_what_a_test_makes_is_fp32():
    with library_default("float16"):
        assert torch.ones(3).dtype == torch.float32
        assert torch.tensor([1.0]).dtype == (torch.arange(3) * 0.5).dtype == torch.float32
        assert torch.tensor([1]).dtype == torch.int64
        assert torch.get_default_dtype() == torch.float16
        # A layer's parameters are made by torch.
        assert nn.LayerNorm(4).weight.dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32
