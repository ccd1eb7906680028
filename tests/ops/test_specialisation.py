"""What is compiled ahead of time is what Triton compiles at a launch with the same arguments."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton.language as tl
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from subulp.ops.triton import launch

VALUES = (0, 1, 2, 15, 16, 17, 2048, -1, -16, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**31 + 1)
VALUES += (2**63 - 16, 2**63 - 1, 2**63, 2**64 - 1)


def kernel(x, number, other, scale, BLOCK: tl.constexpr):  # noqa: N803
    pass


# Also where kernels are interpreted, functions can be made ready to compile.
KERNELS = {
    "all": JITFunction(kernel),
    "varying": JITFunction(kernel, do_not_specialize=["number"]),
    "unaligned": JITFunction(kernel, do_not_specialize_on_alignment=["number"]),
    "others": JITFunction(kernel, do_not_specialize=["x", "other"]),
    "others unaligned": JITFunction(kernel, do_not_specialize_on_alignment=["x", "other"]),
}


def at_launch(function: JITFunction, target: launch.Target, *values: object) -> ASTSource:
    """What Triton itself compiles."""
    backend = make_backend(launch.gpu_of(target))
    binder = create_function_from_signature(function.signature, function.params, backend)
    bound, specialisation, options = binder(*values)
    _, signature, constants, attributes = function._pack_args(
        backend, {"enable_fp_fusion": False}, bound, specialisation, options
    )
    attributes = {place: known for place, known in attributes.items() if known}
    return ASTSource(function, signature, constants, attributes)


def is_refused(target: launch.Target) -> bool:
    try:
        launch.gpu_of(target)
    except RuntimeError:
        return True
    return False


TARGETS = [target for target in (90, "gfx942") if not is_refused(target)]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", KERNELS)
def test_integers(name, value, target):
    function = KERNELS[name]
    expected = at_launch(function, target, torch.zeros(16), value, 48, 1.0, 128)
    arguments = {"x": "*fp32", "number": value, "other": 48, "scale": "fp32"}
    found = launch.source_for(function, target, arguments, BLOCK=128)
    assert found.signature == expected.signature
    assert found.constants == expected.constants
    assert found.attrs == expected.attrs
