"""Heads and tables that a mesh of GPUs trains, or one GPU alone: in ranks, see tests/ranks.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed

from subulp import nn, optim
from tests.ranks import device, mesh_of

from . import heads

HEADS = ["precise", "e4m3-stochastic", "dropout of integers", "sum", "fewer labels than ranks"]
EXAMPLES = 12


def _part(size: int) -> slice:
    rank, count = distributed.get_rank(), distributed.get_world_size()
    return slice(rank * size // count, (rank + 1) * size // count)


def head_on_mesh(name: str) -> dict[str, Any]:
    """A trained head over all ranks: losses, its rows, answers for this rank's examples."""
    mesh = mesh_of((distributed.get_world_size(),))
    return head_of(name, device(), _part(EXAMPLES), mesh=mesh)


def head_of(name: str, where: str, own: slice, **options: Any) -> dict[str, Any]:
    """The same in one process."""
    case = replace(heads.CASES[name], batch=EXAMPLES)
    head = heads.make(case, device=where, **options)
    losses = []
    for step in range(heads.STEPS):
        x, rows, cols = heads.batch(case, step)
        inside = (rows >= own.start) & (rows < own.stop)
        x = x[own].to(where).requires_grad_()
        loss = head(x, (rows[inside] - own.start).to(where), cols[inside].to(where), loss=True)
        loss.backward()
        losses.append(loss.detach().cpu())
    head.eval()
    scores, labels = head.topk(heads.batch(case, 9)[0][own].to(where), min(5, case.labels))
    rows = head.weight(torch.arange(case.labels, device=where))
    return {
        "losses": torch.stack(losses),
        "rows": rows.cpu(),
        "scores": scores.cpu(),
        "labels": labels.cpu(),
    }


def _tables() -> list[nn.EmbeddingTable]:
    return [
        nn.EmbeddingTable(1100, 8, "int8", 0.02),
        nn.EmbeddingTable(1137, 16, "int4", 0.03, "lru", 4),
        nn.EmbeddingTable(1174, 12, "int2", 0.02, "lfu", 1),
        nn.EmbeddingTable(3, 4),
    ]


def tables_on_mesh(planned: str) -> dict[str, Tensor]:
    """Trained tables over all ranks: outputs of this rank's examples, all rows."""
    mesh = mesh_of((distributed.get_world_size(),))
    plan = [nn.RowWise() if planned == "rows" else nn.TableWise()] * len(_tables())
    bags = nn.ShardedCachedEmbeddingBags(_tables(), mesh, plan, seed=5)
    return _train_tables(bags, device(), _part(EXAMPLES))


def tables_alone(where: str) -> dict[str, Tensor]:
    """The same in one process."""
    bags = nn.CachedEmbeddingBags(_tables(), seed=5, device=where)
    return _train_tables(bags, where, slice(0, EXAMPLES))


def _train_tables(bags: Any, where: str, own: slice) -> dict[str, Tensor]:
    optim.RowAdagrad(bags, lr=0.1)
    generator = torch.Generator().manual_seed(0)
    seen = {}
    sizes = torch.tensor([table.num_embeddings for table in _tables()])
    for step in range(heads.STEPS):
        # Four rows a bag; most lookups are of few rows.
        drawn = torch.rand(len(sizes), EXAMPLES, 4, generator=generator, dtype=torch.float64) ** 3
        rows = (drawn * sizes[:, None, None]).long()[:, own]
        lengths = torch.full((len(sizes), rows.shape[1]), 4)
        out = bags(rows.flatten().to(where), lengths.flatten().to(where))
        grad = torch.randn(EXAMPLES, out.shape[1], generator=generator, dtype=torch.float32)
        out.backward(grad[own].to(where))
        seen[f"out {step}"] = out.detach().cpu()
    whole = {f"rows {i}": bags.weight_fp32(i).cpu() for i in range(len(sizes))}
    return seen | whole
