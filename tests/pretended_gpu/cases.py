"""Steps on a GPU that is not there; ``python -m tests.pretended_gpu.cases`` prints what they cost.

One process for all of them, and none after it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from subulp import nn, optim
from subulp.nn.cached_table import EmbeddingTable
from subulp.nn.fp8_linear import _Fp8Linear
from subulp.nn.linear import _DecodedLinear, _NarrowLinear
from subulp.nn.mor_linear import _MoRLinear, _without_tensors, forward_product
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


@case("head, 8 chunks, FP32", "fp32", exact=False)
@case("head, 8 chunks, BF16", "bf16", exact=False)
@case("head, 8 chunks, remainders and dropout", "bf16", 0.1, 30, exact=False)
def head(place: Place, products: str, dropout: float = 0.0, precise: int = 0) -> Any:
    options = {"dropout": dropout, "precise": precise, "operands": {}}
    made = head_jobs.job(products=products, rounding="nearest", **options)
    tensors = {
        name: place(value) for name, value in vars(made).items() if isinstance(value, Tensor)
    }
    job = replace(made, **tensors)
    return lambda: [head_step(job) for _ in range(8)], lambda: [job.grad_x, job.loss]


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
    *("bags, sum by lengths", "bags, update", "fused backward, BF16"),
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


def is_near(a: Tensor, b: Tensor, *, exact: bool) -> bool:
    """Whether a result is that of the CPU."""
    if exact:
        return torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (a, b)))
    return torch.allclose(
        a.double(), b.double(), rtol=0.02, atol=0.02 * float(a.double().abs().max())
    )


def main() -> None:
    """Print what all cases cost, as one line of JSON."""
    tuning.timer = later_is_faster()
    kept = TemporaryDirectory()
    with torch.no_grad(), kept, environment(SUBULP_TUNE="0", SUBULP_CACHE=kept.name):
        counts = {name: measure(name) for name in CASES}
        refusals = {name: captured(name) for name in CAPTURED}
        late = late_fault()
        graphs = {
            f"{name}, {word}": graphed(f"{name}, capturable", moves=word == "moved")
            for name in ("AdamW, BF16", "AdamW, E4M3", "SGD, BF16")
            for word in ("in place", "moved")
        }
        held = {name: measure(name, is_captured=True) for name in HELD}
        measured = {name: tuned(name) for name in TUNED}
    found = {
        "counts": counts,
        "captured": refusals,
        "late fault": late,
        "graphs": graphs,
        "held": held,
        "tuned": measured,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
