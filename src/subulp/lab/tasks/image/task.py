"""The image classifier's data, model and measurements."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .... import optim
from ....optim.options import strategy_for
from ...data.digest import digest as digest_of
from ...engine.data_parallel import replicated, same_buffers, shard
from ...engine.metrics import Metric
from ...engine.ranks import ALONE, Ranks
from ...engine.recipe import bytes_of_parameters, decay_groups, one_cycle, steps_of
from ...engine.task import Workload
from .config import WIDE, ImageConfig, ParameterDtype
from .images import Batches, Images, load_images
from .resnet import ResNet18, Shape
from .simulated import SimulatedSGD, simulated_bits

METRICS = (
    Metric("val_loss", "val\nloss", "{:.4f}", "Validation loss", "nats per picture"),
    Metric(
        "accuracy",
        "accuracy\n%",
        "{:.2f}",
        "Accuracy",
        "%",
        factor=100,
        versus="difference",
        higher_is_better=True,
    ),
)

COUNTED = "parameter"

EVALUATION_BATCH = 256

_DTYPES: dict[ParameterDtype, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def load(config: ImageConfig) -> Images:
    """The pictures of ``config``, after a check that every precision is possible."""
    for precision in config.precision:
        parameter_dtype(precision, config.dtype)
    images = load_images(config.data)
    if len(images.train) < config.batch_size:
        raise ValueError(
            f"batch_size={config.batch_size} is above the {len(images.train)} training pictures "
            f"of data={images.name}: give at most as many"
        )
    return images


def describe(data: Images) -> dict[str, Any]:
    """Name, number of pictures in each part, and number of classes."""
    return {
        "name": data.name,
        "train": len(data.train),
        "validation": len(data.validation),
        "classes": data.classes,
    }


def steps(config: ImageConfig, data: Images) -> int:
    """Whole batches of all epochs, or what was asked for."""
    return steps_of(config.steps, config.epochs, len(data.train) // config.batch_size)


def digest(data: Images) -> str:
    """A digest of pictures and labels."""
    return digest_of((data.train, data.train_labels, data.validation, data.validation_labels))


def parameter_dtype(precision: str, dtype: ParameterDtype) -> torch.dtype:
    """Storage dtype of the parameters.

    Raises:
        ValueError: The strategy is unknown or not available for ``dtype``.
    """
    if precision in WIDE:
        return torch.float32
    if simulated_bits(precision) is not None:
        return torch.float16
    strategy_for(optim.parse_precision(precision), _DTYPES[dtype])
    return _DTYPES[dtype]


def least_memory(config: ImageConfig, data: Images, variant: str) -> int:
    """Weights, gradients and states, and the activations of the first stage."""
    shape = shape_of(config, data)
    dtype = parameter_dtype(variant, config.dtype)
    stored = "fp32" if variant in WIDE or simulated_bits(variant) is not None else variant
    stored_dtype = torch.float32 if stored == "fp32" else dtype
    kept = bytes_of_parameters(
        partial(optim.SGD, lr=0.1, momentum=config.momentum),
        stored_dtype,
        shape.parameters,
        precision=stored,
    )
    places = data.train.shape[2] * data.train.shape[3]
    # Each of the first stage's convolutions leaves what it got for the backward pass.
    return kept + 4 * 2 * config.batch_size * shape.width * places


def shape_of(config: ImageConfig, data: Images) -> Shape:
    """Sizes of the model."""
    return Shape(data.channels, data.classes, config.width or data.width)


def build_model(
    config: ImageConfig,
    data: Images,
    precision: str,
    seed: int,
    device: torch.device,
    ranks: Ranks = ALONE,
) -> tuple[ResNet18, optim.SGD]:
    """The narrow model and its optimizer.

    The initial weights are made in FP32 from the seed alone, so every precision starts from the
    same ones, as exactly as its components can hold them. Kernels and matrices decay, vectors do
    not.
    """
    torch.manual_seed(seed)
    model = ResNet18(*shape_of(config, data)).to(device)
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    model.to(parameter_dtype(precision, config.dtype))
    shard(model, ranks, model.blocks)
    groups = decay_groups(model.named_parameters())
    options: dict[str, Any] = {
        "lr": config.lr,
        "momentum": config.momentum,
        "nesterov": config.nesterov,
        "weight_decay": config.weight_decay,
        "nonfinite": config.gradient_policy,
        "seed": seed,
    }
    bits = simulated_bits(precision)
    optimizer: optim.SGD
    if bits is None:
        stored = "fp32" if precision in WIDE else precision
        optimizer = optim.SGD(groups, precision=stored, **options)
    else:
        optimizer = SimulatedSGD(groups, bits, **options)
    optimizer.load_full_precision_state_dict(model, initial)
    return model, optimizer


def check_ranks(config: ImageConfig, ranks: Ranks) -> None:
    """Refuse what several ranks cannot share."""
    simulated = [p for p in config.precision if simulated_bits(p) is not None]
    if simulated and ranks.parallel == "fsdp":
        raise ValueError(
            f"precision={simulated[0]} is simulated on whole parameters, and parallel=fsdp shards "
            "them: use ddp, or leave it out"
        )
    if config.batch_size < 2 * ranks.count:
        raise ValueError(
            f"batch_size={config.batch_size} leaves a rank fewer than two pictures to normalise "
            f"over: give at least {2 * ranks.count}"
        )


def build(
    config: ImageConfig,
    data: Images,
    precision: str,
    seed: int,
    device: torch.device,
    ranks: Ranks = ALONE,
) -> Workload:
    """A run of one precision and seed."""
    model, optimizer = build_model(config, data, precision, seed, device, ranks)
    training = Batches(data, config.batch_size, seed, augment=config.augment)
    total = steps(config, data)
    computing = Computing(precision, config.dtype)
    logits = computing.logits(model, device)
    trained = computing.logits(replicated(model, ranks, fused=config.fuse_backward), device)
    own, weight = ranks.part(config.batch_size), ranks.weight(config.batch_size)

    def loss(_: bool) -> Tensor:
        pictures, labels = (t[own] for t in training.draw())
        return weight * F.cross_entropy(trained(pictures), labels.to(device))

    validation = data.validation_batches(EVALUATION_BATCH)
    return Workload(
        model,
        optimizer,
        total,
        config.eval_epochs * (len(data.train) // config.batch_size),
        lambda step: one_cycle(step, total, warmup=config.warmup, final=config.final_lr),
        loss,
        lambda: evaluate(model, logits, validation, ranks),
        {
            "shape": shape_of(config, data)._asdict(),
            "computing": computing._asdict(),
            "side": data.train.shape[-1],
            "mean": data.mean.flatten().tolist(),
            "deviation": data.deviation.flatten().tolist(),
        },
        scaler=torch.amp.GradScaler(device.type) if config.grad_scaler else None,
        simulated=simulated_bits(precision) is not None,
        steps_per_epoch=len(data.train) // config.batch_size,
        parts={"batches": training.shuffled},
    )


class Computing(NamedTuple):
    """How a run computes.

    Attributes:
        precision: Its strategy.
        dtype: Storage of activations, except under ``"fp32"``.
    """

    precision: str
    dtype: ParameterDtype

    def logits(
        self, model: Callable[[Tensor], Tensor], device: torch.device
    ) -> Callable[[Tensor], Tensor]:
        """The function from pictures, FP32 and standardised, to FP32 logits."""
        activations = parameter_dtype(self.precision, self.dtype)

        def logits(pictures: Tensor) -> Tensor:
            amp = self.precision == "amp"
            with torch.autocast(device.type, _DTYPES[self.dtype], enabled=amp):
                result: Tensor = model(pictures.to(device, activations))
            return result

        return logits


@torch.no_grad()
def evaluate(
    model: torch.nn.Module,
    logits: Callable[[Tensor], Tensor],
    batches: Sequence[tuple[Tensor, Tensor]],
    ranks: Ranks = ALONE,
) -> dict[str, float]:
    """Mean loss in nats per picture and share of pictures whose class is the most likely."""

    def summed(batch: tuple[Tensor, Tensor]) -> tuple[float, float]:
        pictures, labels = batch
        scores = logits(pictures).cpu()
        # Of NaN the first class would be the most likely.
        known = bool(scores.isfinite().all())
        right = int((scores.argmax(1) == labels).sum()) if known else math.nan
        return float(F.cross_entropy(scores, labels, reduction="sum")), right

    training = model.training
    model.eval()
    # Each rank has normalised its own part of every batch; the statistics that count are rank 0's.
    same_buffers(model, ranks)
    sums = ranks.each(summed, batches)
    model.train(training)
    total, right = sum(loss for loss, _ in sums), sum(found for _, found in sums)
    count = sum(len(labels) for _, labels in batches)
    return {"val_loss": total / count, "accuracy": right / count}
