"""Giving a model's linear layers operands in a mixture of representations, and taking them away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .linear import Linear
from .mor import MoR
from .mor_linear import MixtureLayer, MoRLinear, check_mor
from .mor_modules import (
    Attention,
    Conv1DProduct,
    Converted,
    Experts,
    conv1d_type,
    has_experts,
    subclass,
)

Filter = Callable[[str, torch.nn.Module], bool]

HEAD_NAMES = ("lm_head", "head", "score", "classifier", "qa_outputs")
"""The last part of the names that output heads go by."""


@dataclass(frozen=True)
class Conversion:
    """What :func:`convert_to_mor` did.

    Attributes:
        converted: Names of the converted modules, and what each was.
        left: Names of the other modules with matrices, and why each was left as it is.
    """

    converted: dict[str, str]
    left: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{len(self.converted)} modules multiply in a mixture of representations:"]
        lines += _grouped(self.converted)
        if self.left:
            lines += [f"{len(self.left)} modules with matrices do not:", *_grouped(self.left)]
        return "\n".join(lines)


def convert_to_mor(
    model: torch.nn.Module,
    mor: MoR,
    *,
    filter: Filter | None = None,
    heads: bool = False,
    first: int = 0,
    last: int = 0,
    quiet: bool = False,
) -> Conversion:
    """Represent the operands of a model's linear layers in a mixture, in place.

    Modules stay the same objects with the same parameters, hooks and names, so tied weights stay
    tied and optimizers go on updating them. Converted are ``torch.nn.Linear`` and
    ``subulp.nn.Linear``, the four projections of ``torch.nn.MultiheadAttention`` (also within
    ``torch.nn.Transformer``, whose fused inference path is given up), and of Hugging Face's
    Transformers ``Conv1D`` and experts that are held in one tensor. Subclasses of these compute
    something else, and are left.

    Their state dict holds the representation too, see :class:`MoRLinear`. :func:`convert_from_mor`
    is the inverse.

    Args:
        model: A module that is or contains linear layers.
        mor: How operands are represented.
        filter: Called with the name and module of each layer; only those for which it returns true
            are converted (default: all).
        heads: Whether output heads are converted too: what ``model.get_output_embeddings()``
            returns, layers whose weight is that of an embedding, and those named as in
            :data:`HEAD_NAMES`. Their errors would enter the loss directly (default: ``False``).
        first: How many blocks at the beginning of the model are left as they are. Blocks are the
            elements of the ``torch.nn.ModuleList`` or ``torch.nn.Sequential`` that has the most of
            the layers (default: 0).
        last: The same at its end (default: 0).
        quiet: Whether the report is returned without being printed (default: ``False``).

    Returns:
        What was converted, what was not, and why.

    Raises:
        ValueError: There is nothing to convert, a layer that is chosen is already converted, or
            ``first`` and ``last`` do not fit the model. Nothing has been converted then.
    """
    check_mor(mor)
    found = dict(_layers(model))
    left = dict(_not_layers(model, found))
    if not found:
        reasons = "".join(f"; {name!r} is {why}" for name, why in left.items())
        raise ValueError(
            f"{type(model).__name__} has no linear layer to convert: torch.nn.Linear, "
            "subulp.nn.Linear, torch.nn.MultiheadAttention and transformers' Conv1D can be, "
            f"subclasses cannot{reasons}"
        )
    chosen: dict[str, torch.nn.Module] = {}
    outputs = set() if heads else _heads(model, found)
    ends = _ends(model, found, first, last)
    for name, module in found.items():
        if id(module) in outputs:
            left[name] = "an output head: heads=True converts it"
        elif name in ends:
            left[name] = ends[name]
        elif filter is not None and not filter(name, module):
            left[name] = "filter= leaves it out"
        elif _is_converted(module):
            raise ValueError(
                f"layer {name!r} is converted already: exclude it by filter=, or assign its .mor"
            )
        else:
            chosen[name] = module
    if not chosen:
        reasons = "; ".join(f"{name!r}: {left[name]}" for name in found)
        raise ValueError(f"none of the {len(found)} linear layers is to be converted: {reasons}")
    converted = {name: type(module).__name__ for name, module in chosen.items()}
    for module in chosen.values():
        _convert(module, mor)
    _forgo_fused_inference(model)
    report = Conversion(converted, left)
    if not quiet:
        print(report)
    return report


def convert_from_mor(model: torch.nn.Module, *, filter: Filter | None = None) -> list[str]:
    """Make converted layers what they were, in place: the inverse of :func:`convert_to_mor`.

    A layer that was made as :class:`MoRLinear` becomes a :class:`subulp.nn.Linear`.

    Args:
        model: A module with converted layers.
        filter: Called with the name and module of each; only those for which it returns true are
            changed (default: all).

    Returns:
        Their names.

    Raises:
        ValueError: There is none.
    """
    found = {
        name: module
        for name, module in _layers(model)
        if _is_converted(module) and (filter is None or filter(name, module))
    }
    if not found:
        raise ValueError(f"{type(model).__name__} has no converted layer to change back")
    for name, module in found.items():
        if torch.nn.utils.parametrize.is_parametrized(module):
            raise ValueError(
                f"the weight of {name!r} is computed by a parametrization: remove it "
                "(torch.nn.utils.parametrize.remove_parametrizations) before; nothing was changed"
            )
    for module in found.values():
        _restore(module)
    _allow_fused_inference(model)
    return list(found)


# ----------------------------------------------------------------------------- what is convertible


def _layers(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Layers that can be or have been converted; those of an attention are parts of it."""
    parts: set[int] = set()
    for name, module in model.named_modules():
        if _is_layer(module) and id(module) not in parts:
            yield name, module
            parts.update(map(id, module.modules()))


def _is_layer(module: torch.nn.Module) -> bool:
    kind = type(module)
    if kind in (torch.nn.Linear, Linear, torch.nn.MultiheadAttention, conv1d_type()):
        return True
    return _is_converted(module) or has_experts(module)


def _is_converted(module: torch.nn.Module) -> bool:
    return isinstance(module, (MoRLinear, Converted))


def _not_layers(
    model: torch.nn.Module, layers: dict[str, torch.nn.Module]
) -> Iterator[tuple[str, str]]:
    parts = {id(part) for layer in layers.values() for part in layer.modules()}
    for name, module in model.named_modules():
        if id(module) in parts or not _has_matrix(module):
            continue
        kind = type(module).__name__
        if isinstance(module, torch.nn.modules.lazy.LazyModuleMixin):
            yield name, f"{kind}, which has no sizes yet: run the model once before"
        elif torch.nn.utils.parametrize.is_parametrized(module):
            yield name, f"{kind}, whose weight is computed: remove the parametrization before"
        elif isinstance(module, torch.nn.Linear):
            yield name, f"{kind}, a subclass of Linear: it may compute something else"
        elif isinstance(module, torch.nn.MultiheadAttention):
            yield name, f"{kind}, a subclass of MultiheadAttention: it may compute something else"
        elif isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            yield name, f"{kind}: it looks up, and multiplies nothing"
        else:
            yield name, f"{kind}: no linear layer"


def _has_matrix(module: torch.nn.Module) -> bool:
    own = module.parameters(recurse=False)
    if torch.nn.utils.parametrize.is_parametrized(module):
        return True
    return any(torch.nn.parameter.is_lazy(p) or p.dim() > 1 for p in own)


def _heads(model: torch.nn.Module, layers: dict[str, torch.nn.Module]) -> set[int]:
    """Identities of the output heads."""
    embedded = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag))
    }
    found = {
        id(module)
        for module in model.modules()
        if isinstance(module, torch.nn.Linear) and id(module.weight) in embedded
    }
    found |= {id(m) for name, m in layers.items() if name.rpartition(".")[2] in HEAD_NAMES}
    for module in model.modules():
        get = getattr(module, "get_output_embeddings", None)
        if callable(get):
            found.add(id(get()))
    return found


def _ends(
    model: torch.nn.Module, layers: dict[str, torch.nn.Module], first: int, last: int
) -> dict[str, str]:
    """Names of the layers in the blocks that are left, and why."""
    for argument, count in (("first", first), ("last", last)):
        if type(count) is not int or count < 0:
            raise ValueError(f"{argument}={count!r} is out of range: a number of blocks, 0 or more")
    if not first and not last:
        return {}
    counted = {
        name: sum(each.startswith(f"{name}." if name else "") for each in layers)
        for name, module in model.named_modules()
        if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)) and len(module) > 1
    }
    most = max(counted.values(), default=0)
    if not most:
        raise ValueError(
            f"first={first}, last={last} cannot apply: {type(model).__name__} has no ModuleList or "
            "Sequential of blocks; choose layers by filter="
        )
    # The innermost one of those that hold as many.
    path = max((name for name, count in counted.items() if count == most), key=len)
    prefix = f"{path}." if path else ""
    blocks = list(dict(model.get_submodule(path).named_children()))
    blocks = [
        b for b in blocks if any(n == prefix + b or n.startswith(f"{prefix}{b}.") for n in layers)
    ]
    if first + last >= len(blocks):
        raise ValueError(
            f"first={first}, last={last} leave nothing: {path or 'the model'} has {len(blocks)} "
            "blocks with linear layers"
        )
    ends = {b: f"one of the first {first} blocks of {path or 'the model'}" for b in blocks[:first]}
    for b in blocks[len(blocks) - last :]:
        ends[b] = f"one of the last {last} blocks of {path or 'the model'}"
    return {name: why for name in layers for b, why in ends.items() if _within(name, prefix + b)}


def _within(name: str, of: str) -> bool:
    return name == of or name.startswith(f"{of}.")


# ------------------------------------------------------------------------------- there and back


def _convert(module: torch.nn.Module, mor: MoR) -> None:
    kind = type(module)
    if kind in (torch.nn.Linear, Linear):
        _make_linear(module, mor)
    elif kind is torch.nn.MultiheadAttention:
        module.__class__ = subclass(Attention, kind)
        assert isinstance(module, Attention)
        module.begin(mor)
        _make_linear(module.out_proj, mor)
    elif kind is conv1d_type():
        module.__class__ = subclass(Conv1DProduct, kind)
        assert isinstance(module, Conv1DProduct)
        module.become(mor)
    else:
        module.__class__ = subclass(Experts, kind)
        assert isinstance(module, Experts)
        module.begin(mor)


def _make_linear(module: torch.nn.Module, mor: MoR) -> None:
    original = type(module)
    module.__class__ = MoRLinear
    assert isinstance(module, MoRLinear)
    module.become(mor, original)


def _restore(module: Any) -> None:
    if isinstance(module, MoRLinear):
        original: type[torch.nn.Module] = module.original_class or Linear
        module.leave()
    else:
        assert isinstance(module, Converted)
        original = module.original
        if isinstance(module, Attention):
            _restore(module.out_proj)
        if isinstance(module, (Attention, Experts)):
            module.end()
        else:
            assert isinstance(module, MixtureLayer)
            module.leave()
    module.__class__ = original


# --------------------------------------------------------------------------------- fused inference


def _forgo_fused_inference(model: torch.nn.Module) -> None:
    """Make PyTorch's transformers call their layers when they are evaluated.

    They have a fused path, which reads the weights and calls no layer; it wants ReLU or GELU, by a
    number that nothing else reads, and padding that is left out.
    """
    for module in model.modules():
        name = _switch(module)
        if name and not hasattr(module, _FUSED) and _has_converted(module):
            setattr(module, _FUSED, getattr(module, name))
            setattr(module, name, type(getattr(module, name))())


def _switch(module: torch.nn.Module) -> str | None:
    """The attribute without which a module takes no fused path."""
    if isinstance(module, torch.nn.TransformerEncoderLayer):
        return "activation_relu_or_gelu"
    return "use_nested_tensor" if isinstance(module, torch.nn.TransformerEncoder) else None


def _allow_fused_inference(model: torch.nn.Module) -> None:
    for module in model.modules():
        name = _switch(module)
        if name and hasattr(module, _FUSED) and not _has_converted(module):
            setattr(module, name, getattr(module, _FUSED))
            delattr(module, _FUSED)


_FUSED = "fused_without_mixtures"


def _has_converted(module: torch.nn.Module) -> bool:
    return any(_is_converted(part) for part in module.modules())


def _grouped(names: dict[str, str]) -> list[str]:
    """A line for each reason, with the names that have it; numbered blocks are named once."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in names.items():
        by_reason.setdefault(reason, []).append(name or "the model itself")
    return [f"  {reason}: {', '.join(_folded(found))}" for reason, found in by_reason.items()]


def _folded(names: list[str]) -> list[str]:
    """Names with their first numbers as ranges: ``h.0.mlp``, ``h.1.mlp`` become ``h.0-1.mlp``."""
    found: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        key = name if at is None else ".".join([*parts[:at], "*", *parts[at + 1 :]])
        found.setdefault(key, []).append("" if at is None else parts[at])
    return [key.replace("*", _ranges(numbers), 1) for key, numbers in found.items()]


def _ranges(numbers: list[str]) -> str:
    """``0-2,5`` of the numbers 0, 1, 2 and 5; other text as it is."""
    runs: list[list[str]] = []
    for number in numbers:
        if runs and number.isdigit() and int(number) == int(runs[-1][-1]) + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
