"""Torch's functions that look for the gradients of parameters, while a fused step takes these.

Between backward passes such parameters have none: ``clip_grad_norm_`` would clip nothing, and say
that the norm is 0. ``DistributedDataParallel`` would average what has stepped already. As long as a
step is fused, they raise an error that names the argument to use instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from types import GeneratorType
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad

_ADVICE_DDP = (
    "DistributedDataParallel around parameters whose step is fused into the backward pass: it "
    "averages gradients after they have stepped, so replicas would drift apart. Train the module "
    "without the wrapper, and pass reduce= to fuse_backward, with an all-reduce of one gradient"
)


class Owner(Protocol):
    """What steps parameters in backward passes."""

    def owns(self, p: Tensor) -> bool:
        """Whether it steps a parameter."""

    def clipped_norm(
        self, parameters: list[Tensor], max_norm: float, norm_type: float
    ) -> Tensor | None:
        """The norm before clipping, if the last step has clipped just like this."""

    def clips_by_value(self, clip_value: float) -> bool:
        """Whether every step clips just like this."""

    def clipping_advice(self, max_norm: float) -> str:
        """What to pass in order to clip by a norm."""

    def check_scaled(self) -> None:
        """Raise RuntimeError unless it was given the gradient scaler that scales the loss."""


_owners: WeakSet[Owner] = WeakSet()
# What was replaced, by where it stands.
_originals: dict[tuple[object, str], Any] = {}


def watch(owner: Owner) -> None:
    """Let torch's functions ask an owner, until :func:`leave`."""
    _owners.add(owner)
    if not _originals:
        for (place, name), guard in _guards().items():
            _originals[place, name] = getattr(place, name)
            setattr(place, name, guard)


def leave(owner: Owner) -> None:
    """Undo :func:`watch`; torch's functions are its own again after the last owner."""
    _owners.discard(owner)
    if not _owners:
        while _originals:
            (place, name), original = _originals.popitem()
            setattr(place, name, original)


def is_owned(p: Tensor) -> bool:
    """Whether an owner steps a parameter."""
    return _owner_of([p]) is not None


def _guards() -> dict[tuple[object, str], Callable[..., Any]]:
    norm = _guarded_norm(clip_grad.clip_grad_norm_)
    value = _guarded_value(clip_grad.clip_grad_value_)
    # Called by clip_grad_norm_ too, also by one that a script has imported by its name before.
    scaling = _guarded_scaling(torch.nn.utils.clip_grads_with_norm_)
    return {
        (clip_grad, "clip_grad_norm_"): norm,
        (torch.nn.utils, "clip_grad_norm_"): norm,
        (clip_grad, "clip_grad_value_"): value,
        (torch.nn.utils, "clip_grad_value_"): value,
        (clip_grad, "_clip_grads_with_norm_"): scaling,
        (torch.nn.utils, "clip_grads_with_norm_"): scaling,
        (torch.amp.GradScaler, "unscale_"): _guarded_unscaling(torch.amp.GradScaler.unscale_),
        (DistributedDataParallel, "__init__"): _guarded_ddp(DistributedDataParallel.__init__),
    }


def _owner_of(parameters: Iterable[Tensor]) -> Owner | None:
    return next((owner for p in parameters for owner in _owners if owner.owns(p)), None)


def _listed(parameters: Any) -> Any:
    """Parameters that may be looked at more than once; an empty generator as it is."""
    if isinstance(parameters, Tensor):
        return [parameters]
    found = list(parameters)
    return found or parameters if isinstance(parameters, GeneratorType) else found


def _guarded_norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def clip_grad_norm_(
        parameters: Any, max_norm: float, norm_type: float = 2.0, *args: Any, **options: Any
    ) -> Tensor:
        if torch.compiler.is_compiling():
            return original(parameters, max_norm, norm_type, *args, **options)
        parameters = _listed(parameters)
        owner = _owner_of(parameters)
        if owner is None:
            return original(parameters, max_norm, norm_type, *args, **options)
        norm = owner.clipped_norm(parameters, float(max_norm), float(norm_type))
        if norm is None:
            raise _used("clip_grad_norm_", owner.clipping_advice(float(max_norm)))
        return norm

    return clip_grad_norm_


def _guarded_value(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def clip_grad_value_(parameters: Any, clip_value: float, *args: Any, **options: Any) -> None:
        if not torch.compiler.is_compiling():
            parameters = _listed(parameters)
            owner = _owner_of(parameters)
            if owner is not None:
                if owner.clips_by_value(float(clip_value)):
                    return
                raise _used("clip_grad_value_", f"Pass clip_value={clip_value} to fuse_backward")
        original(parameters, clip_value, *args, **options)

    return clip_grad_value_


def _guarded_scaling(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def clip_grads_with_norm_(parameters: Any, max_norm: float, *args: Any, **options: Any) -> None:
        if not torch.compiler.is_compiling():
            parameters = _listed(parameters)
            owner = _owner_of(parameters)
            if owner is not None:
                raise _used("clip_grad_norm_", owner.clipping_advice(float(max_norm)))
        original(parameters, max_norm, *args, **options)

    return clip_grads_with_norm_


def _guarded_unscaling(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def unscale_(self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        owner = _owner_of(params) if self.is_enabled() else None
        if owner is not None:
            owner.check_scaled()
        original(self, optimizer)

    return unscale_


def _guarded_ddp(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def init(self: DistributedDataParallel, module: Any, *args: Any, **options: Any) -> None:
        if isinstance(module, torch.nn.Module) and _owner_of(module.parameters()) is not None:
            raise ValueError(_ADVICE_DDP)
        original(self, module, *args, **options)

    return init


def _used(name: str, advice: str) -> RuntimeError:
    return RuntimeError(
        f"{name} of parameters whose step is fused into the backward pass: their gradients have "
        f"been used, and there is nothing left to clip. {advice}"
    )
