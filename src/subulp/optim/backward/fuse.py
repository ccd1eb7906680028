"""``fuse_backward``: its options, and which of them exclude each other."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...numerics.whole import is_whole
from .. import shards
from ..adam import Adam
from ..base import Optimizer
from ..loss_scaling import ScalerLink
from ..parameters import Buckets, Place, places
from . import fsdp, outside
from .accumulation import Accumulator, BufferAccumulator, BufferFormat
from .clipping import Clipping
from .handle import FusedBackward
from .moments import Fold, MomentAccumulator
from .reduction import Reduce, Reduction

AccumulateIn = Literal[BufferFormat, "adam-moments"]


def fuse_backward(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    keep_bytes: int = 0,
    clip_parameter_norm: float | None = None,
    clip_value: float | None = None,
    accumulate: int = 1,
    accumulate_in: AccumulateIn = "param",
    scaler: torch.amp.GradScaler | None = None,
    reduce: Reduce | None = None,
) -> FusedBackward:
    """Step each parameter as soon as its gradient is complete, and free the gradient.

    Bit-identical to ``backward(); clip; step(); zero_grad()`` for every optimizer and precision.
    Small gradients, up to 1 MiB of them, wait to be clipped and stepped together.

    A parameter's value changes while the pass is still running. If an operation needs the old value
    later, autograd raises its usual error about in-place modification.

    Args:
        model: Module whose parameters the optimizer steps; others keep their gradients.
        optimizer: One of :mod:`subulp.optim`. Until :meth:`FusedBackward.remove`, its
            ``zero_grad()`` does nothing, and its ``step()`` only checks that the backward passes
            since its last call have taken one step; schedulers and changed group options take
            effect with the next backward pass.
        max_norm: Clip the global norm of all gradients, as ``clip_grad_norm_`` does. It must be
            known before the first parameter steps, so :meth:`FusedBackward.backward` runs the
            backward pass twice: once for the norm, whose gradients are freed as those that step
            are, and once to step.
        norm_type: Order p of the norm (default: 2).
        keep_bytes: Bytes of gradients that the first of two passes may keep until the step, the
            last ones that it completes. The second pass computes no gradient again that was kept,
            and does not go down to layers whose gradients all were; there, hooks of tensors get
            ``None`` from it. The peak of memory grows by no more than these bytes (default: 0).
        clip_parameter_norm: Clip the norm of each parameter's gradient, as ``clip_grad_norm_`` of
            that parameter alone does; needs no second pass.
        clip_value: Clamp each gradient element to ``[-clip_value, clip_value]``; needs no second
            pass.
        accumulate: Backward passes per step; gradients add up in one buffer per parameter
            (default: 1).
        accumulate_in: Format of that buffer: ``"param"`` (as without fusion), ``"fp32"``, or
            ``"expansion"``, two components of the parameter's dtype, for 16-bit parameters.
            ``"adam-moments"`` needs no buffer and is an approximation: each gradient is added to
            Adam's moments at once, so the second moment takes the sum of the squares instead of
            the square of the sum (default: ``"param"``).
        scaler: The ``torch.amp.GradScaler`` that scales the loss. Gradients are unscaled in FP32
            before they are clipped; if one is not finite, the whole step is skipped, which takes a
            second pass, as ``max_norm`` does. ``scaler.update()`` follows each step as usual.
        reduce: Called once with each complete gradient, before it is unscaled and clipped; returns
            the one to step with, for example the mean over all ranks. It is called in the reverse
            order of the optimizer's parameters, with zeros for a parameter that the pass did not
            reach, so the ranks' graphs may differ.

    Returns:
        A handle, also usable as a context manager that removes itself at the end.

    Raises:
        ValueError: An argument is out of range or excludes another; the optimizer is not subulp's,
            is fused already, or has parameters that are not the model's, or that another fused
            optimizer has; one of these has a gradient; or the model is wrapped in
            ``DistributedDataParallel``, or the optimizer in a framework's class.
        RuntimeError: A hook waits before the optimizer's steps, or before all optimizers'.
    """
    _check_pair(model, optimizer)
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    if reduce is not None and any(map(shards.is_sharded, stepped)):
        raise ValueError(
            "reduce= is not available for parameters that are DTensors: their gradients arrive "
            "reduced (by fully_shard or parallelize_module); leave it out"
        )
    if not is_whole(keep_bytes) or keep_bytes < 0:
        raise ValueError(f"keep_bytes={keep_bytes!r} is out of range: a whole number of bytes")
    if keep_bytes and fsdp.is_in(model):
        raise ValueError(
            f"keep_bytes={keep_bytes} is not available with fully_shard: its passes reduce all "
            "gradients of a module together; leave it out"
        )
    clipping = Clipping(max_norm, clip_parameter_norm, clip_value, norm_type)
    accumulator = _accumulator(optimizer, accumulate, accumulate_in)
    if reduce is not None and not callable(reduce):
        raise ValueError(
            f"reduce is {type(reduce).__name__}: pass a function of one gradient, or None"
        )
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ValueError(f"scaler is {type(scaler).__name__}: pass a torch.amp.GradScaler or None")
    if isinstance(accumulator, MomentAccumulator):
        _check_moments(clipping, scaler, reduce)
    return FusedBackward(
        model,
        optimizer,
        clipping,
        accumulator,
        None if scaler is None else ScalerLink(scaler),
        None if reduce is None else Reduction(reduce),
        keep_bytes,
    )


def _check_pair(model: nn.Module, optimizer: Optimizer) -> None:
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"optimizer is {type(optimizer).__name__}: only optimizers of subulp.optim can step "
            "one parameter at a time"
        )
    optimizer.check_bare()
    optimizer.check_hooks()
    if optimizer.fused is not None:
        raise ValueError("the optimizer is fused already: remove its handle first")
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            "the model is a torch.jit.ScriptModule, whose parameters cannot be watched from here: "
            "pass the module that it was made of"
        )
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "the model is wrapped in DistributedDataParallel, which reduces gradients in buckets "
            "of its own, after they have stepped here: replicas would drift apart. Pass the module "
            "without the wrapper, and reduce= with an all-reduce of one gradient"
        )
    if any(group["capturable"] for group in optimizer.param_groups):
        raise ValueError(
            "the optimizer has capturable=True, which is not available with fuse_backward: what "
            "waits for a step inside the backward pass is on the host; leave capturable out, or "
            "capture the passes and the step without fuse_backward"
        )
    in_model, seen = {id(p) for p in model.parameters()}, set()
    for g, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            if id(p) in seen:
                raise ValueError(
                    f"parameter {i} of group {g} (shape {tuple(p.shape)}) is in its group twice: "
                    "leave one of the two out"
                )
            seen.add(id(p))
            if id(p) not in in_model:
                raise ValueError(
                    f"parameter {i} of group {g} (shape {tuple(p.shape)}) is not in the model: it "
                    "would never step, for optimizer.step() does nothing while fused. Give it an "
                    "optimizer of its own, or pass a module that holds all of them"
                )
            if outside.is_owned(p):
                raise ValueError(
                    f"parameter {i} of group {g} (shape {tuple(p.shape)}) steps in the backward "
                    "pass already, by another optimizer's handle, which would take its gradient: "
                    "remove that one first"
                )
            if p.grad is not None:
                raise ValueError(
                    f"a parameter of shape {tuple(p.shape)} has a gradient, to which the next "
                    "backward pass would add: call optimizer.step() if it is still to step, and "
                    "zero_grad()"
                )


def _accumulator(optimizer: Optimizer, passes: int, form: AccumulateIn) -> Accumulator:
    if not is_whole(passes) or passes < 1:
        raise ValueError(
            f"accumulate={passes!r} is out of range: a whole number of backward passes, 1 or more"
        )
    if form not in (*get_args(BufferFormat), "adam-moments"):
        raise ValueError(
            f"accumulate_in={form!r} is unknown: use 'param', 'fp32', 'expansion' or 'adam-moments'"
        )
    if form != "adam-moments":
        return BufferAccumulator(passes, form)
    if not isinstance(optimizer, Adam):
        raise ValueError(
            f"accumulate_in='adam-moments' is not available for {type(optimizer).__name__}: it "
            "has no such moments; use 'param', 'fp32' or 'expansion'"
        )
    if any(group["arithmetic"] == "strict" for group in optimizer.param_groups):
        raise ValueError(
            "accumulate_in='adam-moments' is not available with arithmetic='strict': use 'wide', "
            "or accumulate in 'param' or 'fp32'"
        )
    return MomentAccumulator(passes, _folding(optimizer))


def _folding(optimizer: Adam) -> Fold:
    place_of: dict[int, Place] = {}

    def fold(p: Tensor, grad: Tensor, folded: bool, number: int) -> None:
        place = place_of.get(id(p))
        groups = optimizer.param_groups
        if place is None or groups[place.group]["params"][place.index] is not p:
            # Also if groups have been put in another order.
            place_of.update(places(groups))
            place = place_of[id(p)]
        buckets = Buckets()
        buckets.add(optimizer.param_groups[place.group], place, p, grad, folded=folded)
        optimizer.fold(buckets.pop_largest(), number)

    return fold


def _check_moments(clipping: Clipping, scaler: object, reduce: object) -> None:
    """Refuse what needs the sum of the gradients, or to take one back."""
    refused = {
        "clipping": clipping.active,
        "scaler=": scaler is not None,
        "reduce=": reduce is not None,
    }
    for name, given in refused.items():
        if given:
            raise ValueError(
                f"{name} is not available with accumulate_in='adam-moments': the moments take each "
                "gradient at once, and their sum is never known; accumulate in 'param', 'fp32' or "
                "'expansion'"
            )
