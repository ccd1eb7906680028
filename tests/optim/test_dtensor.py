"""DTensors are refused by name, whatever the backend, until steps know shards."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from subulp import optim


@pytest.fixture
def mesh(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_sharded_parameter_is_refused(mesh, backend, monkeypatch):
    if backend:
        monkeypatch.setenv("SUBULP_BACKEND", backend)
    whole = torch.randn(4, 4).bfloat16()
    for precision in ("nearest", "master", "collage-plus"):
        p = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
        with pytest.raises(TypeError, match="parameter 0 is a DTensor: kernels take plain tensors"):
            optim.AdamW([p], precision=precision)

    # And one whose gradient alone is sharded.
    q = nn.Parameter(whole.clone())
    optimizer = optim.AdamW([q])
    q.grad = DTensor.from_local(torch.ones_like(whole), mesh, [Shard(0)])
    with pytest.raises(TypeError, match="the gradient of parameter 0 of group 0 is a DTensor"):
        optimizer.step()
    assert torch.equal(q, whole)
