"""Which implementation of an op runs: reference, cpu (C++) or triton.

``SUBULP_BACKEND`` overrides the choice and is strict: an implementation that cannot run is an
error, never replaced.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from .environment import variable

BACKENDS = ("reference", "cpu", "triton")
OPS = ("adam", "sgd", "all_finite", "head", "embedding", "mixture")


@dataclass(frozen=True)
class Choice:
    """A backend and the reason for it, as ``subulp doctor`` prints them."""

    backend: str
    reason: str


_CHOICES = {
    "cpu": Choice("cpu", "C++ kernels for CPU tensors"),
    "cuda": Choice("triton", "Triton kernels for CUDA tensors"),
}


def choose(device: torch.device) -> Choice:
    """The backend of ops on ``device``.

    Raises:
        ValueError: ``SUBULP_BACKEND`` has an unknown value, or chooses the C++ kernels for tensors
            that are not on a CPU.
    """
    forced = variable("SUBULP_BACKEND")
    if forced:
        if forced not in BACKENDS:
            raise ValueError(f"SUBULP_BACKEND={forced!r} is unknown: use one of {BACKENDS}")
        if forced == "cpu" and device.type != "cpu":
            raise ValueError(
                f"SUBULP_BACKEND='cpu' runs the C++ kernels, and these tensors are on {device}: "
                "unset it, or move them to the CPU"
            )
        return Choice(forced, "SUBULP_BACKEND is set")
    if known := _CHOICES.get(device.type):
        return known
    return Choice("reference", f"no kernels for {device.type} tensors: plain PyTorch")


def is_cpp() -> bool:
    """Whether the C++ kernels run on CPU tensors: :func:`choose` without a reason."""
    return variable("SUBULP_BACKEND") in ("", "cpu")


def is_forced() -> bool:
    """Whether ``SUBULP_BACKEND`` overrides the choice."""
    return bool(variable("SUBULP_BACKEND"))


def run(op: str, job: Any) -> Any:
    """Run an op on the tensors of ``job`` with the backend of its device.

    Raises:
        RuntimeError: The backend's native library or compiler is missing; the message names the
            remedy.
    """
    # Strict arithmetic reproduces papers; it has one implementation, in plain PyTorch.
    name = "strict" if getattr(job, "strict", False) else choose(job.device).backend
    return _implementation(op, name).run(job)


# Remembered: the import system takes longer than a small call.
@cache
def _implementation(op: str, name: str) -> Any:
    try:
        return importlib.import_module(f"{__package__}.{op}.{name}")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise RuntimeError(
            "Triton is not installed, and CUDA tensors are updated by Triton kernels: pip install "
            "triton, or set SUBULP_BACKEND=reference to run in plain PyTorch, slowly"
        ) from error
