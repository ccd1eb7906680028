"""Parameters that are DTensors: the part of each that this rank holds, and where the part lies.

A step is elementwise, so each rank steps its own parts, without communication. Random bits are
counted by an element's index in the whole tensor: whatever the mesh, the bits are those of one
process. Only what concerns a whole tensor is reduced over its mesh: the largest gradient that
scales FP8 states, norms, and whether gradients are finite.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..numerics.random_bits import WHOLE, Region
from ..ops.pointers import is_plain_type

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


# What to_local() returns where no gradients are recorded; of a parameter that makes a view.
_LOCAL: Callable[[Tensor], Tensor] = attrgetter("_local_tensor")


_PLACE: tuple[Callable[[Tensor], object], ...] = (
    attrgetter("placements"),
    attrgetter("device_mesh"),
)


@cache
def is_sharded_type(kind: type) -> bool:
    """Whether tensors of a type are DTensors."""
    # Nobody has made one unless this has been imported, and importing it takes long.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and issubclass(kind, module.DTensor)


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor: this rank may hold a part of it, or a replica."""
    return is_sharded_type(type(tensor))


# ------------------------------------------------------------------------------ parts and wholes


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: a DTensor's local tensor, or the tensor itself."""
    if not is_sharded_type(type(tensor)):
        return tensor
    if torch.is_grad_enabled():
        with torch.no_grad():
            return local(tensor)
    part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    if not is_plain_type(type(part)) and hasattr(part, "wait"):
        # A collective is still filling it.
        part = part.wait()
    return part


def parts(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """:func:`local` of each of many tensors; one by one, that takes longer than a small step."""
    if not any(map(is_sharded_type, set(map(type, tensors)))):
        return tensors
    try:
        found = list(map(_LOCAL, tensors))
    except AttributeError:
        # Some are plain.
        found = []
    if found and all(map(is_plain_type, set(map(type, found)))):
        return found
    return [local(tensor) for tensor in tensors]


def part_of(p: Tensor, part: Tensor) -> Tensor:
    """A tensor of the shape and placement of ``p``, of which this rank holds ``part``."""
    if not is_sharded(p):
        return part
    placed: DTensor = p  # type: ignore[assignment]
    return _from_local(placed, part, placed.placements)


def _from_local(p: DTensor, part: Tensor, placements: Sequence[Placement]) -> Tensor:
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    return DTensor.from_local(
        part, p.device_mesh, placements, run_check=False, shape=p.shape, stride=p.stride()
    )


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank; a collective for a DTensor."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def placed_like(p: Tensor, value: Tensor) -> Tensor:
    """What this rank holds of a value of the shape of ``p``, placed as ``p`` is.

    Args:
        p: A parameter.
        value: A DTensor, redistributed if it is placed otherwise; or the whole value, which every
            rank has.
    """
    if not is_sharded(p):
        return whole(value)
    from torch.distributed.tensor import DTensor, distribute_tensor  # noqa: PLC0415

    placed: DTensor = p  # type: ignore[assignment]
    if not isinstance(value, DTensor):
        # Every rank cuts out its own part: nothing is sent.
        return local(
            distribute_tensor(value, placed.device_mesh, placed.placements, src_data_rank=None)
        )
    if value.device_mesh != placed.device_mesh:
        return placed_like(p, value.full_tensor())
    with torch.no_grad():
        return local(value.redistribute(placements=placed.placements))


def gradient_part(p: Tensor, grad: Tensor) -> Tensor:
    """What this rank holds of a gradient, placed as its parameter is.

    Tensor parallelism leaves some gradients unreduced, ``Partial``; they are reduced here, as
    torch's own optimizers do.
    """
    if not is_sharded(p) or not is_sharded(grad):
        return grad
    return local(grad) if is_placed_like(p, grad) else placed_like(p, grad)


def gradient_parts(params: Sequence[Tensor], grads: Sequence[Tensor]) -> Sequence[Tensor]:
    """:func:`gradient_part` of each of many DTensors."""
    if all(map(is_sharded_type, set(map(type, grads)))) and all(
        list(map(of, params)) == list(map(of, grads)) for of in _PLACE
    ):
        return parts(grads)
    return [gradient_part(p, grad) for p, grad in zip(params, grads, strict=True)]


def is_placed_like(p: Tensor, value: Tensor) -> bool:
    """Whether two DTensors have the same placement."""
    mine, its = p.placements, value.placements  # type: ignore[attr-defined]
    if mine is not its and mine != its:
        return False
    same: bool = value.device_mesh == p.device_mesh  # type: ignore[attr-defined]
    return same


# --------------------------------------------------------------------------------------- regions


def check(name: str, p: Tensor) -> None:
    """Raise unless the elements of a DTensor that this rank holds can be told.

    Args:
        name: What errors call it.
        p: A parameter; a plain tensor is fine.

    Raises:
        ValueError: It is not reduced (``Partial``), or placed as no steps are known for.
    """
    if not is_sharded(p):
        return
    try:
        region_of(p)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def region_of(p: Tensor) -> Region:
    """Which elements of the whole tensor this rank holds of ``p``.

    Raises:
        ValueError: See :func:`check`.
    """
    if not is_sharded(p):
        return WHOLE
    placed: DTensor = p  # type: ignore[assignment]
    part, mesh = local(p), placed.device_mesh
    coordinate = mesh.get_coordinate()
    return _region(
        p.shape,
        p.stride(),
        part.shape,
        part.stride(),
        mesh.shape,
        None if coordinate is None else tuple(coordinate),
        placed.placements,
    )


class Regions:
    """:func:`region_of` parameters that are asked for at every step."""

    def __init__(self) -> None:
        # By identity: the parameter, and what its region was computed from.
        self._of: dict[int, tuple[Tensor, object, object, Region]] = {}

    def of(self, p: Tensor, part: Tensor) -> Region:
        """The region of a parameter of which this rank holds ``part``."""
        known = self._of.get(id(p))
        placements, strides = p.placements, part.stride()  # type: ignore[attr-defined]
        if known is None or known[1] is not placements or known[2] != strides:
            known = self._of[id(p)] = p, placements, strides, region_of(p)
        return known[3]


@lru_cache(maxsize=65536)
def _region(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    part: tuple[int, ...],
    part_strides: tuple[int, ...],
    mesh: tuple[int, ...],
    coordinate: tuple[int, ...] | None,
    placements: tuple[Placement, ...],
) -> Region:
    _check_placements(placements)
    if coordinate is None or 0 in part:
        return WHOLE
    first = []
    for dim, (size, held) in enumerate(zip(shape, part, strict=True)):
        start, stop = _held(dim, size, mesh, coordinate, placements)
        if stop - start != held:
            raise ValueError(
                f"this rank holds {held} of {size} indices of dimension {dim}, and placements "
                f"{placements} give it {stop - start}: a DTensor made by hand must be divided as "
                "distribute_tensor divides it"
            )
        first.append(start)
    # In the order of memory, as elements are counted.
    order = sorted(range(len(shape)), key=part_strides.__getitem__, reverse=True)
    offset = sum(i * stride for i, stride in zip(first, strides, strict=True))
    return Region.of([part[d] for d in order], [strides[d] for d in order], offset)


def _check_placements(placements: tuple[Placement, ...]) -> None:
    for placement in placements:
        if placement.is_replicate() or _sharded_dim(placement) is not None:
            continue
        remedy = (
            "reduce it first, with redistribute()"
            if placement.is_partial()
            else "only Replicate and Shard are"
        )
        raise ValueError(f"placement {placement} is not available for parameters: {remedy}")


def _sharded_dim(placement: Placement) -> int | None:
    """The dimension that a placement divides; that of FSDP over tensor parallelism, too."""
    if placement.is_shard() or hasattr(placement, "split_factor"):
        return int(placement.dim)  # type: ignore[attr-defined]
    return None


def _held(
    dim: int,
    size: int,
    mesh: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
) -> tuple[int, int]:
    """First and end index of a dimension that a rank holds.

    Raises:
        ValueError: It holds several runs of indices.
    """
    runs = [(0, size)]
    for n, rank, placement in zip(mesh, coordinate, placements, strict=True):
        if _sharded_dim(placement) != dim:
            continue
        # A strided shard takes its part of each of so many parts that another mesh dimension,
        # whose placement follows, divides the tensor into first.
        factor = int(getattr(placement, "split_factor", 1))
        parts = [_chunk(runs, factor, i) for i in range(factor)]
        runs = [run for part in parts for run in _chunk(part, n, rank)]
    runs = _joined(runs)
    if len(runs) > 1:
        raise ValueError(
            f"this rank holds several runs of indices of dimension {dim}, by placements "
            f"{placements}: it must hold one"
        )
    return runs[0] if runs else (0, 0)


def _chunk(runs: list[tuple[int, int]], chunks: int, number: int) -> list[tuple[int, int]]:
    """Chunk ``number`` of the indices in ``runs``, divided as ``torch.chunk`` divides."""
    size = sum(stop - start for start, stop in runs)
    length = math.ceil(size / chunks)
    first, last = length * number, min(length * (number + 1), size)
    result, before = [], 0
    for start, stop in runs:
        low, high = max(first - before, 0), min(last - before, stop - start)
        if low < high:
            result.append((start + low, start + high))
        before += stop - start
    return result


def _joined(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    result: list[tuple[int, int]] = []
    for start, stop in runs:
        if result and result[-1][1] == start:
            result[-1] = result[-1][0], stop
        else:
            result.append((start, stop))
    return result


# ------------------------------------------------------------------------------ over the whole


def reduced(params: Sequence[Tensor], values: Tensor, operation: Literal["sum", "max"]) -> Tensor:
    """Values of the ranks' parts of tensors, reduced to those of the whole tensors.

    One collective for all tensors that are divided over the same dimensions of the same mesh.

    Args:
        params: Tensors; of a plain one, or a replica, the value is the whole one's already.
        values: ``(len(params), ...)``, a value for each.
        operation: How values of parts combine.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate  # noqa: PLC0415

    together: dict[tuple[DeviceMesh, tuple[bool, ...]], list[int]] = {}
    for i, p in enumerate(params):
        if is_sharded(p):
            divided = tuple(_sharded_dim(each) is not None for each in p.placements)  # type: ignore[attr-defined]
            if any(divided):
                together.setdefault((p.device_mesh, divided), []).append(i)  # type: ignore[attr-defined]
    result = values.clone()
    for (mesh, divided), rows in together.items():
        placements = [Partial(operation) if each else Replicate() for each in divided]
        part = DTensor.from_local(values[rows], mesh, placements, run_check=False)
        result[rows] = local(part.redistribute(placements=[Replicate()] * mesh.ndim))
    return result


def joint_norm(norms: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of tensors together, from the norm of each; the order of the ranks' sums is torch's.

    Args:
        norms: Tensors (); those of DTensors are DTensors, on one or several meshes.
        norm_type: Order p of the norm.

    Returns:
        Plain tensor ().
    """

    def joint(some: Sequence[Tensor]) -> Tensor:
        device = some[0].device
        norm: Tensor = torch.linalg.vector_norm(
            torch.stack([norm.to(device) for norm in some]), norm_type
        )
        return norm.full_tensor() if is_sharded(norm) else norm  # type: ignore[attr-defined]

    together: dict[Any, list[Tensor]] = {}
    for norm in norms:
        key = norm.device_mesh if is_sharded(norm) else None  # type: ignore[attr-defined]
        together.setdefault(key, []).append(norm)
    joints = [joint(some) for some in together.values()]
    return joints[0] if len(joints) == 1 else joint(joints)


# ------------------------------------------------------------------------------------- all ranks


def are_several() -> bool:
    """Whether this process is one of several ranks of ``torch.distributed``."""
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def agreed_seed(seed: int) -> int:
    """Rank 0's seed, where there are several ranks; else this one. A collective."""
    if not are_several():
        return seed
    seeds = [seed]
    torch.distributed.broadcast_object_list(seeds, src=0)
    return seeds[0]


def highest(number: int, device: torch.device) -> int:
    """The highest number of any rank, where there are several; else this one. A collective.

    Args:
        number: This rank's.
        device: A device that the default process group can send from.
    """
    if not are_several():
        return number
    found = torch.tensor(number, dtype=torch.int64, device=device)
    torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX)
    return int(found)
