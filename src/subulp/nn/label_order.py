"""The order of a classifier's rows where the most frequent labels come first."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def check_counts(counts: Tensor, labels: int) -> None:
    """Raise ValueError unless these are integers ``(labels,)``."""
    if not isinstance(counts, Tensor):
        raise ValueError(f"label_counts is a {type(counts).__name__}: pass a tensor of integers")
    if counts.shape != (labels,) or counts.is_floating_point():
        raise ValueError(
            f"label_counts has shape {tuple(counts.shape)} and dtype {counts.dtype}: expected "
            f"integers ({labels},)"
        )


def checksum(counts: Tensor, labels: int) -> int:
    """A number that other counts, once checked, do not have; 0 for counts without data."""
    check_counts(counts, labels)
    if counts.is_meta:
        return 0
    return zlib.crc32(counts.to("cpu", torch.int64).contiguous().numpy().tobytes())


def frequent_first(counts: Tensor, precise: int) -> Tensor:
    """The label of each row, int64: the ``precise`` most frequent ones, then the others.

    Both ascend. Of equal counts, the lower label is the more frequent.
    """
    order = torch.argsort(counts, descending=True, stable=True)
    return torch.cat([order[:precise].sort().values, order[precise:].sort().values])


def wrong_order(state_dict: Mapping[str, Any], prefix: str, labels: int) -> list[str]:
    """A sentence, if a state dict's order of the labels is none."""
    row_of, label_of = (state_dict.get(prefix + name) for name in ("row_of", "label_of"))
    if row_of is None and label_of is None:
        return []
    if _are_inverse(row_of, label_of, labels):
        return []
    return [
        f"{prefix}row_of and {prefix}label_of do not number the {labels} labels' rows both "
        "ways: the state dict is damaged"
    ]


def damaged_order() -> RuntimeError:
    """The error for an order of the labels that is none any more."""
    return RuntimeError(
        "row_of and label_of no longer number the labels' rows both ways: something has computed "
        "with them, as averages of buffers do (AveragedModel(use_buffers=True)); load a state "
        "dict, and leave buffers out of averages"
    )


def _are_inverse(row_of: object, label_of: object, count: int) -> bool:
    """Whether these are int64 ``(count,)``, one the inverse of the other; on "meta", the former."""
    for order in (row_of, label_of):
        if not isinstance(order, Tensor) or order.dtype != torch.int64 or order.shape != (count,):
            return False
        if not order.is_meta and not bool(((order >= 0) & (order < count)).all()):
            return False
    assert isinstance(row_of, Tensor)
    assert isinstance(label_of, Tensor)
    if row_of.is_meta or label_of.is_meta:
        return True
    numbers = torch.arange(count, dtype=torch.int64, device=label_of.device)
    return torch.equal(row_of.to(label_of.device)[label_of], numbers)
