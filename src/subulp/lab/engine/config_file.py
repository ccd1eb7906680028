"""Options from a file: TOML whose keys are names of options, or the ``config.json`` of a run."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import TypeAdapter

from .toml_lines import line_of, lines_of
from .typed_files import (
    LARGEST_TOML,
    Place,
    checked,
    did_you_mean,
    parse_json,
    parse_toml,
    read_bytes,
)

RECORDS = ("task", "versions", "machine", "decided", "data_digest")
"""Keys of ``config.json`` that record the run and are no options."""


@dataclass(frozen=True)
class Option:
    """An option that a key may set.

    Attributes:
        names: Its names, the first one for messages; dashes and underscores are the same.
        type: Type of its value.
    """

    names: tuple[str, ...]
    type: Any


def read_config(path: Path, task: str, options: Sequence[Option]) -> dict[str, Any]:
    """The values of a file, by the first name of each option.

    Args:
        path: A TOML file, or a file ``*.json`` as a run of the task leaves it. Values of the
            latter that equal their defaults are ignored, since presets decide defaults.
        task: Name of the task; a run's file must be of the same.
        options: The options that a file may set.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is damaged, a key is no option, or a value has another type than its
            option; the message names the file, the line and what was expected.
    """
    if not path.is_file():
        raise ValueError(f"config={path} is not a file: give a TOML file, or config.json of a run")
    raw = read_bytes(path, LARGEST_TOML, "a file of options")
    found, where = _of_run(raw, path, task) if path.suffix == ".json" else _of_toml(raw, path)
    known = {_plain(name): option for option in options for name in option.names}
    values: dict[str, Any] = {}
    for key, value in found.items():
        option = known.get(_plain(key))
        if option is None:
            hint = did_you_mean(_plain(key), known) or f": `subulp train {task} --help` names all"
            raise ValueError(f"{where((key,))}: unknown key {key}{hint}")
        name = option.names[0]
        if name in values:
            raise ValueError(f"{where((key,))}: {key} sets {name} a second time: give it once")
        if value == []:
            raise ValueError(f"{where((key,))}: expected {key} to have at least one value, got []")
        as_list = _takes_list(option.type) and not isinstance(value, list)
        checked(TypeAdapter(option.type), [value] if as_list else value, where, inside=(key,))
        values[name] = value
    return values


def place_of(path: Path, name: str) -> str | None:
    """``file:line`` of the key that sets an option in a TOML file; ``None`` without one."""
    raw = read_bytes(path, LARGEST_TOML, "a file of options")
    lines = lines_of(raw.decode("utf-8"))
    found = (line for (key, *_), line in lines.items() if _plain(str(key)) == _plain(name))
    return next((f"{path}:{line}" for line in found), None)


def _plain(name: str) -> str:
    return name.replace("_", "-")


def _takes_list(type_: Any) -> bool:
    """Whether an option's value is a list; a single element may stand alone."""
    return any(get_origin(choice) is tuple for choice in (type_, *get_args(type_)))


Found = tuple[dict[str, Any], Callable[[Place], str]]
"""Keys and values of a file, and the function that names a place in it."""


def _of_toml(raw: bytes, path: Path) -> Found:
    found = parse_toml(raw, path)
    return found, lambda place: f"{path}:{line_of(lines_of(raw.decode('utf-8')), place[:1])}"


def _of_run(raw: bytes, path: Path, task: str) -> Found:
    """The options that a run was given."""

    def where(place: Place) -> str:
        key = re.escape(str(place[0]).encode("utf-8", "replace"))
        # One key a line, as a run writes it.
        at = re.search(rb"^[ \t{,]*\"" + key + rb"\"\s*:", raw, re.MULTILINE)
        line = raw.count(b"\n", 0, at.start()) + 1 if at else 1
        return f"{path}:{line}"

    found = parse_json(raw, path)
    if found.get("task") != task:
        raise ValueError(
            f"{where(('task',))}: expected a run of the task {task}, got {found.get('task')!r:.40}"
        )
    # They import torch, which a TOML file does not need.
    from .config_json import defaults_of  # noqa: PLC0415
    from .task import config_class  # noqa: PLC0415

    found = {**config_class(task).earlier, **found}
    defaults = defaults_of(task, found)
    # What decides other defaults may have to be given, and never does harm.
    for name in config_class(task).decides:
        defaults[name] = None
    given = {
        name: value
        for name, value in found.items()
        if name not in RECORDS and value is not None and value != defaults.get(name)
    }
    return given, where
