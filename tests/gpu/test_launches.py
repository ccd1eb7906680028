"""What steps launch on a real GPU, and that the host never waits for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from subulp import nn, optim
from subulp.nn.cached_table import EmbeddingTable

pytestmark = pytest.mark.gpu

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """An operation of PyTorch's that has the host wait raises an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def launches(step) -> list[str]:
    """The kernels of a step, by name, in their order; the step has run before."""
    with no_waits():
        step()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [e.name for e in events if not e.name.startswith(("Memcpy", "Memset"))]


def ours(names: list[str]) -> list[str]:
    return [name for name in names if name.endswith("_kernel")]


@pytest.mark.parametrize(("dtype", "expected"), [(BF16, 1), (torch.float16, 1), (E4M3, 2)], ids=str)
def test_a_step_of_an_optimizer(dtype, expected):
    params = [torch.randn(n, device="cuda").to(dtype) for n in (1024, 37, 4096)]
    for p in params:
        p.grad = torch.randn(p.shape, device="cuda").to(dtype)
    optimizer = optim.AdamW(params, lr=1e-3, precision="collage-plus", seed=0)
    optimizer.step()
    found = launches(optimizer.step)
    assert len(ours(found)) == expected, found
    # Beside them, PyTorch's own count of the steps at most.
    assert len(found) <= expected + 2, found


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
def test_a_step_that_may_be_captured(dtype):
    params = [torch.randn(n, device="cuda").to(dtype) for n in (1024, 37, 4096)]
    for p in params:
        p.grad = torch.randn(p.shape, device="cuda").to(dtype)
    lr = torch.tensor(1e-3, device="cuda")
    optimizer = optim.AdamW(params, lr=lr, precision="collage-plus", seed=0, capturable=True)
    optimizer.step()
    scales = ["scales_kernel"] if dtype == E4M3 else []
    assert launches(optimizer.step) == ["counts_kernel", *scales, "adam_step_kernel"]


def test_tables():
    bags = nn.CachedEmbeddingBags(
        [EmbeddingTable(1000, 16, "int8", 0.1)] * 26, narrow_above=0, seed=0, device="cuda"
    )
    optim.RowAdagrad(bags, lr=0.1)
    values = torch.arange(26 * 64, device="cuda") % 1000
    offsets = torch.arange(0, 26 * 64 + 1, 4, device="cuda")
    grad = torch.randn(16, 26 * 16, device="cuda")
    bags(values, offsets=offsets).backward(grad)
    out = bags(values, offsets=offsets)
    assert ours(launches(lambda: bags(values, offsets=offsets))) == ["lookup_kernel"]
    found = launches(lambda: out.backward(grad, retain_graph=True))
    assert ours(found) == ["order_kernel", "spans_kernel", "update_kernel"], found


@pytest.mark.parametrize("products", ["fp32", "bf16", "fp8"])
def test_a_head(products):
    if products == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 units begin with sm_89")
    head = nn.ExtremeClassifier(64, 4096, chunks=8, seed=0, products=products, device="cuda")
    optim.RowSGD(head, lr=0.1)
    x = torch.randn(16, 64, device="cuda", requires_grad=True)
    rows, labels = torch.arange(16, device="cuda"), torch.arange(16, device="cuda") * 200
    head(x, rows, labels).backward()
    found = launches(lambda: head(x, rows, labels).backward())
    assert found.count("update_kernel") == found.count("logistic_kernel") == 8, found


def test_a_linear_layer_of_fp8_weights():
    layer = nn.Linear(512, 1024).to(E4M3).cuda()
    x = torch.randn(8, 512, device="cuda", dtype=BF16, requires_grad=True)
    out = layer(x)
    grad = torch.randn_like(out)

    def backward():
        x.grad = None
        layer.zero_grad()
        out.backward(grad, retain_graph=True)

    backward()
    # One product and two; a library may add the parts of each in a kernel of its own.
    assert len(launches(lambda: layer(x))) <= 3 + 1
    assert len(launches(backward)) <= 6 + 2


@pytest.mark.parametrize("partition", ["tensor", "block-128x128", "subchannel-128"])
def test_a_mixture(partition):
    layer = nn.MoRLinear(256, 128, mor=nn.MoR("tensor", partition)).to(BF16).cuda()
    x = torch.randn(128, 256, device="cuda", dtype=BF16, requires_grad=True)
    grad = torch.randn(128, 128, device="cuda", dtype=BF16)

    def both_passes():
        x.grad = None
        layer.zero_grad()
        layer(x).backward(grad)

    both_passes()
    found = launches(both_passes)
    assert found.count("product_kernel") == 3, found
    assert len(found) - 3 <= 20, found


def test_a_fused_backward_pass_that_clips_waits_for_nothing():
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))).to(BF16).cuda()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3, precision="collage-plus", seed=0)
    x = torch.randn(8, 64, device="cuda", dtype=BF16)
    with optim.fuse_backward(model, optimizer):
        for _ in range(2):
            model(x).float().square().sum().backward()
            optimizer.step()
        with no_waits():
            model(x).float().square().sum().backward()
            optimizer.step()
