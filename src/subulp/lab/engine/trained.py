"""Trained models, of any task, as what they are used for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal, Self

import torch
from torch import nn

from .config import RunConfig, check_range
from .loop import resolve_device, thread_count
from .machine import check_kernels
from .run_directory import CONFIG, read_config
from .saved_model import ModelName, SavedModel, Weights, choose_models, open_model
from .task import task_named

Form = Literal["jsonl", "tsv"]

LABELS = 5
"""Labels that are predicted of an instance if no number is given."""


@dataclass(frozen=True, eq=False)
class TrainedModel(ABC):
    """A trained model of a task, in ``eval()`` and without gradients.

    Attributes:
        saved: Where it comes from.
        model: The module.
        device: Where it computes.
    """

    saved: SavedModel
    model: nn.Module
    device: torch.device

    uses: ClassVar[str]
    """The command that uses such models, for messages."""

    @classmethod
    @abstractmethod
    def of(cls, saved: SavedModel, weights: Weights, device: torch.device) -> Self:
        """Build a model.

        Raises:
            ValueError: It is not what a run of the task writes.
        """

    @abstractmethod
    def measure(self, config: Any, data: str | None) -> dict[str, float]:
        """The metrics of the model on some data.

        Args:
            config: The configuration of its run.
            data: As the task's ``--data``; ``None`` is what the run has measured on.

        Raises:
            ValueError, OSError: The data cannot be used.
        """

    def predict_file(
        self,
        path: Path,
        out: BinaryIO,
        *,
        k: int | None = None,
        form: Form = "jsonl",
        batch: int = 256,
    ) -> int:
        """Write a prediction for each instance of a file.

        Args:
            path: The file.
            out: Where to write, UTF-8.
            k: Labels of an instance, where there are several; ``None`` is :data:`LABELS`, or as
                many as there are (default: ``None``).
            form: ``"jsonl"``: an object a line; ``"tsv"``: a header, then rows (default:
                ``"jsonl"``).
            batch: Instances at a time (default: 256).

        Returns:
            The number of instances.

        Raises:
            ValueError: The task predicts nothing, or the file is not what the model reads.
            OSError: The file cannot be read.
        """
        raise self._not_for("predict")

    def sample(
        self,
        prompt: str,
        length: int,
        *,
        temperature: float = 1.0,
        top: int | None = None,
        seed: int = 0,
    ) -> bytes:
        """Continue a text.

        Args:
            prompt: The text.
            length: Tokens to add.
            temperature: Divides the logits; 0 always takes the most probable token (default: 1).
            top: Draw from so many of the most probable tokens; ``None`` from all (default:
                ``None``).
            seed: Seed of what is drawn (default: 0).

        Returns:
            What was added, in UTF-8.

        Raises:
            ValueError: The task's models do not continue texts, or an argument is out of range.
        """
        raise self._not_for("sample")

    def _not_for(self, command: str) -> ValueError:
        return ValueError(
            f"a model of the task {self.saved.task} is not for `subulp {command}`: use "
            f"`subulp {self.uses}`"
        )


def load(
    run: Path,
    precision: str | None = None,
    seed: int | None = None,
    *,
    weights: Weights = "stored",
    device: str = "auto",
) -> TrainedModel:
    """The best model of a run directory, or the one that is asked for.

    Args:
        run: The run directory.
        precision: Variant of the model; ``None`` for any (default: ``None``).
        seed: Its seed; ``None`` for any (default: ``None``).
        weights: ``"stored"``, as they were measured, or ``"full"``, rebuilt in FP32 (default:
            ``"stored"``).
        device: ``"auto"``, ``"cpu"`` or ``"cuda"`` (default: ``"auto"``).

    Raises:
        FileNotFoundError: There is no run, or no trained model.
        ValueError: There is no model of this kind, or a file is damaged.
    """
    return load_named(run, choose_models(run, precision, seed)[0], weights, device)


def load_named(run: Path, name: ModelName, weights: Weights, device: str) -> TrainedModel:
    """The model of a name; see :func:`load`."""
    chosen = resolve_device(device)
    check_kernels(chosen)
    saved = open_model(run, name)
    module = import_module(f"subulp.lab.tasks.{saved.task}.trained")
    kind: type[TrainedModel] = module.Trained
    return kind.of(saved, weights, chosen)


def evaluate(
    run: Path, name: ModelName, *, data: str | None, weights: Weights, device: str
) -> dict[str, float]:
    """The metrics of a model of a run directory.

    Args:
        run: The run directory.
        name: The model.
        data: As the task's ``--data``; ``None`` is the run's own, whose digest is compared.
        weights: As in :func:`load`.
        device: As in :func:`load`.

    Raises:
        ValueError, OSError: The run, the model or the data cannot be used.
    """
    config, digest = read_config(run)
    trained = load_named(run, name, weights, device)
    if data is None:
        _check_data(run, config, digest)
    # The last bits of matrix products depend on the number of threads.
    with thread_count(config.threads), torch.no_grad():
        return trained.measure(config, data)


def _check_data(run: Path, config: RunConfig, digest: str) -> None:
    task = task_named(config.task)
    try:
        found = task.digest(task.load(config))
    except (ValueError, OSError) as error:
        raise ValueError(
            f"run={run}: {error}; give the data with --data, or change its path in {run / CONFIG}"
        ) from error
    if found != digest:
        raise ValueError(
            f"run={run} was trained on other data than there is now: give the data with --data"
        )


def labels_wanted(k: int | None, count: int) -> int:
    """How many labels to predict of an instance.

    Args:
        k: What was asked for; ``None`` is :data:`LABELS`, or all of them.
        count: Labels that there are.

    Raises:
        ValueError: There are fewer than were asked for, or none is asked for.
    """
    if k is None:
        return min(LABELS, count)
    check_range("k", k, 1, count)
    return k
