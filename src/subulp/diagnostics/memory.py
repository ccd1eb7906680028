"""Memory by category: what training keeps alive at its peak and over time, in bytes of tensors.

Counted from tensor storages rather than from an allocator: the same numbers on every device and in
every run, without caching, fragmentation or other libraries in them.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ..ops.graph_breaks import between_graphs

CATEGORIES = ("weights", "gradients", "states", "activations")
"""The categories of memory, in the order of tables."""


def track_memory(model: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> MemoryTracker:
    """Track every tensor of a training step, and count the live bytes by category.

    ::

        with track_memory(model, optimizer) as memory:
            loss = loss_function(model(x), y)
            memory.mark("backward")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        memory.peak_bytes["activations"]
        [moment.bytes["total"] for moment in memory.timeline if moment.mark == "backward"]

    Categories:

    - ``weights``: parameters and buffers of the model;
    - ``gradients``: gradients of parameters, from the moment that autograd computes them;
    - ``states``: tensors of the optimizers' ``state``, the lower components of weights included;
    - ``activations``: everything else created inside the block, temporaries included.

    Tensors that exist before the block count if they belong to the model or the optimizer. Scratch
    memory inside a native kernel is not a tensor and does not count. Every operation pays for the
    bookkeeping: track a step or two, not a whole training run. The arithmetic does not change.

    Args:
        model: Its parameters, gradients and buffers are counted.
        optimizers: Their states are counted.
    """
    return MemoryTracker(model, *optimizers)


@dataclass(frozen=True)
class Moment:
    """Live bytes after one allocation, release or resize.

    Attributes:
        seconds: Since the block was entered.
        mark: The latest label given to :meth:`MemoryTracker.mark`; empty before the first.
        bytes: Live bytes of each category, and their sum as ``"total"``.
    """

    seconds: float
    mark: str
    bytes: dict[str, int]


class MemoryTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager that :func:`track_memory` returns; read it after the block.

    Every block starts anew.

    Attributes:
        peak_bytes: Bytes of each category at the moment when all of them together were highest,
            and their sum as ``"total"``.
        category_peak_bytes: The highest value of each category on its own, and of the total.
    """

    def __init__(self, model: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = dict.fromkeys((*CATEGORIES, "total"), 0)
        self.category_peak_bytes = dict(self.peak_bytes)
        self._model = model
        self._optimizers = optimizers
        self._storages = _StorageLog()
        self._hooks: list[Any] = []

    @property
    def timeline(self) -> list[Moment]:
        """Every change of the live bytes, in order; what was there before the block comes first."""
        return _timeline(self._storages.changes)

    def mark(self, label: str) -> None:
        """Label what follows, for example as the forward pass of the second step.

        Args:
            label: What :attr:`Moment.mark` says until the next call.
        """
        self._storages.mark = label

    def __enter__(self) -> Self:
        self._storages = _StorageLog()
        self._classify()
        # A gradient is recognised when autograd hands it over, and again once it is accumulated:
        # autograd keeps the tensor that it computed, or a copy.
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                self._hooks += [
                    parameter.register_hook(self._gradient),  # type: ignore[no-untyped-call]
                    parameter.register_post_accumulate_grad_hook(self._gradient_of),  # type: ignore[no-untyped-call]
                ]
        for optimizer in self._optimizers:
            self._hooks.append(optimizer.register_step_post_hook(lambda *_: self._classify()))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(exc_type, exc_value, traceback)  # type: ignore[no-untyped-call]
        self._classify()
        for hook in self._hooks:
            hook.remove()
        self._storages.stop()
        self.peak_bytes, self.category_peak_bytes = _peaks(self._storages.changes)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch need not keep the next method out of graphs, which would import Dynamo: it is."""
        return False

    @between_graphs
    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if _has_dtensor(types):
            # What DTensor makes of it on this rank comes here instead, temporaries and all.
            return NotImplemented
        kwargs = kwargs or {}
        # A view of a tensor from before the block creates nothing.
        borrowed = {s for tensor in _tensors((args, kwargs)) for s in _storages(tensor)}
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            self._storages.see(tensor, borrowed=borrowed)
        return result

    def _classify(self) -> None:
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            self._storages.see(tensor, "weights")
        for optimizer in self._optimizers:
            for tensor in _tensors(list(optimizer.state.values())):
                self._storages.see(tensor, "states")
        for parameter in self._model.parameters():
            self._gradient_of(parameter)

    def _gradient_of(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._gradient(parameter.grad)

    def _gradient(self, grad: Tensor | None) -> None:
        # None where a function gave no gradient.
        if grad is not None:
            self._storages.see(grad, "gradients")


@dataclass
class _Entry:
    """A storage: how many bytes it holds now, and the category that it turned out to be."""

    nbytes: int = 0
    category: str = "activations"


class _Change(NamedTuple):
    """One change of the bytes of one storage."""

    entry: _Entry
    nbytes: int
    seconds: float
    mark: str


class _StorageLog:
    """Every change of live bytes, in order, with the storage that it belongs to.

    A storage's category is known only after its birth (a gradient is a nameless tensor until it is
    accumulated), so the log keeps the storage's entry and is summed up when all is known.
    """

    def __init__(self) -> None:
        self.changes: list[_Change] = []
        self.mark = ""
        self._start = time.perf_counter()
        self._alive: dict[int, _Entry] = {}
        self._finalizers: dict[int, weakref.finalize[..., Any]] = {}

    def see(
        self,
        tensor: Tensor,
        category: str | None = None,
        *,
        borrowed: Container[torch.UntypedStorage] = (),
    ) -> None:
        """Note the storages of ``tensor``; those that are ``borrowed`` and unknown stay unknown."""
        for storage in _storages(tensor):
            key = id(storage)
            entry = self._alive.get(key)
            if entry is None:
                if storage in borrowed:
                    continue
                entry = self._alive[key] = _Entry()
                self._finalizers[key] = weakref.finalize(storage, self._free, key)
            if category is not None:
                entry.category = category
            # Storages can be resized, in place, by out= arguments and by resize_().
            self._change(entry, storage.nbytes() - entry.nbytes)

    def stop(self) -> None:
        """Forget the storages that are still alive; the changes stay."""
        for finalizer in self._finalizers.values():
            finalizer.detach()
        self._alive.clear()
        self._finalizers.clear()

    def _free(self, key: int) -> None:
        entry = self._alive.pop(key)
        del self._finalizers[key]
        self._change(entry, -entry.nbytes)

    def _change(self, entry: _Entry, nbytes: int) -> None:
        if nbytes:
            entry.nbytes += nbytes
            seconds = time.perf_counter() - self._start
            self.changes.append(_Change(entry, nbytes, seconds, self.mark))


def _has_dtensor(types: Iterable[type]) -> bool:
    # There is none as long as nothing has imported it, or while its module is being imported.
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return dtensor is not None and any(issubclass(kind, dtensor) for kind in types)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor))


def _storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Storages behind a tensor: for a sparse tensor or a wrapper subclass, those of its parts.

    Tensors without memory have none: those on the meta device, and those that stand for others
    while DTensor finds out shapes, which lie there whatever they say.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        # A DTensor names its mesh among them.
        for part in parts:
            if isinstance(part, Tensor):
                yield from _storages(part)
        return
    held = [tensor]
    if tensor.layout == torch.sparse_coo:
        held = [tensor._indices(), tensor._values()]
    elif tensor.layout != torch.strided:
        return
    for part in held:
        storage = part.untyped_storage()
        if storage.device.type != "meta":
            yield storage


def _running(changes: list[_Change]) -> Iterator[tuple[_Change, dict[str, int]]]:
    """Every change and the live bytes after it; the dictionary is the same one throughout."""
    now = dict.fromkeys((*CATEGORIES, "total"), 0)
    for change in changes:
        for name in (change.entry.category, "total"):
            now[name] += change.nbytes
        yield change, now


def _timeline(changes: list[_Change]) -> list[Moment]:
    return [Moment(c.seconds, c.mark, dict(now)) for c, now in _running(changes)]


def _peaks(changes: list[_Change]) -> tuple[dict[str, int], dict[str, int]]:
    at_peak = dict.fromkeys((*CATEGORIES, "total"), 0)
    highest = dict(at_peak)
    for _, now in _running(changes):
        highest = {name: max(value, now[name]) for name, value in highest.items()}
        if now["total"] > at_peak["total"]:
            at_peak = dict(now)
    return at_peak, highest
