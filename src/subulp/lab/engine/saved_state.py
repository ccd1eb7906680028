"""Nested states as plain JSON and a flat set of tensors, and back exactly, without pickle.

What JSON lacks is an object with the one key ``"$"``: tensors by name, tuples, dictionaries whose
keys are not strings, and floats that are not finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_KEY = "$"


def flatten(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Split a state into JSON and tensors.

    Args:
        state: Dictionaries, lists, tuples, tensors of any dtype and device, strings, numbers,
            booleans and ``None``, nested in any way.

    Returns:
        The same as plain JSON, and its tensors by name, contiguous and on the CPU. Tensors that
        share their memory are one.

    Raises:
        TypeError: It contains something else.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[tuple[Any, ...], str] = {}
    storages: set[int] = set()

    def plain(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            return {_KEY: ["tensor", tensor(value.detach(), path)]}
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {_KEY: ["float", repr(value)]}
        if type(value) in (list, tuple):
            items = [plain(item, f"{path}.{i}") for i, item in enumerate(value)]
            return items if type(value) is list else {_KEY: ["tuple", items]}
        if isinstance(value, Mapping):
            pairs = [(key, plain(item, f"{path}.{key}")) for key, item in value.items()]
            if all(type(key) is str and key != _KEY for key, _ in pairs):
                return dict(pairs)
            if all(type(key) in (int, str) for key, _ in pairs):
                return {_KEY: ["dict", [[key, item] for key, item in pairs]]}
        raise TypeError(f"{path or 'the state'} is {type(value).__name__}, which is not saved")

    def tensor(value: Tensor, path: str) -> str:
        # Empty tensors have no memory to be recognised by.
        same = (value.data_ptr() or path, value.dtype, value.device, value.shape, value.stride())
        if same not in names:
            name = path.lstrip(".")
            while name in tensors:
                name += "'"
            names[same], tensors[name] = name, apart(value.cpu().contiguous())
        return names[same]

    def apart(value: Tensor) -> Tensor:
        # Safetensors takes no two views of one memory.
        memory = value.untyped_storage().data_ptr()
        if memory in storages:
            return value.clone()
        storages.add(memory)
        return value

    return plain(state, ""), tensors


def rebuild(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The state that :func:`flatten` split.

    Raises:
        ValueError: The parts do not form a state.
    """
    if isinstance(plain, list):
        return [rebuild(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if _KEY not in plain:
        return {key: rebuild(item, tensors) for key, item in plain.items()}
    value: Any
    match plain:
        case {"$": ["tensor", str(name)]} if name in tensors:
            value = tensors[name]
        case {"$": ["float", ("nan" | "inf" | "-inf") as text]}:
            value = float(text)
        case {"$": ["tuple", list(items)]}:
            value = tuple(rebuild(item, tensors) for item in items)
        case {"$": ["dict", list(pairs)]} if all(_is_pair(pair) for pair in pairs):
            value = {key: rebuild(item, tensors) for key, item in pairs}
        case _:
            raise ValueError(f"{plain!r:.80} stands for nothing")
    return value


def _is_pair(pair: Any) -> bool:
    match pair:
        case [int() | str(), _]:
            return True
    return False


def numbers(values: list[float]) -> Tensor:
    """Many floats as one tensor, which keeps them exactly and takes less room than their text."""
    return torch.tensor(values, dtype=torch.float64)
