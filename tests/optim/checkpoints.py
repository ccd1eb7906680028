"""Training that stops, saved by torch.distributed.checkpoint, and goes on with other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from subulp import optim
from tests.optim.parallel import batch, distribute, loss_of, new_model
from tests.optim.sharded import DTYPES, PRECISIONS, whole

CASES = [
    (kind, precision, name)
    for i, (precision, name) in enumerate(
        [(p, "fp32" if p == "fp32" else "bf16") for p in PRECISIONS]
        + [("extra-bits-8-stochastic", "fp16"), ("stochastic", "fp16")]
    )
    for kind in (("AdamW", "SGD") if i % 3 == 0 else ("AdamW",))
]

# One for each way to keep what rounding takes.
FEW = [case for case in CASES if case[1] in ("collage-plus", "master", "extra-bits-8-stochastic")]


def new_pair(case: tuple[str, str, str], parallel: bool, seed: int = 5) -> tuple[Any, Any]:
    kind, precision, name = case
    model = new_model(DTYPES[name])
    if parallel:
        model = distribute(model, "fsdp")
    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "precision": precision}
    if kind == "SGD":
        return model, optim.SGD(model.named_parameters(), momentum=0.9, seed=seed, **options)
    return model, optim.AdamW(model.named_parameters(), seed=seed, **options)


def step_with(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """A step with gradients that only its number decides, whoever holds which part."""
    generator = torch.Generator().manual_seed(number)
    for p in model.parameters():
        grad = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
        if isinstance(p, DTensor):
            grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)
        p.grad = grad
    optimizer.step()
    optimizer.zero_grad()


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state = optimizer.state_dict()["state"]
    found = [*model.parameters(), *(v for i in sorted(state) for _, v in sorted(state[i].items()))]
    return [whole(x).float().cpu() for x in found]


def options(flatten: bool) -> StateDictOptions:
    return StateDictOptions(flatten_optimizer_state_dict=flatten)


def save_all(
    folder: str, cases: list[Any], flatten: bool, in_background: bool
) -> list[list[Tensor]]:
    """What training without a stop gives, for each case; saved after two steps of four."""
    group = dist.new_group(backend="gloo") if in_background else None
    results = []
    for number, case in enumerate(cases):
        model, optimizer = new_pair(case, parallel=True)
        for step in range(2):
            step_with(model, optimizer, step)
        parts = dict(
            zip(
                ("model", "optim"),
                get_state_dict(model, optimizer, options=options(flatten)),
                strict=True,
            )
        )
        place = str(Path(folder) / str(number))
        if in_background:
            future = dcp.async_save(parts, checkpoint_id=place, process_group=group)
            future.result()
        else:
            dcp.save(parts, checkpoint_id=place)
        for step in range(2, 4):
            step_with(model, optimizer, step)
        results.append(bits(model, optimizer))
    return results


def load_all(folder: str, cases: list[Any], flatten: bool, parallel: bool) -> list[list[Tensor]]:
    """The same from the middle on, in a model and an optimizer of other values."""
    results = []
    for number, case in enumerate(cases):
        model, optimizer = new_pair(case, parallel, seed=77)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(1.0)
        model_state, optim_state = get_state_dict(model, optimizer, options=options(flatten))
        parts = {"model": model_state, "optim": optim_state}
        dcp.load(parts, checkpoint_id=str(Path(folder) / str(number)))
        set_state_dict(
            model,
            optimizer,
            model_state_dict=parts["model"],
            optim_state_dict=parts["optim"],
            options=options(flatten),
        )
        assert optimizer.param_groups[0]["seed"] == 5, "the seed is part of the state"
        for step in range(2, 4):
            step_with(model, optimizer, step)
        results.append(bits(model, optimizer))
    return results


def full_round_trip() -> None:
    """A full state dict, gathered on rank 0 and broadcast from it."""
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    back = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for case in FEW:
        model, optimizer = new_pair(case, parallel=True)
        step_with(model, optimizer, 0)
        parts = get_state_dict(model, optimizer, options=full)
        other, resumed = new_pair(case, parallel=True, seed=77)
        # Not set_state_dict: other ranks have nothing, which it takes for a wish to load nothing.
        set_model_state_dict(other, parts[0], options=back)
        set_optimizer_state_dict(other, resumed, parts[1], options=back)
        for m, o in ((model, optimizer), (other, resumed)):
            step_with(m, o, 1)
        for a, b in zip(bits(model, optimizer), bits(other, resumed), strict=True):
            assert torch.equal(a, b), case


def preparing_changes_nothing() -> None:
    """What DCP does to an optimizer without states: no step is counted, no bit moves."""
    for fused in (False, True):
        for case in CASES:
            runs = []
            for prepared in (False, True):
                model, optimizer = new_pair(case, parallel=True)
                handle = optim.fuse_backward(model, optimizer) if fused else None
                if prepared:
                    _, found = get_state_dict(model, optimizer)
                    steps = [state["step"] for state in found["state"].values()]
                    assert len(steps) == len(list(model.parameters()))
                    assert not any(map(bool, steps))
                dtype = DTYPES[case[2]]
                loss = loss_of(model, batch(0, dtype))
                if handle is not None:
                    handle.backward(loss)
                else:
                    loss.backward()
                    optimizer.step()
                runs.append(bits(model, optimizer))
            for a, b in zip(*runs, strict=True):
                assert torch.equal(a, b), (case, fused)
