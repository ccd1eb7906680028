"""How a run is resumed, in words."""

from __future__ import annotations

import shlex
from pathlib import Path


def resume_command(directory: Path) -> str:
    """The command that resumes a run directory."""
    return f"subulp train --resume {shlex.quote(str(directory))}"
