"""The click-through-rate model's data, model and measurements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.numpy import save_file
from torch import Tensor, nn

from .... import optim
from ....nn import ShardedCachedEmbeddingBags
from ....nn.cached_table import CacheMemory
from ....optim.rows.base import RowOptimizer
from ...engine.config import parameter_dtype
from ...engine.data_parallel import replicated, shard
from ...engine.files import replacing
from ...engine.metrics import Metric
from ...engine.ranks import ALONE, Ranks
from ...engine.recipe import decay_groups, one_cycle, steps_of
from ...engine.run_directory import ACCESS_PLOT
from ...engine.task import Workload
from .config import CTRConfig
from .dlrm import DLRM
from .metrics import click_metrics
from .parameter_tables import ParameterTables
from .readers.dataset import CTRData, ReadOptions
from .readers.example_stream import ExampleStream
from .readers.examples import Batch, Encoder, Examples
from .readers.layout import Table
from .readers.load import load_data
from .split_tables import SplitTables, Tables, hit_rate, make_tables, memory_of
from .variant import Variant

METRICS = (
    Metric("log_loss", "log\nloss", "{:.4f}", "Log loss", "nats per example"),
    Metric("AUC", "AUC\n%", "{:.2f}", "AUC", "%", factor=100, higher_is_better=True),
    Metric("accuracy", "accuracy\n%", "{:.2f}", "Accuracy", "%", factor=100, higher_is_better=True),
    Metric("accuracy_drop", "accuracy\ndrop %", "{:.3f}", "Accuracy drop", "%", drop_of="accuracy"),
    Metric("compression", "bytes /\nFP32", "{:.4f}", "Memory compression", "bytes over FP32's"),
    Metric("hit_rate", "hit\nrate %", "{:.1f}", "Hit rate", "%", factor=100, higher_is_better=True),
    Metric(
        "normalised_entropy",
        "normalised\nentropy",
        "{:.4f}",
        "Normalised entropy",
        "log loss over the base rate's",
        versus="ratio",
    ),
)

COUNTED = "number of the tables"

EVALUATION_BATCH = 4096

COLUMNS = "columns.safetensors"
"""What turns examples into what a model takes, in the folder of the models."""

_BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4, "int2": 2}


def load(config: CTRConfig) -> CTRData:
    """The data of ``config``, after a check that every table is possible."""
    data = load_data(
        config.data,
        ReadOptions(
            on_bad_line=config.on_bad_line,
            buffer=config.shuffle_rows,
            min_count=config.min_count or None,
        ),
        test=config.test,
        test_share=config.test_share,
        columns=config.columns,
        rows=config.rows,
    )
    for table in data.tables:
        for variant in config.grid.values():
            try:
                variant.table(table.rows, config.dim, table.storage)
            except ValueError as error:
                raise ValueError(f"table {table.name} of data={data.name}: {error}") from None
    if len(data.train) < 2 * config.batch_size:
        raise ValueError(
            f"batch_size={config.batch_size} is above half of the {len(data.train)} training "
            f"examples of data={data.name}: give at most {len(data.train) // 2}"
        )
    return data


def describe(data: CTRData) -> dict[str, Any]:
    """Name, number of examples in each part, tables and their rows, and skipped lines."""
    skipped = {"skipped_lines": data.skipped, "first_skipped": data.first_skipped}
    return {
        "name": data.name,
        "train": len(data.train),
        "test": len(data.test),
        "numbers": data.numbers,
        "tables": len(data.tables),
        "rows": sum(table.rows for table in data.tables),
        **(skipped if data.skipped else {}),
    }


def steps(config: CTRConfig, data: CTRData) -> int:
    """Whole batches of all epochs, or what was asked for."""
    return steps_of(config.steps, config.epochs, len(data.train) // config.batch_size)


def digest(data: CTRData) -> str:
    """A digest of all examples."""
    return data.digest


@dataclass(frozen=True)
class Built:
    """What a model is built from, beside its columns.

    Attributes:
        dim: Numbers of a row.
        bottom: Hidden layers of the MLP over the numbers.
        top: Hidden layers of the MLP over the dot products.
        narrow_above: Tables of at most so many rows are in FP32.
        variant: How the others are kept.
        positive_share: Share of the training part's labels that are 1.
    """

    dim: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    narrow_above: int
    variant: Variant
    positive_share: float

    @classmethod
    def of(cls, config: CTRConfig, data: CTRData, variant: Variant) -> Built:
        """That of a run."""
        sizes = config.dim, config.bottom, config.top, config.narrow_above
        return cls(*sizes, variant, data.positive_share)

    def least_memory(self, tables: Sequence[Table], numbers: int) -> int:
        """Bytes that the tables and the MLPs take at the very least."""
        total = 0
        for table in tables:
            wide = self.variant.precision == "fp32" or table.rows <= self.narrow_above
            name = "fp32" if wide else table.storage or self.variant.precision.partition("+")[0]
            cached = 32 * (0 if wide else self.variant.cache_fraction)
            total += int(table.rows * self.dim * (_BITS[name] + cached)) // 8
        pairs = (len(tables) + 1) * len(tables) // 2
        for widths in (
            (numbers, *self.bottom, self.dim),
            (self.dim + pairs, *self.top, 1),
        ):
            size = 4 if self.variant.dense == "fp32" else 2
            total += size * sum((inside + 1) * outside for inside, outside in pairwise(widths))
        return total

    def model(self, tables: Sequence[Table], numbers: int, seed: int, ranks: Ranks = ALONE) -> DLRM:
        """The model; its initial weights are made in FP32 from the seed alone."""
        torch.manual_seed(seed)
        configs = [self.variant.table(table.rows, self.dim, table.storage) for table in tables]
        bags: Tables
        if self.variant.extra_bits is None:
            bags = make_tables(configs, self.narrow_above, seed, ranks)
        else:
            name, bits = self.variant.extra_bits
            dtype = torch.float16 if name == "fp16" else torch.bfloat16
            bags = ParameterTables(configs, dtype, bits, self.narrow_above, seed)
        return DLRM(numbers, bags, self.dim, self.bottom, self.top)


def least_memory(config: CTRConfig, data: CTRData, variant: str) -> int:
    """Tables and caches, and the MLPs with their gradients and moments."""
    built = Built.of(config, data, config.grid[variant])
    return built.least_memory(data.tables, data.numbers)


def save_columns(data: CTRData, folder: Path) -> list[str]:
    """Write what turns examples into what a model takes; returns the name of the file."""
    with replacing(folder / COLUMNS) as unfinished:
        save_file({n: np.ascontiguousarray(a) for n, a in data.encode.arrays().items()}, unfinished)
        unfinished.chmod(folder.stat().st_mode & 0o666)
    return [COLUMNS]


def check_ranks(config: CTRConfig, ranks: Ranks) -> None:
    """Refuse what several ranks cannot share."""
    for variant in config.grid.values():
        if variant.extra_bits is not None:
            raise ValueError(
                f"precision={variant.precision} keeps whole tables as parameters, and ranks split "
                "tables: train it in one process"
            )


def build_rows(config: CTRConfig, tables: Tables) -> RowOptimizer | None:
    """The optimizer of the tables; ``None`` if they are parameters of the other one."""
    if isinstance(tables, ParameterTables):
        return None
    if config.row_optimizer == "sgd":
        return optim.RowSGD(tables, lr=config.row_lr)
    rowwise = config.row_optimizer == "rowwise-adagrad"
    return optim.RowAdagrad(tables, lr=config.row_lr, rowwise=rowwise)


def build(
    config: CTRConfig,
    data: CTRData,
    variant: str,
    seed: int,
    device: torch.device,
    ranks: Ranks = ALONE,
) -> Workload:
    """A run of one variant and seed."""
    built = Built.of(config, data, config.grid[variant])
    model = built.model(data.tables, data.numbers, seed, ranks).to(device)
    optimizer = _optimizer(config, built.variant, model, seed, ranks)
    named = _dense(model)
    tables = model.tables
    rows = build_rows(config, tables)
    batches = data.train.batches(config.batch_size, seed)
    total = steps(config, data)
    forward = replicated(model, ranks, fused=config.fuse_backward)
    own, weight = ranks.part(config.batch_size), ranks.weight(config.batch_size)

    def loss(_: bool) -> Tensor:
        batch = data.encode(next(batches).take(own))
        labels = torch.from_numpy(batch.labels).to(device)
        logits = logits_of(forward, batch, device)
        return weight * F.binary_cross_entropy_with_logits(logits, labels)

    return Workload(
        model,
        optimizer,
        total,
        max(1, total // config.evaluations),
        lambda step: one_cycle(step, total, warmup=config.warmup, final=config.final_lr),
        loss,
        lambda: measures(data.test, data.encode, model, data.positive_share, device, ranks),
        {**asdict(built), "layout": asdict(data.encode.layout)},
        save_shared=lambda folder: save_columns(data, folder),
        rows=rows,
        bytes_per_parameter=lambda: table_bytes(memory_of(tables, ranks)),
        parameters=memory_of(tables, ranks).fp32 // 4 + sum(p.numel() for _, p in named),
        steps_per_epoch=len(data.train) // config.batch_size,
        parts={"batches": batches},
        split=(
            SplitTables(tables, ranks) if isinstance(tables, ShardedCachedEmbeddingBags) else None
        ),
    )


def _optimizer(
    config: CTRConfig, variant: Variant, model: DLRM, seed: int, ranks: Ranks
) -> optim.AdamW | optim.SGD:
    """The optimizer of the MLPs, and of tables that are parameters.

    The first weights are those of MLPs in FP32, as exactly as the components can hold them.
    """
    parts = nn.ModuleDict({"bottom": model.bottom, "top": model.top})
    if isinstance(model.tables, ParameterTables):
        parts["tables"] = model.tables
    initial = {name: value.clone() for name, value in parts.state_dict().items()}
    stored = parameter_dtype("dense_precision", variant.dense, config.dense_dtype)
    dtype = getattr(torch, stored)
    for mlp in (model.bottom, model.top):
        mlp.to(dtype)
        shard(mlp, ranks)
    groups = decay_groups(_dense(model))
    if isinstance(model.tables, ParameterTables):
        assert variant.extra_bits is not None
        model.tables.narrow()
        narrow = f"extra-bits-{variant.extra_bits[1]}"
        groups += [
            {
                "params": [(f"tables.{name}", p)],
                "precision": "fp32" if p.dtype == torch.float32 else narrow,
                "lr": config.row_lr,
                "weight_decay": 0.0,
            }
            for name, p in model.tables.named_parameters()
        ]
    options: dict[str, Any] = {
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "precision": variant.dense,
        "nonfinite": config.gradient_policy,
        "seed": seed,
    }
    kind_of = optim.SGD if config.optimizer == "sgd" else optim.AdamW
    optimizer = kind_of(groups, **options)
    if dtype != torch.float32 or variant.extra_bits is not None:
        optimizer.load_full_precision_state_dict(parts, initial)
    return optimizer


def _dense(model: DLRM) -> list[tuple[str, nn.Parameter]]:
    return [(n, p) for n, p in model.named_parameters() if n.startswith(("bottom.", "top."))]


def logits_of(
    model: Callable[[Tensor, Tensor], Tensor], batch: Batch, device: torch.device
) -> Tensor:
    """Logits of a batch, FP32 ``(count,)``."""
    numbers, rows = (torch.from_numpy(a).to(device) for a in (batch.numbers, batch.rows))
    return model(numbers, rows)


def table_bytes(memory: CacheMemory) -> dict[str, float]:
    """Bytes that training keeps of one number of the tables; there are no gradients."""
    count = memory.fp32 / 4
    kept = {
        "parameter": (memory.codes + memory.quantisation) / count,
        "cache": (memory.total - memory.codes - memory.quantisation) / count,
        "optimizer": memory.optimizer / count,
    }
    return {**kept, "total": sum(kept.values())}


@torch.no_grad()
def measures(
    part: ExampleStream,
    encode: Encoder,
    model: DLRM,
    positive_share: float,
    device: torch.device,
    ranks: Ranks = ALONE,
) -> dict[str, float]:
    """Every measure of a part of a data set, and of the tables as they are.

    Args:
        part: The examples.
        encode: From examples to what the model takes.
        model: The model.
        positive_share: Share of the training part's labels that are 1.
        device: Where the model is.
        ranks: Those that have the model (default: this process alone).
    """

    def scored(examples: Examples) -> tuple[np.ndarray, np.ndarray]:
        batch = encode(examples)
        return logits_of(model, batch, device).cpu().numpy(), batch.labels

    training = model.training
    model.eval()
    logits, labels = zip(*ranks.each(scored, part.in_order(EVALUATION_BATCH)), strict=True)
    model.train(training)
    measured = click_metrics(np.concatenate(logits), np.concatenate(labels), positive_share)
    return {
        **measured,
        "compression": memory_of(model.tables, ranks).compression,
        "hit_rate": hit_rate(model.tables, ranks),
    }


def access_counts(data: CTRData, narrow_above: int) -> tuple[dict[str, np.ndarray], int]:
    """Accesses of each row of the large tables, and the training examples that were counted.

    Data that does not fit the shuffling buffer is counted from its first buffer.
    """
    first = next(data.train.chunks())
    rows = data.encode(first).rows
    tables = list(enumerate(data.tables))
    large = [(i, table) for i, table in tables if table.rows > narrow_above] or tables
    counts = {table.name: np.bincount(rows[:, i], minlength=table.rows) for i, table in large}
    return counts, len(first)


def plot(config: CTRConfig, data: CTRData, directory: Path) -> None:
    """Draw the distribution of accesses."""
    # Matplotlib takes a second to import, which a worker need not wait for.
    from ...report.figure import save_png  # noqa: PLC0415
    from .access_chart import AccessChart  # noqa: PLC0415

    counts, examples = access_counts(data, config.narrow_above)
    save_png([AccessChart(counts, config.cache_fraction, examples)], directory / ACCESS_PLOT)
