"""Representations of the operands of matrix products, by layer and role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ...numerics import BF16, E5M2
from .group import Group


@dataclass(frozen=True)
class HeatCell:
    """The mean decision about an operand.

    Attributes:
        share: Of the elements that are in FP8, in percent.
        texts: The same and more in words.
    """

    share: float
    texts: tuple[str, ...]


@dataclass(frozen=True)
class HeatMap:
    """The operands of a variant.

    Attributes:
        title: Name of the variant.
        roles: The columns.
        rows: Layer, and a cell for each role that it has.
    """

    title: str
    roles: tuple[str, ...]
    rows: tuple[tuple[str, tuple[HeatCell | None, ...]], ...]


def heat_maps(group: Group) -> list[HeatMap]:
    """A map for each variant with mixtures of representations: means over its records and seeds."""
    found = []
    for variant in group.variants:
        operands: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
        for record in group.runs[variant.run].records:
            if record.name == variant.own:
                for operand in record.mix or ():
                    operands.setdefault((operand["layer"], operand["role"]), []).append(operand)
        if operands:
            layers = dict.fromkeys(layer for layer, _ in operands)
            roles = tuple(dict.fromkeys(role for _, role in operands))
            rows = tuple(
                (layer, tuple(_cell(operands.get((layer, role), [])) for role in roles))
                for layer in layers
            )
            found.append(HeatMap(variant.name, roles, rows))
    return found


def _cell(operands: Sequence[Mapping[str, Any]]) -> HeatCell | None:
    if not operands:
        return None
    narrow = fmean(1.0 - operand["elements"].get(BF16.name, 0.0) for operand in operands)
    wide = fmean(operand["elements"].get(E5M2.name, 0.0) for operand in operands)
    texts = [f"{100 * narrow:.1f} %"]
    if wide:
        texts.append(f"E5M2 {100 * wide:.1f} %")
    if narrow:
        texts.append(f"error {100 * fmean(o['error'] for o in operands):.2f} %")
    return HeatCell(100 * narrow, tuple(texts))
