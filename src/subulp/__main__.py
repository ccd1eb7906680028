"""The ``subulp`` command, also ``python -m subulp``; it needs the extra ``lab``."""

from __future__ import annotations

import sys

_REMEDY = (
    "error: the subulp command needs {name}, which is not installed: pip install 'subulp[lab]' "
    "(without it, python -m subulp.diagnostics.doctor checks the installation)"
)


def main() -> int:
    """Run the command line.

    Returns:
        Its exit code; 2 if the extra ``lab`` is not installed.
    """
    try:
        from .lab.cli import main as command_line  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "subulp":
            raise
        print(_REMEDY.format(name=error.name), file=sys.stderr)
        return 2
    return command_line()


if __name__ == "__main__":
    sys.exit(main())
