"""What the ranks of a mesh tell each other: words, and whether all may go on."""

from __future__ import annotations

import builtins
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, distributed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Ranks:
    """The ranks of a mesh of one dimension. Collectives go over its group only.

    Args:
        mesh: The mesh; ``None`` for one process that has all.

    Attributes:
        mesh: The mesh, or ``None``.
        size: Number of ranks.
        rank: This one.

    Raises:
        ValueError: The mesh has several dimensions, or is a slice of one that has.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self.mesh, self.size, self.rank = mesh, 1, 0
        if mesh is None:
            return
        if mesh.ndim != 1:
            raise ValueError(
                f"mesh has {mesh.ndim} dimensions {mesh.shape}: tables are split over one; pass "
                "init_device_mesh(device, (ranks,))"
            )
        whole = mesh._get_root_mesh()
        if whole.size() != mesh.size():
            raise ValueError(
                f"mesh is a slice of {mesh.size()} of {whole.size()} ranks: the other slices would "
                "have copies of the rows, whose updates nothing sums up; pass "
                f"init_device_mesh(device, ({whole.size()},)), of one dimension"
            )
        if mesh.get_coordinate() is None:
            raise ValueError("this rank is not in the mesh: make the module on the mesh's ranks")
        self.size, self.rank = mesh.size(), mesh.get_local_rank()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        raise RuntimeError(
            "a module that is split over ranks cannot be pickled: save its state_dict() by "
            "torch.distributed.checkpoint"
        )

    @property
    def group(self) -> distributed.ProcessGroup:
        """Over which the ranks communicate."""
        assert self.mesh is not None
        return self.mesh.get_group()

    @property
    def device(self) -> torch.device:
        """Where tensors must lie to be sent."""
        kind = "cpu" if self.mesh is None else self.mesh.device_type
        if kind == "cpu":
            return torch.device("cpu")
        return torch.device(kind, torch.accelerator.current_device_index())

    def exchange(self, sent: Tensor, counts: Sequence[int], expected: Sequence[int]) -> Tensor:
        """Send a run of numbers to each rank, and receive one from each.

        Args:
            sent: 1-D, of any dtype: what goes to each rank, one after the other.
            counts: How many for each.
            expected: How many from each.

        Returns:
            What each has sent, one after the other.
        """
        if self.size == 1:
            return sent
        received = sent.new_empty(sum(expected))
        # As bytes, which every backend sends.
        size = sent.itemsize
        distributed.all_to_all_single(
            received.view(torch.uint8),
            sent.contiguous().view(torch.uint8),
            [size * count for count in expected],
            [size * count for count in counts],
            group=self.group,
        )
        return received

    def sum(self, tensor: Tensor) -> None:
        """Add up a tensor of all ranks, in place; the order of the terms is not fixed."""
        if self.size > 1:
            distributed.all_reduce(tensor, group=self.group)

    def agree(self, words: Sequence[int]) -> list[list[int]]:
        """Some words of all ranks."""
        if self.size == 1:
            return [list(words)]
        mine = torch.tensor(words, dtype=torch.int64, device=self.device)
        even = [len(words)] * self.size
        theirs = self.exchange(mine.repeat(self.size), even, even)
        found: list[list[int]] = theirs.view(self.size, -1).tolist()
        return found

    def raise_faults(self, fault: Exception | None) -> None:
        """Raise on all ranks what one of them, or several, have found; called by all.

        Raises:
            Exception: Of the same kind everywhere, with the first such rank's words.
        """
        own = None if fault is None else (type(fault).__name__, str(fault))
        found: list[tuple[str, str] | None] = [own]
        if self.size > 1:
            found = [None] * self.size
            distributed.all_gather_object(found, own, group=self.group)
        if fault is not None:
            raise fault
        rank, (kind, words) = next((r, f) for r, f in enumerate(found) if f is not None)
        known = getattr(builtins, kind, RuntimeError)
        raise known(f"rank {rank} of the mesh: {words}")


def digest(*facts: object) -> int:
    """A number that differs, all but certainly, if one of the facts does; the same everywhere."""
    return zlib.crc32(repr(facts).encode())
