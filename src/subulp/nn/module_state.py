"""What a module of tables keeps in its state dict beside the tensors, as one tensor of numbers.

Seed, number of updates, and the layout of each table: a state dict without it would load into a
table that reads the same bytes as other numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

KEY = "_extra_state"


class Described(Protocol):
    """A table that describes its rows."""

    def layout(self) -> tuple[int, ...]:
        """How its rows are to be read."""

    def misread(self, saved: Sequence[int]) -> str | None:
        """What is wrong with rows of a layout; ``None`` if they fit."""

    def faults(self, state_dict: Mapping[str, Any], prefix: str) -> list[str]:
        """Sentences about a state dict's tensors that it cannot be made of."""

    def refuse(self) -> None:
        """Leave its rows as they are when the state dict that is being loaded comes to them."""


def new_state(seed: int, steps: int, layouts: Sequence[tuple[int, ...]]) -> Tensor:
    """int64 ``(2 + numbers of all layouts,)``."""
    numbers = [seed, steps, *(number for layout in layouts for number in layout)]
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def read_state(state: Tensor) -> tuple[int, int, list[int]]:
    """Seed, number of updates, and the numbers of the layouts, of which older states have none."""
    seed, steps, *layouts = (int(number) for number in state.tolist())
    return seed, steps, layouts


def check_state(
    state_dict: Mapping[str, Any], prefix: str, tables: Mapping[str, Described]
) -> list[str]:
    """Sentences about what makes a state dict unfit for a module's tables, which then refuse it.

    Args:
        state_dict: The state dict.
        prefix: Of the module's keys.
        tables: The module's tables by their names in it.
    """
    found = _misread(state_dict, prefix, tables)
    for name, table in tables.items():
        found += table.faults(state_dict, f"{prefix}{name}.")
    if found:
        for table in tables.values():
            table.refuse()
    return found


def _misread(
    state_dict: Mapping[str, Any], prefix: str, tables: Mapping[str, Described]
) -> list[str]:
    state = state_dict.get(prefix + KEY)
    if state is None:
        return []
    name = prefix + KEY
    if not isinstance(state, Tensor) or state.dtype != torch.int64 or state.dim() != 1:
        return [f"{name} is no tensor of int64 numbers: the state dict is damaged"]
    if state.is_meta or state.numel() < 2:
        return [f"{name} holds no seed and number of updates: the state dict is damaged"]
    seed, steps, numbers = read_state(state)
    if not (0 <= seed < 2**32 and 0 <= steps < 2**32):
        return [f"{name} has seed={seed} and steps={steps}, which are no words of 32 bits"]
    if not numbers:
        return []
    found = []
    for place, table in tables.items():
        size = len(table.layout())
        fault = table.misread(numbers[:size])
        numbers = numbers[size:]
        if fault is not None:
            found.append(f"{prefix}{place}: {fault}")
    if numbers and not found:
        found.append(f"{name} describes more tables than the module's {len(tables)}")
    return found
