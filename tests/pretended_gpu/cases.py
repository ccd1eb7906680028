"""Steps on a GPU that is not there; ``python -m tests.pretended_gpu.cases 0 2`` prints what half of
them cost.

Processes of their own, and none after them.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from subulp import nn, optim
from subulp.nn.cached_table import EmbeddingTable
from subulp.nn.extreme_classifier import _Evaluate, _TrainStep
from subulp.nn.fp8_linear import _Fp8Linear
from subulp.nn.linear import _DecodedLinear, _NarrowLinear
from subulp.nn.mor_linear import _MoRLinear, _without_tensors, forward_product
from subulp.numerics import simulated
from subulp.numerics.int_rows import INT8
from subulp.ops import fp8_product
from subulp.ops.embedding import calls, embedding_pool, embedding_update, make_tables
from subulp.ops.embedding.job import Lookups
from subulp.ops.head import head_step
from subulp.ops.triton import tuning
from tests.ops import embedding_jobs, head_jobs
from tests.ops.support import environment

from .device import Count, GpuTensor, pretended_gpu

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
Place = Callable[[Tensor], Tensor]
Case = Callable[[Place], tuple[Callable[[], Any], Callable[[], Sequence[Tensor]]]]
"""From where tensors are put: a step, and what it has computed."""

NARROW = EmbeddingTable(300, 16, "int8", 0.1)
VALUES = torch.arange(26 * 8) % 300
OFFSETS = torch.arange(0, 26 * 8 + 1, 2)

CASES: dict[str, Case] = {}
EXACT: set[str] = set()
"""Cases whose bits are those of the CPU; others multiply matrices, in another order of the sums."""


def case(name: str, *arguments: Any, exact: bool = True) -> Callable[[Any], Any]:
    """Register a function of a place and of ``arguments``."""

    def register(function: Any) -> Any:
        CASES[name] = lambda place: function(place, *arguments)
        if exact:
            EXACT.add(name)
        return function

    return register


@case("AdamW, BF16, whole blocks", optim.AdamW, BF16, (1024, 4096))
@case("AdamW, BF16", optim.AdamW, BF16, (1024, 37, 4096))
@case("AdamW, FP16", optim.AdamW, FP16, (1024, 37, 4096))
@case("SGD, BF16", optim.SGD, BF16, (1024, 37, 4096))
@case("AdamW, E4M3", optim.AdamW, E4M3, (1024, 37, 4096, 10_000))
@case("AdamW, BF16, moved gradients", optim.AdamW, BF16, (1024, 37), True)
@case("AdamW, E4M3, moved gradients", optim.AdamW, E4M3, (1024, 37), True)
@case("AdamW, BF16, unaligned", optim.AdamW, BF16, (1024, 37, 4096), False, 1)
@case("AdamW, E4M3, unaligned", optim.AdamW, E4M3, (1024, 37, 4096), False, 1)
def optimizer(
    place: Place,
    kind: Any,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    moves: bool = False,
    first: int = 0,
) -> Any:
    params = [place(torch.randn(first + size).to(dtype))[first:] for size in sizes]
    made = kind(params, lr=1e-3, precision="collage-plus", seed=0)
    for p in params:
        p.grad = place(torch.randn(first + p.numel()).to(dtype))[first:]
    gradients: list[Tensor] = []

    def step() -> None:
        if moves:
            # The earlier ones live on, or their memory might be taken again.
            gradients.extend(p.grad for p in params)
            for p in params:
                p.grad = place(torch.randn(p.shape).to(dtype))
        made.step()

    def results() -> list[Tensor]:
        return [*params, *(t for state in made.state.values() for t in state.values())]

    return step, results


@case("AdamW, BF16, capturable", optim.AdamW, BF16)
@case("AdamW, E4M3, capturable", optim.AdamW, E4M3)
@case("SGD, BF16, capturable", optim.SGD, BF16, 0.01)
def capturable(place: Place, kind: Any, dtype: torch.dtype, lr: float | None = None) -> Any:
    params = [place(torch.randn(size).to(dtype)) for size in (1024, 37, 4096)]
    # On a CPU no step is captured.
    options = {"capturable": params[0].is_cuda}
    rate = place(torch.tensor(0.01)) if lr is None else lr
    made = kind(params, lr=rate, precision="collage-plus", seed=0, **options)
    for p in params:
        p.grad = place(torch.randn(p.shape).to(dtype))

    def results() -> list[Tensor]:
        return [*params, *(t for state in made.state.values() for t in state.values())]

    return made.step, results


@case("AdamW, BF16 and FP16, a scaler", {"nonfinite": "propagate"}, 1024.0)
@case("AdamW, BF16 and FP16, raise", {"nonfinite": "raise"})
@case("AdamW, BF16 and FP16, skip", {"nonfinite": "skip"})
def guarded(place: Place, options: Any, scale: float | None = None) -> Any:
    params = [place(torch.randn(size).to(dtype)) for size in (1024, 37) for dtype in (BF16, FP16)]
    made: Any = optim.AdamW(params, lr=1e-3, precision="kahan", seed=0, **options)
    for p in params:
        p.grad = place(torch.randn(p.shape).to(p.dtype))
    if scale is not None:
        # As a scaler tells its optimizer.
        made.grad_scale, made.found_inf = place(torch.tensor(scale)), place(torch.tensor(0.0))

    def results() -> list[Tensor]:
        return [*params, *(t for state in made.state.values() for t in state.values())]

    return made.step, results


@case("fused backward, BF16")
@case("fused backward, BF16, clip_value", {"clip_value": 0.5})
@case("fused backward, BF16, clip_parameter_norm", {"clip_parameter_norm": 1.0})
@case("fused backward, BF16, max_norm", {"max_norm": 1.0})
@case("fused backward, BF16, skip", {}, {"nonfinite": "skip"})
def fused(place: Place, options: Any = {}, policy: Any = {}) -> Any:  # noqa: B006
    sizes = (1024, 37, 4096)
    model = torch.nn.ParameterList(torch.randn(size).to(BF16) for size in sizes)
    params = list(on(place, model).parameters())
    grads = [place(torch.randn(size).to(BF16)) for size in sizes]
    made = optim.AdamW(params, lr=1e-3, precision="collage-plus", seed=0, **policy)
    handle: Any = optim.fuse_backward(model, made, **options)

    def backward(roots: Any, *, retain_graph: bool) -> None:
        # Below autograd's engine: what its hooks would call, in the order of a backward pass.
        handle._begin(None)
        for p, grad in zip(reversed(params), reversed(grads), strict=True):
            p.grad = grad
            handle._complete(p)
        handle._end()

    handle._run = backward
    loss = torch.zeros(())

    def results() -> list[Tensor]:
        return [*params, *(t for state in made.state.values() for t in state.values())]

    return lambda: handle.backward(loss), results


@case("E4M3 linear, forward", exact=False)
def linear(place: Place) -> Any:
    layer = on(place, nn.Linear(512, 1024).to(E4M3))
    x, results = place(torch.randn(8, 512).to(BF16)), []
    return lambda: results.append(layer(x)), lambda: results


@case("E4M3 linear, backward", exact=False)
def linear_backward(place: Place) -> Any:
    weight = place(torch.randn(1024, 512).to(E4M3))
    x, grad = place(torch.randn(8, 512).to(BF16)), place(torch.randn(8, 1024).to(BF16))
    results: list[Tensor] = []

    def backward() -> None:
        # Below autograd's engine: what it would hand to the function.
        ctx = SimpleNamespace(
            saved_tensors=(x, weight),
            needs_input_grad=(True, True, True),
            weight_grad_dtype=E4M3,
            bias_grad_dtype=BF16,
        )
        function = _DecodedLinear if x.is_cuda else _NarrowLinear
        results.extend(function.backward.__wrapped__(ctx, grad))

    return backward, lambda: results


@case("E4M3 linear, FP8 units, forward", 512, 1024, exact=False)
@case("E4M3 linear, FP8 units, forward, ragged", 50, 70, exact=False)
def linear_fp8(place: Place, inputs: int, outputs: int) -> Any:
    layer = on(place, nn.Linear(inputs, outputs, products="fp8").to(E4M3))
    x, results = place(torch.randn(8, inputs).to(BF16)), []
    return lambda: results.append(layer(x)), lambda: results


@case("E4M3 linear, FP8 units, backward", E4M3, exact=False)
@case("BF16 linear, FP8 units, backward", BF16, exact=False)
def linear_fp8_backward(place: Place, dtype: torch.dtype) -> Any:
    weight, x = place(torch.randn(1024, 512).to(dtype)), place(torch.randn(16, 512).to(BF16))
    grad, results = place(torch.randn(16, 1024).to(BF16)), []
    codes, scale = fp8_product.quantised(x)

    def backward() -> None:
        # Below autograd's engine, as above.
        ctx = SimpleNamespace(
            saved_tensors=(codes, scale, weight),
            needs_input_grad=(True, True, True),
            x_shape=x.shape,
            x_dtype=BF16,
            weight_grad_dtype=dtype,
            bias_grad_dtype=BF16,
        )
        results.extend(_Fp8Linear.backward.__wrapped__(ctx, grad))

    return backward, lambda: results


def mixture_layer(place: Place, mor: nn.MoR, dtype: torch.dtype) -> Any:
    """A layer, its input and its output's gradient."""
    layer = on(place, nn.MoRLinear(128, 64, mor=mor).to(dtype))
    return layer, place(torch.randn(64, 128).to(dtype)), place(torch.randn(64, 64).to(dtype))


def mixture_context(layer: Any, x: Tensor) -> SimpleNamespace:
    """What a forward pass leaves to autograd's engine."""
    _, saved, of_weight = forward_product(
        x, layer.weight, layer.bias, layer.mor, None, save=True, kept=layer.kept
    )
    assert saved is not None
    return SimpleNamespace(
        saved_tensors=(layer.weight, *saved.mixture.tensors),
        saved_input=_without_tensors(saved),
        needs_input_grad=(True, True, True),
        mor=layer.mor,
        note=None,
        # C++ keeps nothing in training.
        kept=layer.kept if x.is_cuda else None,
        of_weight=of_weight if x.is_cuda else None,
        x_shape=x.shape,
        x_dtype=x.dtype,
        weight_grad_dtype=x.dtype,
        bias_grad_dtype=x.dtype,
    )


@case("mixture, forward, tensor", "tensor", exact=False)
@case("mixture, forward, blocks", "block-128x128", exact=False)
@case("mixture, forward, a block of two tiles", "tensor", 160, exact=False)
@case("mixture, forward, FP32, ragged", "tensor", 50, torch.float32, exact=False)
def mixture(place: Place, partition: str, rows: int = 64, dtype: torch.dtype = BF16) -> Any:
    layer = on(place, nn.MoRLinear(128, 64, mor=nn.MoR("tensor", partition)).to(dtype))
    x, results = place(torch.randn(rows, 128).to(dtype)), []
    return lambda: results.append(layer(x)), lambda: results


@case("mixture, backward, tensor", "tensor", exact=False)
@case("mixture, backward, blocks", "block-128x128", exact=False)
@case("mixture, backward, sub-channels", "subchannel-128", exact=False)
def mixture_backward(place: Place, partition: str) -> Any:
    layer, x, grad = mixture_layer(place, nn.MoR("tensor", partition), BF16)
    context, results = mixture_context(layer, x), []
    # Below autograd's engine, as above.
    backward = _MoRLinear.backward.__wrapped__
    return lambda: results.extend(backward(context, grad)[:3]), lambda: results


@case("mixture, both passes, blocks", "block-128x128", exact=False)
@case("mixture, both passes, sub-channels", "subchannel-128", exact=False)
@case("mixture, both passes, FP32", "block-128x128", torch.float32, exact=False)
def mixture_both(place: Place, partition: str, dtype: torch.dtype = BF16) -> Any:
    layer, x, grad = mixture_layer(place, nn.MoR("tensor", partition), dtype)
    backward, results = _MoRLinear.backward.__wrapped__, []

    def both() -> None:
        results.extend(backward(mixture_context(layer, x), grad)[:3])

    return both, lambda: results


@case("26 tables, forward")
def tables(place: Place) -> Any:
    made = embedding_jobs.of([NARROW] * 26, "rowwise", list(range(26)))
    *operands, features, values, offsets, weights = there(place, made.pool(VALUES, OFFSETS, None))
    lookups = Lookups(features, values, offsets, weights)
    statistics, results = place(torch.zeros(26, 2, dtype=torch.int64)), []

    def forward() -> None:
        # As modules do, which count into numbers of their own.
        results.append(calls.pool(make_tables(*operands), lookups, statistics))

    return forward, lambda: [*results, statistics]


@case("26 tables, backward")
def tables_backward(place: Place) -> Any:
    # Below autograd's engine: what it would have the tables do.
    made = embedding_jobs.of([NARROW] * 26, "rowwise", list(range(26)))
    update = there(place, made.update(VALUES, OFFSETS, None, torch.randn(4, 26 * 16), 1))
    return lambda: embedding_update(*update), lambda: [*update[0], *update[1], *update[2]]


@case("bags, sum by lengths", "sum", "lengths")
@case("bags, sum by offsets", "sum", "offsets")
@case("bags, mean", "mean", "lengths")
def bags(place: Place, mode: str, by: str) -> Any:
    module, values = bags_module(place, mode), place(VALUES[:72])
    lengths, results = torch.arange(48) % 4, []
    ends = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    bounds = {by: place(lengths if by == "lengths" else ends)}

    def forward() -> None:
        results.append(module(values, **bounds))

    return forward, lambda: results


@case("bags, update", False)
@case("bags, update, a frozen table", True)
def bags_update(place: Place, frozen: bool) -> Any:
    # Below autograd's engine, as above.
    module, values = bags_module(place, "sum"), place(VALUES[:72])
    rows = module.row_parameters
    rows[1].frozen = frozen
    lengths = torch.arange(48) % 4
    offsets = place(torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))))
    grad, weights = place(torch.randn(16, 40)), place(torch.randn(72))
    kept = [t for state in module.row_optimizer.state.values() for t in state.values()]
    for table in module.tables:
        # Floors are bounds that backends may leave alone.
        kept += [table.table.codes, table.cache, table.tags, table.counts]

    def update() -> None:
        module._update(values, offsets, weights, grad)

    return update, lambda: [*kept, module.evicted]


def bags_module(place: Place, mode: str) -> Any:
    """Three tables and their optimizer."""
    configs = [EmbeddingTable(300, dim, "int8", 0.1) for dim in (16, 8, 16)]
    module: Any = nn.CachedEmbeddingBags(configs, 0, mode=mode, seed=1)
    optimizer = optim.RowAdagrad(module, lr=0.1)
    states = [optimizer.state.pop(rows) for rows in module.row_parameters]
    on(place, module)
    for rows, state in zip(module.row_parameters, states, strict=True):
        # A parameter of rows would know it.
        rows.frozen = False
        optimizer.state[rows] = {name: place(tensor) for name, tensor in state.items()}
    optimizer.param_groups[0]["params"] = list(module.row_parameters)
    return module


SMALL, MORE = (50, 32, 7), (110, 48, 17)
"""Labels, dimensions and instances: what a chunk launches does not depend on them."""

FEW = (20, 32, 7), (30, 48, 9)
"""The same where a program takes a row, which takes long to interpret."""

_PART = {"before": 5, "after": 3}

HEADS: dict[str, tuple[dict[str, Any], tuple[tuple[int, int, int], ...]]] = {
    "FP32": ({}, (SMALL, MORE)),
    "BF16": ({"products": "bf16"}, (SMALL,)),
    "FP8": ({"products": "fp8"}, (SMALL, MORE)),
    "remainders and dropout": ({"products": "bf16", "dropout": 0.1, "precise": 30}, (SMALL, MORE)),
    "FP8, dropout": ({"products": "fp8", "dropout": 0.1}, (SMALL, MORE)),
    "simulated rows": ({"fmt": simulated(3, 4)}, (SMALL, MORE)),
    "rows of integers": ({"fmt": INT8}, FEW),
    "FP32, parts of a mesh": (_PART, (SMALL, MORE)),
    "FP8, parts of a mesh": ({"products": "fp8", **_PART}, (SMALL, MORE)),
    "simulated rows, parts of a mesh": ({"fmt": simulated(3, 4), **_PART}, (SMALL, MORE)),
    "rows of integers, parts of a mesh": ({"fmt": INT8, **_PART}, FEW),
}
"""Options of steps, and sizes that each is taken in."""

ELEMENTS: dict[str, int] = {}
"""Weights and logits of the cases that count bytes."""


def head(place: Place, sizes: tuple[int, int, int], options: dict[str, Any]) -> Any:
    labels, dim, batch = sizes
    shape = {"labels": labels, "dim": dim, "batch": batch}
    made = head_jobs.job(**options, **shape, rounding="nearest", operands={})
    tensors = {
        name: place(value) for name, value in vars(made).items() if isinstance(value, Tensor)
    }
    job = replace(made, **tensors)
    return lambda: [head_step(job) for _ in range(8)], lambda: [job.grad_x, job.loss]


for _name, (_options, _sizes) in HEADS.items():
    for _more, (_labels, _dim, _batch) in zip(("", ", more of all"), _sizes, strict=False):
        _case = f"head, 8 chunks, {_name}{_more}"
        _whole = _labels + _options.get("before", 0) + _options.get("after", 0)
        ELEMENTS[_case] = 8 * _whole * (_dim + _batch)
        case(_case, (_labels, _dim, _batch), _options, exact=False)(head)


def head_module(place: Place, sizes: tuple[int, int, int], **options: Any) -> Any:
    """A classifier, a batch and its positives, each pair twice; one instance's sums are exact."""
    labels, dim, batch = sizes
    options = {"chunks": 8, "rounding": "nearest", "seed": 0, **options}
    module = nn.ExtremeClassifier(dim, labels, **options)
    codes: Any = place(Tensor.detach(module.table.codes))
    codes.frozen = False
    module.table._parameters["codes"] = codes
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else place(buffer)
    for name, buffer in module.table._buffers.items():
        module.table._buffers[name] = None if buffer is None else place(buffer)
    group = {"lr": 0.5, "weight_decay": 0.0}
    module.row_optimizer = SimpleNamespace(groups_of=lambda tables: [group for _ in tables])
    x = torch.randn(batch, dim)
    if batch == 1:
        x = torch.zeros(1, dim)
        x[0, 1], x[0, dim - 2] = 1.0, -0.5
    instances, positives = torch.arange(3 * batch) // 3, torch.randint(labels, (3 * batch,))
    pairs = place(instances.repeat(2)), place(positives.repeat(2))
    return module, place(x), pairs


@case("head module, train, FP32", SMALL, "fp32", exact=False)
@case("head module, train, FP32, more of all", MORE, "fp32", exact=False)
@case("head module, train, FP8", SMALL, "fp8", exact=False)
@case("head module, train, FP8, more of all", MORE, "fp8", exact=False)
@case("head module, train, one instance", (50, 32, 1), "fp8")
def head_train(place: Place, sizes: tuple[int, int, int], products: Any) -> Any:
    module, x, pairs = head_module(
        place, sizes, products=products, head_fraction=0.2, label_counts=torch.arange(sizes[0])
    )
    results: list[Tensor] = []

    def step() -> None:
        # Below autograd's engine: what it would hand to the function.
        context = SimpleNamespace()
        with torch.enable_grad():
            batch = module._batch(x, *pairs, True)
        value = _TrainStep.forward(context, x, module, batch, True)
        grad = _TrainStep.backward.__wrapped__(context, place(torch.ones(())))[0]
        results[:] = [value, grad]

    if sizes[2] > 1:
        return step, lambda: results
    # A gradient is a sum over all labels.
    return step, lambda: [module.table.stored, module.table.remainder, results[0]]


@case("head module, evaluate", SMALL, exact=False)
@case("head module, evaluate, more of all", MORE, exact=False)
def head_evaluate(place: Place, sizes: tuple[int, int, int]) -> Any:
    module, x, pairs = head_module(place, sizes, products="bf16")
    results: list[Tensor] = []

    def evaluate() -> None:
        context = SimpleNamespace()
        batch = module.eval()._batch(x, *pairs, False)
        value = _Evaluate.forward(context, x, module, batch)
        grad = _Evaluate.backward.__wrapped__(context, place(torch.ones(())))[0]
        results[:] = [value, grad]

    return evaluate, lambda: results


@case("head module, topk, FP32", (50, 32, 1), "fp32")
@case("head module, topk, FP8", (50, 32, 1), "fp8")
@case("head module, topk, FP8, more of all", (110, 48, 1), "fp8")
def head_topk(place: Place, sizes: tuple[int, int, int], products: Any) -> Any:
    """Few numbers of E4M3 are many equal scores."""
    module, x, _ = head_module(place, sizes, products=products)
    results: list[Tensor] = []

    def best() -> None:
        results[:] = module.topk(x, 20)

    return best, lambda: results


@case("head module, pairs")
def head_pairs(place: Place) -> Any:
    """Which pairs are left, in which order."""
    module, x, pairs = head_module(place, SMALL)
    batches: list[Any] = []

    def results() -> list[Tensor]:
        both = batches[-1].instances, batches[-1].rows
        instances, rows = (t.inner if isinstance(t, GpuTensor) else t for t in both)
        return [instances[instances >= 0], rows[instances >= 0]]

    return lambda: batches.append(module._batch(x, *pairs, False)), results


def on(place: Place, module: torch.nn.Module) -> torch.nn.Module:
    """A module whose tensors lie in a place."""
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = place(tensor.detach())
    return module


def there(place: Place, arguments: Any) -> Any:
    """The arguments of a call, their tensors in a place."""
    if isinstance(arguments, Tensor):
        return place(arguments)
    if isinstance(arguments, list | tuple):
        return type(arguments)(there(place, each) for each in arguments)
    return arguments


def measure(name: str, *, is_captured: bool = False) -> dict[str, Any]:
    """What the second step of a case costs, and whether it computes what the CPU does.

    Args:
        name: Of the case.
        is_captured: A CUDA graph is being captured then (default: ``False``).
    """
    torch.manual_seed(0)
    step, results = CASES[name](torch.clone)
    step(), step()
    expected = list(results())
    torch.manual_seed(0)
    with pretended_gpu() as gpu:
        step, results = CASES[name](gpu.tensor)
        step()
        gpu.count, gpu.is_captured = (count := Count()), is_captured
        step()
        found = [t.inner if isinstance(t, GpuTensor) else t for t in results()]
    return {
        "kernels": dict(count.kernels),
        "ops": dict(count.ops),
        "uploads": count.uploads,
        "waits": dict(count.waits),
        "allocated": count.allocated,
        "elements": ELEMENTS.get(name),
        "far": [
            [str(a.dtype), float((a.float() - b.float()).abs().max())]
            for a, b in zip(expected, found, strict=True)
            if not is_near(a, b, exact=name in EXACT)
        ],
    }


TUNED = (
    *("AdamW, BF16", "AdamW, E4M3", "26 tables, forward", "26 tables, backward"),
    *("head, 8 chunks, remainders and dropout", "mixture, forward, blocks"),
)
"""Cases that are measured."""


def tuned(name: str) -> dict[str, Any]:
    """What a case computes where its first step measures its kernels, and what the second costs."""
    found: dict[str, list[Tensor]] = {}
    for wanted in ("0", "1"):
        tuning.forget()
        torch.manual_seed(0)
        with environment(SUBULP_TUNE=wanted), pretended_gpu() as gpu:
            step, results = CASES[name](gpu.tensor)
            step()
            gpu.count = count = Count()
            step()
            found[wanted] = [gpu.numbers(t) for t in results()]
    return {
        "chosen": [[c.name.split(":")[0], c.source] for c in tuning.chosen()],
        "launches": count.launches,
        "waits": dict(count.waits),
        "same": all(is_near(a, b, exact=True) for a, b in zip(*found.values(), strict=True)),
    }


def later_is_faster() -> tuning.Timer:
    """A clock by which the last configuration of every table is the fastest."""
    powers = itertools.count()

    def time(call: Callable[[], None], device: torch.device) -> float:
        for _ in range(2):
            call()
        return 0.9 ** next(powers)

    return time


CAPTURED = (
    *("AdamW, BF16", "SGD, BF16", "AdamW, E4M3"),
    *("bags, sum by lengths", "bags, update", "fused backward, BF16", "head, 8 chunks, FP32"),
)
"""Cases that no CUDA graph may hold."""

HELD = ("mixture, both passes, blocks", "mixture, both passes, sub-channels")
"""Cases that one may."""


def captured(name: str) -> str:
    """What a case says while a CUDA graph is captured."""
    with pretended_gpu() as gpu:
        step, results = CASES[name](gpu.tensor)
        step()
        before = [gpu.numbers(t).clone() for t in results()]
        gpu.is_captured = True
        try:
            step()
        except RuntimeError as error:
            assert all(
                torch.equal(a.float(), gpu.numbers(b).float())
                for a, b in zip(before, results(), strict=True)
            )
            return str(error)
    return "captured"


def graphed(name: str, *, moves: bool) -> dict[str, Any]:
    """What a step that may be captured brings into a CUDA graph.

    Args:
        name: Of its case.
        moves: The gradients are other tensors than before, as a captured backward pass makes them.
    """
    with pretended_gpu() as gpu:
        step, results = CASES[name](gpu.tensor)
        step()
        if moves:
            # Those of a parameter, which comes before its states.
            for p in results():
                if p.grad is not None:
                    p.grad = gpu.tensor(gpu.numbers(p.grad))
        gpu.count, gpu.is_captured = Count(), True
        step()
        count = gpu.count
    launches = {**count.kernels, **count.ops}
    return {"launches": launches, "uploads": count.uploads, "waits": dict(count.waits)}


def late_fault() -> dict[str, Any]:
    """What tables do about a row number that does not exist, which only the GPU sees."""
    with pretended_gpu() as gpu:
        made = embedding_jobs.of([NARROW] * 2, "rowwise", [0, 1])
        values, offsets, grad = torch.tensor([0, 300, 2, 3]), torch.arange(5), torch.ones(2, 32)
        pool = there(gpu.tensor, made.pool(values, offsets, None))
        update = there(gpu.tensor, made.update(values, offsets, None, grad, 1))
        good = there(gpu.tensor, made.pool(values.clamp(max=299), offsets, None))
        rows = [*update[0], *update[1], *update[2]]
        before = [gpu.numbers(t).clone() for t in rows]
        gpu.count = Count()
        out = gpu.numbers(embedding_pool(*pool)[0])
        found = {"nan": out.isnan().any(1).tolist(), "waits": dict(gpu.count.waits), "raised": []}
        for call, arguments in ((embedding_update, update), (embedding_update, update)):
            try:
                call(*arguments)
            except IndexError as error:
                found["raised"].append(str(error))
        found["unchanged"] = all(map(torch.equal, before, map(gpu.numbers, rows)))
        # Once for the lookup, and once for the update that was refused a row number of its own.
        found["after"] = []
        for _ in range(2):
            try:
                found["after"].append(gpu.numbers(embedding_pool(*good)[0]).isfinite().all().item())
            except IndexError as error:
                found["after"].append(str(error))
    return found


BAD_BATCHES: dict[str, tuple[str, Any]] = {
    "negative instance": ("instances", -1),
    "no instance": ("instances", 7),
    "negative label": ("labels", -3),
    "no label": ("labels", 50),
    "NaN": ("x", math.nan),
    "infinity": ("x", -math.inf),
}
"""What of a batch is wrong, and the number that is."""


def late_head_fault(which: str, number: Any) -> dict[str, Any]:
    """What a head does about a bad batch, which only the GPU sees."""
    torch.manual_seed(0)
    with pretended_gpu() as gpu:
        module, x, pairs = head_module(
            gpu.tensor, SMALL, chunks=1, head_fraction=0.2, label_counts=torch.arange(50)
        )
        good = {"x": x, "instances": pairs[0], "labels": pairs[1]}
        wrong = gpu.numbers(good[which]).clone()
        wrong.view(-1)[5] = number
        bad = good | {which: gpu.tensor(wrong)}

        def step(x: Tensor, instances: Tensor, labels: Tensor) -> list[Tensor]:
            with torch.enable_grad():
                batch = module._batch(x, instances, labels, True)
            return [gpu.numbers(t) for t in module._step(batch, True)]

        def rows() -> list[Tensor]:
            stored = module.table.stored, module.table.remainder
            return [gpu.numbers(t).float() for t in stored]

        before, gpu.count = rows(), Count()
        loss, grad = step(**bad)
        found: dict[str, Any] = {
            "nan": bool(loss.isnan()) and bool(grad.isnan().all()),
            "waits": dict(gpu.count.waits),
            "unchanged": all(map(torch.equal, before, rows())),
        }
        try:
            step(**good)
        except (ValueError, FloatingPointError) as error:
            found |= {"error": type(error).__name__, "message": str(error)}
        found["still unchanged"] = all(map(torch.equal, before, rows()))
        found["after"] = bool(step(**good)[0].isfinite())
        found["updated"] = not any(map(torch.equal, before, rows()))
    return found


def is_near(a: Tensor, b: Tensor, *, exact: bool) -> bool:
    """Whether a result is that of the CPU."""
    if exact:
        return torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (a, b)))
    return torch.allclose(
        a.double(), b.double(), rtol=0.02, atol=0.02 * float(a.double().abs().max())
    )


def questions() -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """What is asked: in which part of the answer, of what, and how it is found out."""
    for name in CASES:
        yield "counts", name, partial(measure, name)
    for name in CAPTURED:
        yield "captured", name, partial(captured, name)
    yield "late fault", "tables", late_fault
    for name, bad in BAD_BATCHES.items():
        yield "bad batches of heads", name, partial(late_head_fault, *bad)
    for name in ("AdamW, BF16", "AdamW, E4M3", "SGD, BF16"):
        for word in ("in place", "moved"):
            moves = word == "moved"
            yield "graphs", f"{name}, {word}", partial(graphed, f"{name}, capturable", moves=moves)
    for name in HELD:
        yield "held", name, partial(measure, name, is_captured=True)
    for name in TUNED:
        yield "tuned", name, partial(tuned, name)


def main(part: int, parts: int) -> None:
    """Print one part of all answers, every so-manieth of them, as one line of JSON."""
    tuning.timer = later_is_faster()
    kept = TemporaryDirectory()
    found: dict[str, dict[str, Any]] = {}
    with torch.no_grad(), kept, environment(SUBULP_TUNE="0", SUBULP_CACHE=kept.name):
        for section, name, answer in itertools.islice(questions(), part, None, parts):
            found.setdefault(section, {})[name] = answer()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
