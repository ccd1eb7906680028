"""The ``subulp`` command, also ``python -m subulp``; it needs the extra ``lab``."""

from __future__ import annotations

import re
import sys
from importlib import metadata

_REMEDY = (
    "error: the subulp command needs {name}, which is not installed: pip install {packages} "
    "(without it, python -m subulp.diagnostics.doctor checks the installation)"
)
_OF_LAB = re.compile(r"""extra\s*==\s*["']lab["']""")


def main() -> int:
    """Run the command line.

    Returns:
        Its exit code; 2 if the extra ``lab`` is not installed, 130 after Ctrl-C.
    """
    try:
        from .lab.cli import main as command_line  # noqa: PLC0415
    except KeyboardInterrupt:
        # Before there is a command line that could say more.
        print("interrupted", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "subulp":
            raise
        print(_REMEDY.format(name=error.name, packages=_packages(error.name)), file=sys.stderr)
        return 2
    return command_line()


def _packages(missing: str) -> str:
    """What the extra needs, by name: pip finds that wherever this package came from."""
    try:
        lines = metadata.requires("subulp") or []
    except metadata.PackageNotFoundError:
        lines = []
    found = [line.partition(";")[0].strip() for line in lines if _OF_LAB.search(line)]
    return " ".join(f"'{package}'" for package in found) or missing.partition(".")[0]


if __name__ == "__main__":
    sys.exit(main())
