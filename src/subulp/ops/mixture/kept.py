"""What a matrix was encoded as, to be encoded anew by a GPU where its bytes are others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class KeptEncoding:
    """Stored tensors that kernels leave as they are while the matrix has the same bytes.

    Only kernels know whether it has: they add up a number of all bytes on their way through the
    matrix, as :func:`subulp.ops.fingerprint.fingerprint` is for C++, and compare it with that of
    the call before. What changes a weight without telling PyTorch is noticed, and the host does not
    wait. It launches the same kernels whatever they find; those that would write return at once.

    For calls of one stream, with matrices of one shape and dtype and the same other arguments.

    Attributes:
        stored: Codes, types, mantissas, exponents and lower bytes; ``None`` before the first call.
        numbers: Those of the summary.
        marks: int64 (3, 2): in the first column this call's number, that of the call before, and
            the 0 with which the next one begins, by turns. The second one aligns them.
        turn: Calls until now.
    """

    stored: tuple[Tensor, ...] | None = None
    numbers: Tensor | None = None
    marks: Tensor | None = None
    turn: int = 0

    def places(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Where this call's number is, that of the call before, and the next one's."""
        if self.marks is None:
            self.marks = torch.zeros(3, 2, dtype=torch.int64, device=device)
            # The number of a single zero is 0: there is none before the first call.
            self.marks[2].fill_(-1)
        now, before, after = (self.marks[(self.turn + i) % 3] for i in (0, 2, 1))
        return now, before, after

    def keep(self, stored: tuple[Tensor, ...], numbers: Tensor) -> None:
        """End a call."""
        self.stored, self.numbers = stored, numbers
        self.turn += 1
