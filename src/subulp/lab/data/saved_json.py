"""JSON files that name their format: what a run saves beside its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..engine.typed_files import read_json

_DAMAGES = (
    *(ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, RuntimeError),
)


@contextmanager
def saved_json(path: Path, format: str, what: str, remedy: str) -> Iterator[dict[str, Any]]:
    """The fields of a file, and one error for whatever is wrong with them.

    Args:
        path: The file.
        format: What its field ``format`` must be.
        what: What the file is called in the error.
        remedy: What to do, at the end of the error.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file holds something else: it is no JSON object, names another format, or
            the block raised an error about a field.
    """
    try:
        fields = read_json(path)
        if fields["format"] != format:
            raise ValueError(f"its format is {fields['format']!r}")
        yield fields
    except _DAMAGES as error:
        raise ValueError(
            f"{path} is not {what} as {format!r} writes it ({error}): {remedy}"
        ) from None
