"""Operands of the linear layers' products, a second axis of a comparison beside the precision.

The command line's help is made from it, so nothing here imports torch.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, get_args

from cyclopts import Parameter

from .config import COMPARED, NAMES, RunConfig, check_list, check_names, check_range

Linear = Literal["bf16", "torchao-fp8", "e4m3", "mor-tensor", "mor-2way", "mor-3way"]
GradientName = Literal["e4m3", "e5m2", "mor-tensor", "mor-2way", "mor-3way"]
PartitionName = Literal["tensor", "channel", "subchannel-128", "subchannel-32", "block-128x128"]

PLAIN: Linear = "bf16"
"""Layers as they are."""

TORCHAO: Linear = "torchao-fp8"
"""Layers of the package torchao, whose operands are in FP8."""

_PARTITION: PartitionName = "block-128x128"


@dataclass(frozen=True)
class Variant:
    """The precision of a run and the operands of its linear layers.

    Attributes:
        precision: Value of ``--precision``.
        linear: The operands' representation.
        partition: Values that share a scale; ``None`` for layers without mixtures.
        threshold: Error threshold of a tensor; ``None`` for its default.
        gradients: Representation of the outputs' gradients; ``None`` for that of all operands.
    """

    precision: str
    linear: Linear = PLAIN
    partition: PartitionName | None = None
    threshold: float | None = None
    gradients: GradientName | None = None

    @property
    def is_mixture(self) -> bool:
        """Whether operands are in a mixture of representations."""
        return self.linear not in (PLAIN, TORCHAO)

    def settings(self) -> dict[str, Any]:
        """The same as plain JSON, without settings that do not apply."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class LinearConfig(RunConfig):
    """A comparison whose model has linear layers.

    Raises:
        ValueError: A field is out of range, or two fields contradict each other.
    """

    linear: Annotated[tuple[str, ...], NAMES] = (PLAIN,)
    """Operands of the linear layers' products, separated by commas. bf16: unchanged; e4m3: all
    in E4M3; mor-tensor, mor-2way, mor-3way: each tensor or block in E4M3, E5M2 or BF16, by its
    error."""

    partition: Annotated[tuple[str, ...] | None, NAMES, Parameter(show_default=False)] = None
    """Values that share a scale, separated by commas, in runs of e4m3 and mor: tensor, channel,
    subchannel-128, subchannel-32, block-128x128; block-128x128 by default."""

    mor_threshold: Annotated[float | None, COMPARED] = None
    """Mean relative error at which mor-tensor falls back to BF16; 0.045 by default."""

    mor_gradients: Annotated[GradientName | None, COMPARED] = None
    """Representation of the outputs' gradients in runs of e4m3 and mor; by default that of the
    other operands. e5m2: all in E5M2."""

    def check(self) -> None:
        """As of every configuration."""
        super().check()
        if "fp8" in self.linear and TORCHAO in self.linear_choices:
            raise ValueError(
                f"linear='fp8' does not say whose FP8: use {TORCHAO} for the layers of the package "
                "torchao, which had this name, or e4m3 for ours"
            )
        check_list("linear", self.linear)
        check_names("linear", self.linear, self.linear_choices)
        if self.partition is not None:
            check_list("partition", self.partition)
            check_names("partition", self.partition, get_args(PartitionName))
        mixtures = [name for name in self.linear if name not in (PLAIN, TORCHAO)]
        if self.partition is not None and not mixtures:
            raise ValueError(
                f"partition={','.join(self.partition)} has no effect on "
                f"linear={','.join(self.linear)}: it applies to e4m3 and mor-...; "
                "add one of them, or leave partition out"
            )
        if self.mor_gradients is not None:
            check_names("mor_gradients", (self.mor_gradients,), get_args(GradientName))
            if not mixtures:
                raise ValueError(
                    f"mor_gradients={self.mor_gradients} has no effect on "
                    f"linear={','.join(self.linear)}: it applies to e4m3 and mor-...; add one of "
                    "them, or leave mor_gradients out"
                )
        if self.mor_threshold is not None:
            check_range("mor_threshold", self.mor_threshold, 0, 1, top_included=False)
            if not self.mor_threshold or "mor-tensor" not in self.linear:
                raise ValueError(
                    f"mor_threshold={self.mor_threshold} has no effect: give more than 0, and "
                    f"mor-tensor among linear={','.join(self.linear)}, which alone compares with it"
                )

    @property
    def linear_choices(self) -> tuple[str, ...]:
        """Values that ``linear`` may have."""
        return tuple(name for name in get_args(Linear) if name != TORCHAO)

    @property
    def plain_precisions(self) -> tuple[str, ...]:
        """Precisions whose runs keep their linear layers as they are."""
        return ()

    @property
    def grid(self) -> dict[str, Variant]:
        """The variants by name; a name holds the precision and the settings that vary.

        Plain layers go without a name of their own, so that the baseline keeps its name.
        """
        found: dict[str, Variant] = {}
        for precision in self.precision:
            linear = (PLAIN,) if precision in self.plain_precisions else self.linear
            for name, variant in self._of_layers(precision, linear):
                found[" ".join([precision, *name])] = variant
        return found

    def _of_layers(
        self, precision: str, linear: Iterable[Any]
    ) -> Iterable[tuple[list[str], Variant]]:
        for layers in linear:
            one = Variant(precision, layers)
            threshold = self.mor_threshold if layers == "mor-tensor" else None
            name = [] if layers == PLAIN or len(self.linear) == 1 else [layers]
            if not one.is_mixture:
                yield name, one
                continue
            partitions = self.partition or (_PARTITION,)
            for partition in partitions:
                last = [partition] if len(partitions) > 1 else []
                yield (
                    name + last,
                    Variant(precision, layers, partition, threshold, self.mor_gradients),  # type: ignore[arg-type]
                )

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the combinations."""
        return tuple(self.grid)

    def settings(self, variant: str) -> dict[str, Any]:
        """Precision, and what the linear layers multiply where it is anything but plain."""
        if self.linear == (PLAIN,):
            return {"precision": variant}
        return self.grid[variant].settings()

    @property
    def has_mixtures(self) -> bool:
        """Whether any run has a mixture of representations."""
        return any(variant.is_mixture for variant in self.grid.values())
