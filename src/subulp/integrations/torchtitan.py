"""torchtitan: its containers with subulp's optimizers, and its linear layers in a mixture.

The form of torchtitan 0.3: components are made from their ``Config``, and a converter changes the
configuration of a model before the model is built::

    spec = model_registry("8B", converters=[MixtureConverter.Config(mor=nn.MoR())])
    Trainer.Config(
        model_spec=spec,
        optimizer=adamw(lr=3e-4, precision="collage-plus"),
        training=TrainingConfig(dtype="bfloat16"),
        ...
    )
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.model import ModelConfigConverter
from torchtitan.protocols.module import Module

from .. import optim
from ..nn.mor import MoR
from ..nn.mor_convert import HEAD_NAMES
from ..nn.mor_linear import MoRLinear, check_mor
from ..optim.base import Optimizer

_OPTIMIZERS: dict[str, type[Optimizer]] = {
    "Adam": optim.Adam,
    "AdamW": optim.AdamW,
    "SGD": optim.SGD,
}
_NAMES = ("params", "param_names")

# -------------------------------------------------------------------------------------- optimizers


class LowPrecisionOptimizers(OptimizersContainer):  # type: ignore[misc]
    """torchtitan's ``OptimizersContainer``, which makes subulp's optimizers.

    ``optimizer_name`` is ``"AdamW"``, ``"Adam"`` or ``"SGD"``; ``optimizer_kwargs`` are that
    optimizer's options, ``precision`` included. Everything else is torchtitan's: patterns, flat
    state dicts with names of parameters, schedulers, checkpoints. Random bits are drawn by these
    names, so pipeline stages and shards draw as one process does.

    Args:
        config: The groups.
        model_parts: The model, or its pipeline stages on this rank.

    Raises:
        ValueError: A name or an option is unknown or out of range, a parameter cannot have its
            precision, or a pattern matches none.
        TypeError: An optimizer has no option of that name.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc]
        """As torchtitan's; there is one implementation, which steps a group in one pass."""

        implementation: Literal["fused"] = "fused"

    @staticmethod
    def _build_impl_kwargs(config: Config) -> dict[str, Any]:
        if config.implementation != "fused":
            raise ValueError(
                f"implementation={config.implementation!r} has no effect on subulp's optimizers, "
                "which step a group in one pass: leave it out, and choose the format of the states "
                "by optimizer_kwargs={'precision': ...}"
            )
        return {}

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Optimizer]:
        if name not in _OPTIMIZERS:
            known = ", ".join(map(repr, _OPTIMIZERS))
            raise ValueError(
                f"optimizer_name={name!r} is not one of subulp's: use {known}, or torchtitan's own "
                "OptimizersContainer"
            )
        return partial(_made, _OPTIMIZERS[name])


def _made(kind: type[Optimizer], groups: list[dict[str, Any]], **options: Any) -> Optimizer:
    """One optimizer of several groups, whose options are all its own.

    ``torch.optim`` keeps whatever else a group has, and a misspelt option would be ignored.
    """
    kept = []
    for group in groups:
        own = {name: value for name, value in group.items() if name not in _NAMES}
        # Checks names and values, with the dtype of a parameter that they are for.
        first, names = group["params"][0], group.get("param_names")
        probe = [first] if not names else [(names[0], first)]
        known = kind(probe, **{**options, **own}).defaults
        kept.append({n: v for n, v in group.items() if n in _NAMES or n in known})
    return kind(kept, **options)


def adamw(lr: float = 8e-4, **options: Any) -> LowPrecisionOptimizers.Config:
    """All parameters in one group of subulp's AdamW: the counterpart of ``default_adamw``.

    Args:
        lr: Learning rate (default: 8e-4).
        options: Further options of :class:`subulp.optim.AdamW`, ``precision`` included; ``betas``
            and ``weight_decay`` are torchtitan's by default, (0.9, 0.95) and 0.1.
    """
    options = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, **options}
    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=options)
    return LowPrecisionOptimizers.Config(param_groups=[group])


# ---------------------------------------------------------------------------------------- mixtures


class MixtureLinear(MoRLinear, Module):  # type: ignore[misc]
    """torchtitan's ``Linear`` with operands in a mixture; see :class:`subulp.nn.MoRLinear`.

    Data parallelism, pipelines and context parallelism leave the operands of a product whole.

    Args:
        config: Its sizes, and how operands are represented.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):  # type: ignore[misc]
        """``Linear.Config``, and :attr:`subulp.nn.MoR.text`."""

        mor: str

    def __init__(self, config: Config) -> None:
        mor = MoR.from_text(config.mor)
        MoRLinear.__init__(self, config.in_features, config.out_features, config.bias, mor)

    def parallelize(self, parallel_dims: Any) -> None:
        """Distribute the layer as its model does.

        Raises:
            ValueError: Tensor parallelism would divide the operands.
        """
        if parallel_dims.tp_enabled:
            raise ValueError(
                "tensor_parallel_degree > 1 divides the operands of products, and each rank would "
                "decide on representations alone: set it to 1, or do without MixtureConverter"
            )
        super().parallelize(parallel_dims)


class MixtureConverter(ModelConfigConverter):  # type: ignore[misc]
    """Represents the operands of a model's linear layers in a mixture, as ``nn.convert_to_mor``.

    For ``model_registry(..., converters=[...])``. Only torchtitan's ``Linear`` itself is converted:
    layers that another converter has replaced stay as they are, so this one comes before LoRA's.

    Args:
        config: How operands are represented, and in which layers.

    Raises:
        ValueError: ``mor`` is no configuration, or a number of blocks is negative.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):  # type: ignore[misc]
        """Options of the conversion.

        Attributes:
            mor: How operands are represented (default: ``MoR()``).
            filter_fqns: Layers whose name contains one of these are left (default: none).
            heads: Whether output heads are converted too, see
                :func:`subulp.nn.convert_to_mor` (default: ``False``).
            first: How many of the first layers of the decoder are left (default: 0).
            last: The same of the last ones (default: 0).
        """

        mor: MoR = field(default_factory=MoR)
        filter_fqns: list[str] = field(default_factory=list)
        heads: bool = False
        first: int = 0
        last: int = 0

    def __init__(self, config: Config) -> None:
        check_mor(config.mor)
        for name in ("first", "last"):
            count = getattr(config, name)
            if type(count) is not int or count < 0:
                raise ValueError(f"{name}={count!r} is out of range: a number of layers, 0 or more")
        names = config.filter_fqns
        if not isinstance(names, (list, tuple)) or not all(n and isinstance(n, str) for n in names):
            raise ValueError(f"filter_fqns={names!r} is no list of parts of names")
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Replace the configurations of linear layers, in place.

        Args:
            model_config: A model's.

        Returns:
            The same; another one if it is itself that of a linear layer.

        Raises:
            ValueError: No layer is left to be converted, or an entry of ``filter_fqns`` is in no
                name.
        """
        layers = [
            found
            for found in model_config.traverse(Linear.Config)
            if type(found[1]) is Linear.Config
        ]
        names = [name for name, *_ in layers]
        for part in self.config.filter_fqns:
            if not any(part in name for name in names):
                raise ValueError(
                    f"filter_fqns={self.config.filter_fqns} leaves out {part!r}, which no linear "
                    f"layer has in its name: {', '.join(names) or 'there is none'}"
                )
        left = set(self._left(names, len(getattr(model_config, "layers", []))))
        if len(left) == len(set(names)):
            raise ValueError(
                f"none of {len(names)} linear layers is to be converted: {', '.join(names)}. "
                "heads, filter_fqns, first and last choose; other converters come after this one"
            )
        for name, config, parent, attribute in layers:
            if name in left:
                continue
            mixed = self._mixed(config)
            if parent is None:
                model_config = mixed
            elif isinstance(parent, list):
                parent[attribute] = mixed
            else:
                setattr(parent, attribute, mixed)
        return model_config

    def _left(self, names: list[str], blocks: int) -> Iterator[str]:
        """Names of layers that stay as they are."""
        config = self.config
        first = min(config.first, blocks)
        kept = {*range(first), *range(max(blocks - config.last, 0), blocks)}
        for name in names:
            parts = name.split(".")
            in_kept = len(parts) > 1 and parts[0] == "layers" and int(parts[1]) in kept
            is_head = not config.heads and parts[-1] in HEAD_NAMES
            if in_kept or is_head or any(part in name for part in config.filter_fqns):
                yield name

    def _mixed(self, config: Any) -> Any:
        return MixtureLinear.Config(
            in_features=config.in_features,
            out_features=config.out_features,
            bias=config.bias,
            param_init=config.param_init,
            sharding_config=config.sharding_config,
            mor=self.config.mor.text,
        )


__all__ = ["LowPrecisionOptimizers", "MixtureConverter", "MixtureLinear", "adamw"]
