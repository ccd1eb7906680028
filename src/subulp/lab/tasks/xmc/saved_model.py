"""Trained models in a run directory: written by a run, read to predict.

``RUN/models`` holds what all runs share once: the encoder's settings and what turns texts or
features into its input, and the label texts, one JSON string per line. Each run adds
``PRECISION-seed-SEED.safetensors`` and, last, a JSON file of the same name that says how to read
it. Nothing is pickled, so opening someone else's run executes none of their code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ....nn import ExtremeClassifier
from ....numerics import Format
from ....numerics.logistic import sigmoid
from ...data.lines import TextLines
from ...engine.files import replacing, write_text
from ...engine.linear_operands import TORCHAO, Variant
from ...engine.run_directory import MODELS, task_of_run
from ...engine.typed_files import saved_json
from .linear_layers import change_layers
from .preprocessing import SETTINGS, Preprocessor, load_preprocessor, save_preprocessor, to_device
from .readers.dataset import Texts
from .renee import ReneeClassifier

LABELS = "labels.jsonl"

_FORMAT = "subulp xmc model 2"
_NAME = re.compile(r"(.+)-seed-(\d+)\.json")
# What only training needs.
_LEFT_OUT = (
    "head.momentum",
    "head.loss_scale",
    "head.finite_steps",
    "head.skipped_steps",
    "head._extra_state",
)

Head = ExtremeClassifier | ReneeClassifier


class RunName(NamedTuple):
    """Which of a directory's runs."""

    precision: str
    seed: int

    def __str__(self) -> str:
        return f"precision={self.precision} seed={self.seed}"


def save_model(
    path: Path,
    model: nn.ModuleDict,
    variant: Variant,
    preprocessor: Preprocessor[Any],
    label_texts: Texts | None,
) -> None:
    """Write a trained model, and beside it what its directory has not yet.

    Weights are saved as they are stored, not widened by what the optimizer keeps beside them: so
    the model predicts bit for bit what the run has measured, and the file is no larger than it.

    Args:
        path: ``RUN/models/PRECISION-seed-SEED``; suffixes are appended.
        model: ``encoder`` and ``head``.
        variant: What the encoder's linear layers multiply.
        preprocessor: The encoder's.
        label_texts: Text of each label, if there are any.
    """
    _save_shared(path.parent, preprocessor, label_texts)
    tensors = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if name not in _LEFT_OUT
    }
    with replacing(_tensors(path)) as unfinished:
        save_file(tensors, unfinished)
        # It makes a file that its owner alone may read.
        unfinished.chmod((path.parent / SETTINGS).stat().st_mode)
    head = model["head"]
    assert isinstance(head, Head)
    description = {
        "format": _FORMAT,
        "head": _describe(head),
        # The rounding of its products is part of what was measured.
        "encoder": variant.settings(),
    }
    write_text(_description(path), json.dumps(description, indent=2) + "\n")


def _save_shared(folder: Path, preprocessor: Preprocessor[Any], label_texts: Texts | None) -> None:
    """What all runs have in common; runs that end at once write the same."""
    folder.mkdir(parents=True, exist_ok=True)
    if label_texts is not None and not (folder / LABELS).exists():
        with (
            replacing(folder / LABELS) as unfinished,
            unfinished.open("w", encoding="ascii") as file,
        ):
            file.writelines(json.dumps(text) + "\n" for text in label_texts)
    if not (folder / SETTINGS).exists():
        save_preprocessor(preprocessor, folder)


@dataclass(frozen=True, eq=False)
class SavedModel:
    """A trained model that predicts.

    Attributes:
        preprocessor: Texts, or given features, to the encoder's input.
        model: ``encoder`` and ``head``, in ``eval()``.
        label_texts: Text of each label as JSON, if the data set had any.
    """

    preprocessor: Preprocessor[Any]
    model: nn.ModuleDict
    label_texts: TextLines | None

    @property
    def num_labels(self) -> int:
        """Number of labels."""
        head = self.model["head"]
        assert isinstance(head, Head)
        return head.num_labels

    @torch.no_grad()
    def topk(self, instances: Any, k: int) -> tuple[Tensor, Tensor]:
        """The most probable labels of some instances.

        Args:
            instances: ``batch`` of them, as ``preprocessor`` reads them: texts or features.
            k: How many labels, at most ``num_labels``.

        Returns:
            Probabilities, FP32 ``(batch, k)``, descending: logistic functions of the logits, each
            label on its own; and labels, int64 ``(batch, k)``.
        """
        encoder, head = self.model["encoder"], self.model["head"]
        assert isinstance(head, Head)
        device = next(encoder.parameters()).device
        logits, labels = head.topk(encoder(to_device(self.preprocessor.read(instances), device)), k)
        return sigmoid(logits), labels

    def names(self, labels: Sequence[int]) -> list[str] | None:
        """Texts of labels; ``None`` if the data set had none."""
        if self.label_texts is None:
            return None
        return [json.loads(text) for text in self.label_texts.read(labels)]


def saved_models(run: Path) -> list[RunName]:
    """The trained models of a run directory, sorted.

    Raises:
        FileNotFoundError: There is no such folder, it holds no run, or the run no model.
        ValueError: The run is of another task.
    """
    if not run.is_dir():
        raise FileNotFoundError(
            f"run={run} is not a folder: give the run directory that `subulp train xmc` wrote"
        )
    task = task_of_run(run)
    if task is None:
        raise FileNotFoundError(
            f"run={run} holds no run: give the run directory that `subulp train xmc` wrote"
        )
    if task != "xmc":
        raise ValueError(f"run={run} is of the task {task}: only runs of xmc predict")
    folder = run / MODELS
    files = folder.iterdir() if folder.is_dir() else ()
    found = [match for file in files if (match := _NAME.fullmatch(file.name))]
    if not found:
        raise FileNotFoundError(
            f"run={run} holds no trained model: no training has finished there; train again"
        )
    return sorted(RunName(match[1], int(match[2])) for match in found)


def choose_model(run: Path, precision: str | None, seed: int | None) -> RunName:
    """The one model of a run directory that is meant.

    Args:
        run: The run directory.
        precision: Its precision, or ``None`` for any.
        seed: Its seed, or ``None`` for any.

    Raises:
        FileNotFoundError: There is none.
        ValueError: There is none of this precision and seed, or more than one.
    """
    models = saved_models(run)
    fitting = [m for m in models if precision in (None, m.precision) and seed in (None, m.seed)]
    if len(fitting) == 1:
        return fitting[0]
    problem = "more than one trained model" if fitting else "no trained model of this kind"
    raise ValueError(
        f"run={run} holds {problem}; choose with --precision and --seed one of: "
        + ", ".join(map(str, models))
    )


def load_model(run: Path, name: RunName, device: torch.device) -> SavedModel:
    """Read a trained model.

    Args:
        run: The run directory.
        name: See :func:`choose_model`.
        device: Where it predicts.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is damaged, or the encoder needs torchao and it is not installed.
    """
    folder = run / MODELS
    path = folder / f"{name.precision}-seed-{name.seed}"
    preprocessor = load_preprocessor(folder)
    encoder = preprocessor.encoder(device)
    head, variant = _described(_description(path))
    change_layers(encoder, variant, device)
    model = nn.ModuleDict({"encoder": encoder, "head": head})
    try:
        tensors = load_file(_tensors(path), device=str(device))
        # Not into parameters of FP32: the tensors as they were stored.
        model.load_state_dict(tensors, strict=False, assign=True)
        _check_whole(model, tensors)
    except FileNotFoundError:
        raise FileNotFoundError(f"{_tensors(path)} is missing: train again") from None
    except (SafetensorError, RuntimeError, ValueError) as error:
        raise ValueError(f"{_tensors(path)} is damaged ({error}): train again") from None
    labels = folder / LABELS
    texts = TextLines(labels) if labels.exists() else None
    if texts is not None and len(texts) != head.num_labels:
        raise ValueError(
            f"{labels} has {len(texts)} lines for {head.num_labels} labels: it is damaged; train "
            "again"
        )
    return SavedModel(preprocessor, model.to(device).eval(), texts)


def _check_whole(model: nn.ModuleDict, tensors: dict[str, Tensor]) -> None:
    wanted = set(model.state_dict()) - set(_LEFT_OUT)
    # Models of earlier versions have no representation of their layers beside them.
    wanted = {name for name in wanted if name in tensors or not name.endswith("_extra_state")}
    if wanted != set(tensors):
        raise ValueError(f"wrong or missing tensors: {', '.join(sorted(wanted ^ set(tensors)))}")


def _tensors(path: Path) -> Path:
    return path.with_name(f"{path.name}.safetensors")


def _description(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _describe(head: Head) -> dict[str, Any]:
    if isinstance(head, ReneeClassifier):
        return {"storage": "renee", "dim": head.weight.shape[1], "num_labels": head.num_labels}
    table = head.table
    storage: Any = table.storage.name
    if isinstance(table.storage, Format) and table.storage.dtype is None:
        storage = [table.storage.exponent_bits, table.storage.mantissa_bits]
    return {
        "storage": storage,
        "dim": table.dim,
        "num_labels": head.num_labels,
        "scale": table.scale,
        "head_fraction": head.head_fraction,
        # What "auto" was where it trained: it predicts with the logits that were measured.
        "products": head.chosen_products,
    }


def _described(path: Path) -> tuple[Head, Variant]:
    """What a description says: a head without rows, and the encoder's linear layers."""
    with saved_json(path, _FORMAT, "a description", "train again") as description:
        settings, encoder = description["head"], description["encoder"]
        if encoder.get("linear") == "fp8":
            # What torchao's layers were called before there were others in FP8.
            encoder["linear"] = TORCHAO
        variant = Variant(**encoder)
        storage = settings.pop("storage")
        head: Head
        if storage == "renee":
            head = ReneeClassifier(**settings, seed=0)
        else:
            storage = tuple(storage) if isinstance(storage, list) else storage
            head = ExtremeClassifier(**settings, storage=storage, chunks=1, device="meta")
    return head, variant
