"""A T5 of transformers' on generated sentence tasks, its step after and inside the backward pass.

"Memory Efficient Mixed Precision Optimizers", Table 2. Weights are drawn, not downloaded.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .... import optim
from ....diagnostics import track_memory
from ..found import Found, Observation

VOCABULARY, _MARK, _FIRST = 256, 3, 8
"""Tokens; what stands between two sentences; the first word. 0 fills up, 1 ends, 4 to 7 answer."""

FREED, KEPT, FUSED = WAYS = ("not fused", "not fused, gradients kept", "fused")

Task = Callable[[Tensor, Tensor], Tensor]
"""The answers, int64 ``(batch,)``, to two sentences each."""

TASKS: dict[str, Task] = {
    # As MNLI has three answers: which sentence has the larger first word, or neither.
    "three answers": lambda a, b: torch.sign(a[:, 0] - b[:, 0]) + 1,
    # As QNLI: whether the first word of one stands in the other.
    "an answer in a text": lambda a, b: (a[:, :1] == b).any(1).long(),
    # As MRPC: whether two sentences begin alike.
    "paraphrases": lambda a, b: (a[:, 0] == b[:, 0]).long(),
}


def _batches(task: Task, steps: int, batch: int, length: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs ``(batch, length)`` and answers ``(batch, 2)``."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(steps):
        # Few first words, so that they are often the same.
        words = torch.randint(_FIRST, VOCABULARY, (batch, length - 2), generator=generator)
        half = (length - 2) // 2
        a, b = words[:, :half], words[:, half:]
        a[:, 0], b[:, 0] = a[:, 0] % 2 + _FIRST, b[:, 0] % 2 + _FIRST
        mark, end = torch.full((batch, 1), _MARK), torch.ones(batch, 1, dtype=torch.int64)
        labels = torch.cat((task(a, b).unsqueeze(1) + 4, end), 1)
        found.append((torch.cat((a, mark, b, end), 1), labels))
    return found


def _model(sizes: dict[str, int]) -> nn.Module:
    if importlib.util.find_spec("transformers") is None:
        raise RuntimeError(
            "claims=extra-bits-table2 needs transformers: pip install 'subulp[transformers]'"
        )
    from transformers import T5Config, T5ForConditionalGeneration  # noqa: PLC0415 - optional

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY,
        decoder_start_token_id=0,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        tie_word_embeddings=False,
        **sizes,
    )
    model: nn.Module = T5ForConditionalGeneration(config)
    return model.train()


def fine_tuned(
    tasks: list[str], sizes: dict[str, int], batch: int, length: int, steps: int
) -> Found:
    """Peaks of live bytes, weights that differ, and seconds of a step, all ways by turns.

    Not fused, gradients are freed after the step, or kept and filled with zeros.

    Args:
        tasks: Names in :data:`TASKS`.
        sizes: Of transformers' ``T5Config``.
        batch: Pairs of sentences.
        length: Tokens of a pair.
        steps: Of AdamW in FP32; the second one is measured for memory.

    Raises:
        RuntimeError: transformers is missing.
    """
    found = []
    for name in tasks:
        models, peaks = {}, {}
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for way in WAYS:
            model = _model(sizes)
            optimizer = optim.AdamW(
                model.parameters(), lr=1e-3, precision="fp32", nonfinite="propagate"
            )
            models[way] = model, optimizer
            if way == FUSED:
                optim.fuse_backward(model, optimizer)
        for i, (ids, labels) in enumerate(_batches(TASKS[name], steps, batch, length)):
            for way, (model, optimizer) in models.items():
                if i == 1:
                    with track_memory(model, optimizer) as memory:
                        _step(model, optimizer, way, ids, labels)
                    peaks[way] = memory
                    continue
                begin = time.perf_counter()
                _step(model, optimizer, way, ids, labels)
                seconds[way].append(time.perf_counter() - begin)
        weights = [
            torch.cat([p.detach().flatten() for p in model.parameters()])
            for model, _ in models.values()
        ]
        differing = sum(int((weights[0] != other).sum()) for other in weights[1:])
        found.append(Observation(f"{name}, {FUSED}", "weights that differ", differing))
        found.append(Observation(name, "million parameters", len(weights[0]) / 1e6))
        for way, memory in peaks.items():
            case = f"{name}, {way}"
            peak, gradients = memory.peak_bytes["total"], memory.category_peak_bytes["gradients"]
            found += [
                Observation(case, "peak MiB", peak / 2**20),
                Observation(case, "largest gradients, MiB", gradients / 2**20),
                # The first step makes the states.
                Observation(case, "seconds of a step", statistics.median(seconds[way][1:])),
            ]
        ratio = statistics.median(
            f / u for f, u in zip(seconds[FUSED][1:], seconds[FREED][1:], strict=True)
        )
        found.append(Observation(f"{name}, {FUSED}", "time beside not fused", ratio))
    return Found(tuple(found))


def _step(model: Any, optimizer: optim.AdamW, way: str, ids: Tensor, labels: Tensor) -> None:
    model(input_ids=ids, labels=labels).loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=way != KEPT)
