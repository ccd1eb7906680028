"""Data that are drawn instead of read, named on the command line by their numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, TypeVar

NAME = "generated"

Own = TypeVar("Own", bound="Drawn")


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What is drawn: a subclass has a field for each number, with a default, and its range.

    Raises:
        ValueError: A number is out of range.
    """

    _RANGES: ClassVar[Mapping[str, tuple[float, float]]]
    """Smallest and largest value of every field."""

    def __post_init__(self) -> None:
        for name, (low, high) in self._RANGES.items():
            if not low <= (value := getattr(self, name)) <= high:
                raise ValueError(
                    f"data={NAME}: {name}={value:g} is out of range: give from {low} to {high}"
                )

    @classmethod
    def parse(cls: type[Own], text: str) -> Own:
        """Options as in ``examples=1000,seed=1``; none are the defaults.

        Raises:
            ValueError: One is unknown, given twice, no number, or out of range.
        """
        default = cls()
        known: dict[str, type[int] | type[float]] = {
            field.name: type(getattr(default, field.name)) for field in fields(cls)
        }
        given: dict[str, float] = {}
        for entry in filter(None, text.split(",")):
            name, _, value = entry.partition("=")
            if name not in known:
                raise ValueError(
                    f"data={NAME}: {entry!r} is unknown: give {', '.join(f'{k}=' for k in known)}"
                )
            if name in given:
                raise ValueError(f"data={NAME} repeats {name}: give it once")
            try:
                given[name] = known[name](value)
            except ValueError:
                kind = "an integer" if known[name] is int else "a number"
                raise ValueError(f"data={NAME}: {entry!r} is not {kind}") from None
        return cls(**given)

    @property
    def name(self) -> str:
        """All options as :meth:`parse` takes them."""
        given = (f"{field.name}={getattr(self, field.name)}" for field in fields(self))
        return f"{NAME}:{','.join(given)}"
