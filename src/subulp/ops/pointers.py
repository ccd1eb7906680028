"""Addresses of tensors for kernels: the one door, which nothing passes unchecked.

A kernel believes the address it gets. So whatever is no plain memory of the expected kind is
refused here by name: C++ and Triton would read or write somewhere else, or end the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

_CPU = torch.device("cpu")
_NO_DISPATCH = Tensor.__torch_dispatch__


def data_ptr(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int] | None = None
) -> int:
    """The address of a CPU tensor that a C++ kernel reads or writes as a run of ``dtype``.

    Args:
        name: What the caller calls it.
        tensor: Plain, contiguous and on the CPU.
        dtype: Its dtype.
        shape: Its shape; ``None`` leaves it to the caller (default: ``None``).

    Returns:
        The address, 0 for a tensor without elements.

    Raises:
        TypeError: It is no tensor, or wraps others, as DTensor and FakeTensor do.
        ValueError: It is of another dtype, shape or device, not contiguous, or has no memory.
    """
    if at := _in_order(tensor, dtype, shape):
        return at
    check_plain(name, tensor)
    if tensor.device != _CPU:
        raise ValueError(f"{name} lies on {tensor.device}{_remedy(tensor)}")
    if tensor.layout != torch.strided:
        raise ValueError(f"{name} has the layout {tensor.layout}: expected a dense tensor")
    if tensor.dtype != dtype:
        raise ValueError(f"{name} has dtype {tensor.dtype}: expected {dtype}")
    if shape is not None and tensor.shape != torch.Size(shape):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}: expected {tuple(shape)}")
    (address,) = run_ptrs(name, (tensor,))
    return address


def run_ptr(name: str, tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:
    """A tensor's numbers as one run of memory, and the address of that.

    Args:
        name: What the caller calls it.
        tensor: On the CPU, in any layout, which may stand for its negative.
        dtype: Its dtype.

    Returns:
        The tensor, or a copy that is to be kept while the address is used; and the address.

    Raises:
        TypeError, ValueError: See :func:`data_ptr`; gaps and negatives are none of the reasons.
    """
    if at := _in_order(tensor, dtype, None):
        return tensor, at
    if tensor.layout == torch.strided:
        tensor = tensor.resolve_neg().contiguous()
    return tensor, data_ptr(name, tensor, dtype)


def _in_order(tensor: Tensor, dtype: torch.dtype, shape: Sequence[int] | None) -> int:
    """The address of a tensor of which nothing is wrong; 0 of others, which take longer.

    They are nearly all, and calls are many: what is wrong with one is asked of that one.
    """
    if not (
        is_plain_type(type(tensor))
        and tensor.dtype == dtype
        and tensor.is_cpu
        and tensor.layout == torch.strided
        and (shape is None or tensor.shape == shape)
        and tensor.is_contiguous()
        and not tensor.is_neg()
    ):
        return 0
    try:
        held = tensor.untyped_storage().nbytes()
    except RuntimeError:
        # In one of torch.func's transforms.
        return 0
    size = tensor.nbytes
    whole = tensor.storage_offset() * tensor.itemsize + size <= held
    return tensor.data_ptr() if size and whole else 0


def run_ptrs(name: str, tensors: Sequence[Tensor]) -> list[int]:
    """The addresses of a role's tensors, each of which is one run of memory.

    Their dtypes, shapes and devices are checked already. See :func:`data_ptr` for what is returned
    and raised.
    """
    addresses = dense_ptrs(name, tensors)
    if not all(map(Tensor.is_contiguous, tensors)):
        strides = next(t.stride() for t in tensors if not t.is_contiguous())
        raise ValueError(f"{name} has strides {strides}: expected a contiguous tensor")
    return [0 if not tensor.nbytes else at for at, tensor in zip(addresses, tensors, strict=True)]


def matrix_ptr(name: str, matrix: Tensor) -> tuple[int, int, bool]:
    """The address of a CPU matrix whose rows, or else columns, are runs of memory.

    Its dtype, shape and device are checked already. See :func:`data_ptr` for what is raised.

    Returns:
        The address, 0 for a matrix without elements; numbers from one run to the next; whether the
        runs are rows.
    """
    (address,) = data_ptrs(name, (matrix,))
    (rows, columns), (down, across) = matrix.shape, matrix.stride()
    if not matrix.numel():
        return 0, 0, True
    by_row = across == 1 or columns == 1
    if not by_row and down != 1 and rows != 1:
        raise ValueError(
            f"{name} has strides {matrix.stride()}: expected contiguous rows or columns"
        )
    end = matrix.storage_offset() + (rows - 1) * down + (columns - 1) * across + 1
    held = matrix.untyped_storage().nbytes()
    if end * matrix.itemsize > held:
        raise ValueError(
            f"{name} of shape {tuple(matrix.shape)} reaches beyond its storage of {held} bytes, "
            "which was resized"
        )
    return address, down if by_row else across, by_row


def dense_ptrs(name: str, tensors: Sequence[Tensor]) -> list[int]:
    """The addresses of a role's tensors, whose layouts are known to have no gaps.

    See :func:`data_ptrs` for the rest.

    Raises:
        ValueError: One reaches beyond its storage, which was resized.
    """
    addresses = data_ptrs(name, tensors)
    _check_storage(name, tensors, [tensor.nbytes for tensor in tensors])
    return addresses


def held_ptrs(name: str, tensors: Sequence[Tensor], sizes: list[int]) -> list[int]:
    """The addresses of plain tensors without gaps whose bytes are known; nothing else is checked.

    Args:
        name: What the caller calls the role.
        tensors: The tensors.
        sizes: Bytes of each.

    Raises:
        ValueError: One has no memory, or reaches beyond its storage, which was resized.
    """
    addresses = _addresses(name, tensors)
    _check_storage(name, tensors, sizes)
    return addresses


def data_ptrs(name: str, tensors: Sequence[Tensor]) -> list[int]:
    """The addresses of a role's tensors, whose dtypes, devices and layouts are checked already.

    Args:
        name: What the caller calls the role.
        tensors: Plain tensors.

    Raises:
        TypeError: One wraps others, as DTensor and FakeTensor do.
        ValueError: One has no memory, or stands for its negative.
    """
    if not all(map(is_plain_type, set(map(type, tensors)))):
        for tensor in tensors:
            check_plain(name, tensor)
    addresses = _addresses(name, tensors)
    if any(map(Tensor.is_neg, tensors)):
        # A lazy negation: its memory holds the numbers with the other sign.
        raise ValueError(f"{name} has a tensor that is a negated view: pass its resolve_neg()")
    return addresses


def _addresses(name: str, tensors: Sequence[Tensor]) -> list[int]:
    try:
        addresses = list(map(Tensor.data_ptr, tensors))
    except RuntimeError as error:
        raise TypeError(
            f"{name} has a tensor without memory of its own ({error}): call this outside of "
            "torch.func's transforms"
        ) from error
    if 0 in addresses:
        for tensor, address in zip(tensors, addresses, strict=True):
            if not address and tensor.numel():
                raise ValueError(
                    f"{name} has a tensor of shape {tuple(tensor.shape)} on {tensor.device} "
                    f"without memory{_remedy(tensor)}"
                )
    return addresses


def _check_storage(name: str, tensors: Sequence[Tensor], sizes: list[int]) -> None:
    held = list(map(torch.UntypedStorage.nbytes, map(Tensor.untyped_storage, tensors)))
    if held == sizes and not any(map(Tensor.storage_offset, tensors)):
        return
    for tensor, size, room in zip(tensors, sizes, held, strict=True):
        if size and tensor.storage_offset() * tensor.itemsize + size > room:
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)} reaches beyond its storage of {room} "
                "bytes, which was resized"
            )


def are_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether all are what they look like: none wraps others, or stands for its negative."""
    kinds = set(map(type, tensors))
    return all(map(is_plain_type, kinds)) and not any(map(Tensor.is_neg, tensors))


@cache
def is_plain_type(kind: type) -> bool:
    """Whether instances are tensors with memory of their own, as Parameters are."""
    return issubclass(kind, Tensor) and kind.__torch_dispatch__ is _NO_DISPATCH


def check_plain(name: str, tensor: Tensor) -> None:
    """Raise TypeError unless a tensor has memory of its own, on whatever device."""
    if not is_plain_type(type(tensor)):
        raise TypeError(
            f"{name} is a {type(tensor).__name__}: kernels take plain tensors, which have memory "
            "of their own (of a DTensor, that is to_local())"
        )


def _remedy(tensor: Tensor) -> str:
    if tensor.is_meta:
        return ", where tensors hold no data: load a state dict with assign=True first"
    return ": C++ kernels take CPU tensors" if tensor.device != _CPU else ": it was freed"
