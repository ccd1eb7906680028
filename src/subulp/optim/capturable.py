"""Steps that a CUDA graph may hold: what they need, and what a capture would get wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..ops import backend, capture
from .observers import StepObserver
from .parameters import Bucket

State = dict[Tensor, Any]

# One call for many tensors: a loop of Python's takes longer.
_DEVICE, _DTYPE = attrgetter("device"), attrgetter("dtype")


def counters(bucket: Bucket, state: State, steps: list[Tensor]) -> list[Tensor]:
    """The step counters of a bucket, where its group has them: on the device, or on the CPU.

    Args:
        bucket: The parameters.
        state: The optimizer's; counters that lie elsewhere are moved in it.
        steps: The counters as they are.
    """
    device = bucket.params[0].device if bucket.group["capturable"] else torch.device("cpu")
    if set(map(_DEVICE, steps)) == {device}:
        return steps
    for p, step in zip(bucket.params, steps, strict=True):
        state[p]["step"] = step.to(device)
    return [state[p]["step"] for p in bucket.params]


def check_bucket(bucket: Bucket, *, fused: bool) -> None:
    """Raise unless the device can count the steps of a bucket.

    Args:
        bucket: The parameters, of a group that is capturable.
        fused: Whether the step is fused into the backward pass.

    Raises:
        ValueError: The parameters are DTensors, or ``lr`` is a tensor that lies elsewhere.
        RuntimeError: No Triton kernels update them, or the step is fused.
    """
    device, lr = bucket.params[0].device, bucket.group["lr"]
    if fused:
        raise RuntimeError(
            "a group has capturable=True while the step is fused into the backward pass: set it "
            "back to False, or remove the handle"
        )
    if bucket.sharded:
        raise ValueError(
            "capturable=True is not available for parameters that are DTensors: ranks agree on "
            "what concerns a whole tensor outside of a graph; leave capturable out"
        )
    if (choice := backend.choose(device)).backend != "triton":
        raise RuntimeError(
            "capturable=True is for parameters that Triton's kernels update, and those on "
            f"{device} are updated otherwise ({choice.reason}): move the model to a GPU, or leave "
            "capturable out"
        )
    if isinstance(lr, Tensor) and lr.device != device:
        raise ValueError(
            f"lr is a tensor on {lr.device}, and with capturable=True the step reads it on "
            f"{device}: move it there, or pass a float, which a CUDA graph keeps as it is"
        )


def check_counters(steps: Sequence[Tensor]) -> None:
    """Raise ValueError unless step counters are what the device counts in."""
    if set(map(_DTYPE, steps)) == {torch.float32} and not any(map(Tensor.dim, steps)):
        return
    for step in steps:
        if step.dtype != torch.float32 or step.dim():
            raise ValueError(
                f"a step counter is {step.dtype} of shape {tuple(step.shape)}: expected a float32 "
                "tensor (), as the optimizer makes it"
            )


def check_capture(
    groups: list[dict[str, Any]],
    state: State,
    observers: Sequence[StepObserver],
    *,
    scaled: bool,
) -> None:
    """Raise RuntimeError unless a step may go into the graph that is being captured.

    Args:
        groups: The optimizer's groups.
        state: Its states.
        observers: What observes its steps.
        scaled: A gradient scaler takes the step.
    """
    if not all(group["capturable"] for group in groups):
        raise capture.refusal()
    if scaled:
        raise RuntimeError(
            "a CUDA graph is being captured, and a gradient scaler has the host decide whether a "
            "step is skipped: capture the model's passes alone, and take scaled steps of subulp "
            "outside of the graph"
        )
    if observers:
        raise RuntimeError(
            "a CUDA graph is being captured, and what observes the steps (diagnostics.watch) "
            "would see this one alone: end it before the capture"
        )
    if not state:
        raise capture.not_ready("the parameters have no states yet")


@contextmanager
def nothing_new(state: State, device: torch.device) -> Iterator[None]:
    """While a graph is being captured, a step must find all its states as they are to stay.

    Args:
        state: The optimizer's; put back where that does not hold.
        device: Of the parameters.

    Raises:
        RuntimeError: A state was moved to another device or layout.
    """
    if not capture.is_under_way(device):
        yield
        return
    before = {p: dict(values) for p, values in state.items()}
    yield
    now = {p: {n: id(v) for n, v in values.items()} for p, values in state.items() if values}
    if now != {p: {n: id(v) for n, v in values.items()} for p, values in before.items() if values}:
        state.clear()
        state.update(before)
        raise capture.not_ready("a state would be moved to another device or layout")
