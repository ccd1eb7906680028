"""A second backward pass that computes only the gradients which the first one has not kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle


class KeptGradients:
    """Gradients of the first pass, up to a number of bytes: the last ones that it completes.

    Those belong to the first layers, so that a second pass need not go down to them.

    Args:
        budget: Bytes.
    """

    def __init__(self, budget: int) -> None:
        self._budget, self._nbytes = budget, 0
        self._of: dict[int, tuple[Tensor, Tensor]] = {}

    def __contains__(self, p: Tensor) -> bool:
        return id(p) in self._of

    def __len__(self) -> int:
        return len(self._of)

    def ids(self) -> Iterable[int]:
        """The ids of the parameters whose gradients are kept."""
        return self._of.keys()

    def add(self, p: Tensor, grad: Tensor) -> None:
        """Keep the gradient of a parameter, in place of those that came first."""
        nbytes = grad.untyped_storage().nbytes()
        if nbytes > self._budget:
            return
        self._of[id(p)] = p, grad
        self._nbytes += nbytes
        while self._nbytes > self._budget:
            _, dropped = self._of.pop(next(iter(self._of)))
            self._nbytes -= dropped.untyped_storage().nbytes()

    def take(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Parameters and gradients, which are kept no longer."""
        kept, self._of, self._nbytes = list(self._of.values()), {}, 0
        kept.reverse()
        while kept:
            yield kept.pop()

    def backward(
        self,
        losses: Sequence[Tensor],
        gradients: Sequence[Tensor | None] | None,
        *,
        retain_graph: bool,
    ) -> None:
        """``torch.autograd.backward`` for all other leaves; the whole graph is freed as ever.

        Parts of the graph that lead to kept gradients only are run with undefined gradients, which
        frees what they hold and computes nothing.
        """
        if not self._of or any(loss.grad_fn is None for loss in losses) or is_reentrant(losses):
            torch.autograd.backward(losses, gradients, retain_graph=retain_graph)
            return
        graph = _Graph(_roots(losses), self)
        with graph.cut(free=not retain_graph):
            # A leaf may stand in several places of the graph.
            if inputs := list({id(leaf): leaf for leaf in graph.inputs}.values()):
                torch.autograd.backward(losses, gradients, retain_graph=retain_graph, inputs=inputs)


def is_reentrant(losses: Sequence[Tensor]) -> bool:
    """Whether a reentrant checkpoint is part of the graph: it reaches leaves of its own.

    Such a graph takes no ``inputs``.
    """
    return any(_function(node) is CheckpointFunction for node in _postorder(_roots(losses)))


def may_nest(losses: Sequence[Tensor]) -> bool:
    """Whether a function of the graph may run a backward pass of its own, which knows no inputs.

    A reentrant checkpoint does, and any other function in Python may, but for torch's own and ours.
    """
    ours = ("torch", __name__.partition(".")[0])
    functions = {_function(node) for node in _postorder(_roots(losses))} - {None}
    return any(
        function is CheckpointFunction or function.__module__.partition(".")[0] not in ours
        for function in functions
    )


def leaves_of(losses: Sequence[Tensor]) -> list[Tensor]:
    """The leaves of the graph."""
    found = (getattr(node, "variable", None) for node in _postorder(_roots(losses)))
    return [leaf for leaf in found if isinstance(leaf, Tensor)]


def _roots(losses: Sequence[Tensor]) -> list[Node]:
    return [loss.grad_fn for loss in losses if loss.grad_fn is not None]


class _Graph:
    """Which nodes below the roots are needed: those that lead to a leaf whose gradient is not kept.

    Functions in Python other than this library's are needed in any case, for they may run backward
    passes of their own.

    Attributes:
        inputs: The leaves that the pass is to reach.
    """

    def __init__(self, roots: Sequence[Node], kept: KeptGradients) -> None:
        self._roots = roots
        # Nodes are looked up by identity, and stay the same objects while they are held here.
        self._needed: dict[Node, bool] = {}
        self._leaves: dict[Node, Tensor] = {}
        self.inputs: list[Tensor] = []
        for node in _postorder(roots):
            below = [self._needed[child] for child in _children(node)]
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, Tensor):
                self._leaves[node] = leaf
                below = [leaf not in kept]
            self._needed[node] = any(below) or not _is_known(node)

    @contextmanager
    def cut(self, *, free: bool) -> Iterator[None]:
        """Let no gradient pass where no needed node follows; ``free`` what those nodes hold."""
        self.inputs = [leaf for node, leaf in self._leaves.items() if self._needed[node]]
        for node in self._needed:
            if not _is_known(node) and not any(self._needed[below] for below in _children(node)):
                # Autograd runs only what leads to an input.
                self.inputs += self._leaves_below(node)
        handles: list[RemovableHandle] = []
        try:
            for node in self._border() if free else ():
                if any(map(_holds_tensors, _postorder([node]))):
                    handles.append(node.register_prehook(_undefined))
                    self.inputs += self._leaves_below(node)
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _leaves_below(self, node: Node) -> list[Tensor]:
        return [self._leaves[each] for each in _postorder([node]) if each in self._leaves]

    def _border(self) -> Iterable[Node]:
        """The first nodes, seen from the roots, that are not needed."""
        border = [root for root in self._roots if not self._needed[root]]
        for node, needed in self._needed.items():
            if needed:
                border += [child for child in _children(node) if not self._needed[child]]
        return dict.fromkeys(border)


def _undefined(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(None for _ in gradients)  # type: ignore[misc]


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _postorder(roots: Iterable[Node]) -> Iterator[Node]:
    """Each node below the roots once, after those that it leads to."""
    seen: set[Node] = set()
    for root in roots:
        stack = [(root, False)]
        while stack:
            node, done = stack.pop()
            if done:
                yield node
            elif node not in seen:
                seen.add(node)
                stack.append((node, True))
                stack += [(child, False) for child in _children(node)]


def _function(node: Node) -> type | None:
    """The function in Python whose backward pass a node is, if it is one."""
    return getattr(type(node), "_forward_cls", None)


def _is_known(node: Node) -> bool:
    function = _function(node)
    return function is None or function.__module__.startswith(__name__.partition(".")[0] + ".")


def _holds_tensors(node: Node) -> bool:
    """Whether a node may keep tensors until it is run: saved ones, or any if it is in Python."""
    return any(name == "saved_tensors" or name.startswith("_raw_saved_") for name in dir(node))
