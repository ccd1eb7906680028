"""An optimizer's parameters: their places, and the buckets that one call updates."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..numerics import format_of
from ..ops.pointers import check_plain, is_plain_type
from ..ops.step.job import is_strict
from ..ops.strategy import Strategy
from .components import is_dense
from .options import strategy_for

# What tensors of one bucket have in common, each in every way that is checked.
_KIND: tuple[Callable[[Tensor], Hashable], ...] = (
    type,
    *map(attrgetter, ("dtype", "device", "layout")),
)

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter stands in an optimizer.

    Attributes:
        group: Number of its group.
        index: Its position in the group.
        stream: Its position among all parameters, the key of its random bits.
    """

    group: int
    index: int
    stream: int


def places(groups: list[dict[str, Any]]) -> dict[int, Place]:
    """The places of all parameters of an optimizer's groups, by their id."""
    pairs = [(g, i, p) for g, group in enumerate(groups) for i, p in enumerate(group["params"])]
    return {id(p): Place(g, i, stream) for stream, (g, i, p) in enumerate(pairs)}


def check_parameters(group: dict[str, Any]) -> None:
    """Raise an error unless every parameter of a group can have the group's precision."""
    for i, p in enumerate(group["params"]):
        where = _name(group, i)
        check_plain(where, p)
        if p.is_complex():
            raise ValueError(
                f"{where} is complex ({p.dtype}): narrow formats are real; optimize "
                "torch.view_as_real of it"
            )
        if p.layout != torch.strided:
            raise ValueError(
                f"{where} has layout {p.layout}: only dense ones are updated; use to_dense()"
            )
        if not is_dense(p):
            raise ValueError(
                f"{where} has strides {p.stride()} for shape {tuple(p.shape)}: its elements do "
                "not fill one run of memory; use a contiguous parameter"
            )
        try:
            strategy = strategy_for(group["precision"], p.dtype)
            is_strict(group["arithmetic"], strategy, p.dtype)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None


@dataclass
class Bucket:
    """Parameters of one group, dtype and device, and their gradients, of one dtype.

    Attributes:
        group: The group.
        strategy: Its strategy for these parameters.
        params: The parameters.
        grads: Their gradients.
        streams: Their positions among all parameters.
        folded: The moments already hold earlier gradients of this step, and have decayed for it.
    """

    group: dict[str, Any]
    strategy: Strategy
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)
    folded: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients."""
        return sum(grad.nbytes for grad in self.grads)


class Buckets:
    """Parameters and their gradients, grouped by what one call can update.

    Attributes:
        nbytes: Bytes of all gradients.
    """

    def __init__(self) -> None:
        self._buckets: dict[tuple[Any, ...], Bucket] = {}
        self.nbytes = 0

    def add(
        self, group: dict[str, Any], place: Place, p: Tensor, grad: Tensor, *, folded: bool = False
    ) -> Bucket:
        """Add a parameter and its gradient to the bucket that it can be updated with.

        Args:
            group: The parameter's group.
            place: Its place.
            p: The parameter.
            grad: The gradient that it steps with, of its shape.
            folded: See :class:`Bucket` (default: ``False``).

        Returns:
            The bucket.

        Raises:
            TypeError: One of them is no plain tensor, as a DTensor is not.
            ValueError: The gradient is sparse, complex or has a dtype that is no format of subulp.
        """
        # A parameter may have been replaced by a sharded one since. Names take longer than checks.
        if not (is_plain_type(type(grad)) and is_plain_type(type(p))):
            check_plain(gradient_name(group, place), grad)
            check_plain(_name(group, place.index), p)
        if grad.layout != torch.strided:
            raise ValueError(
                f"{gradient_name(group, place)} has layout {grad.layout}: only dense gradients are "
                "taken (for embeddings, sparse=False)"
            )
        key = (place.group, p.dtype, grad.dtype, p.device, folded)
        bucket = self._buckets.get(key)
        if bucket is None:
            _check_gradient_dtype(group, place, grad.dtype)
            strategy = strategy_for(group["precision"], p.dtype)
            bucket = self._buckets[key] = Bucket(group, strategy, folded=folded)
        bucket.params.append(p)
        bucket.grads.append(grad)
        bucket.streams.append(place.stream)
        self.nbytes += grad.nbytes
        return bucket

    def add_group(self, number: int, group: dict[str, Any], first_stream: int) -> None:
        """Add the parameters of a group that have a gradient, as :meth:`add` does one by one.

        Args:
            number: The group's number.
            group: The group.
            first_stream: The stream of its first parameter.
        """
        params = group["params"]
        grads = [p.grad for p in params]
        indices = list(compress(range(len(params)), [grad is not None for grad in grads]))
        if len(indices) < len(params):
            params, grads = [params[i] for i in indices], [grads[i] for i in indices]
        places = (Place(number, i, first_stream + i) for i in indices)
        # What was checked for the first holds for all of its kind.
        if not all(len(set(map(of, ts))) == 1 for ts in (params, grads) for of in _KIND):
            for place, p, grad in zip(places, params, grads, strict=True):
                self.add(group, place, p, grad)
            return
        bucket = self.add(group, next(places), params[0], grads[0])
        bucket.params.extend(params[1:])
        bucket.grads.extend(grads[1:])
        bucket.streams.extend(first_stream + i for i in indices[1:])
        self.nbytes += sum(grad.nbytes for grad in grads[1:])

    def pop_largest(self) -> Bucket:
        """Remove and return the bucket with the most bytes of gradients."""
        key = max(self._buckets, key=lambda key: self._buckets[key].nbytes)
        bucket = self._buckets.pop(key)
        self.nbytes -= bucket.nbytes
        return bucket

    def clear(self) -> None:
        """Remove all buckets."""
        self._buckets.clear()
        self.nbytes = 0

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._buckets.values())

    def __len__(self) -> int:
        return len(self._buckets)


def buckets_of(groups: list[dict[str, Any]]) -> Buckets:
    """The parameters of all groups that have a gradient.

    Raises:
        ValueError: See :meth:`Buckets.add`.
    """
    buckets, stream = Buckets(), 0
    for g, group in enumerate(groups):
        buckets.add_group(g, group, stream)
        stream += len(group["params"])
    return buckets


def nonfinite_error(groups: list[dict[str, Any]], p: Tensor) -> FloatingPointError:
    """The error for a parameter whose gradient is not finite, under ``nonfinite="raise"``."""
    place = places(groups)[id(p)]
    return FloatingPointError(
        f"{gradient_name(groups[place.group], place)} (shape {tuple(p.shape)}) has NaN or "
        "infinite values; nothing was updated. Lower the learning rate or scale the loss, or "
        "pass nonfinite='skip' to leave such steps out or nonfinite='propagate' to let them "
        "through"
    )


def gradient_name(group: dict[str, Any], place: Place) -> str:
    """What errors call a gradient."""
    return f"the gradient of {_name(group, place.index)} of group {place.group}"


def _check_gradient_dtype(group: dict[str, Any], place: Place, dtype: torch.dtype) -> None:
    where = gradient_name(group, place)
    if dtype.is_complex:
        raise ValueError(f"{where} is complex ({dtype}): narrow formats are real")
    try:
        format_of(dtype)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _name(group: dict[str, Any], index: int) -> str:
    """What errors call a parameter: its name, if the user gave names."""
    names = group.get("param_names")
    return f"parameter {names[index]!r}" if names else f"parameter {index}"
