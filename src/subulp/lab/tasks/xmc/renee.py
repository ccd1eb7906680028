"""The baseline of the ELMO paper: mixed FP16-FP32 precision, master weights and momentum.

Renee (Jain et al., 2023), as section 4.4 of the ELMO paper accounts for it: FP32 weights and
momentum, an FP16 copy of the weights for the products, all logits at once in FP16, a gradient of
the weights in FP16 that is widened to FP32, and a factor on the loss against underflow.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ....nn.head_batch import merged
from ....nn.ranks import Ranks
from ....nn.top_k import TopK
from ....optim.shards import local

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MOMENTUM = 0.9
INITIAL_LOSS_SCALE = 2.0**10
GROWTH_INTERVAL = 2000
"""Steps without overflow after which the factor on the loss doubles, as in PyTorch's GradScaler."""


class ReneeClassifier(nn.Module):
    """A classifier over all labels at once, with the loss's gradient written out.

    Like :class:`subulp.nn.ExtremeClassifier` it updates itself in the forward pass, from the
    learning rate of :class:`subulp.optim.RowSGD`. Products are computed in FP32 from FP16 operands
    where FP16 units are missing.

    A step whose gradient overflows FP16 is skipped and counted, and the factor on the loss is
    halved.

    On a mesh, ranks share the labels: weights and momentum are DTensors. The embeddings' gradient
    is a sum of what the ranks have in FP16.

    Args:
        dim: Size of an embedding.
        num_labels: Number of labels.
        seed: Seed of the initial weights, which are those of ``ExtremeClassifier``.
        mesh: As of ``ExtremeClassifier`` (default: ``None``).
    """

    momentum: Tensor

    def __init__(
        self, dim: int, num_labels: int, seed: int, mesh: DeviceMesh | None = None
    ) -> None:
        super().__init__()
        self.ranks = None if mesh is None else Ranks(mesh)
        bound = math.sqrt(6 / (dim + num_labels))
        weight = torch.empty(num_labels, dim)
        weight.uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))
        # As torch divides the rows of a DTensor.
        share = -(-num_labels // (1 if self.ranks is None else self.ranks.size))
        self._first = min(num_labels, 0 if self.ranks is None else self.ranks.rank * share)
        if mesh is not None:
            weight = weight[self._first : self._first + share].to(mesh.device_type)
            weight = _whole_of(weight, mesh, num_labels, dim)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("momentum", torch.zeros_like(weight))
        self.row_optimizer: Any = None
        self.steps = 0
        self.register_buffer("loss_scale", torch.tensor(INITIAL_LOSS_SCALE))
        self.register_buffer("finite_steps", torch.tensor(0))
        self.register_buffer("skipped_steps", torch.tensor(0))

    def count(self, finite: bool) -> None:
        """Adapt the factor on the loss to a step that was finite or not."""
        scale, steps = self.get_buffer("loss_scale"), self.get_buffer("finite_steps")
        if not finite:
            steps.zero_()
            scale.div_(2)
            self.get_buffer("skipped_steps").add_(1)
            return
        steps.add_(1)
        if steps % GROWTH_INTERVAL == 0:
            scale.mul_(2)

    @property
    def own_weight(self) -> Tensor:
        """The weights of the labels that this rank has."""
        return local(self.weight.detach())

    @property
    def num_labels(self) -> int:
        """Number of labels."""
        return self.weight.shape[0]

    @property
    def row_parameters(self) -> list[nn.Parameter]:
        """The weights, for :class:`subulp.optim.RowSGD`."""
        return [self.weight]

    def forward(
        self, embeddings: Tensor, label_rows: Tensor, label_cols: Tensor, *, loss: bool = False
    ) -> Tensor:
        """As of ``ExtremeClassifier``, with the loss summed over instances and labels."""
        value: Tensor = _Step.apply(  # type: ignore[no-untyped-call]
            embeddings, self, label_rows, label_cols, loss
        )
        return value

    def gather(self, x: Tensor, rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor, Tensor, Any]:
        """The batch of all ranks, with the pairs of own labels; and the sizes of its parts."""
        if self.ranks is None:
            return x, rows, cols, [len(x)]
        sizes = self.ranks.gather_numbers([len(x), len(rows)])
        counts, pairs = ([size[i] for size in sizes] for i in range(2))
        x = self.ranks.gather(x, counts)
        before = sum(counts[: self.ranks.rank])
        rows, cols = (self.ranks.gather(t, pairs) for t in (rows + before, cols))
        cols = cols - self._first
        mine = (cols >= 0) & (cols < len(self.own_weight))
        return x, rows[mine], cols[mine], counts

    @torch.no_grad()
    def topk(self, embeddings: Tensor, k: int = 5) -> tuple[Tensor, Tensor]:
        """The k highest logits, FP32 ``(batch, k)``, and their labels."""
        none = torch.zeros(0, dtype=torch.int64, device=embeddings.device)
        x, _, _, counts = self.gather(embeddings.half(), none, none)
        weight = self.own_weight
        scores = _product(x, weight.half().t())
        if self.ranks is None:
            best = scores.float().topk(k, dim=1)
            return best.values, best.indices
        found = TopK(len(x), k, x.device)
        if len(weight):
            found.add(scores.float(), self._first + torch.arange(len(weight), device=x.device))
        found = merged(self.ranks, found, counts, k)
        return found.scores, found.labels


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, head: ReneeClassifier, rows: Tensor, cols: Tensor, loss: bool
    ) -> Tensor:
        ranks = head.ranks
        narrow, rows, cols, counts = head.gather(x.detach().half(), rows, cols)
        own = head.own_weight
        weight = own.half()
        logits = _product(narrow, weight.t())
        value = torch.full((), math.nan)
        if loss:
            total = nn.functional.softplus(logits.float()).sum()
            value = total - logits[rows, cols].float().sum()
            value = value if ranks is None else ranks.add_(value)
        gradient = logits.sigmoid_()
        gradient[rows, cols] -= 1
        scale = head.get_buffer("loss_scale")
        gradient.mul_(scale)
        grad_x = _product(gradient, weight).float() / scale
        grad_weight = _product(gradient.t(), narrow).float().div_(scale)
        wrong = ~(_is_finite(grad_weight) & _is_finite(grad_x))
        if ranks is not None:
            wrong = ranks.add_(wrong.float())
            # Of the whole batch's loss: ranks average the gradients of an encoder.
            grad_x = ranks.add_and_scatter(grad_x, counts) * ranks.size
        finite = not bool(wrong)
        (group,) = head.row_optimizer.groups_of((head.weight,))
        head.steps += 1
        head.count(finite)
        if finite:
            grad_weight.add_(own, alpha=group["weight_decay"])
            momentum = local(head.momentum)
            momentum.mul_(MOMENTUM).add_(grad_weight, alpha=1 - MOMENTUM)
            own.sub_(momentum, alpha=group["lr"])
        ctx.save_for_backward((grad_x if finite else torch.zeros_like(grad_x)).to(x.dtype))
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (grad_x,) = ctx.saved_tensors
        return grad_x * grad.to(grad_x.dtype), None, None, None, None


def _whole_of(part: Tensor, mesh: DeviceMesh, *shape: int) -> Tensor:
    from torch.distributed.tensor import DTensor, Shard  # noqa: PLC0415

    return DTensor.from_local(
        part, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
    )


def _is_finite(x: Tensor) -> Tensor:
    """Whether all of it is, without a second tensor of its size."""
    if not x.numel():
        return torch.ones((), dtype=torch.bool, device=x.device)
    low, high = x.aminmax()
    return torch.isfinite(low) & torch.isfinite(high)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """FP16 operands, FP32 sums, FP16 result."""
    if a.is_cuda:
        return a @ b
    return (a.float() @ b.float()).half()
