"""A step that has been checked, and not been taken yet."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..ops import backend
from ..ops.step.counters import Counters
from ..ops.step.job import StepJob
from ..ops.step.repeat import Repeated
from .parameters import Bucket


@dataclass(frozen=True)
class Pending:
    """The step of a bucket; what it counts and scales by changes only when it is taken.

    Attributes:
        op: Name of the fused op.
        bucket: The parameters, updated in place.
        job: The op's job.
        counters: The step counters, ``None`` where the device counts, or nothing is counted.
    """

    op: str
    bucket: Bucket
    job: StepJob
    counters: Counters | None

    def check_memory(self) -> None:
        """Raise unless the tensors have the memory that they say they have.

        Raises:
            ValueError: One has none, or less.
        """
        for name in self.job.roles():
            self.job.addresses(name)

    def take(self) -> None:
        """Take the step.

        Raises:
            RuntimeError: The backend cannot run; nothing was updated.
        """
        with torch.no_grad():
            backend.run(self.op, self.job)
            if self.counters is not None:
                self.counters.count()
        # A backward pass that still needs an old value must notice.
        torch.autograd.graph.increment_version(self.bucket.params)


Prepared = Pending | Repeated
"""A step that has been checked, prepared anew or like one before."""
