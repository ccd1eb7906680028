"""TorchRec's DLRM with its own tables, and with narrow tables and a cache: memory, and the loss.

    python examples/torchrec_dlrm.py

Needs what tests/integrations/requirements.txt lists.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM

from subulp import optim
from subulp.integrations.torchrec import CachedEmbeddingBagCollection

ROWS = {"user": 20_000, "item": 50_000}
DIM, DENSE, BATCH = 32, 8, 256


def batch(step: int) -> tuple[Tensor, KeyedJaggedTensor, Tensor]:
    """Dense numbers, looked-up rows and clicks: few rows take most of the lookups."""
    generator = torch.Generator().manual_seed(step)
    dense = torch.randn(BATCH, DENSE, generator=generator)
    rows = [(torch.rand(BATCH, generator=generator) ** 6 * n).long() for n in ROWS.values()]
    sparse = KeyedJaggedTensor(list(ROWS), torch.cat(rows), lengths=torch.ones(2 * BATCH).long())
    # Every row of a table has a taste of its own, which the model has to find.
    taste = sum(torch.sin(r * 12.9898) for r in rows)
    logit = dense[:, 0] + 2 * taste
    click = (torch.rand(BATCH, generator=generator) < logit.sigmoid()).float()
    return dense, sparse, click


def tables() -> EmbeddingBagCollection:
    """TorchRec's tables, from the same rows every time."""
    torch.manual_seed(0)
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=n, embedding_dim=DIM, feature_names=[name])
        for name, n in ROWS.items()
    ]
    return EmbeddingBagCollection(configs)


def train(sparse: nn.Module, rows: torch.optim.Optimizer, steps: int) -> float:
    """The mean loss of the last quarter of the steps."""
    torch.manual_seed(1)
    model = DLRM(sparse, DENSE, [64, DIM], [64, 1])
    layers = [*model.dense_arch.parameters(), *model.over_arch.parameters()]
    optimizers = [rows, torch.optim.AdamW(layers, lr=3e-3)]
    losses = []
    for step in range(steps):
        dense, features, click = batch(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        logits = model(dense, features).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, click)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    last = losses[-max(1, steps // 4) :]
    return sum(last) / len(last)


def main(steps: int) -> None:
    """Train with tables of each kind, and print what came of it."""
    print(f"{'tables':24} {'bytes/weight':>12} {'with optimizer':>14} {'loss':>8}")
    numbers = DIM * sum(ROWS.values())
    plain = tables()
    adagrad = torch.optim.Adagrad(plain.parameters(), lr=0.05)
    loss = train(plain, adagrad, steps)
    weights = sum(p.nbytes for p in plain.parameters())
    sums = sum(s["sum"].nbytes for s in adagrad.state.values())
    gradients = weights
    both = (weights + gradients + sums) / numbers
    print(f"{'torchrec, FP32':24} {weights / numbers:12.3f} {both:14.3f} {loss:8.4f}")
    for storage in ("int8", "int4", "int2"):
        narrow = CachedEmbeddingBagCollection.from_embedding_bag_collection(
            tables(), storage=storage, cache_fraction=0.05, seed=0
        )
        loss = train(narrow, optim.RowAdagrad(narrow.bags, lr=0.05), steps)
        memory = narrow.bags.memory()
        both = (memory.total + memory.optimizer) / numbers
        name = f"subulp, {storage}, 5 % cache"
        print(f"{name:24} {memory.total / numbers:12.3f} {both:14.3f} {loss:8.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    main(parser.parse_args().steps)
