"""The parameter that a table's stored rows are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self, cast

import torch
from torch import Tensor, nn


class RowParameter(nn.Parameter):
    """Stored rows: they update themselves and never have a gradient.

    So ``requires_grad`` is always ``False``; but what is written to it counts.
    ``requires_grad_(False)``, of the parameter or of any module around it, freezes the rows, and
    ``requires_grad_(True)`` lets them train again.

    Args:
        data: The rows.
        frozen: Whether updates leave them alone (default: ``False``).
        numbers: Whether the rows are numbers that arithmetic makes sense of; else ``detach()``
            refuses it, which protects them from averages of weights (default: ``True``).
        shard: Whether these are one rank's rows of a table, and the other ranks have others; then
            ``detach()`` is refused, which protects them from being taken for copies of each other
            (default: ``False``).
    """

    frozen: bool
    numbers: bool
    shard: bool = False

    def __new__(  # noqa: D102
        cls, data: Tensor, *, frozen: bool = False, numbers: bool = True, shard: bool = False
    ) -> Self:
        made = super().__new__(cls, memory_of(data), False)
        made.frozen, made.numbers, made.shard = frozen, numbers, shard
        return made

    def __init__(
        self, data: Tensor, *, frozen: bool = False, numbers: bool = True, shard: bool = False
    ) -> None:
        """Nothing: :meth:`__new__` has done all."""

    @property
    def requires_grad(self) -> bool:
        """``False``; writing freezes the rows or lets them train."""
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.frozen = not value

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Let the rows train, or freeze them."""
        self.frozen = not requires_grad
        return self

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> NoReturn:
        """Raise ValueError: there is no gradient that a hook could wait for."""
        raise ValueError(
            f"rows of shape {tuple(self.shape)} update themselves and have no gradient: leave them "
            "out of the parameters of dense optimizers, and give their module to RowSGD or "
            "RowAdagrad"
        )

    def detach(self) -> Tensor:
        """The rows as a tensor; one that refuses arithmetic unless they are numbers.

        Raises:
            RuntimeError: They are one rank's rows of a table.
        """
        if self.shard:
            # What DistributedDataParallel does before it overwrites all ranks' rows with rank 0's.
            raise RuntimeError(
                f"rows of shape {tuple(self.shape)} are one rank's part of a table on a mesh, and "
                "other ranks have other rows: DistributedDataParallel would overwrite those. Wrap "
                "the encoder alone; or list the table's tensors in "
                "model._ddp_params_and_buffers_to_ignore before you wrap the model. Averages of "
                "weights leave such tables out"
            )
        rows = memory_of(self)
        return rows if self.numbers else rows.as_subclass(_Opaque)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) not in memo:
            memo[id(self)] = self._like(memory_of(self).clone())
        copy: Self = memo[id(self)]
        return copy

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        facts = (self.frozen, self.numbers, self.shard)
        return _rebuilt, (type(self), memory_of(self), *facts)

    def _like(self, data: Tensor) -> Self:
        return type(self)(data, frozen=self.frozen, numbers=self.numbers, shard=self.shard)

    def become(self, other: nn.Parameter) -> None:
        """Take over the rows of ``other``, wherever they are: optimizers know this object."""
        rows = self._like(memory_of(other).contiguous())
        torch.utils.swap_tensors(self, rows)  # type: ignore[no-untyped-call]


def rows_that_train(rows: Tensor | None) -> RowParameter:
    """A table's stored rows, if they are its own.

    Args:
        rows: What the table has in their place; ``None`` if they are gone.

    Raises:
        RuntimeError: They have been replaced.
    """
    # Any tensor that may be frozen will do, whatever its class.
    if hasattr(rows, "frozen"):
        return cast(RowParameter, rows)
    raise RuntimeError(
        "the stored rows of a table have been replaced by another tensor, whose updates would be "
        "lost, as pruning, parametrizations, weight norms and torch.func.functional_call do: leave "
        "heads and tables out of them (functional_call may have their rows in eval())"
    )


def memory_of(rows: Tensor) -> Tensor:
    """A plain tensor with the memory of stored rows."""
    return Tensor.detach(rows)


def _rebuilt(
    kind: type[RowParameter], data: Tensor, frozen: bool, numbers: bool, shard: bool = False
) -> RowParameter:
    return kind(data, frozen=frozen, numbers=numbers, shard=shard)


_ARITHMETIC = ("add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv")


class _Opaque(Tensor):
    """Stored rows for others to copy and to move; arithmetic would make garbage of them."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "").strip("_").removeprefix("foreach_")
        if name.removeprefix("r") in _ARITHMETIC:
            # Not a TypeError: operators would take it for a hint to try the other operand.
            raise RuntimeError(
                f"{func.__name__}() of a table's stored rows: rows of integers are bytes of "
                "scales, biases and codes, and those of a table with a cache are out of date: "
                "arithmetic on them means nothing. Leave the table out of averages of weights, "
                "such as AveragedModel"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
