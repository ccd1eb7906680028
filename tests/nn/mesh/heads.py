"""Trainings of small heads that one process and the ranks of a mesh repeat."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from subulp import nn, optim

STEPS = 3
PARTS = {1: [12], 2: [7, 5], 3: [0, 12, 0], 4: [5, 0, 4, 3]}
"""Instances of each rank, by the number of ranks."""


@dataclass(frozen=True)
class Case:
    """A training."""

    labels: int = 211
    dim: int = 20
    batch: int = 12
    dtype: torch.dtype = torch.float32
    weight_decay: float = 0.0
    counts: bool = False
    options: dict[str, Any] = field(default_factory=dict)


KAHAN = {"head_fraction": 0.3}
CASES = {
    **{
        f"{storage}-{rounding}": Case(
            options={"storage": storage, "rounding": rounding}, weight_decay=0.01
        )
        for storage in ("fp32", "bf16", "fp16", "e4m3", "int8", "int4", "int2", (3, 2))
        for rounding in ("nearest", "stochastic")
        if rounding == "stochastic" or storage in ("e4m3", "int4", (3, 2))
    },
    "dropout": Case(options={"dropout": 0.3}),
    "dropout of integers": Case(options={"dropout": 0.3, "storage": "int8", "chunks": 3}),
    "one chunk": Case(options={"chunks": 1}),
    "a chunk for each label": Case(options={"chunks": 211, "storage": "fp32"}),
    "sum": Case(options={"reduction": "sum", "storage": "bf16"}, dtype=torch.bfloat16),
    "all precise": Case(options={"head_fraction": 1.0}),
    "precise": Case(options=KAHAN, counts=True),
    "precise integers": Case(
        options={**KAHAN, "storage": "int4", "dropout": 0.1}, counts=True, weight_decay=0.01
    ),
    "precise simulated": Case(options={**KAHAN, "storage": (4, 3), "chunks": 1}, counts=True),
    "products in bf16": Case(options={**KAHAN, "products": "bf16"}, counts=True),
    "products in fp8": Case(options={"products": "fp8", "scale": "table"}, dtype=torch.float16),
    "fewer labels than ranks": Case(labels=3, options={"chunks": 2, "storage": "fp32"}),
    "several tiles": Case(labels=6000, dim=768, options={"chunks": 2, "storage": "bf16"}),
    "one instance": Case(labels=1500, dim=768, batch=1, options={"storage": "fp32"}),
}


SAVED = ["precise", "precise integers", "e4m3-stochastic", "all precise", "fewer labels than ranks"]
"""Trainings that are saved and go on."""

IN_REFERENCE = ["precise", "one chunk", "one instance", "int4-stochastic"]
"""Trainings that plain PyTorch repeats."""


def other_counts() -> torch.Tensor:
    """Counts that make other labels frequent."""
    return torch.randint(0, 9, (211,), generator=torch.Generator().manual_seed(17))


def make(case: Case, **options: Any) -> nn.ExtremeClassifier:
    """The head and its optimizer."""
    counts = None
    if case.counts:
        generator = torch.Generator().manual_seed(7)
        counts = torch.randint(0, 9, (case.labels,), generator=generator)
    given = {"seed": 3, "label_counts": counts, **case.options, **options}
    head = nn.ExtremeClassifier(case.dim, case.labels, **given)
    optim.RowSGD(head, lr=0.5, weight_decay=case.weight_decay)
    return head


def batch(case: Case, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Embeddings and pairs of a step."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(case.batch, case.dim, generator=generator, dtype=torch.float32).to(case.dtype)
    pairs = torch.randint(case.batch * case.labels, (50,), generator=generator)
    return x, pairs // case.labels, pairs % case.labels


def part(
    case: Case, step: int, rank: int, ranks: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a rank has of a batch."""
    x, rows, cols = batch(case, step)
    counts = PARTS[ranks] if case.batch == 12 else [0] * (ranks - 1) + [case.batch]
    first = sum(counts[:rank])
    inside = (rows >= first) & (rows < first + counts[rank])
    return x[first : first + counts[rank]], rows[inside] - first, cols[inside]


def train(
    head: nn.ExtremeClassifier, case: Case, steps: range = range(STEPS)
) -> list[dict[str, torch.Tensor]]:
    """Train, and tell what each step gave."""
    found = []
    rank, ranks = (0, 1) if head.ranks is None else (head.ranks.rank, head.ranks.size)
    for step in steps:
        x, rows, cols = part(case, step, rank, ranks)
        x = x.clone().requires_grad_()
        loss = head(x, rows, cols, loss=step % 2 == 0)
        loss.backward()
        found.append({"loss": loss.detach(), "grad": x.grad})
    return found


def ask(head: nn.ExtremeClassifier, case: Case) -> dict[str, torch.Tensor]:
    """What a trained head gives in eval()."""
    rank, ranks = (0, 1) if head.ranks is None else (head.ranks.rank, head.ranks.size)
    x, rows, cols = part(case, 9, rank, ranks)
    head.eval()
    x.requires_grad_()
    loss = head(x, rows, cols)
    loss.backward()
    with torch.no_grad():
        plain = head(x, rows, cols)
    scores, labels = head.topk(x, min(5, case.labels))
    every_scores, every_labels = head.topk(x[:2], case.labels)
    head.train()
    asked = torch.arange(case.labels).flip(0)[rank : case.labels : 3]
    return {
        "loss": loss.detach(),
        "plain": plain,
        "grad": x.grad,
        "scores": scores,
        "labels": labels,
        "every score": every_scores,
        "every label": every_labels,
        "weight": head.weight(asked),
    }


def stored(head: nn.ExtremeClassifier) -> dict[str, Any]:
    """The rows that a process has, and which those are."""
    remainder = head.table.remainder
    return {
        "runs": [(run.first, run.count) for run in head.table.runs()],
        "codes": head.table.stored.clone().view(torch.uint8),
        "remainder": None if remainder is None else remainder.data.clone(),
        "steps": head.steps,
        "seed": head.seed,
    }
