"""Parameters and states of every strategy, whole or divided over a mesh, and all their bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from subulp import optim
from subulp.ops.strategy import FIXED, parse_strategy
from tests.ranks import mesh_of

# Uneven for two and four ranks; fewer rows than ranks; four dimensions; long runs; a scalar.
SHAPES = ((7, 5), (3,), (4, 3, 5, 2), (2, 1200), ())
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
}
PRECISIONS = (*FIXED, "extra-bits-5", "extra-bits-8-stochastic", "extra-bits-16-stochastic")
# Shape of the mesh, and the dimension that each of its own divides; None for replicas.
LAYOUTS = {
    1: [((1,), (0,))],
    2: [((2,), (0,)), ((2,), (1,)), ((2,), (None,))],
    4: [
        ((4,), (0,)),
        ((2, 2), (None, 0)),
        ((2, 2), (0, 1)),
        ((2, 2), (0, 0)),
        ((2, 2), (2, 1)),
    ],
}


def cases() -> list[tuple[str, str, str]]:
    """Optimizer, precision and dtype: every strategy for every dtype that has it."""
    result = []
    for precision in PRECISIONS:
        for name, dtype in DTYPES.items():
            if dtype in parse_strategy(precision).dtypes:
                result.append(("AdamW" if len(result) % 3 else "SGD", precision, name))
    return result


def values(t: int, dtype: torch.dtype) -> list[Tensor]:
    """Parameters (t = 0) and gradients of step t, whole."""
    generator = torch.Generator().manual_seed(t)
    return [
        (0.1 * torch.randn(shape, generator=generator) * (10.0 ** (t % 3))).to(dtype)
        for shape in SHAPES
    ]


def placements_for(tensor: Tensor, dims: Sequence[int | None]) -> list[Placement]:
    """Dimensions that a tensor does not have count from its last one; a scalar is replicated."""
    if tensor.dim() == 0:
        return [Replicate() for _ in dims]
    return [Replicate() if d is None else Shard(min(d, tensor.dim() - 1)) for d in dims]


def divided(tensor: Tensor, mesh: DeviceMesh, dims: Sequence[int | None]) -> Tensor:
    """A DTensor; every rank has the whole, so that nothing is sent."""
    own = tensor.to(mesh.device_type)
    return distribute_tensor(own, mesh, placements_for(own, dims), src_data_rank=None)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor's bits; gloo does not send FP8."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    part = tensor.to_local().detach()
    codes = part.view(torch.uint8) if part.dtype.itemsize == 1 else part
    together = DTensor.from_local(
        codes,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    ).full_tensor()
    return together.view(part.dtype) if part.dtype.itemsize == 1 else together


def optimizer_of(kind: str, params: list[nn.Parameter], precision: str) -> optim.AdamW | optim.SGD:
    options = {"lr": 0.05, "weight_decay": 0.1, "precision": precision, "seed": 11}
    if kind == "SGD":
        return optim.SGD(params, momentum=0.9, **options)
    return optim.AdamW(params, **options)


def bits(params: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All that a step decides, as whole tensors of integers."""
    state = optimizer.state_dict()["state"]
    found = [*params, *(v for i in sorted(state) for _, v in sorted(state[i].items()))]
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    wholes = map(whole, found)
    return [w.contiguous().view(integers[w.dtype.itemsize]).cpu().clone() for w in wholes]


def train(
    case: tuple[str, str, str],
    layout: tuple[tuple[int, ...], tuple[int | None, ...]] | None,
    steps: int = 3,
) -> list[Tensor]:
    """The bits after some steps of one optimizer; ``None`` for plain tensors."""
    kind, precision, name = case
    mesh = None if layout is None else mesh_of(layout[0])

    def placed(tensor: Tensor) -> Tensor:
        return tensor if layout is None or mesh is None else divided(tensor, mesh, layout[1])

    params = [nn.Parameter(placed(x)) for x in values(0, DTYPES[name])]
    optimizer = optimizer_of(kind, params, precision)
    for t in range(1, steps + 1):
        for p, g in zip(params, values(t, DTYPES[name]), strict=True):
            p.grad = placed(g)
        optimizer.step()
    return bits(params, optimizer)


def train_all(count: int) -> dict[str, list[Tensor]]:
    """By case and layout, what every rank of a mesh of ``count`` sees of the whole."""
    assert dist.get_world_size() == count
    return {
        f"{case} {layout}": train(case, layout) for case in cases() for layout in LAYOUTS[count]
    }
