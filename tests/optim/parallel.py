"""Models under torch's own parallelism, beside one whose optimizer sees whole gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Placement, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from subulp import diagnostics, optim
from tests.optim.sharded import divided, values, whole
from tests.ranks import device, mesh_of


class Block(nn.Module):
    """Sizes that two and four ranks divide unevenly; ten channels, for tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(10)
        self.up = nn.Linear(10, 14)
        self.down = nn.Linear(14, 10)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def new_model(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).to(device(), dtype)


def batch(step: int, dtype: torch.dtype, rank: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, 4, 10, generator=generator).to(device(), dtype)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def distribute(model: nn.Module, kind: str) -> nn.Module:
    """The model under one kind of parallelism, over all ranks."""
    count = dist.get_world_size()
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp":
        mesh = mesh_of((count,))
    elif kind == "hsdp":
        mesh = mesh_of((2, count // 2), ("replica", "shard"))
    else:
        shape = (count,) if kind == "tp" else (2, count // 2)
        names = ("tp",) if kind == "tp" else ("dp", "tp")
        mesh = mesh_of(shape, names)
        for block in model:
            plan = {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            }
            parallelize_module(block, mesh["tp"], plan)
        if kind == "tp":
            return model
        mesh = mesh["dp"]
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def loss_on(model: nn.Module, kind: str, x: Tensor) -> Tensor:
    if not kind.endswith("tp"):
        return loss_of(model, x)
    mesh = next(p.device_mesh for p in model.parameters())
    tp = mesh["tp"] if mesh.ndim > 1 else mesh
    return model(distribute_tensor(x, tp, [Shard(1)])).full_tensor().float().square().mean()


def new_optimizer(model: nn.Module, precision: str, **options: Any) -> optim.AdamW:
    named = model.named_parameters()
    return optim.AdamW(named, lr=0.01, weight_decay=0.1, precision=precision, **options)


def assert_equal(values: list[Tensor], model: nn.Module) -> None:
    for value, p in zip(values, model.parameters(), strict=True):
        assert torch.equal(value, whole(p))


def assert_same_training(kind: str, precision: str, dtype: torch.dtype, steps: int = 3) -> None:
    """Steps under parallelism are those of a plain model that is given the whole gradients."""
    model = distribute(new_model(dtype), kind)
    plain = new_model(dtype)
    seed = 5
    ours, theirs = (new_optimizer(m, precision, seed=seed) for m in (model, plain))
    for step in range(steps):
        # Ranks that share gradients read batches of their own.
        rank = dist.get_rank() if kind in ("ddp", "fsdp", "hsdp") else 0
        loss_on(model, kind, batch(step, dtype, rank)).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            q.grad = whole(p.grad)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(whole(p), q), (kind, precision, name)
        for key, value in theirs.state[q].items():
            if value.shape == q.shape:
                assert torch.equal(whole(ours.state[p][key]), value), (kind, precision, name, key)
    wide = ours.full_precision_state_dict(model)
    expected = theirs.full_precision_state_dict(plain)
    for (name, value), expect in zip(wide.items(), expected.values(), strict=True):
        assert torch.equal(whole(value), expect), name


def every_kind(kinds: list[str]) -> None:
    for kind in kinds:
        assert_same_training(kind, "fp32", torch.float32)
        for precision in ("collage-plus", "stochastic", "extra-bits-8-stochastic"):
            assert_same_training(kind, precision, torch.bfloat16)


def against_torch(kinds: list[str]) -> None:
    """``precision="fp32"`` beside torch's own AdamW under the same parallelism."""
    for kind in kinds:
        models = [distribute(new_model(torch.float32), kind) for _ in range(2)]
        ours = new_optimizer(models[0], "fp32")
        theirs = torch.optim.AdamW(models[1].parameters(), lr=0.01, weight_decay=0.1)
        for step in range(3):
            for model, optimizer in zip(models, (ours, theirs), strict=True):
                loss_on(model, kind, batch(step, torch.float32, 0)).backward()
                optimizer.step()
                optimizer.zero_grad()
        for p, q in zip(*(m.parameters() for m in models), strict=True):
            torch.testing.assert_close(whole(p), whole(q), rtol=1e-5, atol=1e-6)


def zero_redundancy() -> None:
    """torch's ZeRO-1 gives each rank some of the parameters; results are those of one process."""
    for precision, dtype in (("fp32", torch.float32), ("collage-plus", torch.bfloat16)):
        model, plain = new_model(dtype), new_model(dtype)
        options = {"lr": 0.01, "weight_decay": 0.1, "precision": precision}
        sharded = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, **options)
        alone = optim.AdamW(plain.parameters(), **options)
        for step in range(3):
            for m, optimizer in ((model, sharded), (plain, alone)):
                loss_of(m, batch(step, dtype)).backward()
                optimizer.step()
                optimizer.zero_grad()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p, q), precision


def stages() -> None:
    """Pipeline stages: a rank with one of two blocks draws the bits that it has in the whole."""
    dtype, rank = torch.bfloat16, dist.get_rank()
    whole_model, stage = new_model(dtype), new_model(dtype)
    del stage[1 - rank]
    names = [(f"{rank}.{n.partition('.')[2]}", p) for n, p in stage.named_parameters()]
    alone = new_optimizer(whole_model, "stochastic", seed=5)
    ours = optim.AdamW(names, lr=0.01, weight_decay=0.1, precision="stochastic", seed=5)
    pairs = list(zip(stage.parameters(), whole_model[rank].parameters(), strict=True))
    for step in range(3):
        loss_of(whole_model, batch(step, dtype)).backward()
        for p, q in pairs:
            p.grad = q.grad.clone()
        ours.step()
        alone.step()
        alone.zero_grad()
    assert all(torch.equal(p, q) for p, q in pairs)


def seeds() -> tuple[int, int, int]:
    """Ranks seeded differently draw alike; without random bits nothing is sent."""
    torch.manual_seed(1000 + dist.get_rank())
    p = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    agreed = optim.AdamW([p], precision="stochastic").param_groups[0]["seed"]
    given = optim.AdamW([p], precision="stochastic", seed=9).param_groups[0]["seed"]
    quiet = optim.AdamW([p], precision="nearest")
    quiet.param_groups[0]["precision"] = "stochastic"
    p.grad = torch.ones_like(p)
    quiet.step()
    return agreed, given, quiet.param_groups[0]["seed"]


# ------------------------------------------------------------------- the step in the backward pass


def fused_is_unfused(kind: str) -> None:
    for options in (
        {},
        {"max_norm": 0.05},
        {"clip_parameter_norm": 0.01},
        {"clip_value": 0.001},
        {"accumulate": 2},
        {"accumulate": 2, "max_norm": 0.05},
    ):
        assert_fused_is_unfused(kind, options)


def assert_fused_is_unfused(kind: str, options: dict[str, Any], steps: int = 3) -> None:
    dtype = torch.bfloat16
    models = [distribute(new_model(dtype), kind) for _ in range(2)]
    plain, fused = (new_optimizer(m, "stochastic", seed=5) for m in models)
    handle = optim.fuse_backward(models[1], fused, **options)
    norms: list[tuple[Tensor, Tensor]] = []
    for step in range(steps):
        for i in range(options.get("accumulate", 1)):
            x = batch(10 * step + i, dtype, dist.get_rank() if kind != "tp" else 0)
            loss_on(models[0], kind, x).backward()
            handle.backward(loss_on(models[1], kind, x))
        params = list(models[0].parameters())
        if "max_norm" in options:
            norm = nn.utils.clip_grad_norm_(params, options["max_norm"])
            norms.append((whole(norm), handle.total_norm))
        if "clip_parameter_norm" in options:
            for p in params:
                nn.utils.clip_grad_norm_([p], options["clip_parameter_norm"])
        if "clip_value" in options:
            for p in params:
                # torch does not clip what is not reduced yet.
                p.grad = p.grad.redistribute(placements=p.placements)
            nn.utils.clip_grad_value_(params, options["clip_value"])
        plain.step()
        plain.zero_grad()
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(whole(p), whole(q)), (kind, options, name)
        assert q.grad is None
    for theirs, ours in norms:
        assert torch.equal(theirs, ours), (kind, options)


def accumulated_by_fsdp() -> None:
    """set_requires_gradient_sync: the hooks see the sum, once; with accumulate= it is refused."""
    dtype = torch.bfloat16
    models = [distribute(new_model(dtype), "fsdp") for _ in range(2)]
    plain, fused = (new_optimizer(m, "collage-plus") for m in models)
    handle = optim.fuse_backward(models[1], fused)
    for step in range(2):
        for i in range(2):
            for model in models:
                model.set_requires_gradient_sync(i == 1)
                loss_of(model, batch(10 * step + i, dtype, dist.get_rank())).backward()
        for optimizer in (plain, fused):
            optimizer.step()
            optimizer.zero_grad()
    assert all(
        torch.equal(whole(p), whole(q))
        for p, q in zip(*(m.parameters() for m in models), strict=True)
    )
    handle.remove()
    for options, call in (
        ({"accumulate": 2}, "handle"),
        ({"accumulate": 2}, "loss"),
        ({"max_norm": 1.0}, "handle"),
    ):
        model = distribute(new_model(dtype), "fsdp")
        optimizer = new_optimizer(model, "collage-plus")
        before = copy.deepcopy([whole(p) for p in model.parameters()])
        handle = optim.fuse_backward(model, optimizer, **options)
        model.set_requires_gradient_sync(call == "loss")
        loss = loss_of(model, batch(0, dtype))
        wanted = "set_requires_gradient_sync" if call == "handle" else "call handle.backward"
        with pytest.raises(RuntimeError, match=wanted):
            handle.backward(loss) if call == "handle" else loss.backward()
        assert_equal(before, model)


def accumulated_over_replicas() -> None:
    """set_requires_all_reduce: the hooks see the sum, once; a pass that looks ahead is refused."""
    dtype = torch.bfloat16

    def pair(**options: Any) -> tuple[list[nn.Module], list[Any], Any]:
        models = [distribute(new_model(dtype), "hsdp") for _ in range(2)]
        optimizers = [new_optimizer(m, "collage-plus") for m in models]
        return models, optimizers, optim.fuse_backward(models[1], optimizers[1], **options)

    for accumulate in (1, 2):
        models, optimizers, handle = pair(accumulate=accumulate)
        for step in range(2):
            for i in range(2):
                for model, backward in zip(models, (Tensor.backward, handle.backward), strict=True):
                    model.set_requires_all_reduce(i == 1)
                    backward(loss_of(model, batch(10 * step + i, dtype, dist.get_rank())))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_equal([whole(p) for p in models[0].parameters()], models[1])
    for options in ({"max_norm": 1.0}, {"max_norm": 1.0, "accumulate": 2}):
        models, _, handle = pair(**options)
        model = models[1]
        before = copy.deepcopy([whole(p) for p in model.parameters()])
        model.set_requires_all_reduce(False)
        with pytest.raises(RuntimeError, match="set_requires_all_reduce"):  # noqa: PT012
            for i in range(2):
                handle.backward(loss_of(model, batch(i, dtype)))
        assert_equal(before, model)


def averages() -> None:
    """Of what was sharded since, or by fully_shard, there are none."""
    model = new_model()
    average = optim.AveragedModel(model, decay=0.9)
    before = copy.deepcopy(average.state_dict())
    for use in (average, optim.AveragedModel(model)):
        distribute(use.module, "fsdp")
        with pytest.raises(ValueError, match="averages of modules of fully_shard are not"):
            use.update_parameters(model)
    for sharded, message in (
        (distribute(new_model(), "fsdp"), "averages of modules of fully_shard are not available"),
        (distribute(new_model(), "tp"), "is sharded otherwise in the model than in the average"),
    ):
        whole_one = optim.AveragedModel(new_model(), decay=0.9)
        with pytest.raises(ValueError, match=message):
            whole_one.update_parameters(sharded)
        assert all(torch.equal(before[name], t) for name, t in whole_one.state_dict().items())


def not_finite_anywhere(policy: str) -> list[Any]:
    """One rank's shard has an infinite gradient: all ranks leave the step out, or raise."""
    outcomes = []
    for fused in (False, True):
        model = distribute(new_model(), "fsdp")
        optimizer = new_optimizer(model, "collage-plus", nonfinite=policy)
        before = [whole(p).clone() for p in model.parameters()]
        handle = optim.fuse_backward(model, optimizer) if fused else None
        x = batch(0, torch.bfloat16)
        loss = loss_of(model, x)
        target = next(model.parameters())

        def spoil(p: Tensor) -> None:
            if dist.get_rank() == 1 and p.grad is not None:
                p.grad.to_local()[0] = torch.inf

        if fused:
            # Before the handle's own hook.
            hooks = target._post_accumulate_grad_hooks
            hooks[-1] = spoil
            hooks.move_to_end(-1, last=False)
        try:
            if handle is None:
                loss.backward()
                spoil(target)
                optimizer.step()
            else:
                handle.backward(loss)
            outcomes.append(optimizer.skipped_steps)
        except FloatingPointError as error:
            outcomes.append(str(error))
        assert all(
            torch.equal(a, whole(p)) for a, p in zip(before, model.parameters(), strict=True)
        )
    return outcomes


def fused_data_parallel(max_norm: float | None) -> None:
    """reduce= in place of DistributedDataParallel's buckets: the same bits."""
    dtype = torch.bfloat16
    models = [distribute(new_model(dtype), "ddp"), new_model(dtype)]
    plain, fused = (new_optimizer(m, "stochastic", seed=5) for m in models)

    def mean(grad: Tensor) -> Tensor:
        # As DistributedDataParallel: divided first, then summed.
        grad = grad / dist.get_world_size()
        dist.all_reduce(grad)
        return grad

    handle = optim.fuse_backward(models[1], fused, reduce=mean, max_norm=max_norm)
    for step in range(3):
        x = batch(step, dtype, dist.get_rank())
        loss_of(models[0], x).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(models[0].parameters(), max_norm)
        plain.step()
        plain.zero_grad()
        handle.backward(loss_of(models[1], x))
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q), name


# --------------------------------------------------------------------------- what users do besides


def refusals() -> list[str]:
    """What cannot be stepped is refused when the optimizer is made, by name."""
    mesh = mesh_of((2,))
    rank = dist.get_rank()

    def refused(placement: Placement, rows: int) -> str:
        part = torch.ones(rows, 3, dtype=torch.bfloat16)
        whole_shape = torch.Size((4, 3))
        p = DTensor.from_local(
            part, mesh, [placement], run_check=False, shape=whole_shape, stride=(3, 1)
        )
        with pytest.raises(ValueError, match="weight") as error:
            optim.AdamW([("weight", nn.Parameter(p))])
        return str(error.value)

    return [refused(Partial(), 4), refused(Shard(0), 1 if rank == 0 else 3)]


def strict_and_wide() -> None:
    """The papers' narrow arithmetic on shards, and gradients of another dtype."""
    mesh = mesh_of((2,))
    for options, grad_dtype in (
        ({"arithmetic": "strict", "eps": 1e-6}, torch.bfloat16),
        ({}, torch.float32),
    ):
        results = []
        for placed in (False, True):
            x, g = values(0, torch.bfloat16)[0], values(1, grad_dtype)[0]
            p = nn.Parameter(divided(x, mesh, (0,)) if placed else x)
            if grad_dtype != p.dtype:
                p.grad_dtype = grad_dtype
            p.grad = divided(g, mesh, (0,)) if placed else g
            optimizer = optim.AdamW([p], precision="collage-plus", **options)
            optimizer.step()
            results.append(whole(p))
        assert torch.equal(*results), options


def mixed_kinds() -> None:
    """DTensors and plain tensors of one group, some without a gradient."""
    mesh = mesh_of((2,))
    results = []
    for placed in (False, True):
        params = [nn.Parameter(x) for x in values(0, torch.bfloat16)[:4]]
        if placed:
            params[1::2] = [nn.Parameter(divided(p.detach(), mesh, (0,))) for p in params[1::2]]
        for p, g in list(zip(params, values(1, torch.bfloat16), strict=False))[:3]:
            p.grad = divided(g, mesh, (0,)) if isinstance(p, DTensor) else g
        optimizer = optim.AdamW(params, precision="stochastic", seed=3)
        optimizer.step()
        results.append([whole(p) for p in params])
        assert optimizer.bytes_per_parameter()["parameter"] == 2
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def loss_scaling() -> None:
    """GradScaler: unscaled in FP32; an overflow on one rank skips the step of all."""
    for fused in (False, True):
        models = [new_model(torch.float16), distribute(new_model(torch.float16), "fsdp")]
        results = []
        for model in models:
            scaler = torch.amp.GradScaler(device(), init_scale=2.0**10, growth_interval=1)
            optimizer = new_optimizer(model, "collage-plus")
            handle = optim.fuse_backward(model, optimizer, scaler=scaler) if fused else None
            for step in range(3):
                loss = scaler.scale(loss_of(model, batch(step, torch.float16)))
                if step == 1 and model is models[0]:
                    loss = loss * float("inf")
                if step == 1 and model is models[1] and dist.get_rank() == 1:
                    loss = loss * float("inf")
                if handle is not None:
                    handle.backward(loss)
                else:
                    loss.backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            results.append(
                [whole(p) for p in model.parameters()] + [torch.tensor(scaler.get_scale())]
            )
            assert optimizer.skipped_steps == 1, (fused, optimizer.skipped_steps)
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b), fused


def other_precision() -> None:
    """A precision set later, a copy, and wide weights given whole or as DTensors."""
    results = []
    for kind in (None, "fsdp"):
        model = new_model() if kind is None else distribute(new_model(), kind)
        optimizer = new_optimizer(model, "nearest", seed=3)

        def take(number: int, model: nn.Module = model, optimizer: Any = optimizer) -> None:
            generator = torch.Generator().manual_seed(number)
            for p in model.parameters():
                grad = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
                p.grad = divided_like(p, grad)
            optimizer.step()

        take(0)
        optimizer.param_groups[0]["precision"] = "extra-bits-8-stochastic"
        take(1)
        wide = optimizer.full_precision_state_dict(model)
        generator = torch.Generator().manual_seed(9)
        given = {n: torch.randn(v.shape, generator=generator) for n, v in wide.items()}
        optimizer.load_full_precision_state_dict(model, given)
        back = optimizer.full_precision_state_dict(model)
        take(2)
        optimizer.load_full_precision_state_dict(model, back)
        take(3)
        with diagnostics.watch(optimizer) as watch:
            take(4)
        found = [*wide.values(), *back.values(), *model.parameters()]
        results.append(([whole(x) for x in found], watch.effective_descent_quality))
    for a, b in zip(results[0][0], results[1][0], strict=True):
        assert torch.equal(a, b)
    assert results[1][1] == pytest.approx(results[0][1], rel=1e-9)


def divided_like(p: Tensor, x: Tensor) -> Tensor:
    if not isinstance(p, DTensor):
        return x
    return distribute_tensor(x, p.device_mesh, p.placements, src_data_rank=None)


def clipped_over_meshes() -> None:
    """One norm over plain parameters and those of two meshes, which clip_grad_norm_ refuses."""
    line, square = mesh_of((2,)), mesh_of((2, 1))
    x, y, z, *_ = values(0, torch.float32)
    params = [
        nn.Parameter(divided(x, line, (0,))),
        nn.Parameter(y),
        nn.Parameter(divided(z, square, (1, None))),
    ]
    model = nn.ParameterList(params)
    optimizer = optim.AdamW(model.named_parameters(), precision="fp32")
    factors = values(1, torch.float32)[:3]

    with optim.fuse_backward(model, optimizer, max_norm=0.5) as handle:
        terms = [p * divided_like(p, f) for p, f in zip(params, factors, strict=True)]
        total = sum(t.full_tensor().sum() if isinstance(t, DTensor) else t.sum() for t in terms)
        handle.backward(total)
        expected = torch.cat([f.flatten() for f in factors]).double().norm()
        assert float(handle.total_norm) == pytest.approx(float(expected), rel=1e-6)
    plain = [nn.Parameter(v) for v in (x, y, z)]
    for p, f in zip(plain, factors, strict=True):
        p.grad = f.clone()
    nn.utils.clip_grad_norm_(plain, 0.5)
    optim.AdamW(plain, precision="fp32").step()
    for p, q in zip(params, plain, strict=True):
        torch.testing.assert_close(whole(p), q, rtol=1e-6, atol=0)


def memory() -> None:
    """What this rank holds, by category."""
    for fused in (False, True):
        model = distribute(new_model(), "fsdp")
        optimizer = new_optimizer(model, "collage-plus")
        handle = optim.fuse_backward(model, optimizer) if fused else None
        with diagnostics.track_memory(model, optimizer) as found:
            loss = loss_of(model, batch(0, torch.bfloat16))
            if handle is not None:
                handle.backward(loss)
            else:
                loss.backward()
                optimizer.step()
        parts = [p.to_local() for p in model.parameters()]
        held = sum(part.nbytes for part in parts)
        assert found.category_peak_bytes["weights"] == held
        # Two moments and two second components, and a step counter each.
        assert found.category_peak_bytes["states"] == 4 * held + 4 * len(parts)
        assert found.category_peak_bytes["gradients"] == (0 if fused else held)


def first_steps_of_a_rising_rate() -> None:
    """A rank whose gradients are all zero counts a first step of rate zero, as all others do."""
    mesh = mesh_of((2,))
    p = nn.Parameter(divided(torch.ones(2, 4, dtype=torch.bfloat16), mesh, (0,)))
    optimizer = optim.AdamW([p], lr=0.0, precision="collage-plus")
    p.grad = divided(torch.tensor([[1.0] * 4, [0.0] * 4]).bfloat16(), mesh, (0,))
    optimizer.step()
    assert int(optimizer.state[p]["step"]) == 1


def part_of_the_world() -> tuple[int, list[float]]:
    """Ranks 0 and 1 warm up from a rate of zero, and nobody else is asked about it."""
    mesh = DeviceMesh(device(), [0, 1])
    found = []
    if dist.get_rank() < 2:
        model = fully_shard(new_model(), mesh=mesh)
        optimizer = optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: t / 10)
        for t in range(2):
            optimizer.zero_grad()
            # One rank's part of the gradients alone may be zeros.
            loss_of(model, batch(t, torch.bfloat16)).backward()
            optimizer.step()
            schedule.step()
        found = [float(state["step"]) for state in optimizer.state.values()]
    # Another collective of all ranks, which must meet those of the others.
    total = torch.tensor(10 ** dist.get_rank(), device=device())
    dist.all_reduce(total)
    return int(total), found
