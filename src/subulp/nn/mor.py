"""The configuration of MoR: how the operands of a layer's products are represented."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args

import torch
from torch import Tensor

from ..numerics import metrics, partition
from ..numerics.mixture import (
    DEFAULT_THRESHOLD,
    RECIPES,
    Mixture,
    Recipe,
    Summary,
    from_text,
    to_text,
)
from ..numerics.partition import Partition
from ..numerics.scaling import Scaling
from ..ops.mixture import KeptEncoding, encode, encode_both, numbers_like, stored_like

ROLES = ("input", "weight", "output gradient")
"""Operands of a layer's three products."""


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
        threshold: For ``"tensor"``, and where a recipe has ``below_threshold`` without a number:
            the mean error from which on BF16 is used (default: 0.045).
        scaling: ``"gam"``: a mantissa for each group, an exponent for each block. ``"amax"``: an
            FP32 scale for each block. ``"e8m0"``: a power of two for each block
            (default: ``"gam"``).
        group: For ``"gam"``: what shares a mantissa, named or sized like a partition
            (default: ``"tensor"``).
        metric: The error: ``"relative-error"`` (the paper's), ``"squared-relative-error"``,
            ``"underflow"`` (the share of the values that become zero), or one of your own, slowly:
            :func:`subulp.numerics.metrics.register` (default: ``"relative-error"``).
        roles: Configurations of operands that are represented otherwise, by their role:
            ``"input"``, ``"weight"`` or ``"output gradient"``. They have none of their own; kept
            in the order of these names, as pairs (default: none).

    Attributes:
        text: All of it as JSON, see :meth:`to_dict`.

    All of it is data: configurations can be compared, copied, pickled and kept in a state dict
    (:meth:`to_dict`).

    Raises:
        ValueError: An argument is unknown, out of range, or would be ignored.
    """

    granularity: str | Recipe = "tensor"
    partition: Partition = "block-128x128"
    threshold: float = DEFAULT_THRESHOLD
    scaling: Scaling = "gam"
    group: Partition = "tensor"
    metric: str = metrics.RELATIVE_ERROR
    roles: Mapping[str, MoR] | tuple[tuple[str, MoR], ...] = ()
    text: str = field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        if isinstance(self.granularity, Recipe):
            # A recipe of the paper's is the same configuration by its name.
            object.__setattr__(self, "granularity", _named(self.granularity))
        elif not isinstance(self.granularity, str) or self.granularity not in RECIPES:
            choices = ", ".join(map(repr, RECIPES))
            raise ValueError(
                f"granularity={self.granularity!r} is unknown: use one of {choices}, or a "
                "numerics.mixture.Recipe"
            )
        number = isinstance(self.threshold, (int, float)) and not isinstance(self.threshold, bool)
        if not number or not 0 < self.threshold < 1:
            raise ValueError(
                f"threshold={self.threshold} is out of range: a relative error between 0 and 1, "
                "both excluded"
            )
        if not self.recipe.uses_threshold and self.threshold != DEFAULT_THRESHOLD:
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
        for name in ("partition", "group"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check_sizes()
        object.__setattr__(self, "roles", self._checked_roles())
        # Once: compiled graphs pass it as a constant.
        object.__setattr__(self, "text", json.dumps(self.to_dict()))

    def _check_sizes(self) -> None:
        block, group = partition.parse(self.partition), partition.parse(self.group, "group")
        for part, size in zip(block, group, strict=True):
            if size is not None and (part is None or size % part):
                raise ValueError(
                    f"group={self.group!r} cannot apply to partition={self.partition!r}: a group "
                    "consists of whole blocks; use multiples of them"
                )

    def _checked_roles(self) -> tuple[tuple[str, MoR], ...]:
        try:
            roles = dict(self.roles)
        except (TypeError, ValueError):
            raise ValueError(f"roles={self.roles!r} is no mapping of roles to nn.MoR") from None
        if unknown := [role for role in roles if role not in ROLES]:
            choices = ", ".join(map(repr, ROLES))
            raise ValueError(f"roles has {unknown[0]!r}, which is no role: use {choices}")
        for role, mor in roles.items():
            if not isinstance(mor, MoR):
                raise ValueError(f"roles[{role!r}]={mor!r} is not a configuration: pass an nn.MoR")
            if mor.roles:
                raise ValueError(f"roles[{role!r}] has roles of its own: an operand has one role")
        return tuple((role, roles[role]) for role in ROLES if role in roles)

    def of(self, role: str) -> MoR:
        """How the operand of a role is represented: a configuration without roles."""
        return _of(self, role) if self.roles else self

    @property
    def recipe(self) -> Recipe:
        """The recipe of ``granularity``: formats with their acceptance tests."""
        known = self.granularity
        return known if isinstance(known, Recipe) else RECIPES[known]

    @property
    def is_symmetric(self) -> bool:
        """Whether a matrix and its transpose are represented alike."""
        return partition.is_symmetric(self.partition) and partition.is_symmetric(self.group)

    def to_dict(self) -> dict[str, Any]:
        """The configuration as plain JSON."""
        found = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        found |= {"granularity": to_text(self.recipe)}
        roles = {role: mor.to_dict() for role, mor in found.pop("roles")}
        # Earlier versions know no roles, and read what has none.
        return found | {"roles": roles} if roles else found

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> MoR:
        """The configuration that :meth:`to_dict` spelled out.

        Raises:
            ValueError: It is none.
        """
        names = [each.name for each in fields(cls) if each.init]
        if not isinstance(plain, dict) or not set(plain) <= set(names):
            raise ValueError(f"{plain!r} is no configuration of MoR: expected {', '.join(names)}")
        spelled = plain.get("granularity", "tensor")
        roles = plain.get("roles", {})
        if not isinstance(roles, dict):
            raise ValueError(f"roles={roles!r} are no configurations of MoR")
        read = {role: cls.from_dict(each) for role, each in roles.items()}
        return cls(**plain | {"granularity": _named(from_text(spelled)), "roles": read})

    @classmethod
    def from_text(cls, text: str) -> MoR:
        """The configuration whose :attr:`text` this is.

        Raises:
            ValueError: It is none.
        """
        return _from_text(text)

    def sizes(self, shape: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
        """Rows and columns of a block, and those of blocks in a group, of a matrix."""
        block = partition.block_of(self.partition, shape)
        if self.scaling == "amax":
            return block, (1, 1)
        if self.scaling == "e8m0":
            return block, partition.grid_of(shape, block)
        return block, partition.blocks_of_group(self.group, block, shape)

    def stored_like(
        self, shape: tuple[int, int], device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Tensors like those of a mixture of a matrix, and like its summary's numbers, for graphs
        that are traced.
        """
        block, groups = self.sizes(shape)
        numbers = numbers_like(shape, self.recipe, block, device)
        return *stored_like(shape, self.recipe, block, groups, device), numbers

    def encode(self, x: Tensor, kept: KeptEncoding | None = None) -> tuple[Mixture, Summary]:
        """Represent a matrix ``(rows, k)``, contraction dimension last, as a mixture.

        Args:
            x: FP32, BF16 or FP16.
            kept: What a GPU leaves as it is while ``x`` has the same bytes (default: nothing).

        Returns:
            The mixture, and a summary of the decisions.
        """
        with torch.no_grad():
            return encode(x, self.recipe, **self._options, kept=kept)

    def encode_both(self, x: Tensor) -> tuple[tuple[Mixture, Summary], tuple[Mixture, Summary]]:
        """:meth:`encode` of ``x`` and of ``x.t()``, on GPUs from one read of ``x`` where blocks
        allow.

        Args:
            x: FP32, BF16 or FP16.

        Returns:
            The mixture of each, and a summary of its decisions.
        """
        with torch.no_grad():
            return encode_both(x, self.recipe, **self._options)

    @property
    def _options(self) -> dict[str, Any]:
        return {
            "partition": self.partition,
            "scaling": self.scaling,
            "group": self.group,
            "threshold": self.threshold,
            "metric": self.metric,
        }


@functools.lru_cache(maxsize=256)
def _of(mor: MoR, role: str) -> MoR:
    return dict(mor.roles).get(role) or replace(mor, roles=())


@functools.lru_cache(maxsize=256)
def _from_text(text: str) -> MoR:
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{text!r} is no configuration of MoR: {error}") from None
    return MoR.from_dict(plain)


def _named(recipe: Recipe) -> str | Recipe:
    text = to_text(recipe)
    return text if text in RECIPES else recipe
