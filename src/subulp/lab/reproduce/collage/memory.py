"""Peak memory of a training step of a language model, whole and by strategy."""

from __future__ import annotations

import torch

from .... import optim
from ....diagnostics.memory import track_memory
from ...tasks.lm.models import Shape, build, use_bf16
from ..found import Found, Observation

_GIB = 2**30


def peak(strategies: list[str], shape: dict[str, int], batch: int) -> Found:
    """Live bytes at the peak of the second step, when all states are there.

    Args:
        strategies: Of AdamW.
        shape: Sizes of a model with rotary positions, see :class:`..tasks.lm.models.Shape`.
        batch: Sequences in a batch.
    """
    sizes = Shape(**shape, model="llama")  # type: ignore[arg-type]
    found = [Observation("model", "million parameters", sizes.parameters / 1e6)]
    for strategy in strategies:
        torch.manual_seed(0)
        with torch.device("meta"):
            model = build(sizes).to(torch.bfloat16)
        model = model.to_empty(device="cpu")
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        use_bf16(model)
        optimizer = optim.AdamW(model.parameters(), precision=strategy, betas=(0.9, 0.95))
        ids = torch.randint(sizes.vocabulary, (batch, sizes.context + 1))
        memory = track_memory(model, optimizer)
        for step in range(2):
            with memory if step else torch.enable_grad():
                model.loss(ids[:, :-1], ids[:, 1:]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
        found.append(Observation(strategy, "peak GiB", memory.peak_bytes["total"] / _GIB))
        del model, optimizer, memory, parameter
    return Found(tuple(found))
