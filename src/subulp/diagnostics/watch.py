"""What a narrow format loses at the optimizer step: descent quality and lost updates."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from types import TracebackType
from typing import Any, Self

import torch
import torch.utils._python_dispatch as dispatch
from torch import Tensor

from ..numerics.whole import is_whole
from ..optim import shards
from ..optim.base import Optimizer
from ..optim.components import restored
from ..optim.parameters import Bucket
from ..optim.pending import Pending


@dataclass(frozen=True)
class Descent:
    """Norms of one step, over some parameters (Collage, sections 3.1 and 3.2).

    A parameter is the wide value that all its components stand for; its real update is what this
    value moved by (equation 2), where the optimizer intended another one.

    Attributes:
        parameter_norm: Norm of the parameters before the step.
        update_norm: Norm of the intended update.
        effective_update_norm: Norm of the real one.
        effective_descent_quality: Projection of the real update on the intended one (equation 3);
            equals ``update_norm`` if nothing is lost.
        lost_arithmetic: Share of the elements with a nonzero update that did not move at all
            (definition 3.2), 0 to 1.
    """

    parameter_norm: float
    update_norm: float
    effective_update_norm: float
    effective_descent_quality: float
    lost_arithmetic: float


class _Sums:
    """The sums behind a Descent, in FP64."""

    def __init__(self) -> None:
        self.parameter = self.update = self.effective = self.product = 0.0
        self.lost = self.nonzero = 0

    def add(self, theta: Tensor, intended: Tensor, effective: Tensor) -> None:
        wide = [t.to(torch.float64) for t in (theta, intended, effective)]
        self.parameter += float(wide[0].square().sum())
        self.update += float(wide[1].square().sum())
        self.effective += float(wide[2].square().sum())
        self.product += float((wide[1] * wide[2]).sum())
        moves = intended != 0
        self.nonzero += int(moves.sum())
        self.lost += int((moves & (effective == 0)).sum())

    def merge(self, other: _Sums) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def descent(self) -> Descent:
        update = self.update**0.5
        return Descent(
            parameter_norm=self.parameter**0.5,
            update_norm=update,
            effective_update_norm=self.effective**0.5,
            effective_descent_quality=self.product / update if update else 0.0,
            lost_arithmetic=self.lost / self.nonzero if self.nonzero else 0.0,
        )


class Watch:
    """Measures steps of an optimizer without changing a bit of the training; see :func:`watch`.

    Attributes:
        total: :class:`Descent` over all parameters at the last measured step, ``None`` before one.
        groups: The same per parameter group.
        history: One dict a measured step: ``step`` (counted from 1 when the watch began), the
            fields of ``total``, and ``groups``, a list of such fields.
        seconds: What watching has taken, of all steps.
    """

    def __init__(self, optimizer: Optimizer, every: int, shadow: bool) -> None:
        self._optimizer = optimizer
        self._every = every
        self._shadows: dict[Tensor, list[Tensor]] | None = {} if shadow else None
        # Strides that the parameters of the shadows had.
        self._strides: dict[Tensor, tuple[int, ...]] = {}
        self._step = 0
        self._measuring = False
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._sums: dict[int, _Sums] = {}
        self.total: Descent | None = None
        self.groups: list[Descent] = []
        self.history: list[dict[str, Any]] = []
        self.seconds = 0.0

    @property
    def effective_descent_quality(self) -> float:
        """Effective descent quality of the last measured step; NaN before the first."""
        return self.total.effective_descent_quality if self.total else float("nan")

    @property
    def lost_arithmetic(self) -> float:
        """Lost arithmetic of the last measured step; NaN before the first."""
        return self.total.lost_arithmetic if self.total else float("nan")

    def __enter__(self) -> Self:
        if self in self._optimizer.observers:
            raise RuntimeError("this watch is watching already: make another one")
        self._optimizer.observers = (*self._optimizer.observers, self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        others = (each for each in self._optimizer.observers if each is not self)
        self._optimizer.observers = tuple(others)
        self._before.clear()

    def state_dict(self) -> dict[str, Any]:
        """What it has measured, the number of the step, and the shadow moments.

        The moments are tensors, in a list for each of the optimizer's parameters; with those that
        no step has reached, the list is empty. Of a DTensor they are DTensors.
        """
        moments: list[list[Tensor]] = []
        if self._shadows is not None:
            held = [(p, self._shadows.get(p, [])) for p in self._params]
            moments = [[shards.part_of(p, m) for m in each] for p, each in held]
        return {"step": self._step, "history": list(self.history), "moments": moments}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, on these ranks or others.

        Moments of parameters that are DTensors may be DTensors, or whole.
        """
        self._step, self.history = state_dict["step"], list(state_dict["history"])
        if self._shadows is not None:
            # A watch of version 0.1 had none: they begin as the stored ones, as they do here.
            moments = state_dict.get("moments") or [[] for _ in self._params]
            pairs = zip(self._params, moments, strict=True)
            with torch.inference_mode(False), torch.no_grad():
                self._shadows = {
                    p: [shards.placed_like(p, m.detach()).to(p.device, copy=True) for m in moments]
                    for p, moments in pairs
                    if moments
                }
        self.total, self.groups = None, []
        if self.history:
            last = self.history[-1]
            names = [field.name for field in fields(Descent)]
            self.total = Descent(**{name: last[name] for name in names})
            self.groups = [Descent(**group) for group in last["groups"]]

    @property
    def _params(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    # What the optimizer tells, see subulp.optim.observers.StepObserver -------------------------

    def begin_step(self) -> None:
        """Count the step, and forget one that was not finished."""
        self._measuring = self._step % self._every == 0
        self._step += 1
        self._before.clear()
        self._sums.clear()

    def fold(self, pending: Pending) -> None:
        """Move the shadows on."""
        if self._shadows is not None:
            with self._aside():
                self._follow_layout(pending.bucket)
                self._optimizer.move_shadows(pending, self._shadows, decay=False)

    def begin_update(self, pending: Pending) -> None:
        """Move the shadows on, and remember the parameters and what the optimizer intends."""
        if self._shadows is not None:
            with self._aside():
                self._follow_layout(pending.bucket)
        if not self._measuring:
            if self._shadows is not None:
                with self._aside():
                    self._optimizer.move_shadows(pending, self._shadows, decay=True)
            return
        with self._aside():
            group = pending.bucket.group
            for p, _, intended in self._optimizer.intended_updates(pending, self._shadows):
                self._before[id(p)] = self._optimizer.stored_value(group, p).clone(), intended

    def end_update(self, bucket: Bucket) -> None:
        """Compare them with their new values."""
        if not self._measuring:
            return
        with self._aside(), torch.no_grad():
            for p in bucket.params:
                theta, intended = self._before.pop(id(p))
                sums = self._sums[id(p)] = _Sums()
                stored = self._optimizer.stored_value(bucket.group, p)
                sums.add(theta, intended, stored - theta)

    def _follow_layout(self, bucket: Bucket) -> None:
        """Lay shadows out as their parameters, which ``model.to(memory_format=...)`` may change."""
        assert self._shadows is not None
        for p, part in zip(bucket.params, bucket.parts, strict=True):
            before = self._strides.get(p, part.stride())
            if before != part.stride() and p in self._shadows:
                old, new = torch.empty_strided(part.shape, before, device="meta"), part.detach()
                self._shadows[p] = [restored(m, old, new) for m in self._shadows[p]]
            self._strides[p] = part.stride()

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Watching is not training: neither its time nor its memory is."""
        started = time.perf_counter()
        # Moments outlive a step in inference mode, and are changed after it.
        with torch.inference_mode(False), torch.no_grad(), dispatch._disable_current_modes():
            yield
        self.seconds += time.perf_counter() - started

    def end_step(self) -> None:
        """Sum in the order of the parameters, whatever the order of the updates."""
        if not self._sums:
            return
        self._add_up_shards()
        groups = [_Sums() for _ in self._optimizer.param_groups]
        total = _Sums()
        for of_group, group in zip(groups, self._optimizer.param_groups, strict=True):
            for p in group["params"]:
                if id(p) in self._sums:
                    of_group.merge(self._sums[id(p)])
            total.merge(of_group)
        self._sums.clear()
        self.total, self.groups = total.descent(), [s.descent() for s in groups]
        self.history.append(
            {
                "step": self._step,
                **asdict(self.total),
                "groups": [asdict(descent) for descent in self.groups],
            }
        )

    def _add_up_shards(self) -> None:
        """Sums over whole parameters, from those over the parts that the ranks hold."""
        params = [p for p in self._params if id(p) in self._sums and shards.is_sharded(p)]
        if not params:
            return
        rows = [[float(x) for x in vars(self._sums[id(p)]).values()] for p in params]
        parts = torch.tensor(rows, dtype=torch.float64, device=params[0].device)
        for p, row in zip(params, shards.reduced(params, parts, "sum").tolist(), strict=True):
            vars(self._sums[id(p)]).update(zip(vars(self._sums[id(p)]), row, strict=True))


def watch(optimizer: Optimizer, every: int = 1, *, shadow: bool = True) -> Watch:
    """Measure descent quality and lost updates while a ``with`` block runs.

    Steps inside the backward pass, see :func:`subulp.optim.fuse_backward`, count like others. A
    step that was left out, by a policy or a gradient scaler, counts and is not measured.

    Args:
        optimizer: One of :mod:`subulp.optim`.
        every: Measure every so many steps, the first included. A measured step recomputes its
            update in plain PyTorch and keeps two FP32 copies of the parameters that are
            updated together (default: 1).
        shadow: Compute the intended update from FP32 moments that no step rounds. They begin as the
            stored ones, take eight bytes a parameter with Adam, and a pass in plain PyTorch at
            every step. Without them it is computed from the stored moments, which cannot tell what
            those have lost (default: ``True``).

    Returns:
        A context manager that holds the measurements.

    Raises:
        ValueError: ``every`` is below 1, or the optimizer is not subulp's.

    Example::

        with diagnostics.watch(opt, every=50) as w:
            train()
        print(w.effective_descent_quality, w.lost_arithmetic)
    """
    if not is_whole(every) or every < 1:
        raise ValueError(
            f"every={every!r} is out of range: a whole number of steps, 1 or more, between measures"
        )
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"optimizer is {type(optimizer).__name__}: only optimizers of subulp.optim know the "
            "update that they intend"
        )
    optimizer.check_bare()
    return Watch(optimizer, every, shadow)
