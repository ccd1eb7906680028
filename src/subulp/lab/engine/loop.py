"""One run of a task: trained under one precision with one seed, and measured."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from ... import optim
from ...diagnostics import watch
from ...diagnostics.memory import track_memory
from .config import RunConfig
from .data_parallel import average_over
from .files import UnwritableError
from .metrics import Metric, Record, Summary
from .rank_checkpoints import AnyCheckpoints
from .ranks import ALONE, Ranks
from .run_state import Tally, not_finite, restore, state_of
from .saved_model import ModelName, save_model
from .stopping import Stopped
from .task import Task, Workload, task_of
from .whole_state import full

# The first step whose optimizer state is complete from its start. The watch, which keeps copies of
# the parameters, measures the first step and at most every second after it.
MEMORY_STEP = 2

SMALLER_STEP = 0.5
"""Factor on all learning rates when a run returns to a checkpoint."""

MAX_SKIPS = 100
MAX_ROLLBACKS = 5


def run(
    config: RunConfig,
    data: Any,
    variant: str,
    seed: int,
    on_record: Callable[[Record], None] = lambda record: None,
    models: Path | None = None,
    checkpoints: AnyCheckpoints | None = None,
    begin: Path | None = None,
    stop: Callable[[], bool] = lambda: False,
    on_step: Callable[[int], None] = lambda step: None,
    ranks: Ranks = ALONE,
) -> Summary:
    """Train one model and measure it.

    The same arguments give the same numbers, timings aside, however often the run is stopped and
    resumed. Torch's random state and thread count are restored afterwards.

    Args:
        config: The comparison that the run is part of.
        data: What the task's ``load`` returned for it.
        variant: The run's strategy, one of ``config.variants``.
        seed: The run's seed.
        on_record: Called with every logged step as it happens (default: does nothing).
        models: Folder for the trained model (default: not saved).
        checkpoints: Where checkpoints are written; without it there are none, and a rollback
            returns to the start (default: ``None``).
        begin: The checkpoint to resume from; ``None`` starts from scratch (default: ``None``).
        stop: Asked after every step whether to write a checkpoint and end (default: never).
        on_step: Called with every step that was made (default: does nothing).
        ranks: The processes that make the run together, all of which call this with arguments of
            the same meaning (default: this one alone).

    Raises:
        ValueError: The strategy is unknown or not available for the task, or the checkpoint is
            damaged or of another run.
        FloatingPointError: Gradients or the loss are not finite, and ``config.nonfinite`` does not
            help, or has helped too often.
        UnwritableError: A checkpoint could not be written; those before it are whole.
        Stopped: ``stop`` asked for it.
    """
    device = resolve_device(config.device)
    task = task_of(config)
    failed: Tally | None = None
    most = MAX_ROLLBACKS if config.max_rollbacks is None else config.max_rollbacks
    with thread_count(config.threads), torch.random.fork_rng(_cuda_devices(device)):
        while True:
            # Nothing of a run that has failed may be alive beside the next one.
            training = _Training(
                config, task, data, variant, seed, device, on_record, checkpoints, ranks
            )
            if begin is not None:
                assert checkpoints is not None
                training.restore(checkpoints.read(begin))
            if failed is not None:
                training.go_back(failed)
            try:
                summary = training.run(stop, on_step)
                break
            except FloatingPointError as error:
                failed = training.tally
                if config.nonfinite != "rollback" or failed.rollbacks == most:
                    tried = f"; it had rolled back {most} times" if failed.rollbacks else ""
                    named = f"precision={variant}, seed={seed}: {error}{tried}"
                    raise FloatingPointError(named) from error
            begin = checkpoints.go_back() if checkpoints is not None else None
            del training
        if models is not None:
            name = ModelName(variant, seed)
            _save_model(models, config.task, name, training.work, summary, task.METRICS[0], ranks)
        return summary


def _save_model(
    folder: Path,
    task: str,
    name: ModelName,
    work: Workload,
    summary: Summary,
    first: Metric,
    ranks: Ranks,
) -> None:
    value = summary.metrics[first.name]
    order = (-value if first.higher_is_better else value) if math.isfinite(value) else None
    try:
        save_model(folder, task, name, work, summary.metrics, order, ranks)
    except (OSError, SafetensorError) as error:
        error = error if isinstance(error, OSError) else OSError(str(error))
        raise UnwritableError.of(f"the model {name}", error) from error


@dataclass(frozen=True)
class Trial:
    """What the first steps of a run took.

    Attributes:
        seconds_per_step: Median of those that measured nothing else.
        peak_bytes: Live bytes at the peak of a step.
    """

    seconds_per_step: float
    peak_bytes: int


TRIAL_STEPS = 4


def trial(config: RunConfig, data: Any, variant: str, seed: int) -> Trial | None:
    """Make the first steps of a run, and nothing of it stays.

    Returns:
        What they took; ``None`` if they did not get far enough, for a reason that the run itself
        will report.
    """
    device = resolve_device(config.device)
    with thread_count(config.threads), torch.random.fork_rng(_cuda_devices(device)):
        training = _Training(
            config, task_of(config), data, variant, seed, device, lambda record: None, None
        )
        with suppress(Stopped, FloatingPointError):
            training.run(lambda: training.tally.step >= TRIAL_STEPS, lambda step: None)
        if training.tally.step <= MEMORY_STEP or not training.tally.peak_bytes:
            return None
        return Trial(training.tally.seconds_per_step(), training.tally.peak_bytes["total"])


def resolve_device(name: str) -> torch.device:
    """The device that ``"auto"``, ``"cpu"`` or ``"cuda"`` means here.

    Raises:
        ValueError: A GPU is requested and none is available.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda is not available: torch finds no GPU here; use cpu or auto")
    return torch.device(name)


Descend = Callable[[Tensor, bool], float | None]
"""Goes down the gradient of a loss; and whether the gradients' norm is wanted."""


class _Training:
    """A run between two steps."""

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        data: Any,
        variant: str,
        seed: int,
        device: torch.device,
        on_record: Callable[[Record], None],
        checkpoints: AnyCheckpoints | None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.work = task.build(config, data, variant, seed, device, ranks)
        self.tally = Tally()
        self._ranks = ranks
        self._config, self._seed, self._device = config, seed, device
        self._settings = config.settings(variant)
        self._precision = self._settings.pop("precision")
        self._variant = None if self._precision == variant else variant
        self._quality = task.METRICS[0].name
        self._on_record, self._checkpoints = on_record, checkpoints
        self._optimizers = [o for o in (self.work.optimizer, self.work.rows) if o is not None]
        self._schedulers = [
            torch.optim.lr_scheduler.LambdaLR(o, self.work.learning_rate) for o in self._optimizers
        ]
        self._watch = watch(self.work.optimizer, every=config.watch_every)
        self._memory = track_memory(self.work.model, *self._optimizers)

    # ------------------------------------------------------------------------------ checkpoints

    def restore(self, state: Any) -> None:
        """Take over the state of a checkpoint."""
        restore(
            state,
            self.work,
            self._schedulers,
            self._watch,
            self.tally,
            self._device,
            self._ranks,
        )

    def go_back(self, failed: Tally) -> None:
        """Continue from a checkpoint after a failure, with smaller steps than before.

        What it has logged stays, up to the step that failed.
        """
        factor = SMALLER_STEP ** (failed.rollbacks + 1 - self.tally.rollbacks)
        self.tally.rollbacks = failed.rollbacks + 1
        self.tally.records = failed.records
        for scheduler in self._schedulers:
            scheduler.base_lrs = [factor * rate for rate in scheduler.base_lrs]
            scheduler._last_lr = [factor * rate for rate in scheduler.get_last_lr()]
            for group in scheduler.optimizer.param_groups:
                group["lr"] *= factor
                group["initial_lr"] *= factor

    def _save(self, value: float | None, *, asked: bool = False) -> None:
        assert self._checkpoints is not None
        # Not every step checks its loss, nor every run its gradients; whoever resumes from a
        # checkpoint relies on it.
        named = None if self._config.nonfinite == "propagate" else not_finite(self.work.model)
        named = next((name for name in self._ranks.gather(named) if name is not None), None)
        if named is not None:
            raise FloatingPointError(
                f"a weight of {named!r} is not finite, so no checkpoint was written; lower the "
                "learning rate, or pass nonfinite=propagate to let the run go on"
            )
        state = state_of(
            self.work, self._schedulers, self._watch, self.tally, self._device, self._ranks
        )
        self._checkpoints.write(self.tally.step, value, state, asked=asked)

    def _save_if_due(self, value: float | None) -> bool:
        checkpoints = self._checkpoints
        if checkpoints is None:
            return False
        step, steps = self.tally.step, self.work.steps
        due = checkpoints.due(step, value, last=step == steps)
        if due:
            self._save(value)
        checkpoints.see(value)
        return due

    # ------------------------------------------------------------------------------------ steps

    def run(self, stop: Callable[[], bool], on_step: Callable[[int], None]) -> Summary:
        """Run all remaining steps."""
        with ExitStack() as stack:
            stack.enter_context(self._watch)
            descend = stack.enter_context(_stepping(self._config, self.work, self._ranks))
            while self.tally.step < self.work.steps:
                self.tally.step += 1
                try:
                    self._step(descend)
                    value = self._quality_now()
                    saved = self._save_if_due(value)
                    stopping = self.tally.step < self.work.steps and stop()
                    if stopping and self._checkpoints is not None and not saved:
                        self._save(value, asked=True)
                except FloatingPointError as error:
                    raise self._located(error) from error
                if stopping:
                    raise Stopped(self.tally.step)
                on_step(self.tally.step)
        if self.work.finish is not None:
            self.tally.metrics = self.tally.metrics | self.work.finish()
        return self._summary()

    def _quality_now(self) -> float | None:
        """The first metric, if the step measured it and it is finite."""
        value = self.tally.metrics[self._quality] if self._evaluates else math.nan
        return value if math.isfinite(value) else None

    @property
    def _evaluates(self) -> bool:
        step, work = self.tally.step, self.work
        return step % work.eval_every == 0 or step == work.steps

    def _step(self, descend: Descend) -> None:
        config, work, tally, step = self._config, self.work, self.tally, self.tally.step
        lr = float(self._schedulers[0].get_last_lr()[0])
        seen, skipped = len(self._watch.history), work.skipped_steps()
        watching = (step - 1) % config.watch_every == 0
        logged = self._evaluates or watching or step % config.log_every == 0
        if self._ranks.several:
            # What is drawn on the way, as dropout is, differs between ranks, whose other numbers
            # agree; it depends on the step alone, so that any ranks can go on from a checkpoint.
            torch.manual_seed(_seed_of(self._seed, step, self._ranks.rank))
        started, watched = time.perf_counter(), self._watch.seconds
        with self._memory if step == MEMORY_STEP else nullcontext():
            loss = work.loss(logged)
            # Rows step in the forward pass, and their loss is computed only where it is logged.
            known = logged or work.rows is None
            failed: FloatingPointError | None = None
            norm: float | None = None
            try:
                norm = descend(loss, logged)
            except FloatingPointError as error:
                # All ranks find the same: they meet below.
                failed = error
            value = self._ranks.mean(loss.item())
            tally.value = value if known else None
            if failed is not None:
                raise failed
            del loss
        watched = self._watch.seconds - watched
        tally.seconds.append(time.perf_counter() - started - watched)
        if step == MEMORY_STEP:
            peaks = self._memory.peak_bytes, self._memory.category_peak_bytes
            # That of the rank that needs the most.
            tally.peak_bytes, tally.category_peak_bytes = max(
                self._ranks.gather(peaks), key=lambda found: found[0].get("total", 0)
            )
        if known:
            tally.losses.append((step, value))
            self._check_loss(value)
        self._check_skips(work.skipped_steps() > skipped)
        if known and math.isfinite(value):
            tally.last_finite = (step, value)
        for scheduler in self._schedulers:
            scheduler.step()

        measured = self._watch.history[seen:]
        if step != MEMORY_STEP and not measured:
            tally.plain_seconds.append(tally.seconds[-1])
        if self._evaluates:
            tally.metrics = work.measure(self._ranks)
        if logged:
            record = Record(
                self._precision,
                self._seed,
                step,
                value,
                lr,
                tally.seconds[-1],
                tally.metrics if self._evaluates else {},
                mix=work.mix.recent() if self._evaluates and work.mix else None,
                variant=self._variant,
                rollbacks=tally.rollbacks or None,
                skipped_steps=work.skipped_steps() or None,
                gradient_norm=norm,
                **(_descent(measured[-1]) if measured else {}),
            )
            tally.records.append(record)
            self._on_record(record)

    def _check_loss(self, value: float) -> None:
        # A scaler makes losses that overflow smaller.
        ends = self._config.nonfinite in (None, "raise", "rollback") and self.work.scaler is None
        if ends and not math.isfinite(value):
            raise FloatingPointError(
                "the loss is not finite; lower the learning rate, or pass nonfinite=propagate to "
                "let the run go on"
            )

    def _check_skips(self, skipped: bool) -> None:
        tally = self.tally
        tally.skips_in_a_row = tally.skips_in_a_row + 1 if skipped else 0
        most = MAX_SKIPS if self._config.max_skips is None else self._config.max_skips
        if tally.skips_in_a_row >= most and self._config.may_skip:
            raise FloatingPointError(
                f"{most} steps in a row were skipped because a gradient was not finite; lower the "
                "learning rate, or allow more with max_skips"
            )

    def _located(self, error: FloatingPointError) -> FloatingPointError:
        """The same with the step, its loss, and the last one that was finite."""
        tally = self.tally
        loss = "" if tally.value is None else f" (loss {tally.value})"
        last = "no loss before it was finite"
        if tally.last_finite is not None:
            last = "the last finite loss was {1:.6g}, of step {0}".format(*tally.last_finite)
        return FloatingPointError(f"step {tally.step}{loss}: {error}; {last}")

    def _summary(self) -> Summary:
        work, tally, optimizer = self.work, self.tally, self.work.optimizer
        return Summary(
            precision=self._precision,
            seed=self._seed,
            metrics=tally.metrics,
            train_loss=tally.train_loss(work.steps),
            bytes_per_parameter=dict((work.bytes_per_parameter or optimizer.bytes_per_parameter)()),
            peak_bytes=tally.peak_bytes,
            category_peak_bytes=tally.category_peak_bytes,
            seconds_per_step=tally.seconds_per_step(),
            **_mean_descent([_descent(entry) for entry in self._watch.history]),
            steps=work.steps,
            skipped_steps=work.skipped_steps(),
            rollbacks=tally.rollbacks,
            parameters=work.parameters or sum(p.numel() for p in work.model.parameters()),
            simulated=work.simulated,
            seconds_per_epoch=(
                None
                if work.steps_per_epoch is None
                else work.steps_per_epoch * tally.mean_seconds()
            ),
            variant=self._variant,
            settings=self._settings,
            ranks=self._ranks.count if self._ranks.several else None,
        )


@contextmanager
def _stepping(config: RunConfig, work: Workload, ranks: Ranks) -> Iterator[Descend]:
    """The backward pass and the optimizer step, one inside the other or one after the other.

    It returns the norm of the gradients where that is asked for and all of them are there at once.
    """
    # A scaler that is off hands everything on as it is.
    scaler = work.scaler or torch.amp.GradScaler(enabled=False)
    # The loss scale is on the gradients; that of the scaler is taken off before they are clipped.
    most = None if config.max_norm is None else work.loss_scale * config.max_norm
    # In the order in which the fused step adds up their norms.
    stepped = {id(p) for group in work.optimizer.param_groups for p in group["params"]}
    parameters = [p for p in work.model.parameters() if id(p) in stepped]
    fused = None
    if config.fuse_backward:
        fused = optim.fuse_backward(
            work.model,
            work.optimizer,
            max_norm=most,
            scaler=work.scaler,
            reduce=average_over(ranks),
        )

    def descend(loss: Tensor, measured: bool) -> float | None:
        loss, norm = scaler.scale(work.loss_scale * loss), None
        if fused is None:
            loss.backward()  # type: ignore[no-untyped-call]
            if measured:
                norm = _gradient_norm(parameters) / (work.loss_scale * scaler.get_scale())
            if most is not None:
                scaler.unscale_(work.optimizer)
                torch.nn.utils.clip_grad_norm_(parameters, most)
        else:
            fused.backward(loss)
        # Both do nothing while fused, but schedulers want to see the step.
        scaler.step(work.optimizer)
        if work.rows is not None:
            work.rows.step()
        work.optimizer.zero_grad()
        scaler.update()
        return norm

    with fused or nullcontext():
        yield descend


def _gradient_norm(parameters: Iterable[Tensor]) -> float:
    """Norm of all gradients of these parameters, of all ranks' shards together."""
    # One by one: of narrow gradients, only one is wide at a time.
    norms = [full(p.grad.float().norm()) for p in parameters if p.grad is not None]
    return float(torch.stack(norms).norm()) if norms else 0.0


def _descent(entry: Mapping[str, float]) -> dict[str, float]:
    """The fields of a Record that one measurement of the watch fills."""
    quality, norm = entry["effective_descent_quality"], entry["update_norm"]
    return {
        "effective_descent_quality": quality,
        "update_norm": norm,
        "effective_update_norm": entry["effective_update_norm"],
        "parameter_norm": entry["parameter_norm"],
        # No update was intended: none of it was lost.
        "descent_share": quality / norm if norm else 1.0,
        "lost_arithmetic": entry["lost_arithmetic"],
    }


def _mean_descent(measured: list[dict[str, float]]) -> dict[str, float]:
    names = ("effective_descent_quality", "descent_share", "lost_arithmetic")
    if not measured:
        # nonfinite="skip" skipped every watched step.
        return dict.fromkeys(names, math.nan)
    return {name: math.fsum(m[name] for m in measured) / len(measured) for name in names}


def _seed_of(seed: int, step: int, rank: int) -> int:
    return zlib.crc32(f"{seed}.{step}.{rank}".encode())


def _cuda_devices(device: torch.device) -> list[int]:
    return [torch.cuda.current_device()] if device.type == "cuda" else []


@contextmanager
def thread_count(count: int) -> Iterator[None]:
    """Let torch compute with so many threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
