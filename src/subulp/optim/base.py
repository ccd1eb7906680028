"""What all optimizers share: groups, states, and the step's batching."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, cast, get_args, overload

import torch
from torch import Tensor, nn

from ..numerics import format_of
from ..ops import all_finite, storage
from ..ops.job import StepJob, is_strict
from ..ops.strategy import Strategy
from . import full_precision
from .layout import in_layout_of, is_dense, repack, same_layout, storage_view
from .precision import parse_precision, strategy_for
from .state_dict import SCALAR_STATES, check_state_dict, restore_components, use_row_major_words

NonFinite = Literal["raise", "skip", "propagate"]
Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]
States = tuple[tuple[str, Literal["fast", "slow"]], ...]
"""Names of state tensors and their roles; the role decides the format."""


@dataclass
class Bucket:
    """Parameters of one group that one call of the fused op updates."""

    group: dict[str, Any]
    strategy: Strategy
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)


class Optimizer(torch.optim.Optimizer):
    """Base of subulp's optimizers; see :class:`AdamW` for the arguments they share."""

    _is_out_of_graphs: ClassVar[bool] = False
    #: Whether fuse_backward steps the parameters; not part of what is pickled or copied.
    _fused: bool = False
    #: State tensors of the size of the parameter.
    _states: ClassVar[States]

    def __init__(self, params: Params, defaults: dict[str, Any]) -> None:
        defaults["precision"] = parse_precision(defaults["precision"])
        if defaults["seed"] is None:
            # Follows torch.manual_seed; folded, because Philox keys are words of 32 bits.
            initial = torch.initial_seed()
            defaults["seed"] = (initial ^ (initial >> 32)) & 0xFFFFFFFF
        self._check_all_options(defaults)
        defaults["skipped_steps"] = 0
        super().__init__(cast(Any, params), defaults)
        _keep_out_of_graphs()

    # ------------------------------------------------------------------------------ groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; it may have options of its own, ``precision`` included.

        Raises:
            ValueError: An option is out of range, or a parameter cannot have the group's precision:
                its dtype, layout, or a complex or sparse value.
        """
        if "precision" in param_group:
            param_group["precision"] = parse_precision(param_group["precision"])
        if param_group.get("seed", 0) is None:
            param_group["seed"] = self.defaults["seed"]
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group)
        except Exception:
            self.param_groups.pop()
            raise

    def _check_group(self, group: dict[str, Any]) -> None:
        self._check_all_options(group)
        for i, p in enumerate(group["params"]):
            where = _name(group, i)
            if p.is_complex():
                raise ValueError(
                    f"{where} is complex ({p.dtype}): narrow formats are real; optimize "
                    "torch.view_as_real of it"
                )
            if p.layout != torch.strided:
                raise ValueError(
                    f"{where} has layout {p.layout}: only dense ones are updated; use to_dense()"
                )
            if not is_dense(p):
                raise ValueError(
                    f"{where} has strides {p.stride()} for shape {tuple(p.shape)}: its elements do "
                    "not fill one run of memory; use a contiguous parameter"
                )
            try:
                strategy = strategy_for(group["precision"], p.dtype)
                is_strict(group["arithmetic"], strategy, p.dtype)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None

    def _check_all_options(self, options: dict[str, Any]) -> None:
        self._check_options(options)
        for name, choices in (
            ("nonfinite", get_args(NonFinite)),
            ("arithmetic", ("wide", "strict")),
        ):
            if options[name] not in choices:
                raise ValueError(
                    f"{name}={options[name]!r} is unknown: use {' or '.join(map(repr, choices))}"
                )
        seed = options["seed"]
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
            raise ValueError(f"seed={seed!r} is out of range: use an integer from 0 to 2**32 - 1")

    def _check_options(self, options: dict[str, Any]) -> None:
        raise NotImplementedError

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _keep_out_of_graphs()
        for group in self.param_groups:
            for key in self._options():
                group.setdefault(key, self.defaults[key])

    def _options(self) -> set[str]:
        # torch.optim adds an option of its own to defaults when it restores an optimizer.
        return set(self.defaults) - {"differentiable"}

    # ------------------------------------------------------------------------------ states

    def _strategy(self, group: dict[str, Any], p: Tensor) -> Strategy:
        return strategy_for(group["precision"], p.dtype)

    def _new_state(
        self, group: dict[str, Any], p: Tensor, states: States | None = None
    ) -> dict[str, Tensor]:
        """Fresh state of a parameter: zeros, and its wide value its own value."""
        strategy = self._strategy(group, p)
        # On the CPU whatever torch.set_default_device says: the step's scalars are computed there.
        state: dict[str, Tensor] = {"step": torch.zeros((), dtype=torch.float32, device="cpu")}
        for name, role in self._states_of(group) if states is None else states:
            fmt = strategy.fast_format(p.dtype) if role == "fast" else strategy.slow_format(p.dtype)
            state[name] = torch.zeros_like(p, dtype=fmt.dtype, requires_grad=False)
            if role == "slow" and strategy.slow_state == "expansion":
                state[f"{name}_low"] = torch.zeros_like(state[name])
        extra = storage.new_extra(strategy, p.detach())
        if extra is not None:
            assert strategy.extra_name is not None
            state[strategy.extra_name] = extra
        if not strategy.wide_states and p.dtype.itemsize == 1:
            state["gradient_amax"] = torch.zeros((), dtype=torch.float32, device=p.device)
        return state

    def _states_of(self, group: dict[str, Any]) -> States:
        return self._states

    def _state_of(self, group: dict[str, Any], p: Tensor) -> dict[str, Tensor]:
        state = cast("dict[str, Tensor]", self.state[p])
        # A state may join later: schedulers raise SGD's momentum from zero.
        if not state or any(name not in state for name, _ in self._states_of(group)):
            state.update({**self._new_state(group, p), **state})
        _follow_layout(self._strategy(group, p), state, p)
        return state

    # ------------------------------------------------------------------------------ the step

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One optimization step.

        Args:
            closure: Re-evaluates the model and returns the loss (optional).

        Raises:
            FloatingPointError: A gradient is not finite and ``nonfinite="raise"``; nothing was
                updated.
            RuntimeError: The backend cannot run; nothing was updated.
            ValueError: A gradient is sparse or has a dtype that is no format of subulp; nothing was
                updated.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # While fused, the backward pass has stepped already.
        if not self._fused:
            self._step_outside_graphs()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch.optim; while fused, the backward pass frees gradients and this does nothing.

        Args:
            set_to_none: Free gradients instead of filling them with zeros (default: ``True``).
        """
        if not self._fused:
            super().zero_grad(set_to_none)

    def _step_outside_graphs(self) -> None:
        buckets = list(self._buckets())
        if not self._gradients_admit(buckets):
            return
        for bucket in buckets:
            self._update(bucket)

    def _update(self, bucket: Bucket) -> None:
        arguments = self._arguments(bucket)
        states = [self.state[p] for p in bucket.params]
        steps = [s["step"] for s in states]
        amaxes = [s["gradient_amax"] for s in states if "gradient_amax" in s]
        saved = [amax.clone() for amax in amaxes]
        torch._foreach_add_(steps, 1.0)
        try:
            self._run(*arguments)
        except Exception:
            # A backend that cannot run fails before it touches a parameter: so do the counters.
            torch._foreach_add_(steps, -1.0)
            for amax, before in zip(amaxes, saved, strict=True):
                amax.copy_(before)
            raise
        # A backward pass that still needs an old value must notice.
        torch.autograd.graph.increment_version(bucket.params)

    def _buckets(self) -> Iterator[Bucket]:
        """The parameters that have a gradient."""
        places = enumerate((g, i, p) for g in self.param_groups for i, p in enumerate(g["params"]))
        ready = [
            (group, i, stream, p, p.grad) for stream, (group, i, p) in places if p.grad is not None
        ]
        yield from self._bucketed(ready)

    def _bucketed(
        self, ready: Iterable[tuple[dict[str, Any], int, int, Tensor, Tensor]]
    ) -> Iterator[Bucket]:
        """Parameters and their gradients by group, dtype, gradient dtype and device.

        Args:
            ready: ``(group, index in it, stream, parameter, gradient)``.
        """
        buckets: dict[tuple[Any, ...], Bucket] = {}
        for group, i, stream, p, grad in ready:
            g = next(g for g, each in enumerate(self.param_groups) if each is group)
            _check_gradient(grad, f"the gradient of {_name(group, i)} of group {g}")
            key = (g, p.dtype, grad.dtype, p.device)
            if key not in buckets:
                buckets[key] = Bucket(group, self._strategy(group, p))
            buckets[key].params.append(p)
            buckets[key].grads.append(grad)
            buckets[key].streams.append(stream)
        yield from buckets.values()

    def _gradients_admit(self, buckets: list[Bucket]) -> bool:
        """Apply the groups' ``nonfinite`` policies before anything is updated."""
        guarded = [b for b in buckets if b.group["nonfinite"] != "propagate"]
        found = [b for b in guarded if not bool(all_finite(b.grads))]
        if not found:
            return True
        for bucket in found:
            if bucket.group["nonfinite"] != "raise":
                continue
            pairs = zip(bucket.params, bucket.grads, strict=True)
            bad = next(p for p, grad in pairs if not bool(all_finite([grad])))
            raise self._nonfinite_error(bucket.group, bad)
        self._count_skipped_step()
        return False

    def _nonfinite_error(self, group: dict[str, Any], p: Tensor) -> FloatingPointError:
        index = next(i for i, each in enumerate(group["params"]) if each is p)
        g = next(g for g, each in enumerate(self.param_groups) if each is group)
        return FloatingPointError(
            f"the gradient of {_name(group, index)} of group {g} (shape {tuple(p.shape)}) has NaN "
            "or infinite values; nothing was updated. Lower the learning rate or scale the loss, "
            "or pass nonfinite='skip' to leave such steps out or nonfinite='propagate' to let them "
            "through"
        )

    def _count_skipped_step(self) -> None:
        # One policy leaves the whole step out, so every group has skipped it.
        for each in self.param_groups:
            each["skipped_steps"] += 1

    #: The fused step, called with the result of ``_arguments``.
    _run: Callable[..., None]

    def _arguments(self, bucket: Bucket) -> tuple[Any, ...]:
        raise NotImplementedError

    def _common_arguments(self, bucket: Bucket) -> dict[str, Any]:
        """Roles and addresses that every fused op takes, in storage order."""
        params, strategy = bucket.params, bucket.strategy
        states = [self._state_of(bucket.group, p) for p in params]

        def role(name: str | None) -> list[Tensor]:
            if name is None or name not in states[0]:
                return []
            return [
                s[name] if s[name].dim() != p.dim() else storage_view(s[name], p)
                for s, p in zip(states, params, strict=True)
            ]

        lr = bucket.group["lr"]
        return {
            "role": role,
            "params": [storage_view(p.detach(), p) for p in params],
            "grads": [
                storage_view(in_layout_of(grad, p), p)
                for p, grad in zip(params, bucket.grads, strict=True)
            ],
            "extras": role(strategy.extra_name),
            "amaxes": role("gradient_amax"),
            "steps": role("step"),
            "lr": lr
            if isinstance(lr, Tensor)
            else torch.tensor(lr, dtype=torch.float64, device="cpu"),
            "precision": strategy.name,
            "seed": bucket.group["seed"],
            "streams": bucket.streams,
            "offsets": [0] * len(params),
        }

    @property
    def skipped_steps(self) -> int:
        """Steps that ``nonfinite="skip"`` left out."""
        return max((int(g["skipped_steps"]) for g in self.param_groups), default=0)

    # ------------------------------------------------------------------------- diagnostics

    @torch.no_grad()
    def intended_updates(self) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """What the next :meth:`step` would do if nothing were rounded away; changes nothing.

        Yields:
            ``(group index, parameter, wide value, intended update)`` per parameter with a gradient;
            the last two FP32, in storage order.
        """
        for bucket in self._buckets():
            arguments = list(self._arguments(bucket))
            for i, name in enumerate(self._argument_names):
                if name == "steps":
                    arguments[i] = [s + 1 for s in arguments[i]]
                elif name == "amaxes":
                    arguments[i] = [a.clone() for a in arguments[i]]
                elif name == "arithmetic":
                    arguments[i] = "wide"
            job = self._make_job(*arguments)
            group = next(i for i, g in enumerate(self.param_groups) if g is bucket.group)
            for i, p in enumerate(bucket.params):
                theta = storage.decode_parameter(
                    job.strategy, job.params[i], job.role(job.extras, i)
                )
                yield group, p, theta, -self._reference_update(job, i, theta)

    _argument_names: ClassVar[tuple[str, ...]]
    _make_job: Callable[..., StepJob]

    def _reference_update(self, job: StepJob, i: int, theta: Tensor) -> Tensor:
        raise NotImplementedError

    def stored_value(self, p: Tensor) -> Tensor:
        """:meth:`wide_value` in storage order, as :meth:`intended_updates` yields values."""
        return storage_view(self.wide_value(p), p)

    def wide_value(self, p: Tensor) -> Tensor:
        """The FP32 value that the stored components of a parameter stand for together.

        Returns:
            FP32 tensor of its shape; for ``"fp32"`` and ``"master"`` it may be the stored one.
        """
        return self._wide_value(self._group_of(p), p)

    def _wide_value(self, group: dict[str, Any], p: Tensor) -> Tensor:
        strategy, state = self._strategy(group, p), self.state.get(p)
        if strategy.extra_name is None or not state:
            return p.detach().to(torch.float32)
        _follow_layout(strategy, state, p)
        return full_precision.decode(strategy, p.detach(), state[strategy.extra_name])

    def bytes_per_parameter(self) -> dict[str, float]:
        """Bytes of elementwise storage per parameter, from the live tensors (Collage, Table 2).

        Gradients and states that do not exist yet count with the size that they will have. Step
        counters and the like, one number a tensor, do not count.

        Returns:
            Bytes by tensor name (``"parameter"``, ``"gradient"``, ``"exp_avg"``, ...) and
            ``"total"``, averaged over all parameters.
        """
        totals: dict[str, int] = {"parameter": 0, "gradient": 0}
        count = 0
        for group in self.param_groups:
            for p in group["params"]:
                count += p.numel()
                totals["parameter"] += p.nbytes
                dtype = p.grad.dtype if p.grad is not None else getattr(p, "grad_dtype", None)
                totals["gradient"] += p.numel() * (dtype or p.dtype).itemsize
                state = self.state.get(p) or self._new_state(group, p.detach().to("meta"))
                for name, value in state.items():
                    if value.dim() > 0 or (p.dim() == 0 and name not in SCALAR_STATES):
                        totals[name] = totals.get(name, 0) + value.nbytes
        result = {name: total / max(count, 1) for name, total in totals.items()}
        result["total"] = sum(result.values())
        return result

    # -------------------------------------------------------------------------- state dicts

    def state_dict(self) -> dict[str, Any]:
        """As in torch.optim; every component in its own dtype.

        Packed words of extra bits are in row-major order of the parameter, so that it may have
        another memory layout when they are loaded.
        """

        # Before the user's hooks, which may give the dict any form.
        def convert(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
            use_row_major_words(self, state_dict)

        handle = self.register_state_dict_post_hook(convert, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of the same strategy; every component keeps its own dtype.

        ``torch.optim.Optimizer`` casts floating-point state to the parameter's dtype, which would
        round master weights and FP32 moments away; they are put back as they were saved.

        Raises:
            ValueError: It comes from another optimizer, or groups, precision or a tensor's shape or
                dtype do not fit; nothing was changed.
        """
        final: dict[str, Any] = {}

        def check(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
            check_state_dict(self, state_dict)
            final.update(state_dict)

        def restore(_: torch.optim.Optimizer) -> None:
            restore_components(self, final)

        # Checks see what the user's hooks before loading made of the dict; the hooks after loading
        # see the components as they were saved.
        before = self.register_load_state_dict_pre_hook(check)
        after = self.register_load_state_dict_post_hook(restore, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def _group_of(self, p: Tensor) -> dict[str, Any]:
        for group in self.param_groups:
            if any(q is p for q in group["params"]):
                return group
        raise ValueError(f"a parameter of shape {tuple(p.shape)} is not in this optimizer")

    def full_precision_state_dict(self, model: nn.Module) -> OrderedDict[str, Tensor]:
        """The model's state dict with FP32 weights rebuilt from all components.

        Args:
            model: Its parameters are this optimizer's, some or all; others are widened as they are.

        Returns:
            Names as in ``model.state_dict()``; floating-point parameters in FP32, buffers as they
            are. The tensors are copies.
        """
        return full_precision.state_dict(self, model)

    def load_full_precision_state_dict(
        self, model: nn.Module, state_dict: Mapping[str, Tensor]
    ) -> None:
        """Load wide weights into a narrow model and fill all components of its parameters.

        Moments and step counters stay. What the components can hold comes back unchanged from
        :meth:`full_precision_state_dict`.

        Args:
            model: Its parameters are this optimizer's, some or all; others are rounded to nearest.
            state_dict: Names as in ``model.state_dict()``, values of any float dtype.

        Raises:
            ValueError: Names or shapes differ, or a value is no tensor of real numbers; nothing was
                changed.
        """
        full_precision.load_state_dict(self, model, state_dict)

    def _places(self) -> dict[int, tuple[dict[str, Any], int]]:
        pairs = [(g, p) for g in self.param_groups for p in g["params"]]
        return {id(p): (g, stream) for stream, (g, p) in enumerate(pairs)}


def _keep_out_of_graphs() -> None:
    """Let compiled training steps call the optimizer between their graphs.

    Traced, it would be one opaque op in a graph that guards on every tensor, compiles again for
    every new learning rate, and copies what the op mutates wherever the compiler cannot prove that
    it need not. Done with the first optimizer, for it imports all of Dynamo.
    """
    if not Optimizer._is_out_of_graphs:
        Optimizer._is_out_of_graphs = True
        disable = cast("Callable[..., Any]", torch.compiler.disable)
        Optimizer._step_outside_graphs = disable(  # type: ignore[method-assign]
            Optimizer._step_outside_graphs, reason="the fused step is one op"
        )


def _follow_layout(strategy: Strategy, state: dict[str, Tensor], p: Tensor) -> None:
    """Lay states out as their parameter, which ``model.to(memory_format=...)`` may have changed."""
    for name, value in state.items():
        if name in SCALAR_STATES or name == "extra_bits" or same_layout(value, p):
            continue
        if "extra_bits" in state:
            state["extra_bits"] = repack(state["extra_bits"], strategy.tail_width, value, p)
            # Only the first state that differs still tells the order that the words had.
            state.update({n: in_layout_of(v, p) for n, v in state.items() if v.shape == p.shape})
            return
        state[name] = in_layout_of(value, p)


def _check_gradient(grad: Tensor, where: str) -> None:
    if grad.layout != torch.strided:
        raise ValueError(
            f"{where} has layout {grad.layout}: only dense gradients are taken (for embeddings, "
            "sparse=False)"
        )
    if grad.is_complex():
        raise ValueError(f"{where} is complex ({grad.dtype}): narrow formats are real")
    try:
        format_of(grad.dtype)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _name(group: dict[str, Any], index: int) -> str:
    """A parameter as errors call it: by name where the user gave names."""
    names = group.get("param_names")
    return f"parameter {names[index]!r}" if names else f"parameter {index}"
