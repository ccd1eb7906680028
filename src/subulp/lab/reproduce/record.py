"""What is written down about a claim: what was run where, what was found, and what follows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..engine.files import write_text
from ..engine.metrics import to_json
from ..engine.typed_files import saved_json
from .check import Outcome, Verdict, verdict_of
from .claim import Claim, Part, Size
from .found import Found
from .measurement import found_of

FORMAT = "subulp-reproduction-1"


@dataclass(frozen=True)
class Written:
    """A record.

    Attributes:
        claim: Name of the claim.
        size: How much was run.
        experiment: What was run, in words.
        digest: Of the settings of what was run, see :func:`digest_of`.
        command: Repeats it.
        date: When it was written, as YYYY-MM-DD.
        machine: Where the last part ran.
        versions: Of what computed it.
        seeds: Of its runs.
        found: The numbers.
        wall_seconds: How long its runs took, with all that is no step of them; ``None`` in records
            that were written before it was kept.
    """

    claim: str
    size: Size
    experiment: str
    digest: str
    command: str
    date: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str | None]
    seeds: Sequence[int]
    found: Found
    wall_seconds: float | None = None

    def outcomes(self, claim: Claim) -> list[Outcome]:
        """What the numbers say about the checks of the claim."""
        return [check.on(self.found) for check in claim.checks]

    def verdict(self, claim: Claim) -> Verdict:
        """The verdict; the smallest size decides nothing."""
        if self.size == "smallest":
            return "undecided"
        return verdict_of(self.outcomes(claim))

    def write(self, file: Path, claim: Claim) -> None:
        """Write the record, with the verdict for readers of the file; it is not read again."""
        checks = [
            {
                "says": o.check.says,
                "mean": o.mean,
                "low": o.low,
                "high": o.high,
                "seeds": o.seeds,
                "verdict": o.verdict,
            }
            for o in self.outcomes(claim)
        ]
        content = {
            "format": FORMAT,
            **{k: v for k, v in vars(self).items() if k != "found"},
            "verdict": self.verdict(claim),
            "checks": checks,
            "seconds": self.found.seconds,
            "observations": [asdict(o) for o in self.found.observations],
            "curves": [asdict(c) for c in self.found.curves],
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        # A line for each number: what changes can be read.
        lines = [f"{json.dumps(name)}: {_lines(value)}" for name, value in content.items()]
        write_text(file, "{\n" + ",\n".join(lines) + "\n}\n")


def _lines(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n  " + ",\n  ".join(map(to_json, value)) + "\n]"
    return to_json(value)


def read_record(file: Path) -> Written:
    """Read a record.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no record.
    """
    with saved_json(file, FORMAT, "record of a reproduction", "run it again") as read:
        fields = ("claim", "size", "experiment", "digest", "command", "date", "machine", "versions")
        return Written(
            **{name: read[name] for name in fields},
            seeds=read["seeds"],
            found=found_of(read),
            wall_seconds=read.get("wall_seconds"),
        )


def digest_of(parts: Sequence[Part]) -> str:
    """A digest of what an experiment consists of: another experiment has another one."""
    settings = {part.name: dict(part.settings) for part in parts}
    plain = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(plain.encode()).hexdigest()[:16]
