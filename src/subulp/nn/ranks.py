"""What the ranks of a mesh that share a table send each other.

Collectives of ``torch.distributed`` over the mesh's own group. All ranks must call them in the same
order; so an error of one is first told to all.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeVar

import torch
from torch import Tensor, distributed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

_ERRORS = (RuntimeError, ValueError, TypeError, FloatingPointError, IndexError)
_NUMBERS = 24
"""Numbers that ranks compare at a time."""


@dataclass(frozen=True)
class Told(Generic[T]):
    """What a rank has found out before anything is done.

    Attributes:
        value: For the rank itself.
        same: Numbers that must be equal on all ranks, by what they are.
        own: Numbers that the others need.
    """

    value: T
    same: Mapping[str, int | float] = field(default_factory=dict)
    own: Sequence[int] = ()


class Ranks:
    """The processes that share a table.

    Args:
        mesh: A ``torch.distributed.device_mesh.DeviceMesh`` of one dimension that has this process.

    Attributes:
        mesh: The mesh.
        size: Number of ranks.
        rank: This process's number in the mesh.

    Raises:
        TypeError: ``mesh`` is no DeviceMesh.
        ValueError: It has several dimensions, this process is not in it, or its ranks do not
            ascend.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        if not distributed.is_available():
            raise ValueError("mesh was given, and this build of torch has no torch.distributed")
        from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415

        if not isinstance(mesh, DeviceMesh):
            raise TypeError(
                f"mesh is {type(mesh).__name__}: pass a DeviceMesh, as "
                "torch.distributed.device_mesh.init_device_mesh makes them"
            )
        if mesh.ndim != 1:
            raise ValueError(
                f"mesh has {mesh.ndim} dimensions, and rows are shared out over one: pass one of "
                f"them, such as mesh['tp'], of {mesh.mesh_dim_names or 'unnamed dimensions'}"
            )
        if mesh.get_coordinate() is None:
            raise ValueError(
                f"this process, rank {distributed.get_rank()}, is not in the mesh {mesh}: make the "
                "module on the mesh's ranks alone"
            )
        if (ranks := mesh.mesh.tolist()) != sorted(ranks):
            raise ValueError(
                f"mesh has the ranks {ranks}, and parts of a batch are gathered in the order of a "
                "process group, which ascends: list the ranks in that order"
            )
        self.mesh = mesh
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()
        self._group = mesh.get_group()

    @property
    def device(self) -> torch.device:
        """Where collectives take their tensors."""
        if self.mesh.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(
            self.mesh.device_type, torch.get_device_module(self.mesh.device_type).current_device()
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """The same: copies of a module are on the same ranks."""
        return self

    def __reduce__(self) -> NoReturn:
        """Raise TypeError: process groups cannot be saved."""
        raise TypeError(
            "a module on a mesh holds a process group, which no file can hold: save its "
            "state_dict() with torch.distributed.checkpoint"
        )

    # ------------------------------------------------------------------------------ agreement

    def agree(self, find_out: Callable[[], Told[T]]) -> tuple[T, list[list[int]]]:
        """Find something out on each rank, and go on if all ranks can and agree.

        Args:
            find_out: Called once; may raise.

        Returns:
            The rank's own value, and the numbers ``own`` of all ranks.

        Raises:
            Exception: ``find_out`` raised it, here or on another rank, which all ranks then know.
            ValueError: Ranks differ in what must be the same.
        """
        error, told = None, None
        try:
            told = find_out()
        except Exception as caught:
            error = caught
        numbers = [0] * _NUMBERS
        if told is None:
            numbers[0] = 1 + next(
                (i for i, kind in enumerate(_ERRORS) if isinstance(error, kind)), 0
            )
        else:
            found = [_bits(number) for number in told.same.values()] + list(told.own)
            numbers[1 : 1 + len(found)] = found
        everyone = self.gather_numbers(numbers)
        if error is not None:
            raise error
        for rank, theirs in enumerate(everyone):
            if theirs[0]:
                raise _ERRORS[theirs[0] - 1](
                    f"rank {rank} of the mesh raised an error, so all ranks stop here: see that "
                    "rank's; nothing was updated"
                )
        assert told is not None
        for place, (name, number) in enumerate(told.same.items(), start=1):
            for rank, theirs in enumerate(everyone):
                if theirs[place] != everyone[0][place]:
                    both = _number(everyone[0][place], number), _number(theirs[place], number)
                    raise ValueError(
                        f"{name} is {both[0]} on rank 0 of the mesh and {both[1]} on rank {rank}: "
                        "it must be the same on all ranks; nothing was updated"
                    )
        first = 1 + len(told.same)
        return told.value, [theirs[first : first + len(told.own)] for theirs in everyone]

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of all ranks, each of which has as many."""
        own = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        everyone = torch.empty(self.size * len(numbers), dtype=torch.int64, device=self.device)
        _all_gather()(everyone, own, group=self._group)
        found: list[list[int]] = everyone.view(self.size, -1).tolist()
        return found

    # ---------------------------------------------------------------------------- collectives

    def gather(self, part: Tensor, counts: Sequence[int]) -> Tensor:
        """The rows of all ranks, in their order.

        Args:
            part: This rank's, ``(counts[rank], ...)``.
            counts: Number of rows of each rank.
        """
        most = max(counts)
        shape = part.shape[1:]
        whole = torch.empty(self.size * most, *shape, dtype=part.dtype, device=part.device)
        if whole.numel():
            own = part.contiguous()
            if own.shape[0] < most:
                own = torch.cat([own, own.new_zeros(most - own.shape[0], *shape)])
            # As bytes, which every backend moves, whatever the dtype.
            _all_gather()(bytes_of(whole), bytes_of(own), group=self._group)
        if all(count == most for count in counts):
            return whole
        parts = whole.view(self.size, most, *shape)
        return torch.cat([parts[rank, :count] for rank, count in enumerate(counts)])

    def add_and_scatter(self, whole: Tensor, counts: Sequence[int]) -> Tensor:
        """This rank's rows of the sum of what all ranks have for all rows.

        Args:
            whole: ``(sum of counts, ...)``.
            counts: Number of rows of each rank.
        """
        most = max(counts)
        shape = whole.shape[1:]
        if any(count != most for count in counts):
            padded = whole.new_zeros(self.size, most, *shape)
            for rank, part in enumerate(whole.split(list(counts))):  # type: ignore[no-untyped-call]
                padded[rank, : part.shape[0]] = part
            whole = padded.view(self.size * most, *shape)
        own = whole.new_empty(most, *shape)
        if own.numel():
            _reduce_scatter()(own, whole.contiguous(), group=self._group)
        return own[: counts[self.rank]]

    def add_(self, numbers: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        distributed.all_reduce(numbers, group=self._group)
        return numbers

    def exchange(self, rows: Tensor, counts: Sequence[int], expected: Sequence[int]) -> Tensor:
        """Send each rank its rows.

        Args:
            rows: The first ``counts[0]`` are rank 0's, the next ``counts[1]`` rank 1's, and so on.
            counts: Number of rows for each rank.
            expected: Number of rows from each rank.

        Returns:
            The rows from all ranks, in their order.
        """
        found = rows.new_empty(sum(expected), *rows.shape[1:])
        distributed.all_to_all_single(
            bytes_of(found),
            bytes_of(rows.contiguous()),
            list(expected),
            list(counts),
            group=self._group,
        )
        return found


def _all_gather() -> Callable[..., Any]:
    """Named anew in torch 2.13."""
    found: Callable[..., Any] = getattr(distributed, "all_gather_single", None) or (
        distributed.all_gather_into_tensor
    )
    return found


def _reduce_scatter() -> Callable[..., Any]:
    """Named anew in torch 2.13."""
    found: Callable[..., Any] = getattr(distributed, "reduce_scatter_single", None) or (
        distributed.reduce_scatter_tensor
    )
    return found


def bytes_of(rows: Tensor) -> Tensor:
    """The memory of contiguous rows ``(count, ...)``, uint8 ``(count, bytes of a row)``."""
    width = math.prod(rows.shape[1:]) * rows.element_size()
    # A dimension of one element may have any stride, which view() does not like.
    return rows.detach().as_strided((rows.numel(),), (1,)).view(torch.uint8).view(-1, width)


def _bits(number: int | float) -> int:
    """A number as 64 bits, to be compared."""
    if isinstance(number, float):
        return int(struct.unpack("<q", struct.pack("<d", number))[0])
    return number


def _number(bits: int, like: int | float) -> int | float:
    """What has these bits."""
    if isinstance(like, float):
        return float(struct.unpack("<d", struct.pack("<q", bits))[0])
    return bits
