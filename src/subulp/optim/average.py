"""Averages of the weights that all components stand for, as EMA and SWA keep them."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..numerics import format_of, random_bits
from ..numerics.whole import is_whole
from ..ops.step import storage
from ..ops.strategy import Strategy, parse_strategy
from . import full_precision, shards
from .backward import fsdp
from .base import Optimizer
from .components import is_dense

AverageFunction = Callable[[Tensor, Tensor, int], Tensor]
"""The new average from the average, the weight, both FP32, and how many weights are in it."""

_PRECISIONS = ("master", "collage-light", "stochastic")


class AveragedModel(nn.Module):
    """A copy of a model whose weights are an average of those that an optimizer stores.

    As ``torch.optim.swa_utils.AveragedModel``, of each parameter's *full-precision* value: a narrow
    parameter alone stays where it is while its components move, and an average in its dtype does
    not notice updates below half an ulp. The parameters of :attr:`module` have the model's dtypes;
    what they cannot hold is kept beside them::

        averaged = optim.AveragedModel(model, optimizer, decay=0.999)
        for batch in data:
            ...  # a step
            averaged.update_parameters(model)
        averaged(x)

    Args:
        model: Some or all of its parameters are the optimizer's; of others, their own value counts.
        optimizer: One of subulp's; ``None`` takes all parameters as they are (default: ``None``).
        device: Where the average lies (default: ``None``, where the model does).
        avg_fn: Gives the new average (default: ``None``, the mean of all weights).
        use_buffers: Average floating-point buffers too, instead of copying all (default:
            ``False``).
        decay: The exponential moving average that keeps so much of itself, 0 to 1, instead of
            ``avg_fn`` (default: ``None``).
        precision: How the average of a narrow parameter is kept: ``"master"`` in FP32;
            ``"collage-light"`` as two narrow numbers, the second rounded stochastically;
            ``"stochastic"`` as one, rounded so. FP32 parameters have FP32 averages (default:
            ``"master"``).
        seed: Seed of the random bits, 0 to 2**32 - 1 (default: 0).

    Attributes:
        module: The copy of the model.
        optimizer: The optimizer, or ``None``; it is no part of the state dict.
        n_averaged: How many weights are in the average, an int64 tensor ().

    Raises:
        ValueError: An argument is out of range, or a parameter cannot be averaged.
    """

    n_averaged: Tensor

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        device: int | str | torch.device | None = None,
        avg_fn: AverageFunction | None = None,
        use_buffers: bool = False,
        *,
        decay: float | None = None,
        precision: str = "master",
        seed: int = 0,
    ) -> None:
        super().__init__()
        if precision not in _PRECISIONS:
            raise ValueError(
                f"precision={precision!r} is not available for averages: use one of "
                f"{', '.join(map(repr, _PRECISIONS))}"
            )
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise ValueError(
                f"optimizer is of type {type(optimizer).__name__}: pass one of subulp's, "
                "unwrapped, or None to average the parameters as they are"
            )
        if decay is not None and avg_fn is not None:
            raise ValueError("decay and avg_fn both say how to average: pass one of them")
        if decay is not None and not 0.0 <= decay <= 1.0:
            raise ValueError(f"decay={decay} is out of range: use a number from 0 to 1")
        if not is_whole(seed) or not 0 <= seed < 2**32:
            raise ValueError(f"seed={seed!r} is out of range: use an integer from 0 to 2**32 - 1")
        self.module = deepcopy(model)
        self.module.zero_grad(set_to_none=True)
        if device is not None:
            self.module = self.module.to(device)
        self.optimizer = optimizer
        self._decay, self._avg_fn = decay, avg_fn
        self._precision, self._seed, self._use_buffers = precision, seed, use_buffers
        self.register_buffer("n_averaged", torch.zeros((), dtype=torch.int64, device=device))
        self.beside = nn.Module()
        for name, p in self._averaged(self.module).items():
            strategy = self._strategy(name, p)
            extra = storage.new_extra(strategy, shards.local(p.detach()))
            if extra is not None:
                self.beside.register_buffer(_key(strategy, name), shards.part_of(p, extra))

    def _strategy(self, name: str, p: Tensor) -> Strategy:
        if p.dtype == torch.float32:
            return parse_strategy("fp32")
        try:
            strategy = parse_strategy(self._precision)
            strategy.check_dtype(p.dtype)
        except ValueError as error:
            raise ValueError(f"parameter {name!r}: {error}") from None
        if not is_dense(shards.local(p)):
            raise ValueError(
                f"parameter {name!r} has strides {p.stride()} for shape {tuple(p.shape)}: its "
                "elements do not fill one run of memory; use a contiguous parameter"
            )
        return strategy

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output of :attr:`module`."""
        return self.module(*args, **kwargs)

    # ------------------------------------------------------------------------------ averaging

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Take the weights of a model into the average; its buffers are copied.

        The step may be fused into the backward pass: call it after the pass.

        Args:
            model: That of the optimizer.

        Raises:
            ValueError: Its parameters or buffers are not those of :attr:`module`, or have been
                sharded since that was made.
        """
        self._check(model)
        count = int(self.n_averaged)
        averages, theirs = self._averaged(self.module), self._averaged(model)
        stored = self._stored_by_optimizer(theirs.values())
        wide = self.optimizer.wide_values(stored.values()) if self.optimizer else iter(())
        for name, its in theirs.items():
            mine = averages[name]
            weight = shards.local(next(wide) if id(its) in stored else its.detach())
            weight = weight.to(mine.device, torch.float32)
            strategy = self._strategy(name, mine)
            if count:
                weight = self._next(self._part(strategy, name, mine), weight, count)
            self._store(strategy, name, mine, weight, step=count)
        buffers = dict(model.named_buffers())
        for name, mine in self.module.named_buffers():
            if name not in theirs:
                mine.copy_(buffers[name])
        self.n_averaged += 1

    def _averaged(self, model: nn.Module) -> dict[str, Tensor]:
        """The tensors that are averaged, by name."""
        found: dict[str, Tensor] = dict(model.named_parameters())
        if self._use_buffers:
            found |= {n: b for n, b in model.named_buffers() if b.is_floating_point()}
        return found

    def _stored_by_optimizer(self, tensors: Iterable[Tensor]) -> dict[int, Tensor]:
        """Those that the optimizer stores in components, by their ids, in the same order."""
        if self.optimizer is None:
            return {}
        known = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        found = {id(p): p for p in tensors if id(p) in known}
        if not found:
            raise ValueError(
                "the optimizer has no parameter of this model, whose components would be left out: "
                "set averaged.optimizer to the model's, or to None"
            )
        return found

    def _check(self, model: nn.Module) -> None:
        if fsdp.is_in(model) or fsdp.is_in(self.module):
            # Between a forward pass and the next backward pass its parameters are whole copies.
            raise ValueError(
                "averages of modules of fully_shard are not available: average what "
                "optimizer.full_precision_state_dict(model) gives"
            )
        for kind, name in (("parameters", "named_parameters"), ("buffers", "named_buffers")):
            mine, its = (
                {key: value.shape for key, value in getattr(each, name)()}
                for each in (self.module, model)
            )
            if mine != its:
                raise ValueError(
                    f"the model has other {kind} than the one that the average was made of: pass "
                    "that model"
                )
        own = dict(self.module.named_parameters())
        for name, p in model.named_parameters():
            if _sharding(own[name]) != _sharding(p):
                raise ValueError(
                    f"parameter {name!r} is sharded otherwise in the model than in the average: "
                    "make the average after parallelize_module or distribute_tensor"
                )

    def _next(self, average: Tensor, weight: Tensor, count: int) -> Tensor:
        # In FP64, so that it is rounded once: where it is stored.
        if self._avg_fn is not None:
            return self._avg_fn(average, weight, count).to(torch.float32)
        part = 1.0 - self._decay if self._decay is not None else 1.0 / (count + 1)
        wide = average.double()
        return (wide + (weight.double() - wide) * part).to(torch.float32)

    def _part(self, strategy: Strategy, name: str, p: Tensor) -> Tensor:
        """The FP32 average, what this rank holds of it."""
        part = shards.local(p.detach())
        if strategy.extra_name is None:
            return part.to(torch.float32)
        return storage.decode_parameter(strategy, part, self._extra(strategy, name))

    def _extra(self, strategy: Strategy, name: str) -> Tensor:
        return shards.local(self.beside.get_buffer(_key(strategy, name)))

    def _store(self, strategy: Strategy, name: str, p: Tensor, wide: Tensor, *, step: int) -> None:
        part = shards.local(p.detach())
        extra = self._extra(strategy, name) if strategy.extra_name else None
        bits = None
        if strategy.name in ("stochastic", "collage-light"):
            bits = random_bits.draw_part(
                part.shape,
                shards.region_of(p),
                seed=self._seed,
                stream=zlib.crc32(name.encode()),
                step=step + 1,
                width=format_of(part.dtype).random_width,
                device=part.device,
            )
        dither = bits if strategy.weight == "expansion" else None
        storage.encode_parameter(strategy, wide, part, extra, bits, dither)
        torch.autograd.graph.increment_version((p,))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As of every module, for moves; an average has parts in formats that belong together.

        Raises:
            ValueError: Tensors that are averaged would have another dtype.
        """
        for name, p in self._averaged(self.module).items():
            if (dtype := fn(torch.empty(0, dtype=p.dtype, device=p.device)).dtype) != p.dtype:
                raise ValueError(
                    f"an average of dtype {p.dtype} ({name!r}) as {dtype} would lose what is kept "
                    "beside it: load full_precision_state_dict() into a model of that dtype, or "
                    "make the average of one"
                )
        kept = dict(self.beside.named_buffers())
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in kept.items():
            after = self.beside.get_buffer(name)
            if after.dtype != before.dtype:
                setattr(self.beside, name, before.to(after.device))
        return self

    # ------------------------------------------------------------------------------ using it

    @torch.no_grad()
    def full_precision_state_dict(self) -> OrderedDict[str, Tensor]:
        """The state dict of :attr:`module` with the FP32 average of each parameter.

        ``optimizer.load_full_precision_state_dict(model, ...)`` trains on from it.
        """
        names = {id(p): name for name, p in self.module.named_parameters()}

        def value(p: Tensor) -> Tensor:
            name = names[id(p)]
            return shards.part_of(p, self._part(self._strategy(name, p), name, p))

        return full_precision.state_dict(self.module, names, value)

    @contextmanager
    def swapped_in(self, model: nn.Module) -> Iterator[nn.Module]:
        """A block in which a model has the parameters and buffers of :attr:`module`.

        Those that it had come back bit for bit. The block must not train it.

        Args:
            model: That of the optimizer.

        Raises:
            ValueError: Its parameters or buffers are not those of :attr:`module`.
        """
        self._check(model)
        pairs: list[tuple[Tensor, Tensor]] = []
        pairs += zip(model.parameters(), self.module.parameters(), strict=True)
        pairs += zip(model.buffers(), self.module.buffers(), strict=True)
        before = [shards.local(its.detach()).clone() for its, _ in pairs]
        try:
            _write(pairs)
            yield model
        finally:
            _write([(its, old) for (its, _), old in zip(pairs, before, strict=True)])


@torch.no_grad()
def _write(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for target, value in pairs:
        shards.local(target.detach()).copy_(shards.local(value.detach()))
        torch.autograd.graph.increment_version((target,))


def _key(strategy: Strategy, name: str) -> str:
    """A name of a buffer, which has no dots; another one for each meaning."""
    return f"{strategy.extra_name}/{name.replace('.', '/')}"


def _sharding(p: Tensor) -> tuple[object, object]:
    return getattr(p, "device_mesh", None), getattr(p, "placements", None)
