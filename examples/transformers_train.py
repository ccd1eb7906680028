"""Transformers' Trainer with subulp's AdamW beside torch's: bytes a parameter, and the loss.

    python examples/transformers_train.py

A small GPT-2 learns the bytes of a module of Python's library three times: with FP32 weights, with
BF16 weights whose small updates round away, and with BF16 weights that keep them and step in the
backward pass.
"""

from __future__ import annotations

import argparse
import tempfile
import textwrap

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging

from subulp import optim
from subulp.integrations.transformers import FusedBackwardCallback, optimizer_cls_and_kwargs

CONTEXT = 64


class Bytes(Dataset[dict[str, torch.Tensor]]):
    """Windows of a file, byte by byte."""

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            self._bytes = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self._bytes) // CONTEXT

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        window = self._bytes[i * CONTEXT : (i + 1) * CONTEXT]
        return {"input_ids": window, "labels": window}


def new_trainer(dtype: torch.dtype, precision: str | None, steps: int, folder: str) -> Trainer:
    """A Trainer; with a ``precision``, two lines differ."""
    set_seed(0)
    config = GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=4, n_positions=CONTEXT)
    args = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=16,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        adam_beta2=0.999,
        logging_steps=steps // 10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    chosen = (torch.optim.AdamW, {"lr": args.learning_rate})
    if precision is not None:
        chosen = optimizer_cls_and_kwargs(args, precision=precision)
    trainer = Trainer(
        GPT2LMHeadModel(config).to(dtype),
        args,
        train_dataset=Bytes(textwrap.__file__),
        optimizer_cls_and_kwargs=chosen,
    )
    trainer.remove_callback(PrinterCallback)
    if precision is not None:
        trainer.add_callback(FusedBackwardCallback(trainer))
    return trainer


def bytes_per_parameter(trainer: Trainer) -> float:
    """Weights, states of their size, and gradients that are alive together."""
    optimizer = trainer.optimizer.optimizer
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [v for p in params for v in optimizer.state[p].values() if v.numel() == p.numel()]
    # A step in the backward pass frees each gradient at once.
    gradients = 0 if isinstance(optimizer, optim.AdamW) else params[0].element_size()
    count = sum(p.numel() for p in params)
    return sum(t.nbytes for t in (*params, *states)) / count + gradients


def main(steps: int) -> None:
    """Train three times, and print what came of it."""
    methods: dict[str, tuple[torch.dtype, str | None]] = {
        "torch AdamW, FP32": (torch.float32, None),
        "torch AdamW, BF16": (torch.bfloat16, None),
        "subulp AdamW, BF16, collage-plus": (torch.bfloat16, "collage-plus"),
    }
    logging.set_verbosity_error()
    print(f"{'method':34} {'bytes/param':>11} {'loss':>7}")
    for name, (dtype, precision) in methods.items():
        with tempfile.TemporaryDirectory() as folder:
            trainer = new_trainer(dtype, precision, steps, folder)
            trainer.train()
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        print(f"{name:34} {bytes_per_parameter(trainer):11.2f} {losses[-1]:7.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    main(parser.parse_args().steps)
