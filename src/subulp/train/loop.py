"""One run of a task: trained under one precision with one seed, and measured."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import optim
from ..diagnostics import watch
from ..diagnostics.memory import track_memory
from .config import RunConfig
from .metrics import Record, Summary
from .task import Workload, task_of

# The first step whose optimizer state is complete from its start. The watch, which keeps copies of
# the parameters, measures the first step and at most every second after it.
MEMORY_STEP = 2


def run(
    config: RunConfig,
    data: Any,
    variant: str,
    seed: int,
    on_record: Callable[[Record], None] = lambda record: None,
    models: Path | None = None,
) -> Summary:
    """Train one model and measure it.

    The same arguments give the same numbers, timings aside. Torch's random state and thread count
    are those of before afterwards.

    Args:
        config: The comparison that the run is part of.
        data: What the task's ``load`` returned for it.
        variant: The run's strategy, one of ``config.variants``.
        seed: The run's seed.
        on_record: Called with every logged step as it happens (default: does nothing).
        models: Folder for the trained model, if the task saves any (default: not saved).

    Raises:
        ValueError: The strategy is unknown or not available for the task.
        FloatingPointError: A gradient is not finite under the policy ``"raise"``, or the loss is
            not finite in a fused run that was given no policy.
    """
    device = resolve_device(config.device)
    with _threads(config.threads), torch.random.fork_rng(_cuda_devices(device)):
        try:
            workload = task_of(config).build(config, data, variant, seed, device)
            summary = _run(config, workload, variant, seed, on_record)
        except FloatingPointError as error:
            raise FloatingPointError(f"precision={variant}, seed={seed}: {error}") from error
        if models is not None and workload.save is not None:
            workload.save(models / f"{variant}-seed-{seed}")
        return summary


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


def _run(
    config: RunConfig,
    work: Workload,
    variant: str,
    seed: int,
    on_record: Callable[[Record], None],
) -> Summary:
    optimizer = work.optimizer
    settings = config.settings(variant)
    precision = settings.pop("precision")
    name = None if precision == variant else variant
    optimizers = [each for each in (optimizer, work.rows) if each is not None]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, work.learning_rate) for o in optimizers]
    memory = track_memory(work.model, *optimizers)
    losses: list[tuple[int, float]] = []
    all_seconds: list[float] = []
    plain_seconds: list[float] = []
    metrics: dict[str, float] = {}

    with watch(optimizer, every=config.watch_every) as watched, _stepping(config, work) as descend:
        for step in range(1, work.steps + 1):
            lr = float(schedulers[0].get_last_lr()[0])
            seen = len(watched.history)
            evaluated = step % work.eval_every == 0 or step == work.steps
            watching = (step - 1) % config.watch_every == 0
            logged = evaluated or watching or step % config.log_every == 0
            started = time.perf_counter()
            with memory if step == MEMORY_STEP else nullcontext():
                loss = work.loss(logged)
                descend(loss)
                value = loss.item()
                del loss
            all_seconds.append(time.perf_counter() - started)
            if logged or work.rows is None:
                losses.append((step, value))
                if config.fuse_backward and config.nonfinite is None:
                    _check_loss(value, step)
            for scheduler in schedulers:
                scheduler.step()

            measured = watched.history[seen:]
            if step != MEMORY_STEP and not measured:
                plain_seconds.append(all_seconds[-1])
            if evaluated:
                metrics = work.evaluate()
            if logged:
                on_record(
                    Record(
                        precision,
                        seed,
                        step,
                        value,
                        lr,
                        all_seconds[-1],
                        metrics if evaluated else {},
                        mix=work.mix() if evaluated and work.mix else None,
                        variant=name,
                        **(_descent(measured[-1]) if measured else {}),
                    )
                )

    # At least the last step's.
    tail = [value for step, value in losses if step > work.steps - max(1, work.steps // 10)]
    return Summary(
        precision=precision,
        seed=seed,
        metrics=metrics,
        train_loss=math.fsum(tail) / len(tail),
        bytes_per_parameter=dict((work.bytes_per_parameter or optimizer.bytes_per_parameter)()),
        peak_bytes=memory.peak_bytes,
        category_peak_bytes=memory.category_peak_bytes,
        seconds_per_step=statistics.median(plain_seconds or all_seconds),
        **_mean_descent([_descent(entry) for entry in watched.history]),
        steps=work.steps,
        skipped_steps=optimizer.skipped_steps,
        parameters=work.parameters or sum(p.numel() for p in work.model.parameters()),
        simulated=work.simulated,
        seconds_per_epoch=(
            None
            if work.steps_per_epoch is None
            else work.steps_per_epoch * statistics.fmean(plain_seconds or all_seconds)
        ),
        variant=name,
        settings=settings,
    )


@contextmanager
def _stepping(config: RunConfig, work: Workload) -> Iterator[Callable[[Tensor], None]]:
    """The backward pass and the optimizer step, one inside the other or one after the other."""
    # A scaler that is off hands everything on as it is.
    scaler = work.scaler or torch.amp.GradScaler(enabled=False)
    fused = None
    if config.fuse_backward:
        fused = optim.fuse_backward(work.model, work.optimizer, scaler=work.scaler)

    def descend(loss: Tensor) -> None:
        loss = scaler.scale(work.loss_scale * loss)
        if fused is None:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            fused.backward(loss)
        # Both do nothing while fused, but schedulers want to see the step.
        scaler.step(work.optimizer)
        if work.rows is not None:
            work.rows.step()
        work.optimizer.zero_grad()
        scaler.update()

    with fused or nullcontext():
        yield descend


def _check_loss(loss: float, step: int) -> None:
    if not math.isfinite(loss):
        raise FloatingPointError(
            f"the loss of step {step} is {loss}; lower the learning rate, or pass "
            "nonfinite=propagate to let the run go on"
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
