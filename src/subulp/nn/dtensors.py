"""Layers whose parameters torch's tensor parallelism has divided: each rank computes with its own.

The functions of narrow layers are made of pieces that DTensor does not know. So a rank hands its
shards to them as plain tensors, and says of the result what every rank has: rows of a weight give
a shard of the output, columns a part of each sum. Which collectives follow is DTensor's concern.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .narrow import gradient_dtype

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def is_dtensor(value: object) -> bool:
    """Whether it is a DTensor."""
    if not isinstance(value, Tensor) or type(value) in (Tensor, torch.nn.Parameter):
        return False
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    return isinstance(value, DTensor)


def linear_of_shards(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor],
) -> DTensor:
    """A linear layer of DTensors: ``multiply`` with what this rank has.

    Args:
        x: ``(..., in_features)``; moved to where the weight needs it.
        weight: ``(out_features, in_features)``, replicated or divided in either dimension.
        bias: ``(out_features,)`` or ``None``.
        multiply: The layer of plain tensors.

    Returns:
        ``(..., out_features)``: a shard where the weight's rows are divided, a part of each sum
        where its columns are.

    Raises:
        TypeError: Some are DTensors, and some are plain tensors.
        ValueError: They are on different meshes, or placed as nothing here can compute with, or
            the weight has a ``grad_dtype`` of its own (unseen in graphs of ``torch.compile``).
    """
    from torch.distributed.tensor import Partial, Replicate, Shard  # noqa: PLC0415

    x, weight = _on_one_mesh("x", x, weight)
    mesh, last = weight.device_mesh, x.dim() - 1
    placed = _Placed()
    biases: list[Placement] = []
    bias_grads: list[Placement] = []
    adds_bias = True
    for dim, (own, at) in enumerate(zip(x.placements, weight.placements, strict=True)):
        if at == Shard(0):
            placed.add(Replicate(), Partial(), Shard(0), Shard(last))
            biases.append(Shard(0))
            bias_grads.append(Shard(0))
        elif at == Shard(1):
            placed.add(Shard(last), Shard(last), Shard(1), Partial())
            # Of all parts of a sum the first has the bias.
            adds_bias &= mesh.get_local_rank(dim) == 0
            biases.append(Replicate())
            bias_grads.append(Partial())
        else:
            batch = _batch(own, last)
            placed.add(batch, batch, _summed(batch), batch)
            biases.append(Replicate())
            bias_grads.append(_summed(batch))
    x_here = _moved(x, placed.inputs).to_local(grad_placements=placed.input_grads)
    weight_here = weight.to_local(grad_placements=placed.weight_grads)
    bias_here = None
    if bias is not None:
        bias, _ = _on_one_mesh("bias", bias, weight)
        bias_here = _moved(bias, biases).to_local(grad_placements=bias_grads)
        if not adds_bias:
            wide = bias_here.float()
            bias_here = wide.masked_fill(torch.ones_like(wide, dtype=torch.bool), 0.0)
    if weight_here.numel():
        y = multiply(x_here, weight_here, bias_here)
    else:
        wide_bias = None if bias_here is None else bias_here.float()
        y = F.linear(x_here.float(), weight_here.float(), wide_bias).to(x.dtype)
    return placed.output(y, weight, (*x.shape[:-1], weight.shape[0]))


def embedding_of_shards(
    ids: Tensor, weight: Tensor, look_up: Callable[[Tensor, Tensor], Tensor]
) -> DTensor:
    """A lookup in a table that is a DTensor: each rank looks up what it has.

    Args:
        ids: Row numbers, any shape; moved to where the table needs them.
        weight: ``(num_embeddings, embedding_dim)``, replicated or divided in either dimension.
        look_up: The lookup of plain tensors.

    Returns:
        ``(*ids.shape, embedding_dim)``: a shard where the table's columns are divided, a part of
        each sum, the other parts being 0, where its rows are.

    Raises:
        TypeError: One is a DTensor, and one is a plain tensor.
        ValueError: They are on different meshes, or placed as nothing here can compute with, or
            the table has a ``grad_dtype`` of its own (unseen in graphs of ``torch.compile``).
    """
    from torch.distributed.tensor import Partial, Replicate, Shard  # noqa: PLC0415

    ids, weight = _on_one_mesh("ids", ids, weight)
    mesh = weight.device_mesh
    placed = _Placed()
    # The rows of this rank, while the dimensions of the mesh divide them one after the other.
    first, count = 0, weight.shape[0]
    for dim, (own, at) in enumerate(zip(ids.placements, weight.placements, strict=True)):
        if at == Shard(0):
            placed.add(Replicate(), Replicate(), Shard(0), Partial())
            size = -(-count // mesh.size(dim))
            start = min(mesh.get_local_rank(dim) * size, count)
            first, count = first + start, min(size, count - start)
        elif at == Shard(1):
            placed.add(Replicate(), Replicate(), Shard(1), Shard(ids.dim()))
        else:
            batch = _batch(own, ids.dim())
            placed.add(batch, batch, _summed(batch), batch)
    ids_here = _moved(ids, placed.inputs).to_local()
    weight_here = weight.to_local(grad_placements=placed.weight_grads)
    if weight_here.shape[0] != count:
        raise ValueError(
            f"weight has {weight_here.shape[0]} rows on this rank: expected {count}, as "
            "distribute_tensor divides them"
        )
    if weight_here.numel() == 0:
        # The sum of nothing, which gives the shard a gradient as empty as it is.
        y = torch.zeros(*ids_here.shape, weight_here.shape[1], device=ids_here.device)
        y = y + weight_here.float().sum()
    elif count == weight.shape[0]:
        y = look_up(ids_here, weight_here)
    else:
        here = (ids_here >= first) & (ids_here < first + count)
        # What no rank has is one too far here too, for the lookup to refuse.
        elsewhere = torch.where((ids_here >= 0) & (ids_here < weight.shape[0]), 0, count)
        y = look_up(torch.where(here, ids_here - first, elsewhere), weight_here)
        y = torch.where(here[..., None], y, 0.0)
    return placed.output(y, weight, (*ids.shape, weight.shape[1]))


class _Placed:
    """Where tensors lie, by dimension of the mesh."""

    def __init__(self) -> None:
        self.inputs: list[Placement] = []
        self.input_grads: list[Placement] = []
        self.weight_grads: list[Placement] = []
        self.outputs: list[Placement] = []

    def add(
        self, input: Placement, input_grad: Placement, weight_grad: Placement, output: Placement
    ) -> None:
        self.inputs.append(input)
        self.input_grads.append(input_grad)
        self.weight_grads.append(weight_grad)
        self.outputs.append(output)

    def output(self, y: Tensor, weight: DTensor, shape: Sequence[int]) -> DTensor:
        """What a rank has computed, as its part of the whole."""
        from torch.distributed.tensor import DTensor  # noqa: PLC0415

        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            y,
            weight.device_mesh,
            self.outputs,
            run_check=False,
            shape=torch.Size(shape),
            stride=stride,
        )


def _on_one_mesh(name: str, tensor: Tensor, weight: Tensor) -> tuple[DTensor, DTensor]:
    """Both; raise unless they are DTensors on one mesh, the weight placed as layers know it."""
    from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: PLC0415

    if not (isinstance(tensor, DTensor) and isinstance(weight, DTensor)):
        plain, other = ("weight", name) if is_dtensor(tensor) else (name, "weight")
        raise TypeError(
            f"{plain} is a plain tensor, and {other} is a DTensor: divide the layer with "
            "parallelize_module, which makes DTensors of both"
        )
    if tensor.device_mesh != weight.device_mesh:
        raise ValueError(
            f"{name} is on {tensor.device_mesh}, and weight on {weight.device_mesh}: "
            "expected one mesh"
        )
    # Dynamo cannot ask a DTensor for its grad_dtype.
    if not torch.compiler.is_compiling() and gradient_dtype(weight) != weight.dtype:
        raise ValueError(
            f"weight has grad_dtype {gradient_dtype(weight)}, and as a DTensor it gets its "
            f"gradient in {weight.dtype}: leave grad_dtype as it is"
        )
    for placement in weight.placements:
        if placement not in (Replicate(), Shard(0), Shard(1)):
            raise ValueError(
                f"weight is placed as {placement}: expected Replicate(), Shard(0) or Shard(1)"
            )
    return tensor, weight


def _moved(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    """The tensor where it is needed.

    One that lies there stays itself: its gradient may be in parts, which torch would else sum up in
    the gradient's dtype, FP8 too.
    """
    if tuple(tensor.placements) == tuple(placements):
        return tensor
    return tensor.redistribute(tensor.device_mesh, placements)


def _batch(own: Placement, last: int) -> Placement:
    """Where an input stays beside a weight that all have: divided by its leading dimensions."""
    from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415

    return own if any(own == Shard(i) for i in range(last)) else Replicate()


def _summed(batch: Placement) -> Placement:
    """The gradient of what all have, of an input that is divided or not."""
    from torch.distributed.tensor import Partial, Replicate  # noqa: PLC0415

    return Partial() if batch.is_shard() else Replicate()
