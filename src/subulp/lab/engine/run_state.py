"""The state of a run between two steps: what a checkpoint holds, and how it is restored."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from ...diagnostics.watch import Watch
from ...nn.cached_table import CachedTable
from ...nn.row_table import RowTable
from ...ops.all_finite import are_finite
from ...optim import shards
from .metrics import Record
from .ranks import ALONE, Ranks
from .saved_state import numbers
from .task import State, Workload
from .whole_state import whole


@dataclass
class Tally:
    """Measurements of a run so far.

    Attributes:
        step: Steps made, including the current one.
        value: Loss of the latest step, ``None`` if it was not computed.
        losses: Steps and their losses, of those that computed it.
        seconds: Duration of each step.
        plain_seconds: Duration of each step that measured nothing else.
        metrics: What the task measured at the latest evaluation.
        records: The logged steps.
        peak_bytes: As of :class:`subulp.lab.engine.metrics.Summary`.
        category_peak_bytes: As there.
        rollbacks: Rollbacks to a checkpoint so far.
        skips_in_a_row: Skipped steps since the latest that was not.
        last_finite: The latest step whose loss was finite, and that loss.
    """

    step: int = 0
    value: float | None = None
    losses: list[tuple[int, float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    plain_seconds: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    category_peak_bytes: dict[str, int] = field(default_factory=dict)
    rollbacks: int = 0
    skips_in_a_row: int = 0
    last_finite: tuple[int, float] | None = None

    def train_loss(self, steps: int) -> float:
        """Mean loss of the last tenth of ``steps``, and at least of the last one."""
        tail = [value for step, value in self.losses if step > steps - max(1, steps // 10)]
        return math.fsum(tail) / len(tail)

    def seconds_per_step(self) -> float:
        """Median over the plain steps, or over all if there are none."""
        return statistics.median(self.plain_seconds or self.seconds)

    def mean_seconds(self) -> float:
        """Mean over the same."""
        return statistics.fmean(self.plain_seconds or self.seconds)

    def state_dict(self) -> dict[str, Any]:
        """All of it; lists with an entry for each step become tensors."""
        return {
            **{name: getattr(self, name) for name in self._plain()},
            "records": [asdict(record) for record in self.records],
            "loss_steps": torch.tensor([step for step, _ in self.losses], dtype=torch.int64),
            "losses": numbers([value for _, value in self.losses]),
            "seconds": numbers(self.seconds),
            "plain_seconds": numbers(self.plain_seconds),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from such a state."""
        for name in self._plain():
            setattr(self, name, state[name])
        self.records = [Record(**record) for record in state["records"]]
        steps, losses = state["loss_steps"].tolist(), state["losses"].tolist()
        self.losses = list(zip(steps, losses, strict=True))
        self.seconds = state["seconds"].tolist()
        self.plain_seconds = state["plain_seconds"].tolist()

    def _plain(self) -> list[str]:
        return [n for n in vars(self) if n not in ("losses", "seconds", "plain_seconds", "records")]


def state_of(
    work: Workload,
    schedulers: Sequence[LRScheduler],
    watch: Watch,
    tally: Tally,
    device: torch.device,
    ranks: Ranks = ALONE,
) -> dict[str, Any]:
    """The state of a run, as :func:`subulp.lab.engine.saved_state.flatten` takes it.

    The tensors are the run's own, and not copies. Those that ranks share are put together: all
    ranks call this, and what rank 0 gets is the state of the run, as one process has it.
    """
    model, rows = whole_rows(work, ranks)
    return {
        "model": model,
        "optimizer": whole(work.optimizer.state_dict(), ranks),
        "rows": rows,
        "scaler": None if work.scaler is None else work.scaler.state_dict(),
        "schedulers": [scheduler.state_dict() for scheduler in schedulers],
        "parts": {name: part.state_dict() for name, part in work.parts.items()},
        # Each rank's layers have decided about its own part of every batch.
        "mix": None if work.mix is None else ranks.gather(work.mix.state_dict()),
        "watch": whole(watch.state_dict(), ranks),
        "tally": tally.state_dict(),
        "random": {
            "cpu": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state() if device.type == "cuda" else None,
        },
    }


def restore(
    state: dict[str, Any],
    work: Workload,
    schedulers: Sequence[LRScheduler],
    watch: Watch,
    tally: Tally,
    device: torch.device,
    ranks: Ranks = ALONE,
) -> None:
    """Bring a new workload to the state of a checkpoint.

    Args:
        state: What :func:`state_of` returned for a run of the same configuration and data.
        work: A new workload of that run.
        schedulers: Its schedulers, fresh.
        watch: Fresh.
        tally: Fresh.
        device: Where the run trains.
        ranks: As many as there are now: the checkpoint may be of another number (default: one).

    Raises:
        ValueError: The state is of another model, optimizer or task.
    """
    try:
        model, rows = state["model"], state["rows"]
        if work.split is not None:
            model, rows = work.split.share(model, rows)
        load_model_state(work.model, model)
        work.optimizer.load_state_dict(state["optimizer"])
        if work.rows is not None:
            work.rows.load_state_dict(rows)
        if work.scaler is not None:
            work.scaler.load_state_dict(state["scaler"])
            # A scaler makes its tensors when it is first used; here it was, some steps ago.
            work.scaler.scale(torch.zeros((), device=device))
        # After the optimizers: schedulers know the rates that these have.
        for scheduler, saved in zip(schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        for name, part in work.parts.items():
            part.load_state_dict(state["parts"][name])
        if work.mix is not None:
            # Earlier versions knew one process, and kept its mix among the parts.
            mixes = state["mix"] if "mix" in state else [state["parts"]["mix"]]
            work.mix.load_state_dict(mixes[ranks.rank % len(mixes)])
        watch.load_state_dict(state["watch"])
        tally.load_state_dict(state["tally"])
        torch.set_rng_state(state["random"]["cpu"].clone())
        if device.type == "cuda":
            torch.cuda.set_rng_state(state["random"]["cuda"].clone())
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"the checkpoint does not fit this run: {error}") from error


def not_finite(model: nn.Module) -> str | None:
    """The name of a module or parameter with a weight that is not finite; ``None`` without one.

    Of what ranks share, this rank's part counts.
    """
    found: dict[str, list[Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, RowTable):
            found[name] = module.floats()
        elif isinstance(module, CachedTable):
            found[f"{name}.cache"] = [module.cache]
    tables = tuple(f"{name}." for name in found)
    for name, parameter in model.named_parameters():
        if not name.startswith(tables):
            found[name] = [shards.local(parameter.detach())]
    # One pass over all; the second one is for a run that ends.
    if are_finite([tensor for tensors in found.values() for tensor in tensors]):
        return None
    return next(name for name, tensors in found.items() if not are_finite(tensors))


def whole_rows(work: Workload, ranks: Ranks) -> tuple[State, State | None]:
    """The states of the model and of its rows' optimizer, as one process has them."""
    own = None if work.split is None else work.split.prefix
    model = whole(model_state(work.model, own), ranks)
    rows = None if work.rows is None else whole(work.rows.state_dict(), ranks)
    return (model, rows) if work.split is None else work.split.join(model, rows)


def model_state(model: nn.Module, own: str | None = None) -> dict[str, Tensor]:
    """The state dict and the buffers that are not in it, which a run needs to resume too.

    Args:
        model: The model.
        own: Beginning of the names of those that a rank keeps to itself (default: none).
    """
    state: dict[str, Tensor] = dict(model.state_dict())
    others = {name: b for name, b in model.named_buffers() if name not in state}
    return state | {n: b for n, b in others.items() if own is None or not n.startswith(own)}


def _placed(own: Tensor | None, value: Tensor) -> Tensor:
    """A whole value as a DTensor, where the model has one; rows of tables are split there."""
    if own is None or not shards.is_sharded(own) or own.shape != value.shape:
        return value
    return shards.part_of(own, shards.placed_like(own, value))


@torch.no_grad()
def load_model_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Take over what :func:`model_state` returned.

    Raises:
        KeyError, RuntimeError: Names or shapes differ.
    """
    own = model.state_dict()
    others = {name for name, _ in model.named_buffers()} - set(own)
    # A module may lack what its state brings, such as an order of its rows.
    brought = {name: value for name, value in state.items() if name not in others}
    model.load_state_dict({n: _placed(own.get(n), value) for n, value in brought.items()})
    for name, buffer in model.named_buffers():
        # Ranks that share a module keep some to themselves.
        if name in others and name in state:
            buffer.copy_(state[name])
