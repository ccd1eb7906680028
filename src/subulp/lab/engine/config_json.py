"""A configuration as plain JSON, and back."""

from __future__ import annotations

import types
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from .config import RunConfig
from .task import TASKS, config_class


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
        ValueError: The task or a field is unknown or missing, or a value has the wrong type.
    """
    if task not in TASKS:
        raise ValueError(f"task={task!r} is unknown: use {', '.join(TASKS)}")
    kind = config_class(task)
    types_ = get_type_hints(kind, include_extras=True)
    names = [field.name for field in fields(kind)]
    for what, found in (("unknown", set(saved) - set(names)), ("missing", set(names) - set(saved))):
        if found:
            raise ValueError(
                f"{', '.join(sorted(found))}: {what} in a configuration of {task}; another version "
                "of subulp wrote it"
            )
    config = object.__new__(kind)
    for name in names:
        try:
            value = _typed(types_[name], saved[name])
        except TypeError:
            raise ValueError(f"{name}={saved[name]!r} cannot be a value of it") from None
        object.__setattr__(config, name, value)  # The class is frozen.
    return config


def _typed(annotation: Any, value: Any) -> Any:
    """A value of JSON as an annotation has it.

    Raises:
        TypeError: It cannot be.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _typed(arguments[0], value)
    if origin in (Union, types.UnionType):
        return _first_fitting(arguments, value)
    if origin is tuple and isinstance(value, list):
        return tuple(_typed(arguments[0], item) for item in value)
    if (annotation, type(value)) in ((Path, str), (float, int)):
        return annotation(value)
    if value in arguments if origin is Literal else annotation is type(value):
        return value
    raise TypeError


def _first_fitting(arguments: tuple[Any, ...], value: Any) -> Any:
    for each in arguments:
        try:
            return _typed(each, value)
        except TypeError:
            continue
    raise TypeError
