"""A precision chosen for each parameter, by its name or by a function: a group becomes several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

from torch import Tensor

from .options import ExtraBits, Precision, parse_precision
from .parameters import bare_name

Choice = Callable[[str | None, Tensor], Precision]
"""Gives the precision of a parameter, from its name, ``None`` without names, and itself."""

PrecisionChoice = Precision | Mapping[str, Precision] | Choice
"""What ``precision=`` takes."""


@dataclass(frozen=True)
class ByName:
    """The precision of the first pattern that a parameter's name matches, as it is or as it was
    before ``DistributedDataParallel``, ``torch.compile`` and the like put theirs before it.

    Attributes:
        patterns: Pairs of a pattern, as of :mod:`fnmatch`, and a canonical precision.
    """

    patterns: tuple[tuple[str, str], ...]

    def __call__(self, name: str | None, p: Tensor) -> str:
        """The precision of a parameter."""
        if name is None:
            raise ValueError(
                "precision has patterns of names, and the parameters have no names: pass "
                "model.named_parameters()"
            )
        return self.of(name, name)

    def of(self, name: str, bare: str) -> str:
        """The precision of a parameter with a name, and another that it had before."""
        for pattern, precision in self.patterns:
            if fnmatchcase(name, pattern) or fnmatchcase(bare, pattern):
                return precision
        listed = ", ".join(repr(pattern) for pattern, _ in self.patterns)
        raise ValueError(
            f"parameter {name!r} matches no pattern of precision ({listed}): add '*' as the last"
        )


def parse_choice(precision: PrecisionChoice) -> str | Choice:
    """A ``precision=`` argument: a canonical name, or what chooses one for each parameter.

    Raises:
        ValueError: It is unknown or out of range.
    """
    if isinstance(precision, Mapping) and any(isinstance(key, str) for key in precision):
        patterns = []
        for pattern, each in precision.items():
            if not isinstance(pattern, str):
                raise ValueError(
                    f"precision has {pattern!r} beside patterns of names: give names of precisions "
                    "for dtypes, or for patterns; a pattern's may be for dtypes"
                )
            patterns.append((pattern, parse_precision(each)))
        return ByName(tuple(patterns))
    if callable(precision) and not isinstance(precision, (str, ExtraBits)):
        return precision
    return parse_precision(cast(Precision, precision))


def split(group: dict[str, Any], choice: Choice) -> list[dict[str, Any]]:
    """The groups of the parameters of each precision, in the order of the first of each.

    Args:
        group: A group as ``add_param_group`` takes one.
        choice: Chooses the precisions.

    Raises:
        ValueError: A parameter's precision is unknown.
    """
    params = group["params"]
    if isinstance(params, Tensor):
        params = [params]
    if isinstance(params, set) or not isinstance(params, Iterable):
        # torch's own error.
        return [group | {"precision": "auto"}]
    found: dict[str, list[Any]] = {}
    params = list(params)
    bare = _bare_names([item[0] for item in params if isinstance(item, tuple)])
    for item in params:
        name, p = item if isinstance(item, tuple) else (None, item)
        if not isinstance(p, Tensor):
            return [group | {"precision": "auto", "params": [item]}]
        if isinstance(choice, ByName) and name in bare:
            precision = parse_precision(choice.of(name, bare[name]))
        else:
            precision = parse_precision(choice(name, p))
        found.setdefault(precision, []).append(item)
    rest = {key: value for key, value in group.items() if key != "params"}
    return [{**rest, "params": p, "precision": n} for n, p in found.items()] or [
        {**rest, "params": [], "precision": "auto"}
    ]


def _bare_names(names: Sequence[str]) -> dict[str, str]:
    """Names without what wrappers put before them; ``module.`` is theirs if all names have it."""
    wrapped = all(name.startswith("module.") for name in names)
    return {
        name: bare_name(name) if wrapped or not name.startswith("module.") else name
        for name in names
    }
