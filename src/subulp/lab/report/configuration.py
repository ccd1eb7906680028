"""Options, versions and machine of run directories side by side."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from ..engine.config_file import RECORDS
from ..engine.config_json import defaults_of
from .group import Group
from .run_reader import Run

# Entries of config.json about where the run was made, not about what it computes.
_ENVIRONMENT = ("versions", "machine", "decided")


@dataclass(frozen=True)
class Setting:
    """An option.

    Attributes:
        name: As on the command line.
        values: The value in each run directory.
        default: The default value; empty if it is not known.
    """

    name: str
    values: tuple[str, ...]
    default: str


@dataclass(frozen=True)
class Configuration:
    """What the runs were made of, where they ran, and the versions of what ran them.

    Attributes:
        changed: Options that differ from their defaults, or between the run directories.
        others: All other options.
        environment: Name and a value for each run directory.
    """

    changed: list[Setting]
    others: list[Setting]
    environment: list[tuple[str, tuple[str, ...]]]


def configuration(group: Group) -> Configuration:
    """Options, versions and machines of the runs of a group."""
    runs = group.runs
    defaults = [defaults_of(run.task, run.config) for run in runs]
    names = dict.fromkeys(itertools.chain.from_iterable(run.config for run in runs))
    changed: list[Setting] = []
    others: list[Setting] = []
    for name in names:
        if name in RECORDS:
            continue
        values = [run.config.get(name) for run in runs]
        known = [default.get(name, value) for default, value in zip(defaults, values, strict=True)]
        setting = Setting(
            name.replace("_", "-"),
            tuple(map(value_text, values)),
            value_text(defaults[0][name]) if name in defaults[0] else "",
        )
        same = values == known and all(value == values[0] for value in values)
        (others if same else changed).append(setting)
    return Configuration(changed, others, _environment(runs))


def _environment(runs: tuple[Run, ...]) -> list[tuple[str, tuple[str, ...]]]:
    found: dict[str, list[str]] = {}
    for index, run in enumerate(runs):
        for part in _ENVIRONMENT:
            entries = run.config.get(part)
            for name, value in (entries if isinstance(entries, Mapping) else {}).items():
                words = f"{value / 2**30:.1f} GiB" if name == "memory_bytes" else value_text(value)
                shown = "memory" if name == "memory_bytes" else name.replace("_", " ")
                found.setdefault(shown, [""] * len(runs))[index] = words
    return [(name, tuple(values)) for name, values in found.items()]


def value_text(value: object) -> str:
    """A value of ``config.json`` in words."""
    match value:
        case None:
            return "none"
        case bool():
            return "yes" if value else "no"
        case list():
            return ", ".join(map(value_text, value))
        case float():
            return f"{value:g}" if float(f"{value:g}") == value else str(value)
    return str(value)
