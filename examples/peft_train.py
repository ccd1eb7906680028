"""PEFT's LoRA with subulp's AdamW: adapters in BF16 that learn what BF16 alone rounds away.

    python examples/peft_train.py

A small GPT-2 has read one module of Python's library, byte by byte. Its weights stay as they are,
while adapters in FP32, in BF16, and in BF16 that keep small updates learn another module.
"""

from __future__ import annotations

import argparse
import copy
import string
import textwrap

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, set_seed
from transformers.utils import logging

from subulp import optim

CONTEXT, BATCH = 64, 8


def windows(path: str) -> torch.Tensor:
    """Windows of a file, byte by byte."""
    with open(path, "rb") as file:
        text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long()
    return text[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT)


def read_once(steps: int) -> GPT2LMHeadModel:
    """A GPT-2 that has read one module."""
    set_seed(0)
    config = GPT2Config(
        vocab_size=256, n_embd=64, n_layer=2, n_head=4, n_positions=CONTEXT,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    train(model, torch.optim.AdamW(model.parameters(), lr=2e-3), textwrap.__file__, steps)
    return model


def adapted(model: GPT2LMHeadModel, dtype: torch.dtype) -> nn.Module:
    """A copy of a model in BF16, with adapters in ``dtype``."""
    set_seed(1)
    model = copy.deepcopy(model).bfloat16()
    lora = LoraConfig(r=16, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True)
    # PEFT casts adapters to FP32 unless it is told not to.
    return get_peft_model(model, lora, autocast_adapter_dtype=dtype == torch.float32)


def bytes_per_parameter(optimizer: torch.optim.Optimizer) -> float:
    """Of what is trained: weights, gradients of their dtype and states of their size."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [v for p in params for v in optimizer.state[p].values() if v.numel() == p.numel()]
    total = sum(2 * p.nbytes for p in params) + sum(v.nbytes for v in states)
    return total / sum(p.numel() for p in params)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, path: str, steps: int) -> float:
    """The mean loss of the last tenth of the steps."""
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    text, losses = windows(path), []
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        chosen = text[torch.randint(len(text), (BATCH,), generator=generator)]
        loss = model(input_ids=chosen, labels=chosen).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    last = losses[-max(1, steps // 10) :]
    return sum(last) / len(last)


def main(steps: int) -> None:
    """Train three times, and print what came of it."""
    logging.set_verbosity_error()
    methods = {
        "torch AdamW, FP32 adapters": (torch.float32, {}),
        "torch AdamW, BF16 adapters": (torch.bfloat16, {}),
        "subulp AdamW, BF16, collage-plus": (torch.bfloat16, {"precision": "collage-plus"}),
    }
    base = read_once(steps)
    print(f"{'method':34} {'bytes/param':>11} {'loss':>7}")
    for name, (dtype, options) in methods.items():
        model = adapted(base, dtype)
        make = optim.AdamW if options else torch.optim.AdamW
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = make(trained, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0, **options)
        loss = train(model, optimizer, string.__file__, steps)
        print(f"{name:34} {bytes_per_parameter(optimizer):11.2f} {loss:7.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    main(parser.parse_args().steps)
