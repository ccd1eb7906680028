"""One checkpoint: a folder that is complete or absent, and whose every byte is checked.

``tensors.safetensors`` holds the tensors, ``state.json`` all else, and ``manifest.json`` says what
it is of and what sizes and SHA-256 sums the files have. Nothing is pickled: reading
someone else's checkpoint executes none of their code.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from .files import UnwritableError
from .saved_state import flatten, rebuild
from .sealed import DamagedError, check_file, check_seal, fingerprint, read_unchecked, sealed
from .typed_files import LARGEST_JSON, parse_json, read_bytes

TENSORS = "tensors.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"
FORMAT = "subulp checkpoint"
VERSION = 1

_FILES = (TENSORS, STATE)
# A long run has logged many steps.
_LARGEST_STATE = 16 * LARGEST_JSON


@dataclass(frozen=True)
class Header:
    """The run and step that a checkpoint belongs to.

    Attributes:
        task: Name of the task.
        variant: The run's strategy.
        seed: The run's seed.
        step: Steps that were made.
        config: What decides the run's numbers, as plain JSON.
        value: The task's first metric, if the step was evaluated and it is finite.
        asked: It was written because the run was asked to stop, not because it was due.
    """

    task: str
    variant: str
    seed: int
    step: int
    config: dict[str, Any]
    value: float | None = None
    asked: bool = False


def write(path: Path, header: Header, state: Any) -> None:
    """Write a checkpoint, replacing an earlier one of the same name.

    All files and folders are on the disk before the last rename makes them a checkpoint, so neither
    a killed process nor a power cut leaves a part of one under ``path``.

    Args:
        path: The folder to make.
        header: Its run and step.
        state: As :func:`subulp.lab.engine.saved_state.flatten` takes it.

    Raises:
        UnwritableError: The disk is full, for instance. What was there is unchanged.
    """
    unfinished, replaced = (path.with_name(f".{path.name}.{end}") for end in ("new", "old"))
    with _failing_clearly(path, unfinished):
        clear(unfinished, replaced)
        unfinished.mkdir(parents=True)
        plain, tensors = flatten(state)
        save_file(tensors, unfinished / TENSORS)
        _write_json(unfinished / STATE, plain)
        # Safetensors makes a file that its owner alone may read.
        (unfinished / TENSORS).chmod((unfinished / STATE).stat().st_mode)
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            **asdict(header),
            "files": {name: fingerprint(unfinished / name) for name in _FILES},
        }
        (unfinished / MANIFEST).write_text(sealed(manifest), encoding="utf-8")
        for name in (*_FILES, MANIFEST, "."):
            sync(unfinished / name)
        if path.exists():
            path.rename(replaced)
        unfinished.rename(path)
        sync(path.parent)
        clear(replaced)


@contextmanager
def _failing_clearly(path: Path, unfinished: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        clear(unfinished)
        if not isinstance(error, OSError):
            full = "No space left" in str(error)
            error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if full else OSError(error)
        raise UnwritableError.of(f"the checkpoint {path}", error) from error


def clear(*folders: Path) -> None:
    """Remove folders, of links the link; a file under such a name stays."""
    for folder in folders:
        if folder.is_symlink():
            folder.unlink()
        shutil.rmtree(folder, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check(path: Path) -> Header:
    """Compare all files with the manifest.

    Returns:
        The run and step of the checkpoint.

    Raises:
        DamagedError: A file is missing, cut off or changed.
        ValueError: It is not a checkpoint, or one of a newer version.
    """
    manifest = _read_manifest(path / MANIFEST)
    for name in _FILES:
        check_file(path / name, manifest["files"][name])
    return _header(manifest)


def read_header(path: Path) -> Header:
    """The header of a checkpoint; its other files are not read.

    Raises:
        DamagedError: The manifest is missing or damaged.
        ValueError: It is of a newer version.
    """
    return _header(_read_manifest(path / MANIFEST))


def read(path: Path) -> tuple[Header, Any]:
    """Read a checkpoint, after :func:`check`.

    Returns:
        Its run and step, and the state; its tensors are on the CPU and may be memory-mapped.

    Raises:
        DamagedError: A file is missing, cut off or changed.
        ValueError: It is not a checkpoint, or one of a newer version.
    """
    header = check(path)
    try:
        return header, rebuild(read_plain(path), load_file(path / TENSORS))
    except (SafetensorError, ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: {error}") from None


def read_plain(path: Path) -> dict[str, Any]:
    """Everything but the tensors of a checkpoint that passed :func:`check`, as plain JSON.

    Raises:
        ValueError: It is not one JSON object.
    """
    return parse_json(read_bytes(path / STATE, _LARGEST_STATE, "one JSON object"), path / STATE)


def _header(manifest: Mapping[str, Any]) -> Header:
    return Header(**{field.name: manifest[field.name] for field in fields(Header)})


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = read_unchecked(path)
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing") from None
    if manifest.get("format") != FORMAT:
        raise DamagedError(f"{path} is damaged, or not from a subulp checkpoint")
    version = manifest.get("version")
    if isinstance(version, int) and version > VERSION:
        raise ValueError(
            f"{path} has version {version} of the format, and this subulp reads up to {VERSION}: "
            "use the subulp that wrote it"
        )
    check_seal(path, manifest)
    match manifest:
        case {
            "task": str(),
            "variant": str(),
            "seed": int(seed),
            "step": int(step),
            "config": dict(),
            "value": float() | int() | None,
            "asked": bool(),
            "files": {
                "tensors.safetensors": {"size": int(), "sha256": str()},
                "state.json": {"size": int(), "sha256": str()},
            },
        } if not isinstance(seed, bool) and not isinstance(step, bool) and step >= 0:
            return manifest
    raise DamagedError(f"{path} is no manifest of version {VERSION}")


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, allow_nan=False) + "\n", encoding="utf-8")
