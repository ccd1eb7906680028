"""What each rank runs in the tests of comparisons that several ranks make."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from subulp.lab.compare import Comparison, compare, resume
from subulp.lab.engine.data_parallel import replicated, shard
from subulp.lab.engine.ranks import Ranks
from subulp.lab.engine.stopping import Interrupted
from subulp.lab.engine.task import Workload, task_of
from subulp.lab.engine.whole_state import full
from tests.ranks import mesh_of


def trained(
    config: Any,
    out: Path,
    parallel: str | None = None,
    *,
    stop: tuple[int, int] | None = None,
    again: bool = False,
    poison: tuple[int, int] | None = None,
) -> list[dict[str, Any]] | None:
    """The summaries of a comparison that is trained or resumed; ``None`` of one that was stopped.

    Args:
        config: The comparison.
        out: The run directory.
        parallel: As of ``compare``.
        stop: A rank, and a step in which it gets SIGTERM.
        again: Resume instead.
        poison: A rank, and a step in which its loss is infinite.
    """
    with ExitStack() as stack:
        if stop or poison:
            stack.enter_context(_in_steps(config, stop, poison))
        try:
            found = _train(config, out, parallel, again)
        except Interrupted:
            return None
    return [timeless(summary) for summary in found.summaries]


def _train(config: Any, out: Path, parallel: Any, again: bool) -> Comparison:
    if again:
        return resume(out, parallel=parallel)
    return compare(config, out=out, parallel=parallel, jobs=1)


def _in_steps(config: Any, stop: tuple[int, int] | None, poison: tuple[int, int] | None) -> Any:
    task = task_of(config)
    build: Callable[..., Workload] = task.build
    rank = dist.get_rank() if dist.is_initialized() else 0
    steps = 0

    def built(*arguments: Any) -> Workload:
        work = build(*arguments)

        def loss(value: bool) -> Any:
            nonlocal steps
            steps += 1
            if stop == (rank, steps):
                os.kill(os.getpid(), signal.SIGTERM)
            return work.loss(value) * (math.inf if poison == (rank, steps) else 1.0)

        return dataclasses.replace(work, loss=loss)

    return mock.patch.object(task, "build", built)


def timeless(summary: Any) -> dict[str, Any]:
    """A summary without what depends on time and memory, and with ``None`` for NaN."""
    left_out = ("seconds_per_step", "seconds_per_epoch", "peak_bytes", "category_peak_bytes")
    found = {k: v for k, v in dataclasses.asdict(summary).items() if k not in left_out}
    found["metrics"] = {k: None if v != v else v for k, v in summary.metrics.items()}  # noqa: PLR0124
    return found


def error_of(config: Any, out: Path, parallel: str | None = None, **named: Any) -> str:
    """The message of the error that a comparison ends with on this rank."""
    own = named.pop("on_rank", {}).get(dist.get_rank(), {})
    try:
        compare(dataclasses.replace(config, **own), out=out, parallel=parallel, **named)  # type: ignore[arg-type]
    except (ValueError, OSError, FloatingPointError) as error:
        return str(error)
    raise AssertionError("no error")


def gradients(parallel: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """What ranks average the gradients of a linear layer to, of a batch that they share."""
    ranks = Ranks(
        dist.get_rank(), dist.get_world_size(), parallel, mesh_of((dist.get_world_size(),))
    )
    model, x, y = linear_problem(dtype)
    shard(model, ranks)
    forward = replicated(model, ranks, fused=False)
    own = ranks.part(len(x))
    loss = ranks.weight(len(x)) * (forward(x[own]) - y[own]).float().square().mean()
    loss.backward()
    found = [full(p.grad).clone() for p in model.parameters() if p.grad is not None]
    assert ranks.mean(loss.item()) == pytest.approx(float((model(x) - y).float().square().mean()))
    return found


def linear_problem(dtype: torch.dtype) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    """A layer, seven examples, and what it is to make of them."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    x, y = (torch.randn(7, n, generator=generator).to(dtype) for n in (5, 3))
    return nn.Linear(5, 3).to(dtype), x, y
