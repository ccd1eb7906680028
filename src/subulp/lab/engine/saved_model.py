"""Trained models in a run directory: written when a run ends, read by whoever uses them.

``RUN/models`` has three files for each run, beside what the task's models share:

=================================  ==================================================
``NAME.safetensors``               everything that the model consists of: dense weights in FP32,
                                   rebuilt from all components that the optimizer kept; the rows
                                   of tables as they are stored; buffers
``NAME.stored.safetensors``        the dense weights as the run stored them, where that is
                                   something else: what it has measured
``NAME.json``                      what the model is built from, what it has measured, and size
                                   and SHA-256 sum of every file that it needs
=================================  ==================================================

``NAME`` is ``VARIANT-seed-SEED``. Nothing is pickled, and every byte is checked before it is used:
someone else's model executes no code.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ...optim.base import Optimizer
from .config import check_names
from .files import replacing, write_text
from .ranks import ALONE, Ranks
from .run_checkpoints import run_name
from .run_directory import MODELS, task_of_run
from .run_state import whole_rows
from .sealed import DamagedError, check_file, fingerprint, read_sealed, sealed
from .task import TASKS, Workload
from .typed_files import checked
from .whole_state import full

FORMAT = "subulp model 1"

Weights = Literal["stored", "full"]
"""``"stored"``: as the run stored them, so that the model computes what was measured; ``"full"``:
in FP32, rebuilt from all components."""

T = TypeVar("T")

_NAME = re.compile(r"(.+)-seed-(\d+)\.json")


class ModelName(NamedTuple):
    """Which of a directory's models."""

    variant: str
    seed: int

    def __str__(self) -> str:
        return f"precision={self.variant} seed={self.seed}"


# ---------------------------------------------------------------------------------- writing


def save_model(
    folder: Path,
    task: str,
    name: ModelName,
    work: Workload,
    metrics: Mapping[str, float],
    order: float | None,
    ranks: Ranks = ALONE,
) -> None:
    """Write a trained model, its description last: with it, everything is there.

    On several ranks, all call this, and rank 0 writes.

    Args:
        folder: ``RUN/models``.
        task: Name of the task.
        name: Variant and seed.
        work: The run, after its last step.
        metrics: What it has measured.
        order: A number that is lowest for the best model; ``None`` without one.
        ranks: Those that have the model (default: this process alone).

    Raises:
        OSError: A file cannot be written.
    """
    whole, stored = weights_of(work, ranks)
    if ranks.rank > 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    stem = run_name(*name)
    files = [*(work.save_shared(folder) if work.save_shared else ()), f"{stem}.safetensors"]
    _save(folder / files[-1], whole)
    if stored:
        files.append(f"{stem}.stored.safetensors")
        _save(folder / files[-1], stored)
    description = {
        "format": FORMAT,
        "task": task,
        "variant": name.variant,
        "seed": name.seed,
        "build": work.build,
        "metrics": {n: value for n, value in metrics.items() if math.isfinite(value)},
        "rank": order,
        "files": {file: fingerprint(folder / file) for file in files},
    }
    write_text(folder / f"{stem}.json", sealed(description))


def weights_of(work: Workload, ranks: Ranks = ALONE) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a model, with dense weights in FP32; and these as they are stored.

    The second one has those alone that differ.
    """
    state, _ = whole_rows(work, ranks)
    whole = {name: tensor for name, tensor in state.items() if name not in work.left_out}
    own = {id(p) for group in work.optimizer.param_groups for p in group["params"]}
    wide = {n: full(t) for n, t in _wide(work.model, "", work.optimizer, own)}
    stored = {name: whole[name] for name, tensor in wide.items() if _differ(whole[name], tensor)}
    return whole | wide, stored


def _wide(
    module: nn.Module, prefix: str, optimizer: Optimizer, own: set[int]
) -> Iterable[tuple[str, Tensor]]:
    """The parameters of an optimizer in FP32; modules that have others are not widened whole."""
    parameters = list(module.parameters())
    if not any(id(p) in own for p in parameters):
        return
    if all(id(p) in own for p in parameters):
        names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        for name, tensor in optimizer.full_precision_state_dict(module).items():
            if name in names:
                yield prefix + name, tensor
        return
    for name, child in module.named_children():
        yield from _wide(child, f"{prefix}{name}.", optimizer, own)


def _differ(stored: Tensor, wide: Tensor) -> bool:
    if stored.dtype != wide.dtype:
        return True
    # By their bits: a NaN is what it is.
    return not torch.equal(stored.detach().view(torch.int32), wide.view(torch.int32))


def _save(path: Path, tensors: Mapping[str, Tensor]) -> None:
    seen: set[int] = set()
    apart: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        kept = tensor.detach().cpu().contiguous()
        memory = kept.untyped_storage().data_ptr()
        # Safetensors takes no two views of one memory.
        apart[name] = kept.clone() if memory in seen or kept.numel() == 0 else kept
        seen.add(memory)
    with replacing(path) as unfinished:
        save_file(apart, unfinished)
        # It makes a file that its owner alone may read.
        unfinished.chmod(0o666 & ~_umask(path.parent))


def _umask(folder: Path) -> int:
    """What a new folder's mode lacks: the process's own mask can only be read by setting it."""
    return ~folder.stat().st_mode & 0o777


# ---------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class SavedModel:
    """A trained model in a run directory, all files of which have been checked.

    Attributes:
        folder: ``RUN/models``.
        task: Name of the task.
        name: Variant and seed.
        build: What the task builds the model from.
        metrics: What was measured after the last step.
        files: Names of the files that it needs.
    """

    folder: Path
    task: str
    name: ModelName
    build: dict[str, Any]
    metrics: dict[str, float]
    files: tuple[str, ...]

    @property
    def path(self) -> Path:
        """The description, for messages."""
        return self.folder / f"{run_name(*self.name)}.json"

    def tensors(self, weights: Weights) -> dict[str, Tensor]:
        """The tensors of the model, on the CPU.

        Raises:
            ValueError: A file is damaged, or ``weights`` is unknown.
        """
        check_names("weights", (weights,), ("stored", "full"))
        stem = run_name(*self.name)
        names = [f"{stem}.safetensors"]
        if weights == "stored" and f"{stem}.stored.safetensors" in self.files:
            names.append(f"{stem}.stored.safetensors")
        found: dict[str, Tensor] = {}
        for name in names:
            try:
                # Copies: products of mapped tensors, which may lie anywhere, have other last bits.
                found |= {n: t.clone() for n, t in load_file(self.shared(name)).items()}
            except SafetensorError as error:
                raise self.damaged(error) from None
        return found

    def shared(self, name: str) -> Path:
        """A file that the models of the directory share.

        Raises:
            ValueError: The model does not name it.
        """
        if name not in self.files:
            raise self.damaged(f"it does not name {name}")
        return self.folder / name

    def fill(self, model: nn.Module, weights: Weights) -> None:
        """Give a model its tensors, in the dtypes in which they are stored.

        Args:
            model: Built from :attr:`build`; its parameters and buffers may be on the device
                ``"meta"``, as they are replaced.
            weights: As of :meth:`tensors`.

        Raises:
            ValueError: The model has other tensors.
        """
        tensors, kept = self.tensors(weights), set(model.state_dict())
        try:
            # Buffers that are in no state dict count what happened in training.
            model.load_state_dict({n: t for n, t in tensors.items() if n in kept}, assign=True)
            for name, buffer in model.named_buffers():
                if name not in kept and not buffer.is_meta:
                    buffer.copy_(tensors[name])
        except (RuntimeError, KeyError) as error:
            raise self.damaged(error) from None
        model.requires_grad_(False).eval()

    def settings(self, kind: TypeAdapter[T]) -> T:
        """What the model is built from, as a type has it.

        Raises:
            ValueError: It is something else.
        """
        return checked(kind, self.build, lambda _: f"{self.path}: build")

    def damaged(self, reason: object) -> ValueError:
        """An error about a model that cannot be built."""
        return ValueError(f"{self.path} describes no model of {self.task} ({reason}): train again")


def model_names(run: Path) -> list[ModelName]:
    """The trained models of a run directory, sorted.

    Raises:
        FileNotFoundError: There is no such folder, it holds no run, or the run no model.
    """
    if not run.is_dir():
        raise FileNotFoundError(
            f"run={run} is not a folder: give the run directory that `subulp train` wrote"
        )
    if task_of_run(run) is None:
        raise FileNotFoundError(
            f"run={run} holds no run: give the run directory that `subulp train` wrote"
        )
    folder = run / MODELS
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    found = [match for file in files if (match := _NAME.fullmatch(file.name))]
    if not found:
        raise FileNotFoundError(
            f"run={run} holds no trained model: no training has finished there; train again, or "
            f"continue with subulp train --resume {run}"
        )
    return sorted(ModelName(match[1], int(match[2])) for match in found)


def choose_models(
    run: Path, variant: str | None = None, seed: int | None = None
) -> list[ModelName]:
    """The models of a run directory that are meant, the best one first.

    Args:
        run: The run directory.
        variant: Its variant, or ``None`` for any (default: ``None``).
        seed: Its seed, or ``None`` for any (default: ``None``).

    Raises:
        FileNotFoundError: There is none at all.
        ValueError: There is none of this variant and seed, or a description is damaged.
    """
    names = model_names(run)
    fitting = [m for m in names if variant in (None, m.variant) and seed in (None, m.seed)]
    if not fitting:
        raise ValueError(
            f"run={run} holds no trained model of this kind; choose with --precision and --seed "
            f"one of: {', '.join(map(str, names))}"
        )
    if len(fitting) == 1:
        return fitting
    ranks = {name: _described(run / MODELS, name)["rank"] for name in fitting}
    # Without a finite measure it is the last choice.
    return sorted(fitting, key=lambda name: (ranks[name] is None, ranks[name] or 0.0))


def open_model(run: Path, name: ModelName) -> SavedModel:
    """Check all files of a trained model.

    Raises:
        FileNotFoundError: Its description is missing.
        ValueError: A file is missing, damaged, or of another model.
    """
    folder = run / MODELS
    fields = _described(folder, name)
    for file, expected in fields["files"].items():
        try:
            check_file(folder / file, expected)
        except DamagedError as error:
            raise ValueError(f"{error}: train again") from None
    return SavedModel(
        folder, fields["task"], name, fields["build"], fields["metrics"], tuple(fields["files"])
    )


def _described(folder: Path, name: ModelName) -> dict[str, Any]:
    """The fields of a description, after a check that they are there."""
    path = folder / f"{run_name(*name)}.json"
    try:
        fields = read_sealed(path)
    except DamagedError as error:
        raise ValueError(f"{error}: train again") from None
    match fields:
        case {
            "format": "subulp model 1",
            "task": str(task),
            "variant": str(variant),
            "seed": int(seed),
            "build": dict(),
            "metrics": dict(),
            "rank": float() | int() | None,
            "files": dict(files),
        } if task in TASKS and all(map(_is_fingerprint, files.items())):
            if (variant, seed) != name:
                raise ValueError(
                    f"{path} is the model precision={variant} seed={seed}: it was renamed; call it "
                    f"{run_name(variant, seed)}.json again"
                )
            return fields
    raise ValueError(
        f"{path} is not a description as {FORMAT!r} writes it: another version of subulp wrote it; "
        "train again"
    )


def _is_fingerprint(entry: tuple[str, Any]) -> bool:
    name, found = entry
    # Beside the description or in a folder there, and nowhere else.
    parts = name.split("/")
    match found:
        case {"size": int(), "sha256": str()}:
            return "\0" not in name and not {"", ".", ".."} & set(parts)
    return False
