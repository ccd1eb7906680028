"""The step inside the backward pass of Hugging Face's ``Trainer``, and what it logs and saves."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ... import diagnostics, optim
from ...optim.backward.handle import FusedBackward
from ...optim.base import Optimizer
from ..late_hooks import warn_of_late_hooks

FULL_PRECISION = "full_precision"
"""Folder in a checkpoint for the weights in FP32."""


class FusedBackwardCallback(TrainerCallback):  # type: ignore[misc]
    """Fuses the optimizer step into the backward pass of a ``Trainer``.

    Its own arguments keep their meaning: ``max_grad_norm`` clips the norm of all gradients, which
    takes two backward passes (0: one, and the norm that is logged is that of the step);
    ``gradient_accumulation_steps`` adds up gradients, also where an epoch's last step has fewer;
    ``gradient_checkpointing`` as ever. The bits are those of a training without this callback::

        trainer = Trainer(..., optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(args, ...))
        trainer.add_callback(FusedBackwardCallback(trainer))
        trainer.train()

    To what Trainer logs it adds ``descent_quality``, the share of the intended update that the
    parameters made (1: nothing is lost), and ``lost_updates``, the share of the elements that did
    not move at all (:class:`subulp.diagnostics.Descent`). Beside what Trainer saves it puts the
    weights in FP32, rebuilt from all their components, as a model for ``from_pretrained``.

    Args:
        trainer: The trainer that it is added to.
        fuse: Whether to fuse; without, it only logs and saves (default: ``True``).
        watch_every: Measure every so many steps; 0 never (default: 0).
        save_full_precision: Whether checkpoints get a folder :data:`FULL_PRECISION`
            (default: ``True``).
        options: Further options of :func:`subulp.optim.fuse_backward`: ``keep_bytes``,
            ``accumulate_in``, ``clip_value`` or ``clip_parameter_norm`` (then ``max_grad_norm``
            must be 0).

    Raises:
        ValueError: ``max_norm``, ``accumulate`` or ``scaler`` is among the options: Trainer's own
            arguments say them. When training begins: the optimizer is not subulp's, or Trainer has
            put ``DistributedDataParallel`` around the model.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        fuse: bool = True,
        watch_every: int = 0,
        save_full_precision: bool = True,
        **options: Any,
    ) -> None:
        own = {
            "max_norm": "max_grad_norm",
            "accumulate": "gradient_accumulation_steps",
            "scaler": "fp16",
        }
        for name in options.keys() & own.keys():
            raise ValueError(f"{name} comes from TrainingArguments({own[name]}=...): leave it out")
        if options and not fuse:
            raise ValueError(f"{next(iter(options))} has no effect with fuse=False")
        self._trainer, self._fuse, self._options = trainer, fuse, options
        self._watch_every, self._save = watch_every, save_full_precision
        self._handle: FusedBackward | None = None
        self._watch: diagnostics.Watch | None = None
        self._norm: _Norm | None = None

    @property
    def handle(self) -> FusedBackward | None:
        """The handle of the fused step, while a training runs."""
        return self._handle

    # ------------------------------------------------------------------------------- events

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Fuse; the optimizer is there, and its state is loaded."""
        # A training that failed has not said that it ended.
        self._end()
        optimizer = self._optimizer()
        if self._watch_every:
            self._watch = diagnostics.watch(optimizer, self._watch_every).__enter__()
        if self._fuse:
            self._begin(args, optimizer)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Let ``optimizer.step()`` step again."""
        self._end()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add what was measured to a log of training steps."""
        if logs is None or "loss" not in logs or self._watch is None or self._watch.total is None:
            return
        descent = self._watch.total
        whole = descent.update_norm
        measured = {
            "descent_quality": descent.effective_descent_quality / whole if whole else 1.0,
            "lost_updates": descent.lost_arithmetic,
        }
        logs.update(measured)
        # Trainer has copied it already.
        state.log_history[-1].update(measured)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Put the weights in FP32 beside a checkpoint."""
        if not self._save:
            return
        model = self._trainer.model
        weights = self._optimizer().full_precision_state_dict(model)
        # Shards are gathered by all ranks; one writes.
        whole = {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in weights.items()
        }
        if not args.should_save:
            return
        checkpoint = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if not checkpoint.is_dir():
            return
        folder = checkpoint / FULL_PRECISION
        if hasattr(model, "peft_config"):
            # Of every folder with adapters in a checkpoint, Trainer adds these when it resumes.
            folder /= "adapter"
        model.save_pretrained(folder, state_dict=whole)
        if (folder / "config.json").exists():
            # It says the model's own dtype, in which from_pretrained would read the weights.
            config = copy.deepcopy(model.config)
            config.dtype = torch.float32
            config.save_pretrained(folder)

    # ---------------------------------------------------------------------------- one training

    def _optimizer(self) -> Optimizer:
        optimizer = self._trainer.optimizer
        # Accelerate puts its own around it.
        optimizer = getattr(optimizer, "optimizer", optimizer)
        if not isinstance(optimizer, Optimizer):
            raise ValueError(
                f"the optimizer is {type(optimizer).__name__}: pass one of subulp.optim, with "
                "Trainer(optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(args, ...))"
            )
        return optimizer

    def _begin(self, args: TrainingArguments, optimizer: Optimizer) -> None:
        trainer, accelerator = self._trainer, self._trainer.accelerator
        if isinstance(trainer.model_wrapped, DistributedDataParallel):
            raise ValueError(
                "Trainer has put DistributedDataParallel around the model, which averages "
                "gradients after they have stepped: use FSDP2 (fsdp=, fsdp_version=2), or fuse="
                "False"
            )
        settings = max_grad_norm, accumulate = _settings(args)
        callbacks = trainer.callback_handler.callbacks
        warn_of_late_hooks(callbacks, TrainerCallback, "on_pre_optimizer_step")
        handle = optim.fuse_backward(
            trainer.model,
            optimizer,
            max_norm=max_grad_norm,
            accumulate=accumulate,
            scaler=accelerator.scaler,
            **self._options,
        )
        if max_grad_norm is None:
            self._norm = _Norm()
            optimizer.observers = (*optimizer.observers, self._norm)
        self._handle = handle

        def backward(loss: Tensor, **kwargs: Any) -> None:
            if (now := _settings(args)) != settings:
                # Somebody's callback has set others.
                if handle.accumulating:
                    raise RuntimeError(
                        "max_grad_norm and gradient_accumulation_steps are "
                        f"{now} now, and were {settings} when the accumulation of this step "
                        "began: change them between steps"
                    )
                self._unfuse()
                self._begin(args, optimizer)
                accelerator.backward(loss, **kwargs)
                return
            # As Accelerate does it.
            loss = loss / accelerator.gradient_accumulation_steps
            scaler = accelerator.scaler
            loss = loss if scaler is None else scaler.scale(loss)
            handle.backward(loss, last=accelerator.sync_gradients, **kwargs)

        def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
            # Trainer asks for the norm that it logs, and clips by what has clipped.
            if float(max_norm) not in (math.inf, max_grad_norm) or norm_type != 2:
                raise RuntimeError(
                    f"accelerator.clip_grad_norm_(max_norm={max_norm}, norm_type={norm_type}) of "
                    "gradients that have stepped in the backward pass, clipped by "
                    f"max_grad_norm={max_grad_norm}: set TrainingArguments(max_grad_norm=)"
                )
            return handle.total_norm if self._norm is None else self._norm.value

        accelerator.backward, accelerator.clip_grad_norm_ = backward, clip_grad_norm_

    def _end(self) -> None:
        if self._watch is not None:
            self._watch.__exit__(None, None, None)
            self._watch = None
        self._unfuse()

    def _unfuse(self) -> None:
        if self._handle is None:
            return
        self._handle.remove()
        self._handle = None
        optimizer = self._optimizer()
        optimizer.observers = tuple(o for o in optimizer.observers if o is not self._norm)
        self._norm = None
        for name in ("backward", "clip_grad_norm_"):
            # The class has them again.
            self._trainer.accelerator.__dict__.pop(name, None)


def _settings(args: TrainingArguments) -> tuple[float | None, int]:
    """What gradients are clipped by, as Trainer reads it, and passes a step."""
    limit: float = args.max_grad_norm
    return limit if limit > 0 else None, args.gradient_accumulation_steps


class _Norm:
    """Observes the norm of the gradients that a step takes, which are gone after it.

    Attributes:
        value: That of the last step; ``None`` before it.
    """

    def __init__(self) -> None:
        self.value: Tensor | None = None
        self._squares: list[Tensor] = []

    def begin_step(self) -> None:
        """Begin to add up."""
        self._squares = []

    def fold(self, pending: Any) -> None:
        """Gradients that enter the moments before the step have no norm together."""

    def begin_update(self, pending: Any) -> None:
        """Add a bucket's gradients."""
        for grad in pending.bucket.grads:
            self._squares.append(torch.linalg.vector_norm(grad.to(torch.float32)).double().square())

    def end_update(self, bucket: Any) -> None:
        """Nothing to do."""

    def end_step(self) -> None:
        """The norm of all."""
        if self._squares:
            device = self._squares[0].device
            self.value = torch.stack([s.to(device) for s in self._squares]).sum().sqrt().float()
