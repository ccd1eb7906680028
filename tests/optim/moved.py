"""States that move into other optimizers, precisions and averages, whole or divided over a mesh."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from subulp import optim
from tests.ranks import mesh_of

from .sharded import DTYPES, LAYOUTS, bits, divided, values, whole

CASES = (
    ("fp32", "fp32", "fp32"),
    ("stochastic", "extra-bits-5", "bf16"),
    ("master", "extra-bits-12", "fp16"),
    ("collage-plus", "nearest", "e4m3"),
)
"""A precision, another one, and the parameters' dtype."""


def move(
    case: tuple[str, str, str], layout: tuple[tuple[int, ...], tuple[int | None, ...]] | None
) -> list[Tensor]:
    """The bits at the end of a way from torch through both precisions, and of averages."""
    first, second, name = case
    mesh = None if layout is None else mesh_of(layout[0])

    def placed(tensor: Tensor) -> Tensor:
        return tensor if layout is None or mesh is None else divided(tensor, mesh, layout[1])

    def train(params: nn.ParameterList, opt: torch.optim.Optimizer, t: int) -> None:
        for p, g in zip(params, values(t, p_dtype := params[0].dtype), strict=True):
            assert g.dtype == p_dtype
            p.grad = placed(g)
        opt.step()

    def parameters(dtype: torch.dtype) -> nn.ParameterList:
        return nn.ParameterList(nn.Parameter(placed(x)) for x in values(0, dtype))

    wide, narrow, again = (parameters(d) for d in (torch.float32, *[DTYPES[name]] * 2))
    theirs = torch.optim.AdamW(wide, lr=0.05, foreach=False)
    train(wide, theirs, 1)
    ours = optim.AdamW(narrow, precision=first, seed=11)
    ours.import_state_dict(theirs.state_dict())
    kind = "collage-light" if name == "e4m3" else "stochastic"
    averaged = optim.AveragedModel(narrow, ours, decay=0.5, precision=kind)
    for t in (2, 3):
        train(narrow, ours, t)
        averaged.update_parameters(narrow)
    for p, q in zip(again, narrow, strict=True):
        with torch.no_grad():
            p.copy_(q)
    other = optim.AdamW(again, precision=second, seed=11)
    other.import_state_dict(ours.state_dict())
    ours.change_precision(second)
    found = bits(list(narrow), ours)
    for a, b in zip(found, bits(list(again), other), strict=True):
        assert torch.equal(a, b), (case, layout, a.shape, a.dtype)
    train(narrow, ours, 4)
    theirs.load_state_dict(ours.export_state_dict())
    train(wide, theirs, 5)
    return [*found, *bits(list(narrow), ours), *map(whole, averaged.module.parameters())]


def move_all(count: int) -> dict[str, list[Tensor]]:
    """By case and layout, what every rank of a mesh of ``count`` sees of the whole."""
    assert dist.get_world_size() == count
    return {
        f"{case} {layout}": move(case, layout) for case in CASES for layout in LAYOUTS[count][:2]
    }
