"""Accelerate with subulp's AdamW beside torch's: bytes a parameter, and the loss.

    python examples/accelerate_train.py
    accelerate launch --cpu --num_processes 2 examples/accelerate_train.py

The same model learns the same function three times: with FP32 weights, with BF16 weights whose
small updates round away, and with BF16 weights that keep them.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from subulp import optim
from subulp.integrations.accelerate import prepare


def data() -> DataLoader[tuple[Tensor, ...]]:
    """A smooth function of 16 numbers."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4096, 16, generator=generator)
    weights = torch.randn(16, 4, generator=generator) / 4
    y = (x @ weights).sin().sum(1, keepdim=True)
    return DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True, generator=generator)


def network(dtype: torch.dtype) -> nn.Sequential:
    """A network with one hidden layer."""
    return nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 1)).to(dtype)


def bytes_per_parameter(optimizer: torch.optim.Optimizer) -> float:
    """Weights, gradients of their dtype and states of their size, from the live tensors."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    total = sum(2 * p.nbytes for p in params)
    for p in params:
        total += sum(v.nbytes for v in optimizer.state[p].values() if v.numel() == p.numel())
    return total / sum(p.numel() for p in params)


def train(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, epochs: int
) -> tuple[float, float]:
    """Bytes a parameter, and the mean loss of the last epoch."""
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    # As accelerator.prepare, and refuses what would train otherwise than meant.
    model, prepared, loader = prepare(accelerator, model, optimizer, data())
    losses: list[Tensor] = []
    for _ in range(epochs):
        losses.clear()
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(
                    model(x.to(next(model.parameters()).dtype)).float(), y
                )
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                prepared.step()
                prepared.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean())
        schedule.step()
    accelerator.free_memory()
    return bytes_per_parameter(optimizer), torch.stack(losses).mean().item()


def main(epochs: int) -> None:
    """Train three times, and print what came of it."""
    accelerator = Accelerator(cpu=True)
    methods = {
        "torch AdamW, FP32": (torch.float32, {}),
        "torch AdamW, BF16": (torch.bfloat16, {}),
        "subulp AdamW, BF16, collage-plus": (torch.bfloat16, {"precision": "collage-plus"}),
    }
    accelerator.print(f"{'method':34} {'bytes/param':>11} {'loss':>9}")
    for name, (dtype, options) in methods.items():
        set_seed(0)
        model = network(dtype)
        make = optim.AdamW if options else torch.optim.AdamW
        optimizer = make(model.parameters(), lr=5e-4, betas=(0.9, 0.999), **options)
        size, loss = train(accelerator, model, optimizer, epochs)
        accelerator.print(f"{name:34} {size:11.2f} {loss:9.5f}")
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=12)
    main(parser.parse_args().epochs)
