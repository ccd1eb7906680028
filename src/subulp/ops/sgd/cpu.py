"""SGD step in C++ (csrc/step.h)."""

from __future__ import annotations

from ..step import cpu as cpu_step
from ..step.job import StepJob


def run(job: StepJob) -> None:
    """Update the tensors of a job in place."""
    cpu_step.run("subulp_sgd", job)
