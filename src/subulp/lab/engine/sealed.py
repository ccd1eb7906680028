"""JSON objects that carry their own SHA-256 sum, and the sums of files beside them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..data.regular import NotRegularError, open_regular
from .typed_files import parse_json, read_bytes

SUM = "sha256"
"""The key of the sum."""

LARGEST = 1 << 30
"""Bytes of a sealed file."""


class DamagedError(ValueError):
    """A file differs from what was written."""


def sealed(fields: Mapping[str, Any]) -> str:
    """The JSON text of an object and of its sum, in one line.

    Raises:
        ValueError: A number in it is not finite.
    """
    return json.dumps({**fields, SUM: sum_of(fields)}, allow_nan=False) + "\n"


def sum_of(fields: Mapping[str, Any]) -> str:
    """The sum of an object, whatever the order of its keys.

    Raises:
        ValueError: It is nested too deep, or a number in it is not finite.
    """
    try:
        text = json.dumps(fields, sort_keys=True, allow_nan=False)
    except RecursionError:
        raise ValueError("nested too deep") from None
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def read_sealed(path: Path) -> dict[str, Any]:
    """The fields of a sealed object, after their sum was compared.

    Raises:
        FileNotFoundError: There is no such file.
        DamagedError: It is damaged.
    """
    fields = read_unchecked(path)
    check_seal(path, fields)
    return fields


def read_unchecked(path: Path) -> dict[str, Any]:
    """The JSON object of a file, its sum included and not compared.

    Raises:
        FileNotFoundError: There is no such file.
        DamagedError: It is not one JSON object.
    """
    try:
        return parse_json(read_bytes(path, LARGEST, "one JSON object"), path)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: {_without_place(path, error)}") from None


def check_seal(path: Path, fields: dict[str, Any]) -> None:
    """Take the sum out of an object that was read, and compare it.

    Raises:
        DamagedError: It differs.
    """
    expected = fields.pop(SUM, None)
    try:
        found = sum_of(fields)
    except ValueError as error:
        raise DamagedError(f"{path} is damaged: {error}") from None
    if expected != found:
        raise DamagedError(f"{path} is damaged: its SHA-256 sum does not match")


def fingerprint(path: Path) -> dict[str, Any]:
    """Size and sum of a file.

    Raises:
        FileNotFoundError: There is no such file.
        DamagedError: It is a pipe, a device or a folder.
    """
    try:
        with open_regular(path) as file:
            total = hashlib.file_digest(file, SUM).hexdigest()
            return {"size": file.tell(), SUM: total}
    except NotRegularError as error:
        raise DamagedError(str(error)) from None


def check_file(path: Path, expected: Mapping[str, Any]) -> None:
    """Compare a file with its fingerprint.

    Raises:
        DamagedError: It is missing, cut off or changed.
    """
    try:
        found = fingerprint(path)
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing") from None
    if found == expected:
        return
    raise DamagedError(
        f"{path} is damaged: it has {found['size']:,} of {expected['size']:,} bytes"
        if found["size"] != expected["size"]
        else f"{path} is damaged: its SHA-256 sum differs from the one that was written"
    )


def _without_place(path: Path, error: Exception) -> str:
    return str(error).removeprefix(f"{path}:").removeprefix("1: ")
