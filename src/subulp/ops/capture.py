"""CUDA graphs: whether one is being captured, and what it reads whenever it is replayed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

Tables = tuple[Tensor, ...]

_RECENT = 256
"""Tables that are found again, beyond those of graphs: a model has fewer buckets."""


def is_under_way(device: torch.device) -> bool:
    """Whether what is launched on ``device`` now goes into a CUDA graph, and does not run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def stream_of(device: torch.device) -> int:
    """The current stream of ``device``, 0 where there are none."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def refusal() -> RuntimeError:
    """The error for a step whose numbers the host computes."""
    return RuntimeError(
        "a CUDA graph is being captured, and would replay this step with the numbers that it has "
        "now, its count, learning rate and random bits: make the optimizer with capturable=True, "
        "or capture the model's passes alone, and take steps of subulp outside of the graph"
    )


def refusal_of_call() -> RuntimeError:
    """The error for a call of what no option makes fit for a graph: rows, fused steps, checks."""
    return RuntimeError(
        "a CUDA graph is being captured, and would replay this call with the numbers that it has "
        "now, addresses among them, and of an update its count, learning rate and random bits: "
        "tables, heads and their row optimizers, and steps inside the backward pass, have no "
        "capturable=True. Capture the rest of the model alone, and call these outside of the graph"
    )


def not_ready(what: str) -> RuntimeError:
    """The error for a capture that comes before what it needs.

    Args:
        what: What is missing.
    """
    return RuntimeError(
        f"a CUDA graph is being captured, and {what}, which a graph would do again at every "
        "replay: take a step before the capture, to warm up"
    )


class Held:
    """Tables on a device that live as long as an optimizer, for the graphs that read them.

    A table is found by what it holds. One that a capture finds was uploaded before, and is never
    given up; one that it does not find is copied by the graph itself, from memory that stays.
    """

    def __init__(self) -> None:
        self._recent: OrderedDict[tuple[int, Hashable], Tables] = OrderedDict()
        self._captured: list[Tables] = []

    def find(
        self, device: torch.device, key: Hashable, make: Callable[[], Tables], *, large: str = ""
    ) -> Tables:
        """The tables of a key: those that are there, or else what ``make`` makes.

        Args:
            device: Where they are to lie.
            key: All that they are made of.
            make: Uploads them.
            large: What they are, if no graph should copy them at every replay (default: none).

        Raises:
            RuntimeError: A graph is being captured, and tables that are large are not there yet.
        """
        if is_under_way(device):
            # By now all streams have been waited for.
            found = next((t for (_, known), t in self._recent.items() if known == key), None)
            if found is None and large:
                raise not_ready(f"{large} are not on {device} yet")
            # What a capture copies is nothing before the graph is replayed: none may find it.
            found = make() if found is None else found
            self.keep(device, found)
            return found
        # Memory is reused in the order of its stream: there, no kernel still reads what is dropped.
        place = stream_of(device), key
        tables = self._recent.pop(place, None) or make()
        self._recent[place] = tables
        if len(self._recent) > _RECENT:
            self._recent.popitem(last=False)
        return tables

    def keep(self, device: torch.device, tensors: Tables) -> None:
        """Keep what is read on ``device``, if that goes into a graph."""
        if is_under_way(device):
            self._captured.append(tensors)
