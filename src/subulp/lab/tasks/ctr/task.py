"""The click-through-rate model's data, model and measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .... import optim
from ....nn import CachedEmbeddingBags
from ....optim.rows.base import RowOptimizer
from ...engine.metrics import Metric
from ...engine.recipe import decay_groups, one_cycle
from ...engine.run_directory import ACCESS_PLOT
from ...engine.task import Workload
from .config import CTRConfig
from .dlrm import DLRM
from .metrics import click_metrics
from .readers.dataset import CTRData, ReadOptions
from .readers.examples import Batch
from .readers.load import load_data
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


def load(config: CTRConfig) -> CTRData:
    """The data of ``config``, after a check that every table is possible."""
    data = load_data(
        config.data,
        ReadOptions(
            on_bad_line=config.on_bad_line,
            buffer=config.shuffle_rows,
            min_count=config.min_count,
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
    """Whole batches of all epochs."""
    return config.epochs * (len(data.train) // config.batch_size)


def digest(data: CTRData) -> str:
    """A digest of all examples."""
    return data.digest


def build_model(config: CTRConfig, data: CTRData, variant: Variant, seed: int) -> DLRM:
    """The model; its initial weights are made in FP32 from the seed alone."""
    torch.manual_seed(seed)
    tables = CachedEmbeddingBags(
        [variant.table(table.rows, config.dim, table.storage) for table in data.tables],
        config.narrow_above,
        stacked=True,
        seed=seed,
    )
    return DLRM(data.numbers, tables, config.dim, config.bottom, config.top)


def build_rows(config: CTRConfig, tables: CachedEmbeddingBags) -> RowOptimizer:
    """The optimizer of the tables."""
    if config.row_optimizer == "sgd":
        return optim.RowSGD(tables, lr=config.row_lr)
    rowwise = config.row_optimizer == "rowwise-adagrad"
    return optim.RowAdagrad(tables, lr=config.row_lr, rowwise=rowwise)


def build(
    config: CTRConfig, data: CTRData, variant: str, seed: int, device: torch.device
) -> Workload:
    """A run of one variant and seed."""
    model = build_model(config, data, config.grid[variant], seed).to(device)
    named = _dense(model)
    optimizer = optim.AdamW(
        decay_groups(named),
        lr=config.lr,
        weight_decay=config.weight_decay,
        precision="fp32",
        nonfinite=config.gradient_policy,
        seed=seed,
    )
    rows = build_rows(config, model.tables)
    batches = data.train.batches(config.batch_size, seed)
    total = steps(config, data)

    def loss(_: bool) -> Tensor:
        batch = data.encode(next(batches))
        labels = torch.from_numpy(batch.labels).to(device)
        return F.binary_cross_entropy_with_logits(_logits(model, batch, device), labels)

    return Workload(
        model,
        optimizer,
        total,
        max(1, total // config.evaluations),
        lambda step: one_cycle(step, total, warmup=config.warmup, final=config.final_lr),
        loss,
        lambda: evaluate(data, model, device),
        rows=rows,
        bytes_per_parameter=lambda: table_bytes(model.tables),
        parameters=model.tables.memory().fp32 // 4 + sum(p.numel() for _, p in named),
        steps_per_epoch=len(data.train) // config.batch_size,
        parts={"batches": batches},
    )


def _dense(model: DLRM) -> list[tuple[str, nn.Parameter]]:
    return [(n, p) for n, p in model.named_parameters() if n.startswith(("bottom.", "top."))]


def _logits(model: DLRM, batch: Batch, device: torch.device) -> Tensor:
    numbers, rows = (torch.from_numpy(a).to(device) for a in (batch.numbers, batch.rows))
    logits: Tensor = model(numbers, rows)
    return logits


def table_bytes(tables: CachedEmbeddingBags) -> dict[str, float]:
    """Bytes that training keeps of one number of the tables; there are no gradients."""
    memory = tables.memory()
    count = memory.fp32 / 4
    kept = {
        "parameter": (memory.codes + memory.quantisation) / count,
        "cache": (memory.total - memory.codes - memory.quantisation) / count,
        "optimizer": memory.optimizer / count,
    }
    return {**kept, "total": sum(kept.values())}


@torch.no_grad()
def evaluate(data: CTRData, model: DLRM, device: torch.device) -> dict[str, float]:
    """Every measure of the test part, and of the tables as they are."""
    model.eval()
    logits, labels = [], []
    for examples in data.test.in_order(EVALUATION_BATCH):
        batch = data.encode(examples)
        logits.append(_logits(model, batch, device).cpu().numpy())
        labels.append(batch.labels)
    model.train()
    measured = click_metrics(np.concatenate(logits), np.concatenate(labels), data.positive_share)
    return {
        **measured,
        "compression": model.tables.memory().compression,
        "hit_rate": hit_rate(model.tables),
    }


def hit_rate(tables: CachedEmbeddingBags) -> float:
    """Share of the lookups in training so far that a cache served, of tables that have one."""
    cached = [i for i in range(len(tables.tables)) if tables.table(i).sets]
    lookups, hits = tables.statistics[cached].sum(0).tolist()
    return hits / lookups if lookups else 0.0


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
