"""A GPU that is not there: what reaches it is counted, and computed on the CPU.

Tensors say that they lie on ``cuda`` and have their numbers in a CPU tensor; Triton's kernels are
interpreted on those. Counted are what a GPU would launch, and where the host would wait for it.
Autograd's engine wants a real device, so what is counted is called below it. The process must not
go on to anything else: its PyTorch takes for a GPU what is none.
"""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._library import custom_ops
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from triton.runtime import interpreter

from subulp.ops import pointers
from subulp.ops.triton import launch

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")

# The host reads a number, or a size that depends on numbers.
_READS = {
    "_local_scalar_dense",
    "item",
    "equal",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "unique_consecutive",
    "unique_dim",
    "_unique2",
    "bincount",
}
# They launch nothing.
_FREE = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *("set_", "resize_", "detach_", "lift_fresh"),
}


class GpuTensor(Tensor):
    """A tensor on the pretended GPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> GpuTensor:
        made = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=GPU,
        )
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    def tolist(self) -> Any:
        """Torch refuses to make lists of subclasses."""
        return self.cpu().tolist()

    def __bool__(self) -> bool:
        return bool(self.item())

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} reached a pretended GPU that is not in use")


@dataclass
class Count:
    """What has reached the GPU.

    Attributes:
        kernels: Launches of Triton kernels, by name.
        ops: Launches of PyTorch's own operations, by name.
        uploads: Copies from pinned memory.
        waits: What made the host wait, by name.
        allocated: Bytes of new tensors.
    """

    kernels: Counter[str] = field(default_factory=Counter)
    ops: Counter[str] = field(default_factory=Counter)
    uploads: int = 0
    waits: Counter[str] = field(default_factory=Counter)
    allocated: int = 0

    @property
    def launches(self) -> int:
        return self.kernels.total() + self.ops.total()


class PretendedGpu(TorchDispatchMode):
    """While it is in use, ``cuda`` is a device; ``count`` says what has reached it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Count()
        self.is_captured = False
        self._pins: set[int] = set()

    def tensor(self, there: Tensor) -> GpuTensor:
        """A copy of a CPU tensor, which is not counted."""
        with torch.utils._python_dispatch._disable_current_modes():
            return GpuTensor(there.clone())

    def synchronize(self) -> None:
        """What waits for everything."""
        self.count.waits["synchronize"] += 1

    def numbers(self, there: Tensor) -> Tensor:
        """The CPU tensor behind a tensor, which is not counted."""
        return there.inner if isinstance(there, GpuTensor) else there

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func.namespace == "subulp":
            # What our own operators do is what counts.
            with self:
                return custom_ops.OPDEFS[f"subulp::{func.overloadpacket.__name__}"]._init_fn(
                    *args, **kwargs
                )
        there = [t for t in tree_leaves((args, kwargs)) if isinstance(t, GpuTensor)]
        wrapped = {id(t.inner): t for t in there}
        name = func.overloadpacket.__name__
        target = kwargs.get("device")
        to_gpu = bool(there) if target is None else torch.device(target).type == "cuda"
        if target is not None:
            kwargs["device"] = CPU
        pinned = kwargs.pop("pin_memory", False)
        self._note(func, name, args, kwargs, there, to_gpu)
        plain = tree_map_only(GpuTensor, lambda t: t.inner, (args, kwargs))
        if func in (torch.ops.aten.mm.dtype, torch.ops.aten.mm.dtype_out):
            # CPUs have no product with sums wider than its factors.
            result = plain[0][0].to(plain[0][2]) @ plain[0][1].to(plain[0][2])
            if "out" in plain[1]:
                result = plain[1]["out"].copy_(result)
        elif func is torch.ops.aten._scaled_mm.default:
            result = _scaled_mm(*plain[0], **plain[1])
        elif to_gpu and not there and name == "_to_copy":
            result = plain[0][0].clone().to(plain[1].get("dtype") or plain[0][0].dtype)
        else:
            result = func(*plain[0], **plain[1])
        if pinned:
            self._pins.add(result.data_ptr())
        if not to_gpu and name != "copy_":
            return result
        if there and name == "copy_" and not isinstance(args[0], GpuTensor):
            return result

        known = {memory(t) for t in tree_leaves(plain) if isinstance(t, Tensor)}
        found = {memory(t): t for t in tree_leaves(result) if isinstance(t, Tensor)}
        new = [t for address, t in found.items() if address not in known]
        self.count.allocated += sum(t.untyped_storage().nbytes() for t in new)

        def wrap(t: Tensor) -> Tensor:
            return wrapped[id(t)] if id(t) in wrapped else GpuTensor(t)

        return tree_map_only(Tensor, wrap, result)

    def _note(
        self, func: Any, name: str, args: Any, kwargs: Any, there: list[GpuTensor], to_gpu: bool
    ) -> None:
        if name in _READS and there:
            self.count.waits[name] += 1
        elif name in ("_to_copy", "copy_"):
            from_gpu = isinstance(args[1 if name == "copy_" else 0], GpuTensor)
            into = isinstance(args[0], GpuTensor) if name == "copy_" else to_gpu
            source = args[1 if name == "copy_" else 0]
            if from_gpu and not into:
                self.count.waits["copy to the host"] += 1
            elif into and not from_gpu:
                if source.data_ptr() in self._pins and kwargs.get("non_blocking", False):
                    self.count.uploads += 1
                else:
                    self.count.waits["copy from pageable memory"] += 1
            elif from_gpu:
                self.count.ops[name] += 1
        elif name == "index" and any(
            isinstance(t, GpuTensor) and t.dtype == torch.bool for t in tree_leaves(args[1:])
        ):
            self.count.waits["index by a mask"] += 1
        elif name == "repeat_interleave" and kwargs.get("output_size") is None and there:
            self.count.waits["repeat_interleave without output_size"] += 1
        elif there and not there[0].numel():
            # Nothing to compute.
            pass
        elif (there or to_gpu) and not func.is_view and name not in _FREE:
            self.count.ops[name] += 1


def memory(t: Tensor) -> int:
    """Where the memory of a tensor begins."""
    return t.untyped_storage().data_ptr()


def _scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """What FP8 units compute, of what cuBLAS takes."""
    assert out_dtype is not None
    assert a.is_contiguous(), "the first matrix lies row by row"
    assert b.t().is_contiguous(), "and the second one column by column"
    assert not any(size % 16 for size in b.shape), "in multiples of 16"
    assert bias is None or bias.dtype == out_dtype != torch.float32
    result = a.float() @ b.float() * (scale_a * scale_b)
    return (result if bias is None else result + bias.float()).to(out_dtype)


@cache
def _guard() -> ctypes.CDLL:
    """Compiled here, against this PyTorch."""
    torch_home = Path(torch.__file__).parent
    with TemporaryDirectory() as folder:
        built = Path(folder, "guard.so")
        subprocess.run(
            [
                *("g++", "-std=c++20", "-shared", "-fPIC", f"-I{torch_home}/include"),
                *(Path(__file__).with_name("guard.cpp"), "-o", built),
                *(f"-L{torch_home}/lib", "-lc10"),
            ],
            check=True,
        )
        return ctypes.CDLL(str(built))


@contextlib.contextmanager
def pretended_gpu() -> Iterator[PretendedGpu]:
    """Use a GPU that is not there."""
    _guard()
    gpu = PretendedGpu()
    with contextlib.ExitStack() as stack:
        plain = pointers.is_plain_type
        stack.enter_context(
            _everywhere(plain, lambda kind: kind is GpuTensor or plain(kind)),
        )
        for addresses in (
            pointers.data_ptrs,
            pointers.dense_ptrs,
            # Of tensors that were checked before. Wrappers are made anew for each call, and one
            # that lies where an earlier one lay, of the same kind, is taken for it.
            pointers.held_ptrs,
            pointers.run_ptrs,
        ):
            stack.enter_context(_everywhere(addresses, _of_inner(addresses)))
        stack.enter_context(_everywhere(launch.check_device, lambda kernel, device: None))
        run = interpreter.InterpretedFunction.run

        def counted(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            gpu.count.kernels[function.fn.__name__] += 1
            plain = tree_map_only(GpuTensor, lambda t: t.inner, (args, options))
            with torch.utils._python_dispatch._disable_current_modes():
                return run(function, *plain[0], grid=grid, warmup=warmup, **plain[1])

        stack.enter_context(_attribute(interpreter.InterpretedFunction, "run", counted))
        stack.enter_context(_attribute(torch.cuda, "device", lambda d: contextlib.nullcontext()))
        stream = SimpleNamespace(cuda_stream=0)
        stack.enter_context(_attribute(torch.cuda, "current_stream", lambda d=None: stream))
        stack.enter_context(_attribute(torch.cuda, "synchronize", lambda d=None: gpu.synchronize()))
        stack.enter_context(_attribute(torch.cuda, "get_device_capability", lambda d=None: (9, 0)))
        stack.enter_context(_attribute(torch.cuda, "get_device_name", lambda d=None: "pretended"))
        memory = 1 << 30, 1 << 30
        stack.enter_context(_attribute(torch.cuda, "mem_get_info", lambda d=None: memory))
        stack.enter_context(_attribute(torch.cuda, "_lazy_init", lambda: None))
        stack.enter_context(
            _attribute(torch.cuda, "is_current_stream_capturing", lambda: gpu.is_captured)
        )
        # torch.tensor(numbers, device=) makes them on the CPU and then copies, by way of the mode.
        torch._C._set_only_lift_cpu_tensors(True)
        stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        stack.enter_context(gpu)
        yield gpu


def _of_inner(function: Any) -> Any:
    def call(name: str, tensors: Any, *sizes: Any) -> Any:
        inner = [t.inner if isinstance(t, GpuTensor) else t for t in tensors]
        with torch.utils._python_dispatch._disable_current_modes():
            return function(name, inner, *sizes)

    return call


@contextlib.contextmanager
def _everywhere(function: Any, other: Any) -> Iterator[None]:
    """Replace a function in every module of subulp that has it."""
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] != "subulp":
                continue
            for key, value in list(vars(module).items()):
                if value is function:
                    stack.enter_context(_attribute(module, key, other))
        yield


@contextlib.contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
