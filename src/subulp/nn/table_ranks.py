"""What the ranks that split tables tell each other, and one process that has all of them."""

from __future__ import annotations

import builtins
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, distributed

from .ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class TableRanks:
    """The ranks of a mesh of one dimension, or one process.

    Args:
        mesh: The mesh; ``None`` for one process that has all.

    Attributes:
        mesh: The mesh, or ``None``.
        size: Number of ranks.
        rank: This one.

    Raises:
        TypeError: ``mesh`` is no DeviceMesh.
        ValueError: See :class:`.ranks.Ranks`; or it is a slice of a larger mesh.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self.mesh, self.size, self.rank = mesh, 1, 0
        self._ranks = None if mesh is None else Ranks(mesh)
        if mesh is None or self._ranks is None:
            return
        whole = mesh._get_root_mesh()
        if whole.size() != mesh.size():
            raise ValueError(
                f"mesh is a slice of {mesh.size()} of {whole.size()} ranks: the other slices would "
                "have copies of the rows, whose updates nothing sums up; pass "
                f"init_device_mesh(device, ({whole.size()},)), of one dimension"
            )
        self.size, self.rank = self._ranks.size, self._ranks.rank

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """The same: copies of a module are on the same ranks."""
        return self

    @property
    def device(self) -> torch.device:
        """Where tensors must lie to be sent."""
        return torch.device("cpu") if self._ranks is None else self._ranks.device

    def exchange(self, sent: Tensor, counts: Sequence[int], expected: Sequence[int]) -> Tensor:
        """Send a run of numbers to each rank, and receive one from each.

        Args:
            sent: 1-D, of any dtype: what goes to each rank, one after the other.
            counts: How many for each.
            expected: How many from each.

        Returns:
            What each has sent, one after the other.
        """
        if self._ranks is None or self.size == 1:
            return sent
        return self._ranks.exchange(sent, counts, expected)

    def sum(self, tensor: Tensor) -> None:
        """Add up a tensor of all ranks, in place; the order of the terms is not fixed."""
        if self._ranks is not None:
            self._ranks.add_(tensor)

    def agree(self, words: Sequence[int]) -> list[list[int]]:
        """Some words of all ranks."""
        return [list(words)] if self._ranks is None else self._ranks.gather_numbers(words)

    def raise_faults(self, fault: Exception | None) -> None:
        """Raise on all ranks what one of them, or several, have found; called by all.

        Raises:
            Exception: Of the same kind everywhere, with the first such rank's words.
        """
        own = None if fault is None else (type(fault).__name__, str(fault))
        found: list[tuple[str, str] | None] = [own]
        if self.mesh is not None and self.size > 1:
            found = [None] * self.size
            distributed.all_gather_object(found, own, group=self.mesh.get_group())
        if fault is not None:
            raise fault
        rank, (kind, words) = next((r, f) for r, f in enumerate(found) if f is not None)
        known = getattr(builtins, kind, RuntimeError)
        raise known(f"rank {rank} of the mesh: {words}")


def digest(*facts: object) -> int:
    """A number that differs, all but certainly, if one of the facts does; the same everywhere."""
    return zlib.crc32(repr(facts).encode())
