"""What all optimizers share: groups, states, the step's batching, and state dicts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast, get_args, overload

import torch
from torch import Tensor, nn

from ..ops import all_finite, storage
from ..ops.job import StepJob, is_strict
from ..ops.strategy import Strategy, parse_strategy
from .layout import is_dense, matching_gradient, storage_view
from .precision import parse_precision, strategy_for

NonFinite = Literal["raise", "skip", "propagate"]
Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]

# What a group must share with a saved one: its stored tensors mean nothing under another setting.
_FIXED_BY_STATE = ("precision", "arithmetic")


@dataclass
class Bucket:
    """Parameters of one group that one call of the fused op updates."""

    group: dict[str, Any]
    strategy: Strategy
    params: list[Tensor]
    streams: list[int]


class Optimizer(torch.optim.Optimizer):
    """Base of subulp's optimizers; see :class:`AdamW` for the arguments they share."""

    #: State tensors of the size of the parameter: (name, role); the role names a format.
    _states: ClassVar[tuple[tuple[str, Literal["fast", "slow"]], ...]]

    def __init__(self, params: Params, defaults: dict[str, Any]) -> None:
        defaults["precision"] = parse_precision(defaults["precision"])
        if defaults["nonfinite"] not in get_args(NonFinite):
            raise ValueError(
                f"nonfinite={defaults['nonfinite']!r} is unknown: use 'raise', 'skip' or 'propagate'"
            )
        seed = defaults["seed"]
        if seed is None:
            # Follows torch.manual_seed; folded, because Philox keys are words of 32 bits.
            initial = torch.initial_seed()
            seed = (initial ^ (initial >> 32)) & 0xFFFFFFFF
        if not 0 <= int(seed) < 2**32:
            raise ValueError(f"seed={seed} is out of range: use 0 to 2**32 - 1")
        defaults["seed"] = int(seed)
        defaults["skipped_steps"] = 0
        super().__init__(cast(Any, params), defaults)

    # ------------------------------------------------------------------------------ groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; it may have options of its own, ``precision`` included.

        Raises:
            ValueError: An option is out of range, or a parameter cannot have the group's precision:
                its dtype, layout, or a complex or sparse value.
        """
        if "precision" in param_group:
            param_group["precision"] = parse_precision(param_group["precision"])
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group)
        except Exception:
            self.param_groups.pop()
            raise

    def _check_group(self, group: dict[str, Any]) -> None:
        self._check_options(group)
        for i, p in enumerate(group["params"]):
            where = _name(group, i)
            if p.is_complex():
                raise ValueError(
                    f"{where} is complex ({p.dtype}): narrow formats are real; optimize "
                    "torch.view_as_real of it"
                )
            if p.layout != torch.strided:
                raise ValueError(f"{where} has layout {p.layout}: only dense parameters are updated")
            if not is_dense(p):
                raise ValueError(
                    f"{where} has strides {p.stride()} for shape {tuple(p.shape)}: its elements do not "
                    "fill one run of memory; use a contiguous parameter"
                )
            try:
                strategy = strategy_for(group["precision"], p.dtype)
                is_strict(group["arithmetic"], strategy, p.dtype)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None

    def _check_options(self, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    # ------------------------------------------------------------------------------ states

    def _strategy(self, group: dict[str, Any], p: Tensor) -> Strategy:
        return strategy_for(group["precision"], p.dtype)

    def _new_state(self, group: dict[str, Any], p: Tensor) -> dict[str, Tensor]:
        """Fresh state of a parameter: zeros, and its wide value its own value."""
        strategy = self._strategy(group, p)
        state: dict[str, Tensor] = {"step": torch.tensor(0.0, dtype=torch.float32)}
        for name, role in self._states_of(group):
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

    def _states_of(self, group: dict[str, Any]) -> tuple[tuple[str, str], ...]:
        return self._states

    def _state_of(self, group: dict[str, Any], p: Tensor) -> dict[str, Tensor]:
        state = self.state[p]
        if not state:
            state.update(self._new_state(group, p))
        return cast("dict[str, Tensor]", state)

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
            ValueError: A gradient is sparse; nothing was updated.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        buckets = list(self._buckets())
        if not self._gradients_admit(buckets):
            return loss
        for bucket in buckets:
            torch._foreach_add_([self.state[p]["step"] for p in bucket.params], 1.0)
            self._op(*self._arguments(bucket))
        return loss

    def _buckets(self) -> Iterator[Bucket]:
        """Groups of parameters with gradients, split by dtype, gradient dtype and device."""
        stream = 0
        for group in self.param_groups:
            buckets: dict[tuple[Any, ...], Bucket] = {}
            for p in group["params"]:
                stream += 1
                if p.grad is None:
                    continue
                if p.grad.is_sparse or p.grad.layout != torch.strided:
                    raise ValueError(
                        f"a gradient of group {self.param_groups.index(group)} has layout "
                        f"{p.grad.layout}: only dense gradients are taken (for embeddings, "
                        "sparse=False)"
                    )
                self._state_of(group, p)
                key = (p.dtype, p.grad.dtype, p.device)
                if key not in buckets:
                    buckets[key] = Bucket(group, self._strategy(group, p), [], [])
                buckets[key].params.append(p)
                buckets[key].streams.append(stream - 1)
            yield from buckets.values()

    def _gradients_admit(self, buckets: list[Bucket]) -> bool:
        """Apply the groups' ``nonfinite`` policies before anything is updated."""
        guarded = [b for b in buckets if b.group["nonfinite"] != "propagate"]
        found = [b for b in guarded if not bool(all_finite([cast(Tensor, p.grad) for p in b.params]))]
        if not found:
            return True
        for bucket in found:
            if bucket.group["nonfinite"] != "raise":
                continue
            bad = next(p for p in bucket.params if not bool(all_finite([cast(Tensor, p.grad)])))
            index = next(i for i, p in enumerate(bucket.group["params"]) if p is bad)
            group = next(i for i, g in enumerate(self.param_groups) if g is bucket.group)
            raise FloatingPointError(
                f"the gradient of {_name(bucket.group, index)} of group {group} (shape "
                f"{tuple(bad.shape)}) has NaN or infinite values; nothing was updated. Lower the "
                "learning rate or scale the loss, or pass nonfinite='skip' to leave such steps out "
                "or nonfinite='propagate' to let them through"
            )
        for group in {id(b.group): b.group for b in found}.values():
            group["skipped_steps"] += 1
        return False

    #: The fused op, called with the result of ``_arguments``.
    _op: Callable[..., None]

    def _arguments(self, bucket: Bucket) -> tuple[Any, ...]:
        raise NotImplementedError

    def _common_arguments(self, bucket: Bucket) -> dict[str, Any]:
        """Roles and addresses that every fused op takes, in storage order."""
        params, strategy = bucket.params, bucket.strategy
        states = [self.state[p] for p in params]

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
            "grads": [storage_view(matching_gradient(p), p) for p in params],
            "extras": role(strategy.extra_name),
            "amaxes": role("gradient_amax"),
            "steps": role("step"),
            "lr": lr if isinstance(lr, Tensor) else torch.tensor(lr, dtype=torch.float64),
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
                theta = storage.decode_parameter(job.strategy, job.params[i], job.role(job.extras, i))
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
        for group in self.param_groups:
            if any(q is p for q in group["params"]):
                strategy = self._strategy(group, p)
                extra = self.state[p].get(strategy.extra_name) if p in self.state else None
                if strategy.extra_name is None or extra is None:
                    return p.detach().to(torch.float32)
                return _decode(strategy, p.detach(), extra)
        raise ValueError(f"a parameter of shape {tuple(p.shape)} is not in this optimizer")

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
                    if value.dim() > 0 or p.dim() == 0 and name not in ("step", "gradient_amax"):
                        totals[name] = totals.get(name, 0) + value.nbytes
        result = {name: total / max(count, 1) for name, total in totals.items()}
        result["total"] = sum(result.values())
        return result

    # -------------------------------------------------------------------------- state dicts

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of the same strategy; every component keeps its own dtype.

        ``torch.optim.Optimizer`` casts floating-point state to the parameter's dtype, which would
        round master weights and FP32 moments away; they are put back as they were saved.

        Raises:
            ValueError: Groups, precision or a tensor's shape or dtype do not fit; nothing was
                changed.
        """
        self._check_state_dict(state_dict)
        super().load_state_dict(state_dict)
        for p, saved in self._pairs(state_dict):
            for name, value in saved.items():
                if isinstance(value, Tensor):
                    device = torch.device("cpu") if name == "step" else p.device
                    self.state[p][name] = value.detach().to(device, copy=True)

    def _pairs(self, state_dict: dict[str, Any]) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for p, index in zip(group["params"], saved["params"], strict=True):
                if state_dict["state"].get(index):
                    yield p, state_dict["state"][index]

    def _check_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"state_dict has {len(groups)} parameter groups, the optimizer {len(self.param_groups)}"
            )
        for i, (group, saved) in enumerate(zip(self.param_groups, groups, strict=True)):
            if len(group["params"]) != len(saved["params"]):
                raise ValueError(
                    f"group {i} of state_dict has {len(saved['params'])} parameters, the "
                    f"optimizer's has {len(group['params'])}"
                )
            for key in _FIXED_BY_STATE:
                if saved.get(key) != group[key]:
                    raise ValueError(
                        f"group {i} of state_dict was saved with {key}={saved.get(key)!r}, the "
                        f"optimizer has {key}={group[key]!r}: its stored components would mean "
                        "something else. Make the optimizer with the saved setting, or carry the "
                        "weights over with full_precision_state_dict and "
                        "load_full_precision_state_dict"
                    )
        group_of = {id(p): g for g in self.param_groups for p in g["params"]}
        for p, saved in self._pairs(state_dict):
            expected = self._new_state(group_of[id(p)], p.detach().to("meta"))
            if set(expected) != set(saved):
                raise ValueError(
                    f"state_dict keeps {sorted(saved)} for a parameter of shape {tuple(p.shape)}, "
                    f"this optimizer keeps {sorted(expected)}"
                )
            for name, value in expected.items():
                if saved[name].shape != value.shape or saved[name].dtype != value.dtype:
                    raise ValueError(
                        f"{name} in state_dict is {saved[name].dtype} {tuple(saved[name].shape)}, "
                        f"expected {value.dtype} {tuple(value.shape)}"
                    )

    @torch.no_grad()
    def full_precision_state_dict(self, model: nn.Module) -> OrderedDict[str, Tensor]:
        """The model's state dict with FP32 weights rebuilt from all components.

        Args:
            model: Its parameters are this optimizer's, some or all; others are widened as they are.

        Returns:
            Names as in ``model.state_dict()``; floating-point parameters in FP32, buffers as they
            are. The tensors are copies.
        """
        named = dict(model.named_parameters(remove_duplicate=False))
        mine = {id(p) for g in self.param_groups for p in g["params"]}
        result: OrderedDict[str, Tensor] = OrderedDict()
        for name, value in model.state_dict().items():
            p = named.get(name)
            if p is not None and id(p) in mine:
                result[name] = self.wide_value(p).clone()
            elif p is not None and p.is_floating_point():
                result[name] = p.detach().to(torch.float32, copy=True)
            else:
                result[name] = value.detach().clone() if isinstance(value, Tensor) else value
        return result

    @torch.no_grad()
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
            ValueError: Names or shapes differ; nothing was changed.
        """
        own = model.state_dict()
        missing, unexpected = sorted(set(own) - set(state_dict)), sorted(set(state_dict) - set(own))
        if missing or unexpected:
            raise ValueError(f"state_dict lacks {missing} and has unexpected {unexpected}")
        for name, value in own.items():
            if state_dict[name].shape != value.shape:
                raise ValueError(
                    f"{name} has shape {tuple(state_dict[name].shape)} in state_dict, "
                    f"{tuple(value.shape)} in the model"
                )
        named = dict(model.named_parameters(remove_duplicate=False))
        place = self._places()
        for name, value in own.items():
            source = state_dict[name].to(value.device)
            p = named.get(name)
            if p is None or id(p) not in place:
                value.copy_(source)
                continue
            group, stream = place[id(p)]
            self._store_wide(group, stream, p, source.to(torch.float32))

    def _places(self) -> dict[int, tuple[dict[str, Any], int]]:
        pairs = [(g, p) for g in self.param_groups for p in g["params"]]
        return {id(p): (g, stream) for stream, (g, p) in enumerate(pairs)}

    def _store_wide(self, group: dict[str, Any], stream: int, p: Tensor, wide: Tensor) -> None:
        strategy, state = self._strategy(group, p), self._state_of(group, p)
        extra = state.get(strategy.extra_name) if strategy.extra_name else None
        target = storage_view(p.detach(), p)
        if strategy.weight == "stochastic":
            # A given weight is best kept by its nearest neighbour; only updates need be unbiased.
            strategy = parse_strategy("nearest")
        bits = storage.draw_bits(
            strategy,
            target,
            seed=group["seed"],
            stream=stream,
            step=int(state["step"].item()),
            offset=0,
        )
        beside = extra if extra is None or extra.dim() != p.dim() else storage_view(extra, p)
        aligned = torch.empty_like(p, dtype=torch.float32).copy_(wide)
        storage.encode_parameter(strategy, storage_view(aligned, p), target, beside, bits)


def _decode(strategy: Strategy, p: Tensor, extra: Tensor) -> Tensor:
    """Wide value of a parameter of any dense layout, in its own dimension order."""
    beside = extra if extra.dim() != p.dim() else storage_view(extra, p)
    dense = storage.decode_parameter(strategy, storage_view(p, p), beside)
    return storage_view(torch.empty_like(p, dtype=torch.float32), p).copy_(dense).as_strided(
        p.shape, p.stride()
    )


def _name(group: dict[str, Any], index: int) -> str:
    """A parameter as errors call it: by name where the user gave names."""
    names = group.get("param_names")
    return f"parameter {names[index]!r}" if names else f"parameter {index}"
