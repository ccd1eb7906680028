"""A configuration as plain JSON, and back; and the values of options that were not given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, create_model

from .config import RunConfig
from .task import TASKS, config_class
from .typed_files import checked


def plain_fields(config: RunConfig) -> dict[str, Any]:
    """The fields of a configuration as JSON has them: lists for tuples, texts for paths."""
    return {name: _plain(value) for name, value in asdict(config).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def config_of(task: str, saved: dict[str, Any]) -> RunConfig:
    """The configuration that :func:`plain_fields` was given.

    Presets and defaults were resolved when it was made, and are not resolved again.

    Args:
        task: Name of the task.
        saved: Its fields.

    Raises:
        ValueError: The task or a field is unknown or missing, or a value has the wrong type, is out
            of range or contradicts another one.
    """
    if task not in TASKS:
        raise ValueError(f"task={task!r} is unknown: use {', '.join(TASKS)}")
    kind = config_class(task)
    types = get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    model = create_model(
        kind.__name__,
        __config__=ConfigDict(extra="forbid", protected_namespaces=()),
        **{name: (types[name], ...) for name in names},  # type: ignore[call-overload]
    )
    try:
        found = checked(
            TypeAdapter(model), {**kind.earlier, **saved}, lambda _: f"options of {task}"
        )
    except ValueError as error:
        raise ValueError(f"{error}; another version of subulp wrote it") from None
    config = object.__new__(kind)
    for name in names:
        object.__setattr__(config, name, getattr(found, name))  # The class is frozen.
    config.check()
    return config


def defaults_of(task: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Values of the options that a run was not given, as ``config.json`` has them.

    Args:
        task: Name of the task.
        config: ``config.json`` of the run; only options that decide the defaults of others are
            used.
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
