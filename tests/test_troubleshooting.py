"""Each message that the page on troubleshooting explains is one of the code or of PyTorch."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.utils.prune
from torch import Tensor

from subulp import nn, optim
from subulp.ops import capture, facts, native

PAGE = Path(__file__).parent.parent / "docs" / "troubleshooting.md"
ERRORS = PAGE.read_text().partition("## Errors")[2].partition("## It runs")[0]
MESSAGES = re.findall(r"^\| `([^`]+)`", ERRORS, re.MULTILINE)

RAISED: dict[str, Callable[[pytest.MonkeyPatch], object]] = {}


def raises(message: str) -> Callable[[Callable[[pytest.MonkeyPatch], object]], None]:
    def register(function: Callable[[pytest.MonkeyPatch], object]) -> None:
        RAISED[message] = function

    return register


def weight(dtype: torch.dtype = torch.bfloat16) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(4, 4, dtype=dtype))


def stepped(kind: type[torch.optim.Optimizer], **options: object) -> torch.optim.Optimizer:
    parameter = weight()
    optimizer = kind([parameter], **options)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@raises("is not available for a parameter of dtype torch.float32")
def _(patch: pytest.MonkeyPatch) -> object:
    return optim.AdamW([weight(torch.float32)], precision="collage-plus")


@raises("mat1 and mat2 must have the same dtype")
def _(patch: pytest.MonkeyPatch) -> object:
    return torch.nn.Linear(4, 4).bfloat16()(torch.ones(1, 4))


@raises("whose step is always one fused pass over memory")
def _(patch: pytest.MonkeyPatch) -> object:
    return optim.AdamW([weight()], amsgrad=True)


@raises("only dense gradients are taken")
def _(patch: pytest.MonkeyPatch) -> object:
    embedding = torch.nn.Embedding(4, 4, sparse=True).bfloat16()
    optimizer = optim.AdamW(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    return optimizer.step()


@raises("the stored components would mean something else")
def _(patch: pytest.MonkeyPatch) -> object:
    saved = stepped(optim.AdamW, precision="master").state_dict()
    return optim.AdamW([weight()], precision="collage-plus").load_state_dict(saved)


@raises("another optimizer saved it")
def _(patch: pytest.MonkeyPatch) -> object:
    return optim.AdamW([weight()]).load_state_dict(stepped(torch.optim.AdamW).state_dict())


@raises("is torch.float32 now, and was torch.bfloat16 when the optimizer was made")
def _(patch: pytest.MonkeyPatch) -> object:
    model = torch.nn.Linear(4, 4).bfloat16()
    optimizer = optim.AdamW(model.parameters())
    model.float()(torch.ones(1, 4)).sum().backward()
    return optimizer.step()


@raises("those of the model are others")
def _(patch: pytest.MonkeyPatch) -> object:
    model = torch.nn.Linear(4, 4)
    optimizer = optim.AdamW(model.parameters())
    model.weight, model.bias = (torch.nn.Parameter(p.clone()) for p in model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    return optimizer.step()


@raises("there is nothing left to clip")
def _(patch: pytest.MonkeyPatch) -> object:
    model = torch.nn.Linear(4, 4)
    with optim.fuse_backward(model, optim.AdamW(model.parameters())):
        model(torch.ones(1, 4)).sum().backward()
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@raises("of accumulate=")
def _(patch: pytest.MonkeyPatch) -> object:
    model = torch.nn.Linear(4, 4)
    optimizer = optim.AdamW(model.parameters())
    with optim.fuse_backward(model, optimizer, accumulate=2):
        model(torch.ones(1, 4)).sum().backward()
        return optimizer.step()


@raises("call handle.backward(loss), not loss.backward()")
def _(patch: pytest.MonkeyPatch) -> object:
    model = torch.nn.Linear(4, 4).bfloat16()
    optim.fuse_backward(model, optim.AdamW(model.parameters()), max_norm=1.0)
    loss: Tensor = model(torch.ones(1, 4, dtype=torch.bfloat16)).sum()
    return loss.backward()


@raises("nothing was updated")
def _(patch: pytest.MonkeyPatch) -> object:
    parameter = weight()
    parameter.grad = torch.full_like(parameter, torch.nan)
    return optim.AdamW([parameter], nonfinite="raise").step()


@raises("the rows have no optimizer")
def _(patch: pytest.MonkeyPatch) -> object:
    head = nn.ExtremeClassifier(8, 64)
    return head(torch.randn(2, 8), torch.tensor([0]), torch.tensor([1]))


@raises("The C++ kernels are missing")
def _(patch: pytest.MonkeyPatch) -> object:
    patch.setenv("SUBULP_LIBRARY", "/nowhere/libsubulp.so")
    return native.library.__wrapped__()


@raises("they come from another version")
def _(patch: pytest.MonkeyPatch) -> object:
    patch.setattr(facts, "expected", lambda sizes: ["one line"])
    return native.library.__wrapped__()


@raises("have been replaced by another tensor")
def _(patch: pytest.MonkeyPatch) -> object:
    head = nn.ExtremeClassifier(4, 8, storage="fp32")
    torch.nn.utils.prune.l1_unstructured(head.table, "codes", amount=0.5)
    return head(torch.ones(1, 4), torch.tensor([0]), torch.tensor([1]))


@raises("a CUDA graph is being captured")
def _(patch: pytest.MonkeyPatch) -> object:
    launch = pytest.importorskip("subulp.ops.triton.launch", reason="Triton is not installed")
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    return launch.upload(torch.device("cuda"))


@raises("take a step before the capture")
def _(patch: pytest.MonkeyPatch) -> object:
    patch.setattr(capture, "is_under_way", lambda device: True)
    return stepped(optim.AdamW, capturable=True)


@raises("capturable=True is for parameters that Triton's kernels update")
def _(patch: pytest.MonkeyPatch) -> object:
    patch.setenv("SUBULP_BACKEND", "cpu")
    return stepped(optim.AdamW, capturable=True)


@raises("the subulp command needs")
def _(patch: pytest.MonkeyPatch) -> object:
    program = "import sys; sys.modules['cyclopts'] = None; import subulp.__main__ as m; m.main()"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    raise RuntimeError(done.stderr)


def test_every_message_of_the_page_is_tried() -> None:
    assert list(RAISED) == MESSAGES


@pytest.mark.parametrize("message", RAISED)
def test_the_message_is_raised(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((ValueError, RuntimeError, FloatingPointError), match=re.escape(message)):
        RAISED[message](monkeypatch)
