"""What can be wrong about the numbers of a call, and the errors that say so."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from .job import EMPTY, Job


class Fault(IntEnum):
    """What a kernel of a GPU finds, with the numbers that it tells."""

    BAD_OFFSETS = 1
    """The bag, where it begins, where it ends; how many row numbers there are."""
    BAD_VALUE = 2
    """Its position, the row number, its feature; the rows of its table."""
    BAD_GRADIENT = 3
    """The gradient's shape."""
    BAD_WEIGHTS = 4
    """How many there are."""
    BAD_TAGS = 5


def error_of(fault: int, numbers: Sequence[int]) -> Exception:
    """The error for a fault that a kernel has found, and the numbers that it told."""
    a, b, c, d = numbers
    match fault:
        case Fault.BAD_OFFSETS:
            return offsets_error(bag=a, first=b, last=c, count=d)
        case Fault.BAD_VALUE:
            return index_error(position=a, value=b, feature=c, rows=d)
        case Fault.BAD_GRADIENT:
            return not_finite("gradient", (a, b))
        case Fault.BAD_WEIGHTS:
            return not_finite("per_sample_weights", (a,))
    return unknown_resident()


def offsets_error(bag: int, first: int, last: int, count: int) -> ValueError:
    """The error for a bag that begins and ends where none does, of so many row numbers."""
    if bag == 0 and first != 0:
        return ValueError(f"offsets begin with {first}: the first bag begins at 0")
    if last < first:
        return ValueError(
            f"offsets decrease from {first} to {last} at position {bag + 1}: a bag ends where the "
            "next one begins"
        )
    return ValueError(f"the bags reach {last}, and there are {count} row numbers")


def index_error(position: int, value: int, feature: int, rows: int) -> IndexError:
    """The error for a row number that does not exist."""
    return IndexError(
        f"row number {value} at position {position} (feature {feature}) is out of range: its table "
        f"has the rows 0 to {rows - 1}"
    )


def check_offsets(offsets: Tensor, count: int) -> None:
    """Raise ValueError unless offsets begin with 0, do not decrease and end within ``count``."""
    first, last = offsets[[0, -1]].tolist()
    falls = offsets[1:] < offsets[:-1]
    at = 0
    if first == 0:
        if not bool(falls.any()) and last <= count:
            return
        at = int(falls.int().argmax()) if bool(falls.any()) else len(falls) - 1
    raise offsets_error(at, int(offsets[at]), int(offsets[min(at + 1, len(falls))]), count)


def check_values(job: Job) -> None:
    """Raise ValueError unless the offsets fit, and IndexError unless all row numbers exist."""
    looked, batch = job.lookups, job.lookups.batch
    check_offsets(looked.offsets, looked.values.numel())
    bounds = looked.offsets[::batch] if batch else looked.offsets.repeat(len(looked.features) + 1)
    lengths = bounds.diff()
    sizes = [job.tables[t].rows for t in looked.features]
    limits = torch.tensor(sizes, dtype=torch.int64, device=job.device)
    values = looked.values[: int(bounds[-1])]
    bad = (values < 0) | (values >= torch.repeat_interleave(limits, lengths))
    if bool(bad.any()):
        position = int(bad.int().argmax())
        feature = int((bounds <= position).sum()) - 1
        rows = job.tables[looked.features[feature]].rows
        raise index_error(position, int(values[position]), feature, rows)


def unknown_resident() -> ValueError:
    """The error for a cache whose tags are no rows of its table."""
    return ValueError(
        "tags of a cache name rows that its table does not have: what the cache holds is lost; "
        "load a state dict"
    )


def not_finite(name: str, shape: Sequence[int]) -> FloatingPointError:
    """The error for an update that is refused before it begins."""
    return FloatingPointError(
        f"the {name} of shape {tuple(shape)} has NaN or infinite values; nothing was updated"
    )


def check_finite(job: Job) -> None:
    """Raise FloatingPointError unless the gradient and the weights of an update are finite."""
    weights = job.lookups.weights
    for name, tensor in (("gradient", job.grad), ("per_sample_weights", weights)):
        if tensor is not None and not bool(tensor.isfinite().all()):
            raise not_finite(name, tensor.shape)


def check_tags(job: Job) -> None:
    """Raise ValueError unless the caches hold rows of their tables."""
    unknown = [(t.tags >= t.rows).any() | (t.tags < EMPTY).any() for t in job.tables]
    if bool(torch.stack(unknown).any()):
        raise unknown_resident()
