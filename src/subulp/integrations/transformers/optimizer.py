"""Our optimizers for ``Trainer(optimizer_cls_and_kwargs=...)``, with options from its arguments."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping
from typing import Any

from transformers import TrainingArguments

from ... import optim
from ...optim.base import Optimizer

# An option, and a value that may have commas within brackets.
_OPTION = re.compile(r"\s*(\w+)\s*=\s*((?:\([^)]*\)|\[[^\]]*\]|\{[^}]*\}|[^,(\[{])*)(?:,|$)")


def optimizer_cls_and_kwargs(
    args: TrainingArguments, optimizer: type[Optimizer] = optim.AdamW, **options: Any
) -> tuple[type[Optimizer], dict[str, Any]]:
    """What ``Trainer(optimizer_cls_and_kwargs=...)`` takes.

    ``Trainer`` makes its groups without names, so random bits are drawn by a parameter's position.

    Args:
        args: Give the learning rate, Adam's betas and epsilon, and with ``optim_args`` further
            options as text, ``"precision=collage-plus,betas=(0.9,0.95)"``. ``Trainer`` itself
            gives the weight decay to its groups.
        optimizer: One of :mod:`subulp.optim` (default: ``AdamW``).
        options: Options of the optimizer; they come before those of ``args``.

    Returns:
        The class, and its keyword arguments.

    Raises:
        ValueError: The optimizer is not subulp's, or has no option of such a name.
    """
    check_class(optimizer)
    known = [name for name in inspect.signature(optimizer).parameters if name != "params"]
    adam = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    chosen: dict[str, Any] = {"lr": args.learning_rate}
    chosen |= {name: value for name, value in adam.items() if name in known}
    text = args.optim_args
    for source, given in (
        ("optim_args", parse_options(text) if isinstance(text, str) else text or {}),
        ("options", options),
    ):
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ValueError(
                f"{source}: {optimizer.__name__} has no option {unknown[0]!r}; it has "
                f"{', '.join(known)}"
            )
        chosen |= given
    return optimizer, chosen


def check_class(optimizer: object) -> None:
    """Raise ValueError unless it is one of our classes."""
    if not (isinstance(optimizer, type) and issubclass(optimizer, Optimizer)):
        name = getattr(optimizer, "__name__", type(optimizer).__name__)
        raise ValueError(f"optimizer is {name}: pass a class of subulp.optim")


def parse_options(text: str) -> Mapping[str, Any]:
    """Options written as text, with numbers, booleans, ``None`` and tuples for what they are.

    Args:
        text: ``"name=value, name=value"``; what is no Python literal is a string.

    Raises:
        ValueError: Something is no such pair, or is there twice.
    """
    found: dict[str, Any] = {}
    place = 0
    while place < len(text):
        match = _OPTION.match(text, place)
        if match is None or not match[2].strip():
            raise ValueError(f"optim_args: {text[place:]!r} does not begin with name=value")
        name, value = match[1], match[2].strip()
        if name in found:
            raise ValueError(f"optim_args: {name!r} is there twice")
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = {"true": True, "false": False, "none": None}.get(value.lower(), value)
        place = match.end()
    return found
