"""Examples, run as a user runs them, and the tables that they print."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def table(name: str, *options: str) -> dict[str, list[float]]:
    """The numbers of each row of the table that an example prints.

    Args:
        name: The file.
        options: Of its command line.

    Raises:
        AssertionError: It failed; the message is what it wrote.
    """
    command = [sys.executable, str(EXAMPLES / name), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {}
    for line in done.stdout.splitlines()[1:]:
        title, *numbers = re.split(r"\s{2,}", line.strip())
        rows[title] = [float(number) for each in numbers for number in each.split()]
    return rows
