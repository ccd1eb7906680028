"""Options from a file: TOML whose keys are names of options, or the ``config.json`` of a run."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from .json_text import kind_of, parse_object
from .toml_file import lines_of, parse_toml, read_bytes

# Of config.json: records of the run, not options.
RECORDS = ("task", "versions", "machine", "data_digest")


@dataclass(frozen=True)
class Option:
    """What a key may set.

    Attributes:
        names: That it has, the first one for messages; dashes and underscores are the same.
        type: Of its value.
    """

    names: tuple[str, ...]
    type: Any


def read_config(path: Path, task: str, options: Sequence[Option]) -> dict[str, Any]:
    """The values of a file, by the first name of each option.

    Args:
        path: A TOML file, or a file ``*.json`` as a run of the task leaves it: what has its
            default there is left out, since presets decide defaults.
        task: Name of the task, which a run's file must be of.
        options: What there is to set.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is damaged, a key is no option, or a value has another type than its
            option; the message names the file, the line and what was expected.
    """
    if not path.is_file():
        raise ValueError(f"config={path} is not a file: give a TOML file, or config.json of a run")
    raw = read_bytes(path, "a file of options")
    of_run = path.suffix == ".json"
    found = _of_run(raw, path, task) if of_run else parse_toml(raw, path)

    def where(key: str) -> str:
        line = _line_of(raw, key) if of_run else lines_of(raw.decode("utf-8")).get((key,), 1)
        return f"{path}:{line}"

    known = {_plain(name): option for option in options for name in option.names}
    values: dict[str, Any] = {}
    for key, value in found.items():
        option = known.get(_plain(key))
        if option is None:
            raise ValueError(f"{where(key)}: unknown key {key}: {_nearest(key, list(known), task)}")
        name = option.names[0]
        if name in values:
            raise ValueError(f"{where(key)}: {key} sets {name} a second time: give it once")
        if not _fits(value, option.type):
            raise ValueError(
                f"{where(key)}: expected {key} to be {_wanted(option.type)}, got {_got(value)}"
            )
        values[name] = value
    return values


def place_of(path: Path, name: str) -> str | None:
    """``file:line`` of the key that sets an option in a TOML file; ``None`` without one."""
    lines = lines_of(read_bytes(path, "a file of options").decode("utf-8"))
    found = (line for (key, *_), line in lines.items() if _plain(str(key)) == _plain(name))
    return next((f"{path}:{line}" for line in found), None)


def _plain(name: str) -> str:
    return name.replace("_", "-")


def _of_run(raw: bytes, path: Path, task: str) -> dict[str, Any]:
    """The options that a run was given."""
    found = parse_object(raw, path)
    if found.get("task") != task:
        raise ValueError(
            f"{path}:{_line_of(raw, 'task')}: expected a run of the task {task}, got "
            f"{_got(found.get('task'))}"
        )
    # It imports torch, which a TOML file does not need.
    from .defaults import defaults_of  # noqa: PLC0415
    from .task import config_class  # noqa: PLC0415

    defaults = defaults_of(task, found)
    # What decides other defaults may have to be given, and never does harm.
    for name in config_class(task).decides:
        defaults[name] = None
    return {
        name: value
        for name, value in found.items()
        if name not in RECORDS and value is not None and value != defaults.get(name)
    }


def _line_of(raw: bytes, key: str) -> int:
    """The line of a JSON object where a key is, as a run writes it; else the first one."""
    name = re.escape(key.encode("utf-8", "replace"))
    found = re.search(rb"^[ \t{,]*\"" + name + rb"\"\s*:", raw, re.MULTILINE)
    return raw.count(b"\n", 0, found.start()) + 1 if found else 1


def _nearest(key: str, known: Sequence[str], task: str) -> str:
    near = difflib.get_close_matches(_plain(key), known, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]}?"
    return f"`subulp train {task} --help` names all"


def _choices(type_: Any) -> list[Any]:
    """The types that a value may have, without ``None``."""
    if get_origin(type_) in (Union, types.UnionType):
        return [part for part in get_args(type_) if part is not type(None)]
    return [type_]


def _fits(value: object, type_: Any) -> bool:
    return any(_is(value, choice) for choice in _choices(type_))


def _is(value: object, type_: Any) -> bool:
    if get_origin(type_) is tuple:
        element = get_args(type_)[0]
        values = value if isinstance(value, list) else [value]
        return bool(values) and all(_is(each, element) for each in values)
    if get_origin(type_) is Literal:
        return value in get_args(type_)
    kinds = {float: int | float, Path: str}.get(type_, type_)
    # In Python true is a number too.
    return isinstance(value, kinds) and (type_ is bool or not isinstance(value, bool))


_NOUNS: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    Path: "a string, a path",
}


def _wanted(type_: Any) -> str:
    words = []
    for choice in _choices(type_):
        if get_origin(choice) is tuple:
            noun = _wanted(get_args(choice)[0])
            words.append(f"{noun}, or an array of at least one")
        elif get_origin(choice) is Literal:
            words.append("one of " + ", ".join(map(str, get_args(choice))))
        else:
            words.append(_NOUNS[choice])
    return " or ".join(words)


def _got(value: object) -> str:
    if isinstance(value, list) and not value:
        return "an empty array"
    if isinstance(value, list) and len(str(value)) < 40:
        return f"[{', '.join(map(_got, value))}]"
    if isinstance(value, int | float | str | bool) and len(str(value)) < 40:
        return f'"{value}"' if isinstance(value, str) else str(value).lower()
    return kind_of(value)
