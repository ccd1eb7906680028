"""The Deep Learning Recommendation Model (Naumov et al., 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from ....nn import Linear
from .split_tables import Tables


class DLRM(nn.Module):
    """Numbers through an MLP, categories through tables; their dot products through another MLP.

    Weights of the MLPs begin normal with variance ``2 / (inputs + outputs)``, biases with variance
    ``1 / outputs``, as in the paper's code.

    Args:
        numbers: Numbers of an example.
        tables: One row a category, ``stacked=True``.
        dim: Numbers of a row.
        bottom: Widths of the hidden layers of the MLP over the numbers; it ends in ``dim``.
        top: Widths of the hidden layers of the MLP over the dot products; it ends in the logit.
    """

    pairs: Tensor

    def __init__(
        self,
        numbers: int,
        tables: Tables,
        dim: int,
        bottom: Sequence[int],
        top: Sequence[int],
    ) -> None:
        super().__init__()
        self.tables = tables
        vectors = len(tables.features) + 1
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, -1), persistent=False)
        self.bottom = _mlp([numbers, *bottom, dim], last=True)
        self.top = _mlp([dim + self.pairs.shape[1], *top, 1], last=False)

    def forward(self, numbers: Tensor, rows: Tensor) -> Tensor:
        """Logits.

        Args:
            numbers: FP32 ``(batch, numbers)``.
            rows: int64 ``(batch, tables)``.

        Returns:
            FP32 ``(batch,)``.
        """
        dense = self.bottom(numbers)
        bags = torch.ones(rows.numel(), dtype=torch.int64, device=rows.device)
        looked_up = self.tables(rows.t().reshape(-1), bags)
        vectors = torch.cat((dense.unsqueeze(1), looked_up), 1)
        products = vectors @ vectors.mT
        crossed = products[:, self.pairs[0], self.pairs[1]]
        logits: Tensor = self.top(torch.cat((dense, crossed), 1))
        return logits.squeeze(1)


def _mlp(widths: Sequence[int], *, last: bool) -> nn.Sequential:
    """Linear layers with ReLUs between them, and behind the last one if ``last``."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        linear = Linear(inputs, outputs)
        nn.init.normal_(linear.weight, std=(2 / (inputs + outputs)) ** 0.5)
        nn.init.normal_(linear.bias, std=(1 / outputs) ** 0.5)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*(layers if last else layers[:-1]))
