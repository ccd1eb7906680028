"""Layers that torch's tensor parallelism has divided, on the ranks of a team.

All numbers are small integers, whose sums are exact in any order: bits are those of one process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from subulp import nn as subulp_nn
from subulp import optim
from tests.ranks import device, mesh_of

WEIGHTS = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
# Shape of the mesh, where the weight lies, and where the input does.
LAYOUTS: dict[int, list[tuple[tuple[int, ...], tuple[Placement, ...], tuple[Placement, ...]]]] = {
    1: [((1,), (Shard(0),), (Replicate(),))],
    2: [
        ((2,), (at,), (own,))
        for at in (Replicate(), Shard(0), Shard(1))
        for own in (Replicate(), Shard(0), Shard(1))
    ],
    4: [
        ((4,), (Shard(0),), (Replicate(),)),
        ((4,), (Shard(1),), (Replicate(),)),
        ((2, 2), (Replicate(), Shard(0)), (Shard(0), Replicate())),
        ((2, 2), (Replicate(), Shard(1)), (Shard(0), Replicate())),
        ((2, 2), (Shard(0), Shard(0)), (Replicate(), Replicate())),
        ((2, 2), (Shard(0), Shard(1)), (Shard(0), Replicate())),
        ((2, 2), (Shard(1), Shard(1)), (Replicate(), Shard(0))),
    ],
}


def integers(shape: tuple[int, ...], seed: int) -> Tensor:
    """From -2 to 2, the same on all ranks."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def divided(whole: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """As ``distribute_tensor``, without its communication, which knows no FP8."""
    wide = distribute_tensor(whole.float(), mesh, placements)
    return DTensor.from_local(
        wide.to_local().to(whole.dtype),
        mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def linear(features: tuple[int, int], bias: bool, dtype: torch.dtype) -> subulp_nn.Linear:
    """A whole layer: of so many inputs and outputs."""
    layer = subulp_nn.Linear(*features, bias=bias)
    layer.weight = nn.Parameter(integers((features[1], features[0]), 0).to(dtype))
    if bias:
        layer.bias = nn.Parameter(integers((features[1],), 1).to(dtype))
    return layer.to(device())


def table(shape: tuple[int, int], dtype: torch.dtype) -> subulp_nn.Embedding:
    """A whole table."""
    layer = subulp_nn.Embedding(*shape)
    layer.weight = nn.Parameter(integers(shape, 0).to(dtype))
    return layer.to(device())


def on_mesh(
    layer: nn.Module, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> dict[str, Tensor]:
    """Divide a layer's parameters, in place.

    Returns:
        The parameters that it had.
    """
    wholes = dict(layer.named_parameters())
    for name, whole in wholes.items():
        # A bias goes with the rows of its weight.
        at = tuple(Replicate() if name == "bias" and p == Shard(1) else p for p in placements)
        setattr(layer, name, nn.Parameter(divided(whole.detach(), mesh, at)))
    return wholes


def differences(layer: nn.Module, x: Tensor, mesh: DeviceMesh, layout: Any) -> list[str]:
    """What of a layer on a mesh is not as in one process: its result, and all gradients."""
    at, own = layout
    x = x.to(device())
    wide = x.is_floating_point()
    here = divided(x, mesh, own).requires_grad_(wide)
    whole = x.clone().requires_grad_(wide)
    expected = layer(whole)
    outside = integers(tuple(expected.shape), 2).to(expected)
    expected.backward(outside)
    wholes = on_mesh(layer, mesh, at)
    y = layer(here)
    found = [] if y.dtype == expected.dtype and y.shape == expected.shape else ["kind"]
    # Whichever way the gradient comes: all on each rank.
    y = y.redistribute(mesh, [Replicate()] * mesh.ndim)
    if not torch.equal(y.to_local(), expected):
        found.append("result")
    y.backward(divided(outside, mesh, (Replicate(),) * mesh.ndim))
    pairs = {name: (p, wholes[name]) for name, p in layer.named_parameters()}
    if wide:
        pairs["x"] = (here, whole)
    for name, (ours, theirs) in pairs.items():
        assert ours.grad is not None
        assert theirs.grad is not None
        if ours.grad.dtype != theirs.grad.dtype:
            found.append(f"dtype of the gradient of {name}")
        reduced = DTensor.from_local(
            ours.grad.to_local().float(),
            mesh,
            ours.grad.placements,
            run_check=False,
            shape=ours.grad.shape,
            stride=ours.grad.stride(),
        )
        if not torch.equal(reduced.full_tensor(), theirs.grad.float()):
            found.append(f"gradient of {name}")
    return found


def linears(count: int) -> dict[str, list[str]]:
    """Differences of linear layers, by case."""
    found = {}
    for shape, at, own in LAYOUTS[count]:
        mesh = mesh_of(shape)
        for dtype in WEIGHTS:
            for bias in (False, True):
                # Uneven parts, and an output of fewer rows than there are ranks.
                for features in ((7, 5), (5, 3)):
                    for activations in (torch.float32, torch.bfloat16):
                        layer = linear(features, bias, dtype)
                        x = integers((3, 2, features[0]), 3).to(activations)
                        case = f"{shape} {at} {own} {dtype} {bias} {features} {activations}"
                        found[case] = differences(layer, x, mesh, (at, own))
    return found


def tables(count: int) -> dict[str, list[str]]:
    """Differences of tables, by case."""
    found = {}
    for shape, at, own in LAYOUTS[count]:
        mesh = mesh_of(shape)
        for dtype in WEIGHTS:
            for rows in (11, 3):
                ids = torch.randint(rows, (4, 3), generator=torch.Generator().manual_seed(1))
                case = f"{shape} {at} {own} {dtype} {rows}"
                found[case] = differences(table((rows, 5), dtype), ids, mesh, (at, own))
    return found


class Block(nn.Module):
    """A table, norm and two matrices, all of them narrow."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = subulp_nn.Embedding(11, 8)
        self.norm = subulp_nn.LayerNorm(8)
        self.up = subulp_nn.Linear(8, 12)
        self.down = subulp_nn.Linear(12, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        return x + self.down(torch.relu(self.up(self.norm(x))))


def train(count: int, precision: str, *, compiled: bool = False) -> list[Tensor]:
    """Parameters after four steps of a block that ``parallelize_module`` has divided, if at all."""
    torch.manual_seed(0)
    block = Block().to(device(), torch.bfloat16)
    if count > 1:
        plan = {
            "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh_of((count,)), plan)
    forward = torch.compile(block, fullgraph=True) if compiled else block
    optimizer = optim.AdamW(block.named_parameters(), lr=1e-2, precision=precision, seed=1)
    for step in range(4):
        ids = torch.randint(11, (2, 4), generator=torch.Generator().manual_seed(step))
        y = forward(ids.to(device()))
        y.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [
        (p.full_tensor() if isinstance(p, DTensor) else p).detach().float().cpu()
        for p in block.parameters()
    ]


def refusals() -> dict[str, str]:
    """Messages of what cannot be computed."""
    mesh = mesh_of((2,))
    other = mesh_of((1, 2), ("a", "b"))["b"]
    messages = {}

    def tried(name: str, layer: nn.Module, x: Tensor) -> None:
        try:
            layer(x)
        except (TypeError, ValueError, IndexError) as error:
            messages[name] = f"{type(error).__name__}: {error}"

    x = integers((2, 6), 0)
    ids = torch.tensor([1, 2])
    everywhere = (Replicate(),)
    layer, rows = linear((6, 4), True, torch.bfloat16), table((5, 4), torch.bfloat16)
    tried("plain weight", layer, divided(x, mesh, everywhere))
    tried("plain table", rows, divided(ids, mesh, everywhere))
    on_mesh(layer, mesh, (Shard(0),))
    on_mesh(rows, mesh, (Shard(0),))
    tried("plain x", layer, x)
    tried("plain ids", rows, ids)
    tried("ids too large", rows, divided(ids + 3, mesh, everywhere))
    tried("negative ids", rows, divided(ids - 2, mesh, everywhere))
    tried("other mesh", layer, divided(x, other, everywhere))
    layer.weight.grad_dtype = torch.float32
    tried("grad_dtype", layer, divided(x, mesh, everywhere))
    layer.weight.grad_dtype = torch.bfloat16
    layer.products = "fp8"
    tried("fp8", layer, divided(x, mesh, everywhere))
    layer = linear((6, 4), False, torch.bfloat16)
    part = DTensor.from_local(layer.weight.detach(), mesh, (Partial(),), run_check=False)
    layer.weight = nn.Parameter(part)
    tried("partial", layer, divided(x, mesh, everywhere))
    return messages
