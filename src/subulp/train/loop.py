"""One run: a GPT trained under one precision with one seed."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .. import optim
from ..diagnostics import watch
from ..diagnostics.memory import track_memory
from ..optim.precision import strategy_for
from .config import LMConfig, ParameterDtype
from .data.text import Batches, Text, evaluation_batches
from .gpt import GPT, Shape
from .metrics import Record, Summary

# The first step whose optimizer state is complete from its start. The watch, which keeps copies of
# the parameters, measures the first step and at most every second after it.
MEMORY_STEP = 2

EVALUATION_BATCH = 64

_DTYPES: dict[ParameterDtype, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
}
# Formats with few exponents: the smallest E4M3 number is 2**-9, and a second moment is stored in
# FP16 down to 2**-24, while gradients of this model are about 2**-10 and their squares 2**-20.
_LOSS_SCALES = {torch.float16: 1024.0, torch.float8_e4m3fn: 1024.0}


def run(
    config: LMConfig,
    text: Text,
    precision: str,
    seed: int,
    on_record: Callable[[Record], None] = lambda record: None,
) -> Summary:
    """Train one model and measure it.

    The same arguments give the same numbers, timings aside. Torch's random state and thread count
    are those of before afterwards.

    Args:
        config: The comparison that the run is part of.
        text: What to train on.
        precision: The run's strategy.
        seed: The run's seed.
        on_record: Called with every logged step as it happens (default: does nothing).

    Raises:
        ValueError: The strategy is unknown or not available for ``config.dtype``.
        FloatingPointError: A gradient is not finite under ``config.nonfinite="raise"``.
    """
    device = resolve_device(config.device)
    with _threads(config.threads), torch.random.fork_rng(_cuda_devices(device)):
        try:
            return _run(
                config, text, precision=precision, seed=seed, device=device, on_record=on_record
            )
        except FloatingPointError as error:
            raise FloatingPointError(f"precision={precision}, seed={seed}: {error}") from error


def resolve_device(name: str) -> torch.device:
    """The device that ``"auto"``, ``"cpu"`` or ``"cuda"`` means here.

    Raises:
        ValueError: A GPU is asked for and there is none.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda is not available: torch finds no GPU here; use cpu or auto")
    return torch.device(name)


def parameter_dtype(precision: str, dtype: ParameterDtype) -> torch.dtype:
    """Storage dtype of the parameters: ``dtype``, except under ``"fp32"``.

    Raises:
        ValueError: The strategy is unknown or not available for ``dtype``.
    """
    chosen = torch.float32 if precision == "fp32" else _DTYPES[dtype]
    strategy_for(optim.parse_precision(precision), chosen)
    return chosen


def loss_scale(config: LMConfig, precision: str) -> float:
    """Factor on the loss of a run: ``config.loss_scale``, or what its parameters' dtype needs."""
    if config.loss_scale is not None:
        return config.loss_scale
    return _LOSS_SCALES.get(parameter_dtype(precision, config.dtype), 1.0)


def learning_rate_factor(config: LMConfig, step: int) -> float:
    """Share of ``config.lr`` at ``step`` (from 0): a linear rise, then half a cosine.

    The last step has ``config.final_lr``.
    """
    warmup = int(config.warmup * config.steps)
    if step < warmup:
        return (step + 1) / warmup
    falling = max(1, config.steps - 1 - warmup)
    progress = min(1.0, (step - warmup) / falling)
    return config.final_lr + (1 - config.final_lr) * (1 + math.cos(math.pi * progress)) / 2


def build(
    config: LMConfig, vocabulary: int, precision: str, seed: int, device: torch.device
) -> tuple[GPT, optim.AdamW]:
    """The narrow model and its optimizer.

    The initial weights are made in FP32 from the seed alone, so every precision starts from the
    same ones, as exactly as its components can hold them. Matrices decay, vectors do not.
    """
    torch.manual_seed(seed)
    shape = Shape(
        vocabulary,
        config.context,
        config.width,
        config.layers,
        config.heads,
        config.dropout,
        config.tie_head,
    )
    model = GPT(shape).to(device)
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    model.to(parameter_dtype(precision, config.dtype))
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() >= 2]},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = optim.AdamW(
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        # The loss scale cancels in Adam's update, but for the addend of its denominator.
        eps=config.eps * loss_scale(config, precision),
        weight_decay=config.weight_decay,
        precision=precision,
        nonfinite=config.nonfinite,
        seed=seed,
    )
    optimizer.load_full_precision_state_dict(model, initial)
    return model, optimizer


@torch.no_grad()
def evaluate(model: GPT, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Mean loss per token of the narrow model, summed in double precision."""
    model.eval()
    total = sum(float(model.loss(x, y)) * y.numel() for x, y in batches)
    model.train()
    return total / sum(y.numel() for _, y in batches)


def _run(
    config: LMConfig,
    text: Text,
    *,
    precision: str,
    seed: int,
    device: torch.device,
    on_record: Callable[[Record], None],
) -> Summary:
    model, optimizer = build(config, text.vocabulary, precision, seed, device)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(config, step)
    )
    training = Batches(text.train, config.batch_size, config.context, seed)
    validation = [
        (x.to(device), y.to(device))
        for x, y in evaluation_batches(text.validation, EVALUATION_BATCH, config.context)
    ]
    scale = loss_scale(config, precision)
    memory = track_memory(model, optimizer)
    losses: list[float] = []
    all_seconds: list[float] = []
    plain_seconds: list[float] = []
    val_loss = math.nan

    with watch(optimizer, every=config.watch_every) as watched:
        for step in range(1, config.steps + 1):
            lr = float(scheduler.get_last_lr()[0])
            seen = len(watched.history)
            started = time.perf_counter()
            with memory if step == MEMORY_STEP else nullcontext():
                x, y = (t.to(device) for t in training.draw())
                loss = model.loss(x, y)
                (scale * loss).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            all_seconds.append(time.perf_counter() - started)
            scheduler.step()

            measured = watched.history[seen:]
            if step != MEMORY_STEP and not measured:
                plain_seconds.append(all_seconds[-1])
            evaluated = step % config.eval_every == 0 or step == config.steps
            if evaluated:
                val_loss = evaluate(model, validation)
            if evaluated or measured or step % config.log_every == 0:
                on_record(
                    Record(
                        precision,
                        seed,
                        step,
                        losses[-1],
                        lr,
                        all_seconds[-1],
                        val_loss if evaluated else None,
                        **(_descent(measured[-1]) if measured else {}),
                    )
                )

    tail = losses[-max(1, config.steps // 10) :]
    return Summary(
        precision=precision,
        seed=seed,
        val_loss=val_loss,
        perplexity=_exp(val_loss),
        train_loss=math.fsum(tail) / len(tail),
        bytes_per_parameter=dict(optimizer.bytes_per_parameter()),
        peak_bytes=memory.peak_bytes,
        category_peak_bytes=memory.category_peak_bytes,
        seconds_per_step=statistics.median(plain_seconds or all_seconds),
        **_mean_descent([_descent(entry) for entry in watched.history]),
        steps=config.steps,
        skipped_steps=optimizer.skipped_steps,
        parameters=sum(p.numel() for p in model.parameters()),
    )


def _descent(entry: Mapping[str, float]) -> dict[str, float]:
    """The fields of a Record that one measurement of the watch fills."""
    quality, norm = entry["effective_descent_quality"], entry["update_norm"]
    return {
        "effective_descent_quality": quality,
        "update_norm": norm,
        # No update was intended: none of it was lost.
        "descent_share": quality / norm if norm else 1.0,
        "lost_arithmetic": entry["lost_arithmetic"],
    }


def _mean_descent(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = ("effective_descent_quality", "descent_share", "lost_arithmetic")
    if not measured:
        # nonfinite="skip" left out every watched step.
        return dict.fromkeys(names, math.nan)
    return {name: math.fsum(m[name] for m in measured) / len(measured) for name in names}


def _exp(loss: float) -> float:
    """``exp`` that becomes infinite instead of raising: a diverged run still has a summary."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _cuda_devices(device: torch.device) -> list[int]:
    return [torch.cuda.current_device()] if device.type == "cuda" else []


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
