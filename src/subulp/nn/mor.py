"""The configuration of MoR: how the operands of a layer's products are represented."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from ..numerics import metrics, partition
from ..numerics.mixture import (
    ALWAYS_E4M3,
    DEFAULT_THRESHOLD,
    RECIPES,
    THREE_WAY,
    TWO_WAY,
    Mixture,
    Recipe,
    Summary,
)
from ..numerics.partition import Partition
from ..numerics.scaling import Scaling
from ..ops.mixture import encode

_WITHOUT_THRESHOLD = (TWO_WAY, THREE_WAY, ALWAYS_E4M3)


@dataclass(frozen=True)
class MoR:
    """How MoR represents the operands of a linear layer ("MoR", section 3).

    Args:
        granularity: ``"tensor"``: E4M3 for a whole tensor whose error is below the threshold, else
            BF16. ``"subtensor-2way"``: for each block E4M3 if its error is below E5M2's, else BF16.
            ``"subtensor-3way"``: E4M3 if its error is not above E5M2's, else E5M2 if the block's
            magnitudes fit its normal range, else BF16. Or a
            :class:`subulp.numerics.mixture.Recipe` (default: ``"tensor"``).
        partition: What shares a scale and, in the subtensor recipes, a decision: ``"tensor"``,
            ``"channel"``, ``"subchannel-128"``, ``"subchannel-32"``, ``"block-128x128"`` or the
            size (rows, columns) of a block, the contraction dimension last
            (default: ``"block-128x128"``).
        threshold: For ``"tensor"``: the mean relative error from which on BF16 is used
            (default: 0.045).
        scaling: ``"gam"``: a mantissa for each group, an exponent for each block. ``"amax"``: an
            FP32 scale for each block. ``"e8m0"``: a power of two for each block
            (default: ``"gam"``).
        group: For ``"gam"``: what shares a mantissa, named or sized like a partition
            (default: ``"tensor"``).
        metric: The error's name, see :func:`subulp.numerics.metrics.register`
            (default: ``"relative-error"``).

    Raises:
        ValueError: An argument is unknown, out of range, or would be ignored.
    """

    granularity: str | Recipe = "tensor"
    partition: Partition = "block-128x128"
    threshold: float = DEFAULT_THRESHOLD
    scaling: Scaling = "gam"
    group: Partition = "tensor"
    metric: str = metrics.RELATIVE_ERROR

    def __post_init__(self) -> None:
        if not isinstance(self.granularity, Recipe) and self.granularity not in RECIPES:
            choices = ", ".join(map(repr, RECIPES))
            raise ValueError(
                f"granularity={self.granularity!r} is unknown: use one of {choices}, or a "
                "numerics.mixture.Recipe"
            )
        if not isinstance(self.threshold, (int, float)) or not 0 < self.threshold < 1:
            raise ValueError(
                f"threshold={self.threshold} is out of range: a relative error between 0 and 1, "
                "both excluded"
            )
        if self.recipe in _WITHOUT_THRESHOLD and self.threshold != DEFAULT_THRESHOLD:
            raise ValueError(
                f"threshold={self.threshold} has no effect on granularity={self.recipe.name!r}, "
                "which compares no error with it: leave it out"
            )
        if self.scaling not in get_args(Scaling):
            choices = ", ".join(map(repr, get_args(Scaling)))
            raise ValueError(f"scaling={self.scaling!r} is unknown: use one of {choices}")
        if self.scaling != "gam" and self.group != "tensor":
            raise ValueError(
                f"group={self.group!r} has no effect on scaling={self.scaling!r}: only 'gam' has "
                "groups; leave it out"
            )
        metrics.terms_of(self.metric)
        self._check_sizes()

    def _check_sizes(self) -> None:
        block, group = partition.parse(self.partition), partition.parse(self.group, "group")
        for part, size in zip(block, group, strict=True):
            if size is not None and (part is None or size % part):
                raise ValueError(
                    f"group={self.group!r} cannot apply to partition={self.partition!r}: a group "
                    "consists of whole blocks; use multiples of them"
                )

    @property
    def recipe(self) -> Recipe:
        """The recipe of ``granularity``: formats with their acceptance tests."""
        known = self.granularity
        return known if isinstance(known, Recipe) else RECIPES[known]

    @property
    def is_symmetric(self) -> bool:
        """Whether a matrix and its transpose are represented alike."""
        return partition.is_symmetric(self.partition) and partition.is_symmetric(self.group)

    def encode(self, x: Tensor) -> tuple[Mixture, Summary]:
        """Represent a matrix ``(rows, k)``, contraction dimension last, as a mixture.

        Returns:
            The mixture, and a summary of the decisions.
        """
        with torch.no_grad():
            return encode(
                x,
                self.recipe,
                self.partition,
                scaling=self.scaling,
                group=self.group,
                threshold=self.threshold,
                metric=self.metric,
            )
