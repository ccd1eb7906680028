"""Peak memory on a GPU of millions of labels behind an encoder of BERT-base's size."""

from __future__ import annotations

import time
from typing import Any

import torch
from gpu_peers import Peers
from gpu_turns import Sizes, release
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from subulp import nn, optim

BF16 = torch.bfloat16


class Encoder(torch.nn.Module):
    """Words and positions, layers of attention, and a pooled vector: BERT-base's 110 million."""

    def __init__(self, sizes: Sizes, *, again: bool) -> None:
        super().__init__()
        dim = sizes["width"]
        self.again = again
        self.words = torch.nn.Embedding(sizes["words"], dim)
        self.places = torch.nn.Embedding(sizes["places"], dim)
        self.segments = torch.nn.Embedding(2, dim)
        self.norm = torch.nn.LayerNorm(dim)
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(
                dim, sizes["heads"], 4 * dim, activation="gelu", batch_first=True
            )
            for _ in range(sizes["layers"])
        )
        self.pooled = torch.nn.Linear(dim, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """``(batch, tokens)`` numbers of words to ``(batch, dim)``."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.places(places) + self.segments(torch.zeros_like(tokens))
        x = self.norm(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        pooled: Tensor = torch.tanh(self.pooled(x[:, 0]))
        return pooled


def memory(device: torch.device, sizes: Sizes, peers: Peers) -> dict[str, Any]:
    """Peak bytes of a step with the activations kept, as the paper has it, and computed again."""
    del peers  # The paper's own figure is what this is compared with.
    return {
        name: of_steps(device, sizes, again=again)
        for name, again in (("activations kept", False), ("activations computed again", True))
    }


def of_steps(device: torch.device, sizes: Sizes, *, again: bool) -> dict[str, Any]:
    release(device)
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    encoder = Encoder(sizes, again=again).to(device, BF16)
    optimizer = optim.AdamW(encoder.parameters(), lr=1e-5, precision="collage-plus", seed=0)
    labels = sizes["all_labels"]
    head = nn.ExtremeClassifier(sizes["width"], labels, chunks=64, seed=0, device=device)
    optim.RowSGD(head, lr=0.1)
    shape = sizes["instances"], sizes["tokens"]
    tokens = torch.randint(sizes["words"], shape, device=device)
    rows = torch.arange(shape[0], device=device)
    positives = torch.randint(labels, rows.shape, device=device)

    def step() -> None:
        head(encoder(tokens), rows, positives).backward()
        optimizer.step()

    # A gradient is gone before the next layer's exists: the step is part of the backward pass.
    with optim.fuse_backward(encoder, optimizer):
        step()
        peak = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
    return {
        "peak_bytes": peak,
        "labels": labels,
        "parameters": sum(p.numel() for p in encoder.parameters()),
        "seconds": time.perf_counter() - started,
    }
