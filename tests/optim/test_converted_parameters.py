"""Models that are converted, moved or replaced after their optimizer was made."""

from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from subulp import optim


def new(dtype=torch.bfloat16, precision="collage-plus", **options):
    torch.manual_seed(0)
    model = nn.Linear(8, 4).to(dtype)
    return model, optim.AdamW(model.named_parameters(), lr=0.1, precision=precision, **options)


def step(model, optimizer):
    p = next(model.parameters())
    model(torch.ones(2, 8, dtype=p.dtype)).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@contextlib.contextmanager
def future(name):
    change = getattr(torch.__future__, f"set_{name}_module_params_on_conversion")
    change(True)
    yield
    change(False)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(
    ("dtype", "precision", "to"),
    [
        (torch.bfloat16, "collage-plus", torch.float32),
        (torch.bfloat16, "stochastic", torch.float16),
        (torch.bfloat16, "master", torch.float16),
        (torch.float32, "fp32", torch.bfloat16),
    ],
)
@pytest.mark.parametrize("how", ["data", "swap"])
def test_another_dtype_is_noticed(steps, dtype, precision, to, how):
    model, optimizer = new(dtype, precision)
    for _ in range(steps):
        step(model, optimizer)
    with future("swap") if how == "swap" else contextlib.nullcontext():
        model.to(to)
    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match=f"'weight' is {to} now, and was {dtype} .* afterwards"):
        step(model, optimizer)
    assert torch.equal(before, model.weight)
    with pytest.raises(RuntimeError, match="optimizer was made"):
        optimizer.bytes_per_parameter()
    # There and back again is no conversion that a step can see.
    model.to(dtype)
    if how == "data":
        step(model, optimizer)


@pytest.mark.parametrize("steps", [0, 2])
def test_replaced_parameters_are_noticed(steps):
    model, optimizer = new()
    for _ in range(steps):
        step(model, optimizer)
    with future("overwrite"):
        model.float()
    with pytest.raises(RuntimeError, match="nothing else has them: those of the model are others"):
        step(model, optimizer)


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_fully_shard_afterwards_is_noticed(mesh):
    model, optimizer = new()
    fully_shard(model, mesh=mesh)
    with pytest.raises(RuntimeError, match="fully_shard"):
        step(model, optimizer)


def test_exchanged_parameters_would_start_anew():
    model, optimizer = new(torch.float32, "fp32")
    others = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    # Before the first step, as frameworks do that prepare both.
    optimizer.param_groups[0]["params"] = list(others)
    for p in others:
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.param_groups[0]["params"] = list(model.parameters())
    with pytest.raises(RuntimeError, match="states of parameters that are no longer in its groups"):
        step(model, optimizer)


def test_exchanged_and_converted_parameters_are_noticed():
    model, optimizer = new()
    wide = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer.param_groups[0]["params"] = wide
    for p in wide:
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=r"'weight' is torch\.float32 now"):
        optimizer.step()


def test_steps_without_gradients_stay_as_in_torch():
    """Schedulers are tried out like this; parameters that somebody has may yet get gradients."""
    model, optimizer = new()
    optimizer.step()
    bare = [nn.Parameter(torch.ones(3))]
    optim.AdamW(bare, precision="fp32").step()
    model.requires_grad_(False)
    optimizer.step()


def test_copies_know_their_own_parameters():
    model, optimizer = new()
    step(model, optimizer)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        for p in other.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        other.step()
        late = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        other.add_param_group({"params": [("late", late)]})
        other.step()


@pytest.mark.gpu
def test_another_device_is_noticed():
    model, optimizer = new()
    model.cuda()
    model(torch.ones(2, 8, dtype=torch.bfloat16, device="cuda")).float().sum().backward()
    optimizer.step()
    model.cpu()
    with pytest.raises(RuntimeError, match=r"load_state_dict\(optimizer.state_dict\(\)\)"):
        step(model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    step(model, optimizer)
