"""An optimizer's parameters: their places, and the buckets that one call updates."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..numerics import format_of
from ..ops.kinds import Remembered
from ..ops.memory_runs import MemoryRuns
from ..ops.pointers import check_plain, data_ptrs, is_plain_type
from ..ops.step.job import is_strict
from ..ops.strategy import Strategy
from . import shards
from .components import is_dense
from .options import strategy_for

# What tensors of one bucket have in common, each in every way that is checked.
_KIND: tuple[Callable[[Tensor], Hashable], ...] = (
    type,
    *map(attrgetter, ("dtype", "device", "layout")),
)

_alike: Remembered[bool] = Remembered()

_NBYTES = attrgetter("nbytes")

# What torch.compile and activation checkpointing put into names.
_WRAPPERS = frozenset(("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"))

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter stands in an optimizer.

    Attributes:
        group: Number of its group.
        index: Its position in the group.
        stream: The key of its random bits, see :func:`streams_of`.
    """

    group: int
    index: int
    stream: int


def places(groups: list[dict[str, Any]]) -> dict[int, Place]:
    """The places of all parameters of an optimizer's groups, by their id."""
    result: dict[int, Place] = {}
    first = 0
    for g, group in enumerate(groups):
        pairs = zip(group["params"], streams_of(group, first), strict=True)
        result |= {id(p): Place(g, i, stream) for i, (p, stream) in enumerate(pairs)}
        first += len(group["params"])
    return result


def streams_of(group: dict[str, Any], first: int) -> Sequence[int]:
    """The keys of the random bits of a group's parameters, each a word of Philox's key.

    A parameter that has a name draws by its name, so that it draws the same bits on a rank that has
    only some of the parameters; others draw by their position among all of the optimizer's.

    Args:
        group: The group.
        first: The position of its first parameter.
    """
    names = group.get("param_names")
    if names is None:
        return range(first, first + len(group["params"]))
    return list(map(_stream, names))


@cache
def _stream(name: str) -> int:
    """The 32 bits that stand for a name, without what wrappers of modules add to it."""
    return zlib.crc32(bare_name(name).encode())


def bare_name(name: str) -> str:
    """A parameter's name without what wrappers of modules add to it."""
    parts = name.split(".")
    while parts[:1] == ["module"] and len(parts) > 1:
        # DistributedDataParallel and DataParallel.
        del parts[0]
    return ".".join(part for part in parts if part not in _WRAPPERS)


def check_names(groups: list[dict[str, Any]]) -> None:
    """Raise ValueError if two names of an optimizer stand for the same random bits."""
    names = [name for group in groups for name in group.get("param_names") or ()]
    if not any(name.startswith("module.") for name in names):
        return
    known: dict[str, str] = {}
    for name in names:
        other = known.setdefault(bare_name(name), name)
        if other != name:
            raise ValueError(
                f"{other!r} and {name!r} are one name without what DistributedDataParallel and the "
                "like put before it, by which random bits are drawn: give the module called "
                "'module' another name, or pass parameters without names"
            )


def check_parameters(group: dict[str, Any]) -> None:
    """Raise an error unless every parameter of a group can have the group's precision."""
    for i, p in enumerate(group["params"]):
        where = _name(group, i)
        part = shards.local(p)
        check_plain(where, part)
        shards.check(where, p)
        if p.is_complex():
            raise ValueError(
                f"{where} is complex ({p.dtype}): narrow formats are real; optimize "
                "torch.view_as_real of it"
            )
        if p.is_inference():
            raise ValueError(
                f"{where} was made under torch.inference_mode(), where nothing notices that it "
                "changes: make the model outside of it"
            )
        if p.layout != torch.strided:
            raise ValueError(
                f"{where} has layout {p.layout}: only dense ones are updated; use to_dense()"
            )
        if not is_dense(part):
            raise ValueError(
                f"{where} has strides {part.stride()} for shape {tuple(part.shape)}: its elements "
                "do not fill one run of memory; use a contiguous parameter"
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
        folded: The moments already hold earlier gradients of this step, and have decayed for it.
        sharded: The parameters are DTensors.
        params: The parameters.
        grads: Their gradients; of DTensors, the parts that this rank holds.
        streams: The keys of their random bits.
        nbytes: Bytes of the gradients.
    """

    group: dict[str, Any]
    strategy: Strategy
    folded: bool = False
    sharded: bool = False
    params: list[Tensor] = field(default_factory=list, init=False)
    grads: list[Tensor] = field(default_factory=list, init=False)
    streams: list[int] = field(default_factory=list, init=False)
    nbytes: int = field(default=0, init=False)

    @cached_property
    def parts(self) -> Sequence[Tensor]:
        """What this rank holds of the parameters; to be asked for when all have been added."""
        return shards.parts(self.params) if self.sharded else self.params

    def add(self, params: Sequence[Tensor], grads: Sequence[Tensor], streams: Sequence[int]) -> int:
        """Add parameters of the bucket's kind, and return the bytes of their gradients."""
        self.params += params
        self.grads += grads
        self.streams += streams
        nbytes: int = sum(map(_NBYTES, grads))
        self.nbytes += nbytes
        return nbytes


def check_separate(bucket: Bucket, grads: Sequence[Tensor]) -> None:
    """Check the memory of a bucket's parameters, which a call updates at once.

    Args:
        bucket: The parameters.
        grads: Their gradients as the call reads them.

    Raises:
        ValueError: Parameters share memory, or a gradient lies in that of a parameter.
    """
    runs = MemoryRuns(data_ptrs("params", bucket.parts), map(_NBYTES, bucket.parts))
    met = None if runs.clash else runs.meet(data_ptrs("grads", grads), [g.nbytes for g in grads])
    if not (pair := runs.clash or met):
        return
    names = {id(p): _name(bucket.group, k) for k, p in enumerate(bucket.group["params"])}
    one, other = (names[id(bucket.params[k])] for k in pair)
    if met:
        raise ValueError(
            f"the gradient of {other} lies in the memory of {one}, and would be read while that is "
            "updated; nothing was updated. Give it a copy: p.grad = gradient.clone()"
        )
    if one == other:
        raise ValueError(
            f"{one} is in its group twice, and would step twice at once; nothing was "
            "updated. Leave one of the two out"
        )
    raise ValueError(
        f"{one} and {other} share memory, and would be updated at once; nothing was "
        "updated. Tie modules by giving both the same Parameter, instead of its .data"
    )


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
            grad: The gradient that it steps with, of its shape; of a DTensor, a DTensor too, or the
                part that this rank holds.
            folded: See :class:`Bucket` (default: ``False``).

        Returns:
            The bucket.

        Raises:
            TypeError: One of them wraps others, and is no DTensor; or the gradient is a DTensor and
                the parameter is not.
            ValueError: The gradient is sparse, complex or has a dtype that is no format of subulp.
        """
        sharded = not is_plain_type(type(p)) and shards.is_sharded(p)
        if sharded:
            grad = shards.gradient_part(p, grad)
        # Names take longer than checks.
        if not (is_plain_type(type(grad)) and (sharded or is_plain_type(type(p)))):
            check_plain(gradient_name(group, place), grad)
            check_plain(_name(group, place.index), p)
        if grad.layout != torch.strided:
            raise ValueError(
                f"{gradient_name(group, place)} has layout {grad.layout}: only dense gradients are "
                "taken (for embeddings, sparse=False)"
            )
        key = (place.group, p.dtype, grad.dtype, p.device, folded, sharded)
        bucket = self._buckets.get(key)
        if bucket is None:
            _check_gradient_dtype(group, place, grad.dtype)
            strategy = strategy_for(group["precision"], p.dtype)
            bucket = self._buckets[key] = Bucket(group, strategy, folded=folded, sharded=sharded)
        self.nbytes += bucket.add((p,), (grad,), (place.stream,))
        return bucket

    def add_group(self, number: int, group: dict[str, Any], first: int) -> None:
        """Add the parameters of a group that have a gradient, as :meth:`add` does one by one.

        Args:
            number: The group's number.
            group: The group.
            first: The position of its first parameter among all.
        """
        params = group["params"]
        grads = [p.grad for p in params]
        indices = list(compress(range(len(params)), [grad is not None for grad in grads]))
        if len(indices) < len(params):
            params, grads = [params[i] for i in indices], [grads[i] for i in indices]
        if not params:
            return
        streams = streams_of(group, first)
        places = (Place(number, i, streams[i]) for i in indices)
        self._add(group, places, params, grads, [streams[i] for i in indices[1:]])

    def add_all(
        self,
        group: dict[str, Any],
        places: Sequence[Place],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
    ) -> None:
        """Add parameters of one group, as :meth:`add` does one by one."""
        self._add(group, iter(places), params, grads, [place.stream for place in places[1:]])

    def _add(
        self,
        group: dict[str, Any],
        places: Iterator[Place],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        other_streams: list[int],
    ) -> None:
        if not _are_alike(params, grads):
            for place, p, grad in zip(places, params, grads, strict=True):
                self.add(group, place, p, grad)
            return
        # What is checked for the first holds for all.
        bucket = self.add(group, next(places), params[0], grads[0])
        if bucket.sharded:
            grads = list(shards.gradient_parts(params, grads))
        self.nbytes += bucket.add(params[1:], grads[1:], other_streams)

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


def _are_alike(params: Sequence[Tensor], grads: Sequence[Tensor]) -> bool:
    """Whether what is checked for the first parameter and its gradient holds for all."""
    key, tensors = (id(params[0]), len(params)), [*params, *grads]
    alike = _alike.get(key, tensors)
    if alike is None:
        alike = all(len(set(map(of, ts))) == 1 for ts in (params, grads) for of in _KIND)
        _alike.put(key, tensors, alike)
    return alike


def buckets_of(groups: list[dict[str, Any]]) -> Buckets:
    """The parameters of all groups that have a gradient.

    Raises:
        ValueError: See :meth:`Buckets.add`.
    """
    buckets, first = Buckets(), 0
    for g, group in enumerate(groups):
        buckets.add_group(g, group, first)
        first += len(group["params"])
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


def nonfinite_elsewhere() -> FloatingPointError:
    """The error for ranks whose own gradients are finite."""
    return FloatingPointError(
        "a gradient on another rank has NaN or infinite values; nothing was updated on any rank"
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
