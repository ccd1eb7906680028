"""Dense modules on several ranks: replicated as under ``DistributedDataParallel``, or sharded by
``fully_shard``. Gradients are averaged in FP32, whatever the parameters are stored in.

Annotations are objects here, not strings: ``DistributedDataParallel`` reads those of its hook.
"""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...optim.backward.reduction import Reduce
from .ranks import Ranks


def shard(model: nn.Module, ranks: Ranks, units: Iterable[nn.Module] = ()) -> None:
    """Divide a model's parameters over the ranks, where these share them so; before its optimizer.

    Args:
        model: The model.
        ranks: The ranks.
        units: Modules of it that are gathered whole one at a time (default: only the model).
    """
    if not ranks.several or ranks.parallel != "fsdp":
        return
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: PLC0415

    # Nothing here writes into what a module returns.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for module in (*units, model):
        fully_shard(module, mesh=ranks.mesh, mp_policy=policy)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The members of the outermost ``ModuleList`` of a model, such as a transformer's layers."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            return list(module)
    return []


def replicated(model: nn.Module, ranks: Ranks, *, fused: bool) -> Callable[..., Any]:
    """A model's forward pass, after which a backward pass averages gradients over its replicas.

    Args:
        model: The model, in no wrapper; it stays as it is where its parameters are sharded.
        ranks: The ranks.
        fused: The step is inside the backward pass, which averages each gradient itself, by
            :func:`average_over`.
    """
    if not ranks.several or ranks.parallel != "ddp" or fused:
        return model
    with warnings.catch_warnings():
        # What torch has instead of broadcast_buffers, earlier versions do not know.
        warnings.simplefilter("ignore", FutureWarning)
        # All ranks have made the same weights from one seed; some modules have rows that differ.
        wrapped = DistributedDataParallel(
            model, broadcast_buffers=False, init_sync=False, gradient_as_bucket_view=True
        )
    wrapped.register_comm_hook(ranks.count, _average_bucket)
    return wrapped


def average_over(ranks: Ranks) -> Reduce | None:
    """What ``fuse_backward`` reduces gradients by; ``None`` where they arrive reduced."""
    if not ranks.several or ranks.parallel != "ddp":
        return None

    def average(grad: Tensor) -> Tensor:
        wide = grad.float().div_(ranks.count)
        dist.all_reduce(wide)
        return wide.to(grad.dtype)

    return average


def _average_bucket(
    count: int,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    buffer: Tensor = bucket.buffer()
    wide = buffer.float().div_(count)
    work: Any = dist.all_reduce(wide, async_op=True)

    def narrowed(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        return buffer.copy_(done.value()[0])

    averaged: torch.futures.Future[Tensor] = work.get_future().then(narrowed)
    return averaged


def same_buffers(model: nn.Module, ranks: Ranks) -> None:
    """Give all ranks the buffers of rank 0, such as the running statistics of a normalisation."""
    if ranks.several:
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)
