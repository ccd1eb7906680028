"""A small language model on the ranks of a team, and the same in one process."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from subulp.lab.reproduce.collage import memory
from subulp.lab.reproduce.collage.tensor_parallel import divide
from subulp.lab.tasks.lm.models import Attention, LanguageModel, Shape, build
from tests.ranks import mesh_of


def live_bytes_of_rank(shape: Shape, strategy: str, batch: int) -> int:
    """What a rank of a team keeps at its peak."""
    return memory.live_bytes(shape, strategy, batch, mesh_of((torch.distributed.get_world_size(),)))


def of_ranks(shape: Shape) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and whole gradients of a divided model."""
    model = _model(shape)
    divide(model, mesh_of((torch.distributed.get_world_size(),)))
    with loss_parallel():
        loss = model.loss(*_batch(shape))
        loss.backward()
    whole = loss.full_tensor() if isinstance(loss, DTensor) else loss
    return whole.detach(), _gradients(model)


def refusal(shape: Shape) -> str | None:
    """Why a model cannot be divided over the team."""
    try:
        divide(build(shape), mesh_of((torch.distributed.get_world_size(),)))
    except ValueError as error:
        return str(error)
    return None


def of_one_process(shape: Shape, ranks: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The same of a model whose matrices have their rows as ranks' own: those of some heads."""
    model = _model(shape)
    order = {}
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            rows = torch.arange(3 * shape.width).view(3, ranks, -1)
            order[f"{name}.in_"] = rows.transpose(0, 1).flatten()
    inputs = {name: model.get_submodule(name) for name in order}
    with torch.no_grad():
        for name, layer in inputs.items():
            for parameter in layer.parameters():
                # Ranks have the rows of the first model as they lie.
                before = parameter.clone()
                parameter[order[name]] = before
    loss = model.loss(*_batch(shape))
    loss.backward()
    gradients = _gradients(model)
    for name, layer in inputs.items():
        for kind, _ in layer.named_parameters():
            gradients[f"{name}.{kind}"] = gradients[f"{name}.{kind}"][order[name]]
    return loss.detach(), gradients


def _model(shape: Shape) -> LanguageModel:
    torch.manual_seed(0)
    model = build(shape)
    with torch.no_grad():
        # Biases and residual sums that count.
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


def _batch(shape: Shape) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(shape.vocabulary, (2, shape.context + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def _gradients(model: LanguageModel) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert grad is not None
        found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found
