"""Memory of a whole model over one step: an encoder, its optimizer, and the classifier."""

from __future__ import annotations

import torch

from .... import optim
from ....diagnostics.memory import track_memory
from ...tasks.lm.models import BERT, Shape, use_bf16
from ..found import Found, Observation
from .classifier_memory import POSITIVES, classifier, highest

FORWARD, CLASSIFIER, BACKWARD = "encoder forward", "classifier", "encoder backward"
LIVE = "live MiB"
BEFORE, ACTIVATIONS, PEAK = "MiB before the step", "MiB of activations", "MiB at the peak"
ON_TOP = "bytes of a weight on top"
"""Of the classifier's weights, at its peak, beside what stood there before and the activations."""
SHARE = "peak beside the classifier's"
_MIB = 2**20


def trace(
    storages: list[str],
    shape: dict[str, int],
    labels: int,
    tokens: int,
    batch: int,
    chunks: int,
) -> Found:
    """Live tensors over a step of a BERT in BF16 with Kahan summation, and of a classifier on it.

    The optimizer has stepped before, so its states are there; it steps after the backward pass.

    Args:
        storages: Of the classifier's rows, with the baseline.
        shape: Sizes of a BERT, see :class:`..tasks.lm.models.Shape`.
        labels: Number of labels.
        tokens: Tokens of a text.
        batch: Texts.
        chunks: Parts of the labels.
    """
    observations, curves = [], []
    for storage in storages:
        torch.manual_seed(0)
        sizes = Shape(**shape, context=tokens, tie_head=True, model="bert")
        encoder = BERT(sizes).to(torch.bfloat16)
        use_bf16(encoder)
        head, _ = classifier(storage, labels, sizes.width, chunks)
        model = torch.nn.ModuleDict({"encoder": encoder, "head": head})
        optimizer = optim.AdamW(encoder.parameters(), precision="kahan")
        texts = torch.randint(sizes.vocabulary, (batch, tokens))
        rows = torch.arange(batch).repeat_interleave(POSITIVES)
        columns = torch.randint(labels, (batch * POSITIVES,))

        # The optimizer's states are there from the first step on.
        for _ in range(2):
            with track_memory(model, optimizer) as memory:
                memory.mark(FORWARD)
                x = encoder.encoded(texts).mean(1).float()
                memory.mark(CLASSIFIER)
                loss = head(x, rows, columns)
                memory.mark(BACKWARD)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                del x, loss
        moments = memory.timeline
        # What stands there at the beginning comes tensor by tensor.
        before = max(m.bytes["total"] for m in moments if not m.mark)
        live = {
            phase: [m.bytes["total"] for m in moments if m.mark == phase]
            for phase in (FORWARD, CLASSIFIER, BACKWARD)
        }
        activations = live[FORWARD][-1] - before
        peak = max(max(values) for values in live.values())
        on_top = max(live[CLASSIFIER]) - before - activations
        total = [value / _MIB for values in live.values() for value in values]
        curves.append(highest(storage, LIVE, total))
        observations += [
            Observation(storage, BEFORE, before / _MIB),
            Observation(storage, ACTIVATIONS, activations / _MIB),
            Observation(storage, PEAK, peak / _MIB),
            Observation(storage, ON_TOP, on_top / (labels * sizes.width)),
            Observation(storage, SHARE, peak / max(live[CLASSIFIER])),
        ]
        del model, head, encoder, optimizer, memory, moments, live
    return Found(tuple(observations), tuple(curves))
