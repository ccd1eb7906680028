"""What clips, counts or wraps from outside while the step is fused is told so."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_ as imported_before

from subulp import optim


@pytest.fixture(autouse=True)
def handles():
    """Those of a test, removed after it."""
    yield made
    while made:
        made.pop().remove()


made = []


def new(accumulate=1, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)).bfloat16()
    optimizer = optim.AdamW(model.parameters(), lr=0.01, precision="collage-plus")
    handle = optim.fuse_backward(model, optimizer, accumulate=accumulate, **options)
    made.append(handle)
    return model, optimizer, handle


def loss_of(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return model(torch.randn(4, 8, generator=generator).bfloat16()).float().square().mean()


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def same(a, b):
    return all(map(torch.equal, a, b))


# ------------------------------------------------------------------------------------- clipping


@pytest.mark.parametrize(
    ("clip", "message"),
    [
        (lambda ps: nn.utils.clip_grad_norm_(ps, 1.0), r"clip_grad_norm_.*max_norm=1\.0"),
        (lambda ps: nn.utils.clip_grad_norm_(next(iter(ps)), 2), r"max_norm=2\.0"),
        (lambda ps: imported_before(ps, 1.0), r"max_norm=1\.0"),
        (lambda ps: nn.utils.clip_grad_value_(ps, 0.5), r"clip_grad_value_.*clip_value=0\.5"),
        (lambda ps: nn.utils.clip_grad_value_(ps, clip_value=0.5), r"clip_value=0\.5"),
        (
            lambda ps: nn.utils.clip_grads_with_norm_(ps, 1.0, torch.tensor(3.0)),
            r"max_norm=1\.0",
        ),
    ],
)
def test_clipping_names_the_argument(clip, message):
    model, _, handle = new()
    loss_of(model).backward()
    with pytest.raises(RuntimeError, match=message):
        clip(model.parameters())
    handle.remove()
    loss_of(model).backward()
    clip(model.parameters())


def test_the_same_clipping_as_the_handles_is_its_norm():
    model, optimizer, handle = new(max_norm=0.01)
    twin = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)).bfloat16()
    twin.load_state_dict(model.state_dict())
    plain = optim.AdamW(twin.parameters(), lr=0.01, precision="collage-plus")
    with pytest.raises(RuntimeError, match=r"together by max_norm=0\.01"):
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)  # nothing has stepped
    for step in range(3):
        handle.backward(loss_of(model, step))
        loss_of(twin, step).backward()
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.01) for m in (model, twin)]
        assert torch.equal(*norms)
        optimizer.step()
        plain.step()
        plain.zero_grad()
    assert same(values(model), values(twin))


@pytest.mark.parametrize(
    ("parameters", "max_norm", "norm_type"),
    [(slice(None), 0.02, 2.0), (slice(None), 0.01, 1.0), (slice(1, None), 0.01, 2.0)],
)
def test_another_clipping_than_the_handles_is_refused(parameters, max_norm, norm_type):
    model, _, handle = new(max_norm=0.01)
    handle.backward(loss_of(model))
    with pytest.raises(RuntimeError, match=r"together by max_norm=0\.01"):
        nn.utils.clip_grad_norm_(list(model.parameters())[parameters], max_norm, norm_type)


def test_the_order_of_norms_is_the_models():
    """Of FP32 gradients it decides the last bit of the norm."""
    torch.manual_seed(1)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])
    params = list(model.parameters())
    groups = [{"params": params[1::2]}, {"params": params[::2]}]
    handle = optim.fuse_backward(model, optim.AdamW(groups, precision="fp32"), max_norm=1.0)
    made.append(handle)
    generator = torch.Generator().manual_seed(2)
    differ = False
    for _ in range(8):
        x = torch.randn(4, 16, generator=generator)
        for order in (params, params[1::2] + params[::2]):
            handle.norm_order = order
            grads = torch.autograd.grad(model(x).square().mean(), order)
            handle.backward(model(x).square().mean())
            assert torch.equal(handle.total_norm, nn.utils.get_total_norm(grads))
            other = nn.utils.get_total_norm([*grads[1::2], *grads[::2]])
            differ |= not torch.equal(other, handle.total_norm)
    assert differ
    with pytest.raises(ValueError, match="norm_order"):
        handle.norm_order = params[1:]


def test_others_are_clipped_as_ever():
    new()
    other = nn.Linear(3, 2)
    other(torch.ones(1, 3)).sum().backward()
    assert nn.utils.clip_grad_norm_(other.parameters(), 0.1) > 0.1
    assert nn.utils.clip_grad_norm_(other.parameters(), 1e9) <= 0.11
    nn.utils.clip_grad_value_(other.parameters(), 1e-3)
    assert max(p.grad.abs().max() for p in other.parameters()) <= 1e-3
    with pytest.warns(UserWarning, match="empty generator"):
        nn.utils.clip_grad_norm_((p for p in ()), 1.0)


def test_torchs_functions_are_its_own_again():
    """After the last handle, in a process that has no others."""
    program = """
import torch
from torch.nn.utils import clip_grad_norm_
from subulp import optim
models = [torch.nn.Linear(3, 2) for _ in range(2)]
handles = [optim.fuse_backward(m, optim.AdamW(m.parameters())) for m in models]
own = torch.amp.GradScaler.unscale_, torch.nn.parallel.DistributedDataParallel.__init__
for handle in handles:
    assert torch.nn.utils.clip_grad_norm_ is not clip_grad_norm_
    handle.remove()
assert torch.nn.utils.clip_grad_norm_ is clip_grad_norm_
now = torch.amp.GradScaler.unscale_, torch.nn.parallel.DistributedDataParallel.__init__
assert not set(own) & set(now)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


# -------------------------------------------------------------------------------------- scaling


def test_a_scaler_that_was_not_passed_is_refused():
    model, optimizer, _ = new()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model)).backward()
    with pytest.raises(RuntimeError, match="scaler="):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="scaler="):
        scaler.step(optimizer)


def test_the_same_values_as_the_handles_are_clipped():
    model, _, _ = new(clip_value=0.5)
    loss_of(model).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.5)
    with pytest.raises(RuntimeError, match=r"clip_value=0\.25"):
        nn.utils.clip_grad_value_(model.parameters(), 0.25)


# ----------------------------------------------------------------------------------- accumulation


def test_a_step_after_too_many_passes_names_accumulate():
    model, optimizer, _ = new()
    for i in range(2):
        loss_of(model, i).backward()
    with pytest.raises(RuntimeError, match="accumulate=2"):
        optimizer.step()
    loss_of(model).backward()
    optimizer.step()
    optimizer.step()  # no pass since: nothing to do, as after zero_grad()


def test_a_step_after_too_few_passes_names_accumulate():
    model, optimizer, _ = new(accumulate=3)
    before = values(model)
    loss_of(model).backward()
    with pytest.raises(RuntimeError, match=r"after 1 of accumulate=3 .*last=True"):
        optimizer.step()
    assert same(before, values(model))
    for i in (1, 2):
        loss_of(model, i).backward()
    optimizer.step()
    for i in range(6):
        loss_of(model, i).backward()
    with pytest.raises(RuntimeError, match="accumulate=6"):
        optimizer.step()


def test_loops_without_step_go_on():
    model, _, _ = new(accumulate=2)
    for i in range(7):
        loss_of(model, i).backward()


def test_a_closure_is_one_step():
    model, optimizer, _ = new()

    def closure():
        loss = loss_of(model)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)


@pytest.mark.parametrize("options", [{}, {"max_norm": 0.05}, {"accumulate_in": "fp32"}])
def test_short_accumulations_are_steps_of_what_there_is(options):
    """The last of an epoch: the bits of unfused accumulation, of any number of passes."""
    model, optimizer, handle = new(accumulate=4, **options)
    twin = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)).bfloat16()
    twin.load_state_dict(model.state_dict())
    plain = optim.AdamW(twin.parameters(), lr=0.01, precision="collage-plus")
    if "accumulate_in" in options:
        # The same, with an accumulation of its own length each time.
        for i, count in enumerate((4, 1, 3)):
            with optim.fuse_backward(twin, plain, accumulate=count, **options) as whole:
                for j in range(count):
                    whole.backward(loss_of(twin, 10 * i + j))
            for j in range(count):
                handle.backward(loss_of(model, 10 * i + j), last=j == count - 1)
            optimizer.step()
    else:
        for i, count in enumerate((4, 1, 3)):
            for j in range(count):
                handle.backward(loss_of(model, 10 * i + j), last=j == count - 1)
                loss_of(twin, 10 * i + j).backward()
            if "max_norm" in options:
                nn.utils.clip_grad_norm_(twin.parameters(), options["max_norm"])
            plain.step()
            plain.zero_grad()
            optimizer.step()
    assert same(values(model), values(twin))


def test_short_accumulations_in_moments():
    results = []
    for counts in ((3,), (4,)):
        model, _, handle = new(accumulate=counts[0], accumulate_in="adam-moments")
        for j in range(3):
            handle.backward(loss_of(model, j), last=j == 2)
        results.append(values(model))
    assert same(*results)


def test_more_passes_than_promised_are_refused():
    model, _, handle = new(accumulate=2)
    handle.backward(loss_of(model), last=False)
    with pytest.raises(ValueError, match=r"last=False in pass 2 of accumulate=2"):
        handle.backward(loss_of(model), last=False)
    handle.backward(loss_of(model))
    model, _, handle = new()
    with pytest.raises(ValueError, match=r"last=False in pass 1 of accumulate=1"):
        handle.backward(loss_of(model), last=False)


# --------------------------------------------------------------------------------------- wrappers


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ddp_around_it_names_reduce(group):
    model, _, handle = new()
    with pytest.raises(ValueError, match=r"reduce= to fuse_backward"):
        DistributedDataParallel(model)
    with pytest.raises(ValueError, match=r"reduce= to fuse_backward"):
        DistributedDataParallel(nn.Sequential(model, nn.Linear(4, 2)))
    other = nn.Linear(2, 2)
    DistributedDataParallel(other)
    handle.remove()
    DistributedDataParallel(model)


def test_fully_shard_afterwards_is_noticed(group):
    mesh = init_device_mesh("cpu", (1,))
    for step in (
        lambda o, h, loss: h.backward(loss),
        lambda o, h, loss: (loss.backward(), o.step()),
    ):
        model, optimizer, handle = new()
        fully_shard(model, mesh=mesh)
        loss = loss_of(model)
        with pytest.raises(RuntimeError, match=r"4 of the 4 parameters .*fully_shard"):
            step(optimizer, handle, loss)


def test_replaced_modules_are_noticed():
    model, optimizer, handle = new()
    model.append(nn.Linear(4, 2).bfloat16())  # another optimizer's
    handle.backward(loss_of(model))
    optimizer.step()
    model[0] = nn.Linear(8, 16).bfloat16()
    with pytest.raises(RuntimeError, match="2 of the 4 parameters"):
        handle.backward(loss_of(model))
    loss_of(model).backward()
    with pytest.raises(RuntimeError, match="2 of the 4 parameters"):
        optimizer.step()


def test_a_gradient_given_by_hand_is_refused():
    model, optimizer, _ = new()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    with pytest.raises(RuntimeError, match="no fused step has taken"):
        optimizer.step()
