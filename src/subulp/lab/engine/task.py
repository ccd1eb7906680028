"""The interface between a task and the loop, the table and the plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...optim.base import Optimizer
from ...optim.rows.base import RowOptimizer
from .config import RunConfig
from .linear_operands import LinearConfig
from .metrics import Metric
from .mixture_log import MixtureLog, with_mixture_metrics
from .ranks import ALONE, Ranks

TASKS = {
    "lm": "Language model",
    "image": "Image classifier",
    "xmc": "Extreme classifier",
    "ctr": "Click-through-rate model",
}
"""Every task, and what the report calls it."""

_TASKS = "subulp.lab.tasks"


State = dict[str, Any]


class Stateful(Protocol):
    """A part of a run whose state is saved in checkpoints, as modules and optimizers are."""

    def state_dict(self) -> dict[str, Any]:
        """Its state: tensors and what JSON has, nested in any way."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Continue from a state that :meth:`state_dict` returned."""


class Split(Protocol):
    """What ranks share, as states of the model and of the rows' optimizer, if there is one.

    Attributes:
        prefix: Beginning of its names. Buffers that are not in the state dict are a rank's own.
    """

    prefix: str

    def join(self, model: State, rows: State | None) -> tuple[State, State | None]:
        """From what all ranks have, put together, to what one process would have."""

    def share(self, model: State, rows: State | None) -> tuple[State, State | None]:
        """From what one process would have to what this rank loads."""


@dataclass(frozen=True)
class Workload:
    """One run: what is trained, on what, and how it is judged.

    Attributes:
        model: The narrow model.
        optimizer: Optimizer of all parameters but rows that update themselves.
        steps: Training steps.
        eval_every: Steps between evaluations; the last step is always one.
        learning_rate: Step (from 0) to a share of the groups' learning rates.
        loss: Draws the next batch and returns its mean loss; its argument says whether
            the value will be read; otherwise it may be NaN. On several ranks, each returns a number
            of its own, whose mean over the ranks is that of the batch.
        evaluate: The metrics of the model as it is, by name.
        build: What the model is built from again, as plain JSON.
        save_shared: Writes what all models of a comparison share into a folder, and returns the
            names of its files (default: there is nothing).
        left_out: Names of tensors that training alone needs (default: none).
        loss_scale: Factor on the loss in the backward pass (default: 1).
        scaler: Finds that factor itself (default: none).
        rows: Optimizer of the rows that update themselves (default: none).
        bytes_per_parameter: Bytes by tensor and their total; without it those of ``optimizer``.
        simulated: The storage is wider than the format that it stands for, so neither memory nor
            time means anything (default: ``False``).
        parameters: Numbers of the model; ``None`` counts its parameters' elements, where packed
            ones are fewer (default: ``None``).
        steps_per_epoch: Steps of one pass over the training part; ``None`` where there are no such
            passes (default: ``None``).
        mix: What mixtures of representations decide: its metrics join those of ``evaluate``, and
            its state the checkpoints (default: there are none).
        inner_skips: Steps that a part with a scaler of its own skipped, in addition to those of
            ``optimizer`` (default: none).
        finish: Changes the model once, after its last step and checkpoint, and returns its metrics
            anew; the last record keeps those from before (default: nothing).
        parts: What else changes from step to step, such as the place in the data, by name; a run
            is resumed from their states and those of model, optimizers and scaler (default: none).
        split: What ranks share otherwise than as DTensors of what one process has (default:
            nothing).
    """

    model: nn.Module
    optimizer: Optimizer
    steps: int
    eval_every: int
    learning_rate: Callable[[int], float]
    loss: Callable[[bool], Tensor]
    evaluate: Callable[[], dict[str, float]]
    build: dict[str, Any]
    save_shared: Callable[[Path], Sequence[str]] | None = None
    left_out: tuple[str, ...] = ()
    loss_scale: float = 1.0
    scaler: torch.amp.GradScaler | None = None
    rows: RowOptimizer | None = None
    bytes_per_parameter: Callable[[], dict[str, float]] | None = None
    simulated: bool = False
    parameters: int | None = None
    steps_per_epoch: int | None = None
    mix: MixtureLog | None = None
    inner_skips: Callable[[], int] | None = None
    finish: Callable[[], dict[str, float]] | None = None
    parts: dict[str, Stateful] = field(default_factory=dict)
    split: Split | None = None

    def measure(self, ranks: Ranks = ALONE) -> dict[str, float]:
        """All metrics of the model as it is, by name; those of mixtures are means over ranks."""
        mixtures = {} if self.mix is None else self.mix.metrics()
        return self.evaluate() | {name: ranks.mean(value) for name, value in mixtures.items()}

    def skipped_steps(self) -> int:
        """Steps skipped so far because they were not finite."""
        return self.optimizer.skipped_steps + (self.inner_skips() if self.inner_skips else 0)


@dataclass(frozen=True)
class Decided:
    """What ``"auto"`` means in a comparison on this machine.

    Attributes:
        config: The comparison, with values in the place of ``"auto"``.
        record: Why, as plain JSON for the run's record (default: nothing was to be decided).
        notes: The same for the user, in lines (default: none).
    """

    config: RunConfig
    record: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Task(Protocol):
    """A module ``tasks.NAME.task``; its configuration is in ``tasks.NAME.config``, and what uses
    its trained models in ``tasks.NAME.trained``.

    With a function ``plot(config, data, directory)`` it adds figures of its own to the run
    directory. With a function ``decide(config, device)``, which returns a :class:`Decided`, it
    decides once, when a comparison begins, what depends on the machine. With a function
    ``check_ranks(config, ranks)`` it raises ValueError where several ranks cannot train a variant.
    """

    METRICS: tuple[Metric, ...]
    """The metrics that :attr:`Workload.evaluate` measures, in the order of the table; the
    first is plotted as the loss and decides the best checkpoint, the last compares with the
    baseline."""

    COUNTED: str
    """The part of the model that bytes are counted for; ``"parameter"`` is all of it."""

    @staticmethod
    def load(config: Any) -> Any:
        """Read the data that all runs share.

        Raises:
            ValueError, OSError: The data or a precision of ``config`` cannot be used.
        """

    @staticmethod
    def describe(data: Any) -> dict[str, Any]:
        """The data that runs share, as plain JSON: ``"name"``, and sizes of its parts."""

    @staticmethod
    def steps(config: Any, data: Any) -> int:
        """Training steps of each run."""

    @staticmethod
    def digest(data: Any) -> str:
        """Digest of the data: a run resumes only on the data it started with."""

    @staticmethod
    def least_memory(config: Any, data: Any, variant: str) -> int:
        """Bytes that a run of a variant takes at the very least, before it is built."""

    @staticmethod
    def build(
        config: Any,
        data: Any,
        variant: str,
        seed: int,
        device: torch.device,
        ranks: Ranks = ALONE,
    ) -> Workload:
        """One run's workload, from the seed alone; ``variant`` is one of ``config.variants``."""


def metrics_of(task: Task, config: RunConfig) -> tuple[Metric, ...]:
    """Metrics of a task in the runs of a configuration, with those of mixtures if it has any."""
    mixtures = isinstance(config, LinearConfig) and config.has_mixtures
    return with_mixture_metrics(task.METRICS) if mixtures else task.METRICS


def config_class(task: str) -> type[RunConfig]:
    """The configuration of the task of a name, one of :data:`TASKS`."""
    module = import_module(f"{_TASKS}.{task}.config")
    found = (v for v in vars(module).values() if isinstance(v, type) and issubclass(v, RunConfig))
    return next(kind for kind in found if getattr(kind, "task", None) == task)


def task_of(config: RunConfig) -> Task:
    """The task that a configuration belongs to."""
    return task_named(config.task)


def task_named(name: str) -> Task:
    """The task of a name, one of :data:`TASKS`."""
    # Imported by name: a worker process needs its own task and no other.
    task: Task = import_module(f"{_TASKS}.{name}.task")  # type: ignore[assignment]
    return task
