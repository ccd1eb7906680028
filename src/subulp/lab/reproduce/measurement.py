"""Parts of experiments that are a function: computed once, and kept."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..engine.files import write_text
from ..engine.metrics import to_json
from ..engine.process_memory import alone
from ..engine.typed_files import read_json
from .claim import Experiment, Size, Watch
from .found import Curve, Found, Observation

FILE = "found.json"

PROCESSES = 5
"""That repeat a timing, or a measurement of resident memory."""


@dataclass(frozen=True)
class Measurement:
    """A function of some settings, which takes seconds to minutes and is not interrupted.

    Attributes:
        name: Its folder in the experiment's.
        function: Takes the settings by name.
        settings: Plain JSON.
    """

    name: str
    function: Callable[..., Found]
    settings: Mapping[str, object] = field(default_factory=dict)

    def run(self, folder: Path, watch: Watch) -> Found:
        """Measure, or read what was measured."""
        file = folder / FILE
        if file.exists():
            return found_of(read_json(file))
        watch.tell(self.name)
        begin = time.perf_counter()
        measured = self.function(**self.settings)
        found = Found(measured.observations, measured.curves, time.perf_counter() - begin)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(file, to_json(asdict(found)))
        return found


def in_processes(
    name: str, function: Callable[..., Found], settings: Mapping[str, object], size: Size
) -> Measurement:
    """A measurement that several fresh processes repeat, one after the other.

    Times differ more from process to process than from round to round, and so does resident memory:
    each process counts as a seed, and a verdict takes the interval over them.

    Args:
        name: Its folder in the experiment's.
        function: Takes the settings by name.
        settings: Plain JSON.
        size: Of the experiment: the smallest has one process.
    """
    processes = 1 if size == "smallest" else PROCESSES
    repeated = partial(_over_processes, function)
    return Measurement(name, repeated, {**settings, "processes": processes})


def _over_processes(function: Callable[..., Found], *, processes: int, **settings: object) -> Found:
    found = [alone(partial(function, **settings)) for _ in range(processes)]
    return Found(
        tuple(replace(o, seed=i) for i, own in enumerate(found) for o in own.observations),
        tuple(replace(c, seed=i) for i, own in enumerate(found) for c in own.curves),
    )


def measured(name: str, size: str, measurement: Measurement) -> Experiment:
    """An experiment that is one exact measurement, the same at every size.

    Args:
        name: Its folder.
        size: What it is made of, in words.
        measurement: The measurement.
    """
    return Experiment(
        name, {"smallest": size, "small": size, "paper": size}, lambda _: (measurement,)
    )


def found_of(read: Mapping[str, Any]) -> Found:
    """What a file of :meth:`Measurement.run` holds; null is what was not finite."""
    return Found(
        tuple(
            replace(o, value=_number(o.value))
            for o in (Observation(**o) for o in read["observations"])
        ),
        tuple(
            Curve(**c | {"steps": tuple(c["steps"]), "values": tuple(map(_number, c["values"]))})
            for c in read["curves"]
        ),
        read["seconds"],
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else value
