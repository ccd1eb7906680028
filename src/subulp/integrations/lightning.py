"""Lightning: the step inside the backward pass, under its clipping, accumulation and precisions."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import HalfPrecision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .. import optim
from ..optim.backward.handle import FusedBackward
from ..optim.base import Optimizer
from .late_hooks import warn_of_late_hooks

_OURS = {
    "max_norm": "gradient_clip_val",
    "clip_value": "gradient_clip_val",
    "accumulate": "accumulate_grad_batches",
    "scaler": "precision",
}


class FusedBackwardMixin:
    """A ``LightningModule`` whose optimizer steps in its backward passes.

    ``Trainer``'s own arguments keep their meaning: ``gradient_clip_val`` (by the norm of all
    gradients, which takes two backward passes, or by value), ``accumulate_grad_batches``, also
    where an epoch's last accumulation is short, and ``precision``. The bits are those of a training
    without it::

        class Model(FusedBackwardMixin, L.LightningModule):
            def configure_optimizers(self):
                return optim.AdamW(self.parameters(), precision="collage-plus")

    Attributes:
        fuse_options: Further options of :func:`subulp.optim.fuse_backward`, ``keep_bytes``,
            ``accumulate_in`` or ``clip_parameter_norm``.
        fused: The handle of the fused step, while a training runs; its ``total_norm`` is the norm
            before clipping.

    Raises:
        ValueError: In the first backward pass: ``Trainer`` says what ``fuse_options`` say too; the
            module has not one optimizer of subulp's; or the strategy has put
            ``DistributedDataParallel`` around the module.
    """

    fuse_options: dict[str, Any] = {}  # noqa: RUF012 - a default, which nothing changes
    _fusion: _Fusion | None = None

    @property
    def fused(self) -> FusedBackward | None:
        """The handle, while a training runs."""
        return None if self._fusion is None else self._fusion.handle

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """``loss.backward()``, in which the optimizer steps."""
        if self._fusion is None:
            self._fusion = _Fusion(self.fuse_options)
        self._fusion.backward(self, loss, **kwargs)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Nothing: the step has clipped.

        Raises:
            RuntimeError: It has clipped by another limit than this one.
        """
        inherited = super().configure_gradient_clipping  # type: ignore[misc]
        if inherited.__func__ is not pl.LightningModule.configure_gradient_clipping:
            # The module's own, which comes after this one. What it clips is compared there.
            inherited(optimizer, gradient_clip_val, gradient_clip_algorithm)
        elif self._fusion is not None:
            self._fusion.check_clipped(gradient_clip_val, gradient_clip_algorithm)

    def teardown(self, stage: str) -> None:
        """Let ``optimizer.step()`` step again."""
        if self._fusion is not None:
            self._fusion.remove()
            self._fusion = None
        super().teardown(stage)  # type: ignore[misc]


class FusedHalfPrecision(HalfPrecision):  # type: ignore[misc]
    """Lightning's ``"bf16-true"`` or ``"16-true"`` with :class:`FusedBackwardMixin`'s step.

    For modules that stay as they are: ``Trainer(plugins=[FusedHalfPrecision()])``.

    Args:
        precision: The dtype of parameters and activations (default: ``"bf16-true"``).
        options: Those of :attr:`FusedBackwardMixin.fuse_options`.
    """

    def __init__(
        self, precision: Literal["bf16-true", "16-true"] = "bf16-true", **options: Any
    ) -> None:
        super().__init__(precision)
        self._fusion = _Fusion(options)

    @property
    def fused(self) -> FusedBackward | None:
        """The handle, while a training runs."""
        return self._fusion.handle

    def backward(
        self, tensor: Tensor, model: pl.LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """``tensor.backward()``, in which the optimizer steps."""
        self._fusion.backward(model, tensor, **kwargs)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Nothing: the step has clipped.

        Raises:
            RuntimeError: It has clipped by another limit than this one, which the module asks for.
        """
        self._fusion.check_clipped(clip_val, gradient_clip_algorithm)

    def teardown(self) -> None:
        """Let ``optimizer.step()`` step again."""
        self._fusion.remove()
        super().teardown()


class _Settings(NamedTuple):
    """What Trainer says of a step; callbacks may change it between steps."""

    limit: float | None
    by_value: bool
    accumulate: int

    @classmethod
    def of(cls, trainer: pl.Trainer) -> _Settings:
        by_value = trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE
        return cls(trainer.gradient_clip_val or None, by_value, trainer.accumulate_grad_batches)

    def __str__(self) -> str:
        algorithm = "value" if self.by_value else "norm"
        return (
            f"gradient_clip_val={self.limit} by {algorithm} and accumulate_grad_batches="
            f"{self.accumulate}"
        )


class _Fusion:
    """One training's handle, made in its first backward pass, when the optimizer is there.

    Args:
        options: Of :func:`subulp.optim.fuse_backward`.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        for name in options.keys() & _OURS.keys():
            raise ValueError(f"{name} comes from Trainer({_OURS[name]}=...): leave it out")
        self._options = options
        self._optimizer: Optimizer | None = None
        self._settings: _Settings | None = None
        self.handle: FusedBackward | None = None

    def backward(self, module: pl.LightningModule, loss: Tensor, **kwargs: Any) -> None:
        """A backward pass of an automatic optimization."""
        trainer = module.trainer
        optimizer, settings = self._optimizer_of(module), _Settings.of(trainer)
        if (
            self.handle is None
            or optimizer is not self._optimizer
            or (settings != self._settings and not self.handle.accumulating)
        ):
            self.remove()
            self._optimizer, self._settings = optimizer, settings
            self.handle = self._fuse(module, optimizer, settings)
        elif settings != self._settings:
            raise RuntimeError(
                f"Trainer has {settings} now, and had {self._settings} when the accumulation of "
                "this step began: change them between steps"
            )
        # Lightning has no public name for it.
        last = not trainer.fit_loop._should_accumulate()
        self.handle.backward(loss, last=last, **kwargs)

    def check_clipped(self, limit: float | None, algorithm: str | None) -> None:
        """Raise RuntimeError unless the step that was taken has clipped like this."""
        if self.handle is None:
            return
        limit = limit or None
        by_value = algorithm == GradClipAlgorithmType.VALUE
        wanted = (None, limit) if by_value else (limit, None)
        if wanted != self.handle.clips:
            max_norm, clip_value = self.handle.clips
            raise RuntimeError(
                f"gradients are to be clipped by gradient_clip_val={limit}, gradient_clip_algorithm"
                f"={str(algorithm or GradClipAlgorithmType.NORM)!r}, and have stepped in the "
                f"backward pass, clipped by max_norm={max_norm}, clip_value={clip_value}: let "
                "Trainer(gradient_clip_val=, gradient_clip_algorithm=) say it, not the module"
            )

    def remove(self) -> None:
        """Remove the handle, if there is one."""
        if self.handle is not None:
            self.handle.remove()
        self.handle = None

    def _optimizer_of(self, module: pl.LightningModule) -> Optimizer:
        optimizers = module.trainer.optimizers
        if not module.automatic_optimization:
            raise ValueError(
                "a fused step under manual optimization: call optim.fuse_backward and "
                "handle.backward(loss) in training_step instead"
            )
        if len(optimizers) != 1 or not isinstance(optimizers[0], Optimizer):
            names = ", ".join(type(each).__name__ for each in optimizers)
            raise ValueError(
                f"configure_optimizers() has returned {names or 'no optimizer'}: one of "
                "subulp.optim can step in the backward pass"
            )
        return optimizers[0]

    def _fuse(
        self, module: pl.LightningModule, optimizer: Optimizer, settings: _Settings
    ) -> FusedBackward:
        trainer = module.trainer
        if isinstance(trainer.strategy.model, DistributedDataParallel):
            raise ValueError(
                "the strategy has put DistributedDataParallel around the module, which averages "
                "gradients after they have stepped: use ModelParallelStrategy with fully_shard"
            )
        hook = "on_before_optimizer_step"
        warn_of_late_hooks([module], pl.LightningModule, hook)
        warn_of_late_hooks(trainer.callbacks, pl.Callback, hook)
        limit, by_value = settings.limit, settings.by_value
        handle = optim.fuse_backward(
            module,
            optimizer,
            max_norm=None if by_value else limit,
            clip_value=limit if by_value else None,
            accumulate=settings.accumulate,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            **self._options,
        )
        # Lightning clips what the optimizer has, in its order.
        handle.norm_order = [p for group in optimizer.param_groups for p in group["params"]]
        return handle
