"""Bytes that a model of many labels has before its first step, part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from .... import nn, optim
from ...tasks.lm.models import BERT, Shape
from ..found import Found, Observation
from .classifier_memory import STORAGES, batch_of, classifier
from .transients import plain

CLASSIFIER, ENCODER, LOGITS = (
    "GiB of the classifier",
    "GiB of the encoder with its states",
    "MiB of logits",
)
ALL, WEIGHTS = "GiB before the first step", "bytes of a weight with its copy"
RENEE, HEAD = "renee", "fp8, head Kahan"
_GIB = 2**30


def stored(labels: int, dim: int, head_fraction: float) -> Found:
    """Classifiers of every storage without their numbers, on the meta device.

    Args:
        labels: Number of labels.
        dim: Size of a vector.
        head_fraction: Share of the labels that have a remainder in one more case.
    """
    cases = {name: (storage, 0.0) for name, storage in STORAGES.items()}
    cases[HEAD] = (STORAGES["fp8"], head_fraction)
    found = []
    for name, (storage, share) in cases.items():
        head = nn.ExtremeClassifier(
            dim,
            labels,
            storage=storage,
            head_fraction=share,
            label_counts=torch.arange(labels) if share else None,
            seed=0,
            device="meta",
        )
        found.append(Observation(name, CLASSIFIER, _bytes_of(head) / _GIB))
    return Found(tuple(found))


def steps(labels: int, at: int, dim: int, batch: int, chunks: int) -> Found:
    """Weights, their copies and logits in a step of a classifier, all as long as the labels.

    The step is in plain PyTorch, where logits are a tensor.

    Args:
        labels: Labels of the classifier that steps.
        at: Labels to which the bytes are scaled.
        dim: Size of a vector.
        batch: Instances.
        chunks: Parts of the labels; the baseline has one.
    """
    found = []
    for storage in (RENEE, "bf16", "fp8"):
        head, _ = classifier(storage, labels, dim, chunks)
        given = batch_of(labels, dim, batch)
        own = _bytes_of(head) / labels
        with plain(), _Shapes() as shapes:
            head(*given).backward()
        copy = shapes.nbytes.get((labels, dim, torch.float16), 0)
        weights = next(iter(head.parameters())).nbytes
        part = labels if storage == RENEE else labels // chunks
        # A CPU multiplies the baseline's FP16 numbers in FP32, and keeps FP16, as a GPU does.
        kinds = (torch.float16,) if storage == RENEE else (torch.bfloat16, torch.float32)
        sizes = [
            size
            for (*shape, dtype), size in shapes.nbytes.items()
            if sorted(shape) == sorted((batch, part)) and dtype in kinds
        ]
        found.append(Observation(storage, WEIGHTS, (weights + copy) / (labels * dim)))
        if storage == RENEE:
            found.append(Observation(storage, CLASSIFIER, own * at / _GIB))
        found.append(Observation(storage, LOGITS, max(sizes) / labels * at / 2**20))
    return Found(tuple(found))


def encoders(shape: dict[str, int], layers: int) -> Found:
    """Weights and states of an encoder in BF16 with Kahan summation, and in FP32.

    Args:
        shape: Sizes of a BERT without its layers, of which one and two are built.
        layers: Number of layers at which the straight line is read.
    """
    found = []
    for name, dtype, precision in (
        (RENEE, torch.float32, "fp32"),
        ("bf16", torch.bfloat16, "kahan"),
    ):
        one, two = (_kept(shape, n, dtype, precision) for n in (1, 2))
        found.append(Observation(name, ENCODER, (one + (two - one) * (layers - 1)) / _GIB))
    # The paper's encoder beside FP8 rows keeps BF16 weights too.
    return Found((*found, Observation("fp8", ENCODER, found[-1].value)))


def _kept(shape: dict[str, int], layers: int, dtype: torch.dtype, precision: str) -> int:
    sizes = Shape(**shape, layers=layers, tie_head=True, model="bert")
    model = BERT(sizes).to(dtype)
    optimizer = optim.AdamW(model.parameters(), precision=precision)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    states = [t for own in optimizer.state.values() for t in own.values()]
    return _bytes_of(model) + sum(t.nbytes for t in states if isinstance(t, Tensor))


def together(found: Found) -> tuple[Observation, ...]:
    """All that is there before the first step."""
    return tuple(
        Observation(
            name,
            ALL,
            _one(found, name, CLASSIFIER)
            + _one(found, name, ENCODER)
            + _one(found, name, LOGITS) / 2**10,
        )
        for name in (RENEE, "bf16", "fp8")
    )


def _one(found: Found, case: str, quantity: str) -> float:
    (value,) = found.values(case, quantity).values()
    return value


def _bytes_of(module: Any) -> int:
    return sum(t.nbytes for t in (*module.parameters(), *module.buffers()))


class _Shapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of what operations make, by shape and dtype."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes: dict[tuple[Any, ...], int] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, Tensor):
                self.nbytes[*leaf.shape, leaf.dtype] = leaf.nbytes
        return result
