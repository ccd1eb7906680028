"""Lightning with subulp's AdamW beside torch's: bytes a parameter, and the loss.

    python examples/lightning_train.py

The same module learns the same function three times: with FP32 weights, with BF16 weights whose
small updates round away, and with BF16 weights that keep them and step in the backward pass.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from subulp import optim
from subulp.integrations.lightning import FusedHalfPrecision


def data() -> DataLoader[tuple[Tensor, ...]]:
    """A smooth function of 16 numbers."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4096, 16, generator=generator)
    weights = torch.randn(16, 4, generator=generator) / 4
    y = (x @ weights).sin().sum(1, keepdim=True)
    return DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True, generator=generator)


class Regression(pl.LightningModule):
    """A network with one hidden layer."""

    def __init__(self, precision: str | None, epochs: int) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 1))
        self.precision, self.epochs = precision, epochs
        self.losses: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """The mean squared error."""
        x, y = batch
        loss = nn.functional.mse_loss(self.network(x).float(), y.float())
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        """The one line that differs."""
        if self.precision is None:
            optimizer = torch.optim.AdamW(self.parameters(), lr=5e-4)
        else:
            optimizer = optim.AdamW(self.parameters(), lr=5e-4, precision=self.precision)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs)]


def bytes_per_parameter(optimizer: torch.optim.Optimizer) -> float:
    """Weights, states of their size, and gradients that are alive together."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [v for p in params for v in optimizer.state[p].values() if v.numel() == p.numel()]
    # A step in the backward pass frees each gradient at once.
    gradients = 0 if isinstance(optimizer, optim.AdamW) else params[0].element_size()
    total = sum(t.nbytes for t in (*params, *states))
    return total / sum(p.numel() for p in params) + gradients


def main(epochs: int) -> None:
    """Train three times, and print what came of it."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    methods: dict[str, tuple[str | None, dict[str, Any]]] = {
        "torch AdamW, FP32": (None, {"precision": "32-true"}),
        "torch AdamW, BF16": (None, {"precision": "bf16-true"}),
        "subulp AdamW, BF16, collage-plus": ("collage-plus", {"plugins": [FusedHalfPrecision()]}),
    }
    print(f"{'method':34} {'bytes/param':>11} {'loss':>9}")
    for name, (precision, options) in methods.items():
        torch.manual_seed(0)
        module = Regression(precision, epochs)
        trainer = pl.Trainer(
            accelerator="cpu",
            max_epochs=epochs,
            gradient_clip_val=1.0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        loader = data()
        trainer.fit(module, loader)
        loss = torch.stack(module.losses[-len(loader) :]).mean().item()
        size = bytes_per_parameter(trainer.optimizers[0])
        print(f"{name:34} {size:11.2f} {loss:9.5f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=12)
    main(parser.parse_args().epochs)
