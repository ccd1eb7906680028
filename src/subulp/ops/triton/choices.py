"""Choices among configurations of kernels, kept on disk from one process to the next.

One JSON file for all kernels and devices. It is replaced as a whole, so whoever reads it beside
many writers reads one of theirs; what it holds is only a hint, and a file that is none is ignored.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

Configuration = Mapping[str, int]
"""Sizes of tiles, warps, stages and registers of a kernel, by the names of its launch's options."""

FILE_NAME = "configurations.json"

# Goes up when the file's layout or the meaning of names changes: other files are then ignored.
_VERSION = 1


def path() -> Path:
    """Where choices are kept: in ``SUBULP_CACHE``, else in the user's folder of caches.

    Raises:
        ValueError: ``SUBULP_CACHE`` is a file.
    """
    chosen = os.environ.get("SUBULP_CACHE")
    if chosen:
        folder = Path(chosen).expanduser()
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"SUBULP_CACHE={chosen!r} is a file: name a folder, or unset it")
        return folder / FILE_NAME
    caches = os.environ.get("XDG_CACHE_HOME", "")
    # The specification has relative ones ignored.
    home = Path(caches) if os.path.isabs(caches) else Path("~/.cache").expanduser()
    return home / "subulp" / FILE_NAME


def read(file: Path) -> dict[str, Configuration]:
    """The choices in a file, none if it does not exist.

    A file that cannot be read, or is none of this version, is ignored with a warning.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        _warn(f"{file} cannot be read ({error})")
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        _warn(f"{file} is no JSON ({error})")
        return {}
    choices = found.get("choices") if isinstance(found, dict) else None
    if not isinstance(choices, dict) or found.get("version") != _VERSION:
        _warn(f"{file} is no file of configurations of this version")
        return {}
    return {name: choice for name, choice in choices.items() if isinstance(choice, dict)}


def add(file: Path, name: str, choice: Configuration) -> None:
    """Keep a choice beside those that the file has.

    Of processes that add at the same time the last one wins; what it did not know of is measured
    once more. A file that cannot be written is a warning.
    """
    choices = {**read(file), name: dict(choice)}
    text = json.dumps({"version": _VERSION, "choices": choices}, indent=1, sort_keys=True) + "\n"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder: only there renaming is atomic. Its name is nobody else's.
        handle, temporary = tempfile.mkstemp(prefix=f".{file.name}-", dir=file.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                out.write(text)
                out.flush()
                os.fsync(out.fileno())
            os.replace(temporary, file)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        _warn(f"{file} cannot be written ({error}), and what was measured is not kept")


def _warn(what: str) -> None:
    warnings.warn(
        f"{what}: delete it, or have SUBULP_CACHE name another folder", RuntimeWarning, stacklevel=2
    )
