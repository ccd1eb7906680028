"""A language model divided over ranks by torch's tensor parallelism, as Megatron-LM divides it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from ...tasks.lm.models import Attention, LanguageModel


@contextmanager
def first_rank_of(ranks: int) -> Iterator[DeviceMesh]:
    """A mesh of which this process is the first rank, and the others are nowhere.

    Collectives move nothing, so what is computed is wrong, and what is kept in memory is right.

    Args:
        ranks: Number of ranks.
    """
    dist.init_process_group("fake", rank=0, world_size=ranks)
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()


def divide(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Give each rank a part of the heads, of the hidden units and of the vocabulary, in place.

    Norms are on all ranks, and so are activations between the parts, without sequence parallelism,
    as in Collage's runs. A rank's queries, keys and values are those of the same heads: the rows of
    the matrix that makes them are in another order than in one process. Logits are DTensors: their
    loss is computed under :func:`torch.distributed.tensor.parallel.loss_parallel`.

    Args:
        model: A GPT, or a model as Llama's.
        mesh: The ranks.

    Raises:
        ValueError: Ranks do not divide the heads.
    """
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    heads = attentions[0].heads
    if heads % mesh.size():
        raise ValueError(f"{mesh.size()} ranks do not divide {heads} heads")
    rows = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(
        model,
        mesh,
        {
            "tokens": rows,
            **({} if model.positions is None else {"positions": rows}),
            "blocks.*.attention.in_": ColwiseParallel(),
            "blocks.*.attention.out": RowwiseParallel(),
            "blocks.*.mlp.up": ColwiseParallel(),
            **({"blocks.*.mlp.gate": ColwiseParallel()} if model.positions is None else {}),
            "blocks.*.mlp.down": RowwiseParallel(),
            "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        },
    )
    for attention in attentions:
        attention.heads = heads // mesh.size()


def on_this_rank(parameter: Tensor) -> Tensor:
    """What of a parameter lies here, to be written."""
    own = parameter.detach()
    return own.to_local() if isinstance(own, DTensor) else own
