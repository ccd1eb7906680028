"""The terminal: what is printed is text, whatever brackets and colons a path or a line has."""

from __future__ import annotations

from rich.console import Console


def errors(*, quiet: bool = False) -> Console:
    """Standard error, for progress and messages."""
    return Console(
        stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False, quiet=quiet
    )


def output() -> Console:
    """Standard output; a file has no width, so a table there gets the width that it needs."""
    console = Console(markup=False, emoji=False)
    return console if console.is_terminal else Console(width=200, markup=False, emoji=False)
