"""A CUDA graph without CUDA: what is captured does not run, and runs again at every replay."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from torch.utils._python_dispatch import TorchDispatchMode

from subulp.ops import capture

# They make tensors, and launch nothing.
_FREE = {"empty", "empty_like", "new_empty", "empty_strided", "detach"}


class _Refused(TorchDispatchMode):
    """Whatever PyTorch would launch, or the host would wait for: no kernel of a step is one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        free = func.overloadpacket.__name__ in _FREE or func.namespace == "profiler"
        assert func.is_view or free, f"{func} in a capture"
        return func(*args, **(kwargs or {}))


class Graph:
    """Launches of interpreted kernels, with the tensors that they were launched with."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """Capture what is launched, and run none of it."""
        from triton.runtime import interpreter  # noqa: PLC0415

        def note(function: Any, *args: Any, **options: Any) -> None:
            self.launches.append((function, args, options))

        kind = interpreter.InterpretedFunction
        with (
            patch.object(kind, "run", note),
            patch.object(capture, "is_under_way", lambda device: True),
            _Refused(),
        ):
            yield

    @property
    def kernels(self) -> list[str]:
        """The names of what was launched."""
        return [function.fn.__name__ for function, _, _ in self.launches]

    def replay(self) -> None:
        """Run it, on what its tensors hold now."""
        for function, args, options in self.launches:
            function.run(*args, **options)
