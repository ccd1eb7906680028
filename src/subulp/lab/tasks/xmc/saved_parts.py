"""What a trained classifier over labels is saved as, beside its tensors.

All models of a comparison share the encoder's settings and what turns texts or features into its
input, and the label texts, one JSON string per line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ....nn import ExtremeClassifier
from ....numerics import Format
from ...engine.files import replacing
from .preprocessing import SETTINGS, Preprocessor, save_preprocessor
from .readers.dataset import Texts
from .renee import ReneeClassifier
from .sampled import SampledClassifier, ShortlistClassifier
from .storage import RENEE, SAMPLED, SHORTLIST

LABELS = "labels.jsonl"

LEFT_OUT = (
    "head.momentum",
    "head.loss_scale",
    "head.finite_steps",
    "head.skipped_steps",
    "head.drawn_steps",
    "head._extra_state",
)
"""Tensors that only training needs."""

Baseline = ReneeClassifier | SampledClassifier | ShortlistClassifier
Head = ExtremeClassifier | Baseline

_BASELINES: dict[str, type[Baseline]] = {
    RENEE: ReneeClassifier,
    SAMPLED: SampledClassifier,
    SHORTLIST: ShortlistClassifier,
}


def save_shared(
    folder: Path, preprocessor: Preprocessor[Any], label_texts: Texts | None
) -> list[str]:
    """Write what all models have in common; runs that end at once write the same.

    Args:
        folder: The folder of the models.
        preprocessor: The encoder's.
        label_texts: Text of each label, if there are any.

    Returns:
        Names of the files.
    """
    names = [LABELS] if label_texts is not None else []
    if label_texts is not None and not (folder / LABELS).exists():
        with (
            replacing(folder / LABELS) as unfinished,
            unfinished.open("w", encoding="ascii") as file,
        ):
            file.writelines(json.dumps(text) + "\n" for text in label_texts)
    if not (folder / SETTINGS).exists():
        save_preprocessor(preprocessor, folder)
    return [*names, SETTINGS, *preprocessor.files(folder)]


def describe_head(head: Head) -> dict[str, Any]:
    """What :func:`head_of` makes a classifier from, as plain JSON."""
    for name, kind in _BASELINES.items():
        if isinstance(head, kind):
            described = {
                "storage": name,
                "dim": head.weight.shape[1],
                "num_labels": head.num_labels,
            }
            if isinstance(head, ShortlistClassifier):
                described["members"] = list(head.members.shape)
            return described
    assert isinstance(head, ExtremeClassifier)
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


def head_of(description: dict[str, Any]) -> Head:
    """A classifier without rows, from :func:`describe_head`.

    Raises:
        ValueError, TypeError, KeyError, RuntimeError: It describes none.
    """
    settings = dict(description)
    storage = settings.pop("storage")
    # A header alone allocates nothing.
    with torch.device("meta"):
        if storage == SHORTLIST:
            settings["members"] = torch.empty(settings["members"], dtype=torch.int64)
        if isinstance(storage, str) and storage in _BASELINES:
            return _BASELINES[storage](**settings, seed=0)
        storage = tuple(storage) if isinstance(storage, list) else storage
        return ExtremeClassifier(**settings, storage=storage, chunks=1, device="meta")
