"""Experiments: tasks that train real models under several precisions, and compare what each lost.

The command line, tasks, data readers, run directories and reports, behind the extra ``lab``; the
library never imports them. The command line is imported before any training starts, so this file
imports nothing: take what you need from the modules, e.g.
``from subulp.lab.compare import compare``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import os

    from .engine.trained import TrainedModel


def load(
    run: str | os.PathLike[str],
    precision: str | None = None,
    seed: int | None = None,
    *,
    weights: Literal["stored", "full"] = "stored",
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> TrainedModel:
    """A trained model of a run directory: the best one, or the one that is asked for.

    Args:
        run: The run directory.
        precision: Variant of the model; ``None`` for any (default: ``None``).
        seed: Its seed; ``None`` for any (default: ``None``).
        weights: ``"stored"``, the weights as the run stored and measured them, or ``"full"``, in
            FP32, rebuilt from all that its optimizer kept (default: ``"stored"``).
        device: ``"auto"``, ``"cpu"`` or ``"cuda"`` (default: ``"auto"``).

    Returns:
        It has the ``model``, a module; and the methods of its task, such as ``sample`` or
        ``predict_file``.

    Raises:
        FileNotFoundError: There is no run, or no trained model.
        ValueError: There is no model of this kind, or a file is damaged.
    """
    from pathlib import Path  # noqa: PLC0415

    from .engine import trained  # noqa: PLC0415

    return trained.load(Path(run), precision, seed, weights=weights, device=device)
