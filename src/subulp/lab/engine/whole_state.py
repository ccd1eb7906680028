"""States whose tensors several ranks share, put together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from ...optim import shards
from .ranks import Ranks
from .saved_state import flatten, rebuild

Path = tuple[Any, ...]


def whole(state: Any, ranks: Ranks) -> Any:
    """A state dict without DTensors, with everything that any rank has; all ranks call this.

    Args:
        state: Dictionaries in dictionaries, with tensors also in lists. A rank may have entries
            that others lack: of a table that lies there whole. What several have is taken from the
            first of them.
        ranks: The ranks.
    """
    if not ranks.several:
        return state
    own = dict(_entries(state))
    holders: dict[Path, list[int]] = {}
    for rank, paths in enumerate(ranks.gather(list(own))):
        for path in paths:
            holders.setdefault(path, []).append(rank)
    result: dict[Any, Any] = {}
    for path, having in holders.items():
        value = own.get(path)
        if len(having) < ranks.count:
            value = sent(value, having[0], ranks)
        place = result
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = _full(value)
    return result


def _full(value: Any) -> Any:
    if isinstance(value, list):
        return [_full(each) for each in value]
    return full(value) if isinstance(value, Tensor) else value


def sent(state: Any, source: int, ranks: Ranks) -> Any:
    """A rank's state, on each of them; the others may pass ``None``."""
    # Not every tensor can be pickled: the state travels in the form that checkpoints have.
    form = [(None, b"")]
    if ranks.rank == source:
        plain, tensors = flatten(state)
        form = [(plain, save(tensors))]
    dist.broadcast_object_list(form, src=source)
    plain, packed = form[0]
    return state if ranks.rank == source else rebuild(plain, load(packed))


def full(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank; a collective for a DTensor."""
    if not shards.is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    assert isinstance(tensor, DTensor)
    part = shards.local(tensor.detach())
    # No backend sends FP8 numbers as such.
    narrow = part.dtype.itemsize == 1
    placed = DTensor.from_local(
        part.view(torch.uint8) if narrow else part,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    found = placed.full_tensor()
    return found.view(part.dtype) if narrow else found


def _entries(state: Mapping[Any, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    for key, value in state.items():
        if isinstance(value, Mapping) and value:
            yield from _entries(value, (*path, key))
        else:
            yield (*path, key), value
