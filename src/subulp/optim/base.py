"""What all optimizers share: groups, states, and the step's batching."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    Protocol,
    cast,
    get_args,
    overload,
)

import torch
from torch import Tensor, nn

from ..numerics import format_of, random_bits
from ..ops import all_finite
from ..ops.step import storage
from ..ops.step.job import StepJob, is_strict
from ..ops.strategy import Strategy
from . import full_precision, loss_scaling
from .bucket import Bucket, Buckets, Place
from .layout import in_layout_of, is_dense, repack, same_layout, storage_view
from .precision import parse_precision, strategy_for
from .state_dict import SCALAR_STATES, check_state_dict, restore_components, use_row_major_words

if TYPE_CHECKING:
    from .fused_backward import FusedBackward

NonFinite = Literal["raise", "skip", "propagate"]
Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]
States = tuple[tuple[str, Literal["fast", "slow"]], ...]
"""Names of state tensors and their roles; the role decides the format."""
Role = Callable[[str | None], list[Tensor]]
"""The state tensors of a name, one for each parameter of a bucket; empty if there is none."""


class StepObserver(Protocol):
    """Is told of every step, inside the backward pass or after it; may change nothing."""

    def begin_step(self) -> None:
        """A step begins; it may still be left out."""

    def begin_update(self, bucket: Bucket) -> None:
        """A bucket is about to be updated."""

    def end_update(self, bucket: Bucket) -> None:
        """It has been."""

    def end_step(self) -> None:
        """All parameters with a gradient have been updated."""


class Optimizer(torch.optim.Optimizer):
    """Base of subulp's optimizers; see :class:`AdamW` for the arguments they share."""

    _is_out_of_graphs: ClassVar[bool] = False
    #: The handle that steps the parameters instead, and who watches; neither is pickled or copied.
    _fused: FusedBackward | None = None
    _observers: tuple[StepObserver, ...] = ()
    #: torch.amp.GradScaler leaves unscaling to :meth:`step`, see loss_scaling.py.
    _step_supports_amp_scaling: ClassVar[bool] = True
    #: State tensors of the size of the parameter.
    _states: ClassVar[States]

    def __init__(self, params: Params, defaults: dict[str, Any]) -> None:
        defaults["precision"] = parse_precision(defaults["precision"])
        if defaults["seed"] is None:
            defaults["seed"] = random_bits.fold_seed(torch.initial_seed())
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
            RuntimeError: The step is fused into the backward pass.
        """
        if self._fused is not None:
            raise RuntimeError(
                "add_param_group while the step is fused into the backward pass: remove the "
                "handle, add the group, and fuse again"
            )
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

    def _state_of(self, group: dict[str, Any], strategy: Strategy, p: Tensor) -> dict[str, Tensor]:
        state = cast("dict[str, Tensor]", self.state[p])
        # A state may join later: schedulers raise SGD's momentum from zero.
        if not state or any(name not in state for name, _ in self._states_of(group)):
            state.update({**self._new_state(group, p), **state})
        _follow_layout(strategy, state, p)
        return state

    # ------------------------------------------------------------------------------ the step

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One optimization step; while fused, nothing, for the backward pass has stepped already.

        Args:
            closure: Re-evaluates the model and returns the loss; while fused, its backward pass is
                the step (optional).

        Raises:
            FloatingPointError: A gradient is not finite and ``nonfinite="raise"``; nothing was
                updated.
            RuntimeError: The backend cannot run; nothing was updated. Or a gradient scaler calls
                while fused without ``scaler=``.
            ValueError: A gradient is sparse or has a dtype that is no format of subulp; nothing was
                updated.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._fused is None:
            self._step_outside_graphs()
        elif hasattr(self, "grad_scale"):
            self._fused.check_scaled()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch.optim; while fused, the backward pass frees gradients and this does nothing.

        Args:
            set_to_none: Free gradients instead of filling them with zeros (default: ``True``).
        """
        if self._fused is None:
            super().zero_grad(set_to_none)

    def _step_outside_graphs(self) -> None:
        buckets = self._buckets()
        self._begin_step()
        if not self._admits(buckets):
            return
        for bucket in buckets:
            for part in loss_scaling.unscaled(self, bucket):
                self._observed_update(part)
        self._end_step()

    def _begin_step(self) -> None:
        for observer in self._observers:
            observer.begin_step()

    def _end_step(self) -> None:
        for observer in self._observers:
            observer.end_step()

    def _observed_update(self, bucket: Bucket) -> None:
        for observer in self._observers:
            observer.begin_update(bucket)
        self._update(bucket)
        for observer in self._observers:
            observer.end_update(bucket)

    def _update(self, bucket: Bucket) -> None:
        arguments = self._arguments(bucket)
        amaxes = arguments["amaxes"]
        saved = [amax.clone() for amax in amaxes]
        torch._foreach_add_(arguments["steps"], 1.0)
        try:
            self._run_step(**arguments)
        except Exception:
            # A backend that cannot run fails before it touches a parameter: so do the counters.
            torch._foreach_add_(arguments["steps"], -1.0)
            for amax, before in zip(amaxes, saved, strict=True):
                amax.copy_(before)
            raise
        # A backward pass that still needs an old value must notice.
        torch.autograd.graph.increment_version(bucket.params)

    def _buckets(self) -> list[Bucket]:
        """The parameters that have a gradient."""
        buckets: Buckets = {}
        stream = 0
        for g, group in enumerate(self.param_groups):
            for i, p in enumerate(group["params"]):
                if p.grad is not None:
                    self._sort_in(buckets, Place(g, i, stream), p, p.grad)
                stream += 1
        return list(buckets.values())

    def _sort_in(
        self, buckets: Buckets, place: Place, p: Tensor, grad: Tensor, *, folded: bool = False
    ) -> None:
        """Put a parameter and its gradient into the bucket of those that one call can update.

        Raises:
            ValueError: The gradient is sparse, complex or of a dtype that is no format.
        """
        if grad.layout != torch.strided:
            raise ValueError(
                f"{self._gradient_name(place)} has layout {grad.layout}: only dense gradients are "
                "taken (for embeddings, sparse=False)"
            )
        key = (place.group, p.dtype, grad.dtype, p.device, folded)
        bucket = buckets.get(key)
        if bucket is None:
            self._check_gradient_dtype(place, grad.dtype)
            group = self.param_groups[place.group]
            bucket = buckets[key] = Bucket(group, self._strategy(group, p), folded=folded)
        bucket.params.append(p)
        bucket.grads.append(grad)
        bucket.streams.append(place.stream)

    def _check_gradient_dtype(self, place: Place, dtype: torch.dtype) -> None:
        where = self._gradient_name(place)
        if dtype.is_complex:
            raise ValueError(f"{where} is complex ({dtype}): narrow formats are real")
        try:
            format_of(dtype)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None

    def _gradient_name(self, place: Place) -> str:
        name = _name(self.param_groups[place.group], place.index)
        return f"the gradient of {name} of group {place.group}"

    def _admits(self, buckets: list[Bucket]) -> bool:
        """Whether the step may happen, asked before anything is updated."""
        found_inf = loss_scaling.found_inf(self)
        if found_inf is None:
            return self._gradients_admit(buckets)
        # A gradient scaler has looked at all gradients, and leaves steps out on purpose.
        if found_inf:
            self._count_skipped_step()
        return not found_inf

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
            raise self._nonfinite_error(bad)
        self._count_skipped_step()
        return False

    def _nonfinite_error(self, p: Tensor) -> FloatingPointError:
        return FloatingPointError(
            f"{self._gradient_name(self._places()[id(p)])} (shape {tuple(p.shape)}) has NaN or "
            "infinite values; nothing was updated. Lower the learning rate or scale the loss, or "
            "pass nonfinite='skip' to leave such steps out or nonfinite='propagate' to let them "
            "through"
        )

    def _count_skipped_step(self) -> None:
        # One policy leaves the whole step out, so every group has skipped it.
        for each in self.param_groups:
            each["skipped_steps"] += 1

    #: The fused step, and its job for diagnostics; both take ``_arguments``.
    _run_step: Callable[..., None]
    _make_job: Callable[..., StepJob]

    def _arguments(self, bucket: Bucket) -> dict[str, Any]:
        raise NotImplementedError

    def _common_arguments(self, bucket: Bucket) -> tuple[dict[str, Any], Role]:
        """What every fused op takes, in storage order, and the states of a name."""
        group, strategy, params = bucket.group, bucket.strategy, bucket.params
        states = [self._state_of(group, strategy, p) for p in params]

        def role(name: str | None) -> list[Tensor]:
            if name is None or name not in states[0]:
                return []
            return [_beside(s[name], p) for s, p in zip(states, params, strict=True)]

        common = {
            "params": [storage_view(p.detach(), p) for p in params],
            "grads": [
                storage_view(in_layout_of(grad, p), p)
                for p, grad in zip(params, bucket.grads, strict=True)
            ],
            "extras": role(strategy.extra_name),
            "amaxes": role("gradient_amax"),
            "steps": [s["step"] for s in states],
            "lr": group["lr"],
            "precision": strategy.name,
            "arithmetic": group["arithmetic"],
            "maximize": group["maximize"],
            "seed": group["seed"],
            "streams": bucket.streams,
            "offsets": [0] * len(params),
        }
        return common, role

    @property
    def skipped_steps(self) -> int:
        """Steps that ``nonfinite="skip"`` or a gradient scaler left out."""
        return max((int(g["skipped_steps"]) for g in self.param_groups), default=0)

    # ------------------------------------------------------------------------- diagnostics

    @torch.no_grad()
    def intended_updates(self, bucket: Bucket) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """What the coming step would do if nothing were rounded away; changes nothing.

        Args:
            bucket: Parameters and the gradients that they are about to step with.

        Yields:
            ``(parameter, wide value, intended update)``; the last two FP32, in storage order.
        """
        arguments = self._arguments(bucket)
        arguments["steps"] = [step + 1 for step in arguments["steps"]]
        arguments["amaxes"] = [amax.clone() for amax in arguments["amaxes"]]
        arguments["arithmetic"] = "wide"
        job = self._make_job(**arguments)
        for i, p in enumerate(bucket.params):
            theta = storage.decode_parameter(job.strategy, job.params[i], job.role(job.extras, i))
            yield p, theta, -self._reference_update(job, i, theta)

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

    def _places(self) -> dict[int, Place]:
        """Places of all parameters, by their id."""
        pairs = [
            (g, i, p) for g, c in enumerate(self.param_groups) for i, p in enumerate(c["params"])
        ]
        return {id(p): Place(g, i, stream) for stream, (g, i, p) in enumerate(pairs)}


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
    stride = p.stride()
    for name, value in state.items():
        if value.stride() == stride or name in SCALAR_STATES or name == "extra_bits":
            continue
        if same_layout(value, p):
            continue
        if "extra_bits" in state:
            state["extra_bits"] = repack(state["extra_bits"], strategy.tail_width, value, p)
            # Only the first state that differs still tells the order that the words had.
            state.update({n: in_layout_of(v, p) for n, v in state.items() if v.shape == p.shape})
            return
        state[name] = in_layout_of(value, p)


def _beside(value: Tensor, p: Tensor) -> Tensor:
    """A state in the storage order of its parameter; packed words and scalars have no other."""
    return value if value.dim() != p.dim() else storage_view(value, p)


def _name(group: dict[str, Any], index: int) -> str:
    """A parameter as errors call it: by name where the user gave names."""
    names = group.get("param_names")
    return f"parameter {names[index]!r}" if names else f"parameter {index}"
