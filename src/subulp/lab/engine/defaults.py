"""What the options of a run are that nobody gave a value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config_json import plain_fields
from .task import config_class


def defaults_of(task: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Values of the options that a run was not given, as ``config.json`` has them.

    Args:
        task: Name of the task.
        config: ``config.json`` of the run, of which the options count that decide the defaults of
            others.
    """
    kind = config_class(task)
    given: dict[str, Any] = {}
    for name in kind.decides:
        match config.get(name):
            case str() as value:
                given[name] = value
            case [*values] if all(isinstance(value, str) for value in values):
                given[name] = tuple(values)
    own = plain_fields(kind())  # type: ignore[call-arg]
    try:
        decided = plain_fields(kind(**given))
    except ValueError:
        # A preset, or a choice, that this version does not know.
        return own
    return decided | {name: own[name] for name in kind.decides}
