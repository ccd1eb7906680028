"""Tests under another default dtype, which a user may have set: ``--default-dtype bfloat16``.

Kernels read memory as what they take it for. A buffer that the library makes without naming its
dtype is of another size then, and what follows is a wrong result, or the end of the process. So
the library sees the other default; what a test makes itself is FP32 all the same, since it is the
test's and not what is tested.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

DTYPES = ("bfloat16", "float16", "float64")
FOLDERS = ("numerics", "ops", "nn", "optim")

_TESTS = str(Path(__file__).parent)
_LIBRARY = str(Path(__file__).parent.parent / "src")
_LAYERS = str(Path(torch.nn.__file__).parent / "modules")
# What runs code of the library before it returns.
_ENTERS_THE_LIBRARY = {"backward", "grad"}


class _TestsMakeFP32(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        operator = isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
        name = getattr(func, "__name__", "")
        if operator or name in _ENTERS_THE_LIBRARY or not _called_by_a_test():
            return func(*args, **kwargs)
        with _default(torch.float32):
            return func(*args, **kwargs)


def _called_by_a_test() -> bool:
    """Whether a test is nearer on the stack than the library."""
    frame: Any = sys._getframe(2)
    called = ""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_TESTS) and path != __file__:
            return True
        # Parameters that a layer inherits from torch's are of the default dtype on purpose.
        inherited = frame.f_code.co_name == "__init__" and called.startswith(_LAYERS)
        if path.startswith(_LIBRARY) and not inherited:
            return False
        frame, called = frame.f_back, path
    return False


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def library_default(name: str) -> Iterator[None]:
    """The library sees this default dtype, tests FP32."""
    with _default(getattr(torch, name)), _TestsMakeFP32():
        yield
