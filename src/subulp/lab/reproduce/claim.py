"""A row of the index: a table, a figure, an algorithm or a numbered claim of a paper."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol, get_args

from ..engine.progress import Plan, Reporter
from .check import Check
from .found import Found, Observation

Size = Literal["smallest", "small", "paper"]
"""``"smallest"`` shows in seconds that the command works, and decides nothing; ``"small"`` is what
two cores carry; ``"paper"`` the paper's."""

SIZES: tuple[Size, ...] = get_args(Size)

PAPERS = {
    "collage": "Collage: light-weight low-precision strategy for LLM training",
    "extra-bits": "Memory-efficient mixed-precision optimizers",
    "elmo": "ELMO: extreme classification in low precision",
    "cached-tables": "Mixed-precision embedding with a cache",
    "mor": "MoR: mixture of representations",
}
"""Short names of the papers, and what they are about."""


class Part(Protocol):
    """A run, or a measurement, which an experiment consists of."""

    @property
    def name(self) -> str:
        """Its folder in the experiment's."""

    @property
    def settings(self) -> Mapping[str, object]:
        """All that decides what it finds, as plain JSON."""

    def run(self, folder: Path, watch: Watch) -> Found:
        """Run it, or what is left of it, in its folder.

        Args:
            folder: Its own; what an earlier call has left there is taken up.
            watch: Who is told how it goes on.
        """


@dataclass(frozen=True)
class Watch:
    """Who is told how an experiment goes on, and how much of the machine it may take.

    Attributes:
        tell: Shows a line (default: nothing).
        reporter: Shows the steps of trainings, see :func:`..compare.compare` (default: nothing).
        jobs: Trainings that run at the same time; ``None`` is one per core (default: ``None``).
    """

    tell: Callable[[str], None] = lambda _: None
    reporter: Callable[[Plan], Reporter] | None = None
    jobs: int | None = None


@dataclass(frozen=True)
class Options:
    """What a caller decides about an experiment.

    Attributes:
        size: How much is run.
        seeds: Seeds of its runs; ``None`` takes the experiment's own (default: ``None``).
        data: Data of its runs; ``None`` takes what ships, or what is generated
            (default: ``None``).
        encoder: Folder of a transformer, for the paper's size of claims that train one
            (default: ``None``).
    """

    size: Size = "small"
    seeds: tuple[int, ...] | None = None
    data: str | None = None
    encoder: str | None = None

    def seeds_or(self, own: tuple[int, ...]) -> tuple[int, ...]:
        """The caller's seeds, or an experiment's own, of which the smallest size takes one.

        Args:
            own: The experiment's.
        """
        return self.seeds or ((0,) if self.size == "smallest" else own)

    def check_data(self, what: str) -> None:
        """Refuse the paper's size without data: what ships would be another experiment.

        Args:
            what: What the data would be.

        Raises:
            ValueError: There are none.
        """
        if self.size == "paper" and self.data is None:
            raise ValueError(f"size=paper needs data: give --data, {what}")


class _Noting(Options):
    """Options that note which of them are read."""

    def __getattribute__(self, name: str) -> object:
        if name in ("seeds", "data", "encoder"):
            self.noted().add(name)
        return super().__getattribute__(name)

    def noted(self) -> set[str]:
        """What has been read: names of attributes."""
        found: set[str] = vars(self).setdefault("_noted", set())
        return found


def nothing_more(_: Found) -> tuple[Observation, ...]:
    """No numbers follow from others."""
    return ()


@dataclass(frozen=True)
class Experiment:
    """Runs and measurements that one or more claims are checked by.

    Attributes:
        name: Its folder.
        sizes: Model, data and length of each size, in words. A size that is not there cannot be
            run.
        parts: Makes what it consists of.
        derive: Numbers that follow from those of all parts (default: none).
    """

    name: str
    sizes: Mapping[Size, str]
    parts: Callable[[Options], tuple[Part, ...]]
    derive: Callable[[Found], tuple[Observation, ...]] = nothing_more

    def reads(self, options: Options) -> frozenset[str]:
        """Which of a caller's options decide about it: names of attributes."""
        noting = _Noting(**vars(options))
        self.parts(noting)
        return frozenset(noting.noted())

    def whole(self, found: Iterable[Found]) -> Found:
        """What all parts have found, and what follows from it."""
        together = Found.of_all(found)
        return replace(together, observations=(*together.observations, *self.derive(together)))


@dataclass(frozen=True)
class Claim:
    """What a paper says at one place, and what repeats it.

    Attributes:
        paper: One of :data:`PAPERS`.
        place: Where the paper says it, such as ``"Table 6"``.
        says: What, in a sentence.
        experiment: What repeats it; ``None`` if nothing does.
        not_run: Why nothing does.
        published: Numbers that the paper prints there.
        checks: What decides it.
        shows: Quantities of the experiment that belong to it; all if it is empty.
        curves: Curves of the experiment that belong to it.
        along: What they go along (default: steps).
        cases: Begins the cases of the experiment that belong to it; all if it is empty.
        differs: What is otherwise than in the paper, in a sentence.
    """

    paper: str
    place: str
    says: str
    experiment: Experiment | None = None
    not_run: str | None = None
    published: tuple[Observation, ...] = ()
    checks: tuple[Check, ...] = ()
    shows: tuple[str, ...] = ()
    curves: tuple[str, ...] = ()
    along: str = "step"
    cases: tuple[str, ...] = ()
    differs: str = ""

    def __post_init__(self) -> None:
        if (self.experiment is None) == (self.not_run is None):
            raise ValueError(f"{self.name}: give an experiment, or why there is none")
        if self.experiment is not None and not self.checks:
            raise ValueError(f"{self.name}: an experiment without checks decides nothing")

    @property
    def name(self) -> str:
        """What the command line calls it, such as ``"collage-table6"``."""
        parts = (re.sub(r"[^a-z0-9]", "", part) for part in self.place.lower().split(","))
        return "-".join((self.paper, *parts))

    def own(self, found: Found) -> Found:
        """What of an experiment's findings belongs to it."""
        return Found(
            tuple(
                o
                for o in found.observations
                if (not self.shows or o.quantity in self.shows) and self._has(o.case)
            ),
            tuple(c for c in found.curves if c.quantity in self.curves and self._has(c.case)),
            found.seconds,
        )

    def _has(self, case: str) -> bool:
        return not self.cases or case.startswith(self.cases)


def published(
    quantity: str,
    values: Mapping[str, float | None],
    *,
    more: Mapping[str, Mapping[str, float]] = {},
) -> tuple[Observation, ...]:
    """Numbers that a paper prints: of one quantity by case, and of more of them.

    Args:
        quantity: What they are.
        values: By case; ``None`` where the paper has none.
        more: Other quantities (default: none).
    """
    first = [Observation(case, quantity, v) for case, v in values.items() if v is not None]
    others = [Observation(c, q, v) for q, by_case in more.items() for c, v in by_case.items()]
    return (*first, *others)
