"""torchtitan's Llama 3 with subulp's optimizers and mixtures: bytes a parameter, and the loss.

    python examples/torchtitan_train.py

Runs the parts of torchtitan's Trainer that need no accelerator: model, containers, clipping. With
one, give the same configurations to ``torchtitan.trainer.Trainer``. Needs what
tests/integrations/requirements.txt lists.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.tools.utils import set_default_dtype

from subulp.integrations.torchtitan import MixtureConverter, adamw
from subulp.nn import MoR

LENGTH, BATCH = 32, 8


def model(dtype: torch.dtype, converters: list[Any]) -> torch.nn.Module:
    """The debug model with one layer and bytes for words, made as the Trainer makes it."""
    config = model_registry("debugmodel", converters=converters or None).model
    config.layers = config.layers[:1]
    for layer in config.layers:
        # The default one is compiled.
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.vocab_size = config.tok_embeddings.num_embeddings = config.lm_head.out_features = 256
    with torch.device("meta"), set_default_dtype(dtype):
        made = config.build()
    made.verify_module_protocol()
    made.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        made.init_weights(buffer_device=None)
    return made


def batch(text: Tensor, step: int) -> Tensor:
    """Pieces of a text."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(text) - LENGTH, (BATCH, 1), generator=generator)
    return text[starts + torch.arange(LENGTH + 1)].long()


def bytes_per_parameter(optimizers: Any) -> float:
    """Weights, gradients of their dtype and states of their size, from the live tensors."""
    total = count = 0
    for optimizer in optimizers:
        for p, state in optimizer.state.items():
            tensors = [p, p, *(v for v in state.values() if v.numel() == p.numel())]
            total += sum(tensor.nbytes for tensor in tensors)
            count += p.numel()
    return total / count


def train(
    dtype: torch.dtype, optimizer: Any, converters: list[Any], steps: int
) -> tuple[float, float]:
    """Bytes a parameter, and the mean loss of the last quarter of the steps."""
    made = model(dtype, converters)
    optimizers = optimizer.build(model_parts=[made])
    schedule = LRSchedulersContainer.Config(warmup_steps=steps // 10 + 1)
    schedulers = schedule.build(optimizers=optimizers, training_steps=steps)
    with open(__file__, "rb") as file:
        text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
    losses = []
    for step in range(steps):
        optimizers.zero_grad()
        tokens = batch(text, step)
        loss = cross_entropy_loss(made(tokens[:, :-1]), tokens[:, 1:]) / (BATCH * LENGTH)
        loss.backward()
        clip_grad_norm_(made.parameters(), 1.0, foreach=True)
        optimizers.step()
        schedulers.step()
        losses.append(loss.item())
    last = losses[-max(1, steps // 4) :]
    return bytes_per_parameter(optimizers), sum(last) / len(last)


def main(steps: int) -> None:
    """Train under several configurations, and print what came of it."""
    mixture = MixtureConverter.Config(mor=MoR("subtensor-2way"))
    plain = default_adamw(lr=2e-3, fused=False)
    methods: dict[str, tuple[torch.dtype, Any, list[Any]]] = {
        "torch AdamW, FP32": (torch.float32, plain, []),
        "torch AdamW, BF16": (torch.bfloat16, plain, []),
        "subulp, BF16, collage-plus": (torch.bfloat16, adamw(2e-3, precision="collage-plus"), []),
        "the same, operands in FP8": (
            torch.bfloat16,
            adamw(2e-3, precision="collage-plus"),
            [mixture],
        ),
    }
    print(f"{'method':28} {'bytes/param':>11} {'loss':>8}")
    for name, (dtype, optimizer, converters) in methods.items():
        size, loss = train(dtype, optimizer, converters, steps)
        print(f"{name:28} {size:11.2f} {loss:8.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    main(parser.parse_args().steps)
