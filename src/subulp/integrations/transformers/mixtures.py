"""Mixtures of representations in the configuration of a Transformers model.

``save_pretrained`` keeps the configuration, and ``from_pretrained`` converts the layers again: it
takes the mixture for one of its quantization methods, which it finds by importing this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ... import nn

METHOD = "subulp_mor"
"""What a configuration says as ``quant_method``."""


class MoRConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The mixture of a model's layers, as its configuration keeps it.

    Also an argument of ``from_pretrained(..., quantization_config=MoRConfig(nn.MoR()))``, which
    converts a model while it is loaded.

    Args:
        mor: How operands are represented; :class:`subulp.nn.MoR`, or its ``to_dict()``.
        layers: Names of the layers; ``None`` are those that :func:`subulp.nn.convert_to_mor`
            chooses (default: ``None``).

    Raises:
        ValueError: ``mor`` is no such thing.
    """

    def __init__(
        self,
        mor: nn.MoR | dict[str, Any],
        layers: Sequence[str] | None = None,
        quant_method: str = METHOD,
    ) -> None:
        if quant_method != METHOD:
            raise ValueError(f"quant_method={quant_method!r} is not {METHOD!r}")
        self.quant_method = METHOD
        # Checked, and as JSON.
        self.mor = (mor if isinstance(mor, nn.MoR) else nn.MoR.from_dict(mor)).to_dict()
        self.layers = None if layers is None else list(layers)

    def convert(self, model: PreTrainedModel) -> nn.Conversion:
        """Convert the layers of a model, and complete this configuration by their names."""
        names = None if self.layers is None else set(self.layers)
        # A layer that is named is wanted, also where it is an output head.
        report = nn.convert_to_mor(
            model,
            nn.MoR.from_dict(self.mor),
            filter=None if names is None else lambda name, module: name in names,
            heads=names is not None,
            quiet=True,
        )
        missing = (names or set()) - report.converted.keys()
        if missing:
            raise ValueError(
                f"{type(model).__name__} has no layer {min(missing)!r} to convert to a mixture: "
                "it is not the model that was saved"
            )
        self.layers = list(report.converted)
        return report


class MoRQuantizer(HfQuantizer):  # type: ignore[misc]
    """Converts layers for ``from_pretrained``."""

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        self.quantization_config.convert(model)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        # Weights are ordinary parameters of the model's dtype, which may be cast and trained.
        model.is_quantized = False

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Weights are saved as they are."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Mixtures are for training."""
        return True


# Not as decorators: the reference is made where Transformers is not.
register_quantization_config(METHOD)(MoRConfig)
register_quantizer(METHOD)(MoRQuantizer)


def convert_to_mor(model: PreTrainedModel, mor: nn.MoR, **options: Any) -> nn.Conversion:
    """:func:`subulp.nn.convert_to_mor`, noted in ``model.config``.

    The model that ``save_pretrained`` writes is converted again by ``from_pretrained``, as long as
    :mod:`subulp.integrations.transformers` has been imported.

    Args:
        model: A Transformers model.
        mor: How operands are represented.
        options: Those of :func:`subulp.nn.convert_to_mor`.

    Returns:
        What was converted, what was not, and why.

    Raises:
        ValueError: As :func:`subulp.nn.convert_to_mor`; or the model is quantized or converted
            already. Nothing has been converted then.
    """
    there = getattr(model.config, "quantization_config", None)
    if there is not None:
        raise ValueError(
            f"{type(model).__name__} has a quantization_config already "
            f"({type(there).__name__}): a configuration keeps one"
        )
    report = nn.convert_to_mor(model, mor, **options)
    model.config.quantization_config = MoRConfig(mor, list(report.converted))
    return report
