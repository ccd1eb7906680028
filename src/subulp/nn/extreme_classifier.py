"""A linear classifier over millions of labels that updates its own rows.

ELMO ("Efficiency via Low-precision and Peak Memory Optimization in Large Output Spaces"). The rows
stay narrow, there is no gradient, momentum or master copy of them, and logits exist for one chunk
of labels at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..numerics import BF16, E4M3, Format
from ..numerics.int_rows import IntFormat
from ..ops import bf16_product
from ..ops.bf16_product import bf16_mm
from ..ops.graph_breaks import between_graphs
from ..ops.head import HeadJob, Products, RandomAddress, Rounding, fp8, head_step
from ..ops.pointers import check_plain
from ..ops.row_protocols import RowRule
from .fixed_dtypes import FixedDtypes
from .module_state import KEY, check_state, new_state, read_state
from .row_table import RowTable, Storage, parse_storage
from .seeds import seed_of
from .top_k import TopK
from .training import check_one_process, inside_backward

Reduction = Literal["mean", "sum"]
Scale = Literal["table"] | float | None
ProductsChoice = Literal["auto", Products]


class ExtremeClassifier(FixedDtypes):
    """Scores of ``num_labels`` labels, trained with binary cross-entropy over all of them.

    In training, the forward pass does everything that concerns the rows: chunk by chunk it computes
    the logits and their gradient, the embeddings' gradient, and the rows' update. ``backward()``
    only passes the embeddings' gradient on. So the rows are updated even if ``backward()`` is never
    called, and a factor on the loss affects the encoder, not the rows.

    In ``eval()``, and with rows that ``requires_grad_(False)`` has frozen, nothing is updated; the
    loss still gives the embeddings' gradient. A forward pass within a backward pass, as
    ``torch.utils.checkpoint`` makes them, leaves the update to its own backward pass, if there is
    one: so a step is never taken twice.

    ::

        head = ExtremeClassifier(768, num_labels)
        optimizer = optim.RowSGD(head, lr=0.05)
        head(encoder(x), label_rows, label_cols).backward()

    Args:
        dim: Size of an embedding.
        num_labels: Number of labels.
        storage: Format of the rows: ``"e4m3"``, ``"bf16"``, ``"fp16"``, ``"fp32"``; ``"int8"``,
            ``"int4"``, ``"int2"``, integers with a scale and a bias per row, recomputed at every
            step; or a pair (exponent bits, mantissa bits), simulated (default: ``"e4m3"``).
        chunks: Number of parts that the labels are processed in, which bounds the memory of logits
            (default: 8).
        head_fraction: Share of the labels, the most frequent ones, that keep what rounding took
            from them as a BF16 remainder, as in Kahan summation; needs ``label_counts``, here or in
            :meth:`set_label_counts`, unless it is 0 or 1 (default: 0).
        label_counts: Number of training instances of each label, integers ``(num_labels,)``
            (default: ``None``).
        dropout: Probability that a training step leaves a weight out of its products (default: 0).
        rounding: ``"stochastic"`` or ``"nearest"``, for rows without a remainder (default:
            ``"stochastic"``).
        scale: A stored number times ``scale`` is the weight: ``None`` for 1, the paper's recipe;
            ``"table"`` for the power of two that brings the initial weights into the format's
            normal range; or a power of two. Rows of integers accept only ``None``: each has its own
            scale (default: ``None``).
        reduction: ``"mean"`` sums over labels and averages over instances; ``"sum"`` sums over
            both, as in the paper's algorithm 1 (default: ``"mean"``).
        products: Operands of the matrix products, all of whose sums are FP32; see
            :func:`subulp.ops.head.head_step`. ``"fp32"``: decoded rows and embeddings. ``"bf16"``,
            for rows of BF16 numbers: embeddings, logits and their gradient rounded to BF16.
            ``"fp8"``, for rows in E4M3: the same, but for the logits embeddings in E4M3 (the
            paper's section 4.3 and algorithm 1). Units of FP8 and BF16 multiply where there are
            any; elsewhere results differ by the order of the sums alone. ``"auto"``: ``"fp8"`` for
            rows in E4M3 on a GPU of sm_89 or later; ``"bf16"`` for rows of BF16 numbers on a CPU
            with units of BF16; else ``"fp32"`` (default: ``"auto"``).
        seed: Seed of the initial weights, of rounding and of dropout; ``None`` draws one from
            torch's generator, so that heads differ and ``torch.manual_seed`` repeats them (default:
            ``None``).
        device: Device of the rows; on ``"meta"`` there are none until ``load_state_dict`` assigns
            them with ``assign=True`` (default: torch's).

    Attributes:
        table: The rows, those with a remainder first.
        row_optimizer: Set by :class:`subulp.optim.RowSGD`.
        steps: Number of updates so far, which random bits are counted by; in the state dict, with
            the seed.

    Raises:
        ValueError: An argument is out of range or does not fit the others.
    """

    row_of: Tensor | None
    label_of: Tensor | None

    def __init__(
        self,
        dim: int,
        num_labels: int,
        *,
        storage: Storage = "e4m3",
        chunks: int = 8,
        head_fraction: float = 0.0,
        label_counts: Tensor | None = None,
        dropout: float = 0.0,
        rounding: Rounding = "stochastic",
        scale: Scale = None,
        reduction: Reduction = "mean",
        products: ProductsChoice = "auto",
        seed: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        _check(dim, num_labels, chunks, head_fraction, dropout, rounding, reduction)
        made_of = parse_storage(storage)
        if isinstance(made_of, IntFormat) and scale not in (None, 1.0):
            raise ValueError(
                f"scale={scale!r} does not go with storage='{made_of}': every row of integers has "
                "a scale of its own; leave scale out"
            )
        _check_products(products, storage)
        self.products = products
        self.chunks, self.dropout, self.head_fraction = chunks, dropout, head_fraction
        self.rounding, self.reduction = rounding, reduction
        self.row_optimizer: RowRule | None = None
        self.steps = 0
        self.seed = seed = seed_of(seed)
        bound = math.sqrt(6 / (dim + num_labels))
        self.table = RowTable(
            num_labels,
            dim,
            storage,
            precise_rows=math.ceil(head_fraction * num_labels),
            scale=_scale(scale, bound),
            device=device,
        )
        self.register_buffer("row_of", None)
        self.register_buffer("label_of", None)
        self._needs_counts = 0 < head_fraction < 1
        # Xavier's uniform distribution, drawn on the CPU: the same weights on every device.
        self.table.fill_uniform(bound, torch.Generator(device="cpu").manual_seed(seed))
        if label_counts is not None:
            self.set_label_counts(label_counts)

    @property
    def num_labels(self) -> int:
        """Number of labels."""
        return self.table.rows

    @staticmethod
    def has_products(storage: Storage, products: ProductsChoice) -> bool:
        """Whether rows of ``storage`` can be multiplied as ``products`` says.

        Raises:
            ValueError: ``storage`` is unknown.
        """
        made_of = parse_storage(storage)
        if products == "fp8":
            return made_of == E4M3
        if products == "bf16":
            # BF16 has all their numbers, whatever power of two scales them.
            return isinstance(made_of, Format) and made_of.mantissa_bits <= BF16.mantissa_bits
        return True

    @property
    def chosen_products(self) -> Products:
        """``products``, with ``"auto"`` resolved for the device of the rows."""
        if self.products != "auto":
            return self.products
        device, storage = self.table.codes.device, self.table.storage
        if fp8.units_at(device) and self.has_products(storage, "fp8"):
            return "fp8"
        if bf16_product.units_at(device) and self.has_products(storage, "bf16"):
            return "bf16"
        return "fp32"

    @property
    def row_parameters(self) -> Sequence[nn.Parameter]:
        """The stored rows, for :class:`subulp.optim.RowSGD`."""
        return [self.table.codes]

    def set_label_counts(self, counts: Tensor) -> None:
        """Give the remainders to the most frequent labels; of equal counts, to the lower label.

        The rows move to new places, which takes the memory of a second table for a moment.

        Args:
            counts: Number of training instances of each label, integers ``(num_labels,)``.

        Raises:
            ValueError: ``counts`` has another shape, or is not made of integers.
        """
        if counts.shape != (self.num_labels,) or counts.is_floating_point():
            raise ValueError(
                f"label_counts has shape {tuple(counts.shape)} and dtype {counts.dtype}: expected "
                f"integers ({self.num_labels},)"
            )
        self._needs_counts = False
        if self.table.remainder is None or self.table.remainder.shape[0] == self.num_labels:
            return
        device = self.table.codes.device
        everything = torch.arange(self.num_labels, dtype=torch.int64, device=device)
        before = self._rows(everything)
        frequent_first = torch.argsort(counts, descending=True, stable=True)
        precise = self.table.remainder.shape[0]
        # Labels keep their order among the precise ones and among the others.
        label_of = torch.cat(
            [frequent_first[:precise].sort().values, frequent_first[precise:].sort().values]
        ).to(before.device)
        self.table.permute(before[label_of])
        self.label_of = label_of
        self.row_of = torch.empty_like(label_of)
        self.row_of[label_of] = everything

    # ---------------------------------------------------------------------------- training

    # Indices are checked, and rows updated, outside compiled graphs.
    @between_graphs
    def forward(
        self, embeddings: Tensor, label_rows: Tensor, label_cols: Tensor, *, loss: bool = False
    ) -> Tensor:
        """Train on a batch; in ``eval()``, frozen or without gradients, only compute its loss.

        Args:
            embeddings: ``(batch, dim)``, FP32, BF16 or FP16.
            label_rows: Integers ``(count,)``: the instances of positive pairs, in any order.
            label_cols: Integers ``(count,)``: their labels; a repeated pair counts once.
            loss: Compute the value of the loss, one more pass over each chunk's logits; always done
                where nothing is updated (default: ``False``).

        Returns:
            FP32 tensor (): the loss, NaN unless its value is computed; its ``backward()`` gives
            the embeddings' gradient.

        Raises:
            TypeError: A tensor wraps others, as DTensor does; nothing was updated.
            ValueError: A shape, dtype, device or index does not fit; nothing was updated.
            FloatingPointError: The embeddings are not finite; nothing was updated.
            RuntimeError: There is no optimizer, ``label_counts`` are missing, or other processes
                train copies of the rows.
        """
        if torch.compiler.is_exporting():
            # The operators of .head_operators, by their names: that file imports this one.
            parts = (*self._parts(), self.chunks, self.reduction)
            exported: Tensor = torch.ops.subulp.classifier_loss(
                *parts, embeddings, label_rows, label_cols
            )
            return exported
        instances, labels = self._targets(embeddings, label_rows, label_cols)
        if not bool(torch.isfinite(embeddings).all()):
            raise FloatingPointError(
                f"embeddings of shape {tuple(embeddings.shape)} have NaN or infinite values; "
                "nothing was updated"
            )
        grads = torch.is_grad_enabled()
        if not (self.training and grads) or self.table.frozen:
            if not (grads and embeddings.requires_grad):
                return self._visit(_wide(embeddings), instances, labels, None)[0]
            value: Tensor = _Evaluate.apply(embeddings, self, instances, labels)  # type: ignore[no-untyped-call]
            return value
        check_one_process(type(self).__name__)
        if self.row_optimizer is None:
            raise RuntimeError("the rows have no optimizer: make one with optim.RowSGD(head, lr=)")
        if self._needs_counts:
            raise RuntimeError(
                "head_fraction needs the labels' training counts: pass label_counts, or call "
                "set_label_counts"
            )
        value = _TrainStep.apply(  # type: ignore[no-untyped-call]
            embeddings, self, instances, labels, loss
        )
        return value

    def _targets(self, x: Tensor, rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor]:
        """Instances and rows of the table, each pair once, sorted by row."""
        self._check_place(x)
        check_plain("label_rows", rows)
        check_plain("label_cols", cols)
        if x.dim() != 2 or x.shape[1] != self.table.dim or not x.is_floating_point():
            raise ValueError(
                f"embeddings have shape {tuple(x.shape)} and dtype {x.dtype}: expected floating-"
                f"point (batch, {self.table.dim})"
            )
        if rows.shape != cols.shape or rows.dim() != 1:
            raise ValueError(
                f"label_rows and label_cols have shapes {tuple(rows.shape)} and "
                f"{tuple(cols.shape)}: expected one pair for each label of an instance"
            )
        for name, index, count in (
            ("label_rows", rows, x.shape[0]),
            ("label_cols", cols, self.num_labels),
        ):
            if index.is_floating_point() or index.dtype == torch.bool:
                raise ValueError(f"{name} have dtype {index.dtype}: expected integers")
            if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < count:
                raise ValueError(
                    f"{name} have values from {int(index.min())} to {int(index.max())}: expected "
                    f"0 to {count - 1}"
                )
        device = self.table.codes.device
        rows, cols = rows.to(device, torch.int64), cols.to(device, torch.int64)
        pairs = torch.unique(self._rows(cols) * max(1, x.shape[0]) + rows)
        return pairs % max(1, x.shape[0]), pairs // max(1, x.shape[0])

    def _check_place(self, x: Tensor) -> None:
        """Raise unless embeddings are where the rows are, and both are there at all."""
        check_plain("embeddings", x)
        device = self.table.codes.device
        if device.type == "meta":
            raise ValueError(
                "the rows are on 'meta', where tensors hold no data: load a state dict with "
                "assign=True first"
            )
        if x.layout != torch.strided:
            raise ValueError(f"embeddings have the layout {x.layout}: call to_dense() first")
        if x.device != device:
            raise ValueError(
                f"embeddings lie on {x.device} and the rows on {device}: move one to the other's "
                "device"
            )

    def _rows(self, labels: Tensor) -> Tensor:
        return labels if self.row_of is None else self.row_of[labels]

    def _visit(
        self,
        x: Tensor,
        instances: Tensor,
        labels: Tensor,
        step: dict[str, Any] | None,
        *,
        gradient: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Process all chunks.

        Args:
            x: FP32 ``(batch, dim)``.
            instances: The instances of positive pairs.
            labels: Their rows of the table, ascending.
            step: The options of an update, ``None`` for no update.
            gradient: Whether to compute the gradient of ``x`` without an update (default:
                ``False``).

        Returns:
            The loss, FP32 (), NaN unless asked for; and the gradient of ``x``.
        """
        wanted = step is None or step["loss"]
        loss = torch.zeros((), dtype=torch.float64, device=x.device) if wanted else None
        grad_x = torch.zeros_like(x)
        gain = 1.0 / max(1, x.shape[0]) if self.reduction == "mean" else 1.0
        table, dim, products = self.table, self.table.dim, self.chosen_products
        for start, stop in self._chunks():
            first, last = torch.searchsorted(
                labels, torch.tensor([start, stop], dtype=torch.int64, device=labels.device)
            ).tolist()
            remainder = None if table.remainder is None else table.remainder[start:stop]
            head_step(
                HeadJob(
                    rows=table.stored[start:stop],
                    format=table.storage,
                    remainder=remainder,
                    x=x,
                    grad_x=grad_x,
                    positive_instances=instances[first:last],
                    positive_labels=labels[first:last] - start,
                    gain=gain,
                    lr=step["lr"] if step else 0.0,
                    weight_decay=step["weight_decay"] if step else 0.0,
                    rounding=self.rounding,
                    random=RandomAddress(self.seed, 0, step["number"] if step else 0, start * dim),
                    scale=table.scale,
                    dropout=self.dropout,
                    train=step is not None,
                    gradient=gradient,
                    loss=loss,
                    products=products,
                )
            )
        if loss is None:
            return torch.full((), math.nan, dtype=torch.float32, device=x.device), grad_x
        return (loss * gain).float(), grad_x

    def _step(
        self, x: Tensor, instances: Tensor, labels: Tensor, loss: bool
    ) -> tuple[Tensor, Tensor]:
        """Update the rows; the loss, NaN unless asked for, and the gradient of ``x``."""
        assert self.row_optimizer is not None
        group = self.row_optimizer.group_of(self.table.codes)
        self.steps += 1
        step = {
            "lr": float(group["lr"]),
            "weight_decay": float(group["weight_decay"]),
            "number": self.steps,
            "loss": loss,
        }
        return self._visit(x, instances, labels, step)

    def _chunks(self) -> Iterator[tuple[int, int]]:
        size = -(-self.num_labels // self.chunks)
        for start in range(0, self.num_labels, size):
            yield start, min(start + size, self.num_labels)

    # --------------------------------------------------------------------------- inference

    @between_graphs
    @torch.no_grad()
    def topk(self, embeddings: Tensor, k: int = 5) -> tuple[Tensor, Tensor]:
        """The k labels with the highest scores; the scores of all labels are never held at once.

        Args:
            embeddings: ``(batch, dim)``.
            k: Number of labels, at most ``num_labels`` (default: 5).

        Returns:
            Logits, FP32 ``(batch, k)``, descending, and labels, int64 ``(batch, k)``; of equal
            logits, the lower label comes first. With ``products="fp8"`` logits are BF16 numbers, so
            many are equal; with ``"bf16"`` they are sums of FP32, which nothing here has to round.

        Raises:
            ValueError: ``k`` is out of range, or a shape or device does not fit.
        """
        if not 1 <= k <= self.num_labels:
            raise ValueError(f"k={k} is out of range: from 1 to {self.num_labels} labels")
        if torch.compiler.is_exporting():
            found: tuple[Tensor, Tensor] = torch.ops.subulp.classifier_topk(
                *self._parts(), embeddings, k
            )
            return found
        self._check_place(embeddings)
        if embeddings.dim() != 2 or embeddings.shape[1] != self.table.dim:
            raise ValueError(
                f"embeddings have shape {tuple(embeddings.shape)}: expected (batch, "
                f"{self.table.dim})"
            )
        x = _wide(embeddings)
        best = TopK(x.shape[0], k, x.device)
        precise = 0 if self.table.remainder is None else self.table.remainder.shape[0]
        logits = {"fp32": self._logits, "bf16": self._bf16_logits, "fp8": self._fp8_logits}[
            self.chosen_products
        ](x)
        for start, stop in self.table.slices():
            scores = logits(start, stop)
            if self.label_of is None:
                labels = torch.arange(start, stop, dtype=torch.int64, device=x.device)
                best.add(scores, labels)
                continue
            labels = self.label_of[start:stop]
            if start < precise < stop:
                # They ascend among the precise rows and among the others, not across the border.
                labels, order = labels.sort()
                scores = scores[:, order]
            best.add(scores, labels)
        return best.scores, best.labels

    def _logits(self, x: Tensor) -> Callable[[int, int], Tensor]:
        """A function from the rows ``start`` to ``stop`` to FP32 ``(batch, stop - start)``."""
        return lambda start, stop: x @ self.table.decode(start, stop).t()

    def _bf16_logits(self, x: Tensor) -> Callable[[int, int], Tensor]:
        """The same from BF16 operands."""
        table = self.table
        if isinstance(table.storage, Format) and table.storage.dtype is not None:
            return lambda start, stop: bf16_mm(x, table.stored[start:stop].t(), b_scale=table.scale)
        return lambda start, stop: bf16_mm(x, table.decode(start, stop).t())

    def _fp8_logits(self, x: Tensor) -> Callable[[int, int], Tensor]:
        """The same from FP8 operands, rounded to BF16 as in training."""
        narrow, table = fp8.inputs(x), self.table
        if fp8.units_at(x.device):
            return lambda start, stop: (
                fp8.unit_logits(table.stored[start:stop], narrow, table.scale).float().t()
            )
        if bf16_product.units_at(x.device):
            return lambda start, stop: fp8.to_bf16_(
                bf16_mm(narrow, table.stored[start:stop].t(), b_scale=table.scale)
            )
        wide = narrow.float()
        return lambda start, stop: fp8.to_bf16_(wide @ table.decode(start, stop).t())

    def _parts(self) -> tuple[Any, ...]:
        """What the head is to operators of an exported program."""
        if self.training:
            raise RuntimeError(
                "torch.export of an ExtremeClassifier in train(): its rows update themselves, "
                "which no exported program does; call eval() first"
            )
        made_of = self.table.storage
        name = made_of.name
        if isinstance(made_of, Format) and made_of.dtype is None:
            name = f"{made_of.exponent_bits},{made_of.mantissa_bits}"
        rows = self.table.stored, self.row_of, self.label_of
        return (
            *rows,
            name,
            self.table.dim,
            self.table.scale,
            self.head_fraction,
            # Of "auto" the machine that runs the program decides.
            self.products,
        )

    def weight(self, labels: Tensor) -> Tensor:
        """FP32 weights of some labels ``(count, dim)``, remainders added.

        Raises:
            IndexError: A label does not exist.
        """
        self.table.check_rows(labels)
        return self.table.gather(self._rows(labels))

    # As torch calls it; the last of the others collects errors, the third missing keys.
    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *others: Any
    ) -> None:
        faults = check_state(state_dict, prefix, {"table": self.table})
        faults += self._wrong_order(state_dict, prefix)
        others[-1].extend(faults)
        if faults:
            self.table.refuse()
            return
        # Which labels have the remainders belongs to what was trained.
        for name in ("row_of", "label_of"):
            saved = state_dict.get(prefix + name)
            if saved is not None and getattr(self, name) is None:
                setattr(self, name, torch.empty_like(saved, device=self.table.codes.device))
        super()._load_from_state_dict(state_dict, prefix, *others)
        self._needs_counts &= self.label_of is None
        # Older state dicts have none: the count of updates was in the optimizer's state dict.
        missing_keys: list[str] = others[2]
        if prefix + KEY in missing_keys:
            missing_keys.remove(prefix + KEY)

    def _wrong_order(self, state_dict: Mapping[str, Any], prefix: str) -> list[str]:
        """A sentence, if a state dict's order of the labels is none."""
        row_of, label_of = (state_dict.get(prefix + name) for name in ("row_of", "label_of"))
        if row_of is None and label_of is None:
            return []
        labels = self.num_labels
        if _are_inverse(row_of, label_of, labels):
            return []
        return [
            f"{prefix}row_of and {prefix}label_of do not number the {labels} labels' rows both "
            "ways: the state dict is damaged"
        ]

    def get_extra_state(self) -> Tensor:
        """Seed, number of updates, and how the rows are to be read."""
        return new_state(self.seed, self.steps, [self.table.layout()])

    def set_extra_state(self, state: Tensor) -> None:
        """Restore seed and number of updates."""
        self.seed, self.steps, _ = read_state(state)

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return (
            f"chunks={self.chunks}, rounding={self.rounding}, dropout={self.dropout}, "
            f"products={self.products}"
        )


class _Evaluate(torch.autograd.Function):
    """The loss, and the embeddings' gradient: rows stay as they are."""

    @staticmethod
    def forward(
        ctx: Any, embeddings: Tensor, head: ExtremeClassifier, instances: Tensor, labels: Tensor
    ) -> Tensor:
        x = _wide(embeddings)
        value, ctx.grad_x = head._visit(x, instances, labels, None, gradient=True)
        ctx.dtype = embeddings.dtype
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # The factor that the loss was multiplied by comes first: FP16 may need it.
        return (ctx.grad_x * grad).to(ctx.dtype), None, None, None


class _TrainStep(torch.autograd.Function):
    """A step in the forward pass; within a backward pass, in this step's own backward pass.

    The gradient is no saved tensor: where ``torch.utils.checkpoint`` drops those, it would run the
    step again for it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        embeddings: Tensor,
        head: ExtremeClassifier,
        instances: Tensor,
        labels: Tensor,
        loss: bool,
    ) -> Tensor:
        x = _wide(embeddings)
        ctx.dtype, ctx.grad_x, ctx.later = embeddings.dtype, None, None
        if inside_backward():
            ctx.later = head, x, instances, labels
            if loss:
                return head._visit(x, instances, labels, None)[0]
            return torch.full((), math.nan, dtype=torch.float32, device=x.device)
        value, ctx.grad_x = head._step(x, instances, labels, loss)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.later is not None:
            head, x, instances, labels = ctx.later
            _, ctx.grad_x = head._step(x, instances, labels, loss=False)
            ctx.later = None
        # The factor that the loss was multiplied by comes first: FP16 may need it.
        return (ctx.grad_x * grad).to(ctx.dtype), None, None, None, None


def _wide(embeddings: Tensor) -> Tensor:
    """Embeddings in FP32, with the signs that they have."""
    return embeddings.detach().float().resolve_neg()


def _are_inverse(row_of: object, label_of: object, count: int) -> bool:
    """Whether these are int64 ``(count,)``, one the inverse of the other; on "meta", the former."""
    for order in (row_of, label_of):
        if not isinstance(order, Tensor) or order.dtype != torch.int64 or order.shape != (count,):
            return False
        if not order.is_meta and not bool(((order >= 0) & (order < count)).all()):
            return False
    assert isinstance(row_of, Tensor)
    assert isinstance(label_of, Tensor)
    if row_of.is_meta or label_of.is_meta:
        return True
    numbers = torch.arange(count, dtype=torch.int64, device=label_of.device)
    return torch.equal(row_of.to(label_of.device)[label_of], numbers)


def _check_products(products: ProductsChoice, storage: Storage) -> None:
    if products not in get_args(ProductsChoice):
        choices = " or ".join(map(repr, get_args(ProductsChoice)))
        raise ValueError(f"products={products!r} is unknown: use {choices}")
    if not ExtremeClassifier.has_products(storage, products):
        rows, remedy = {
            "fp8": ("rows in E4M3", "storage='e4m3'"),
            "bf16": ("rows of BF16 numbers", "storage='e4m3' or 'bf16'"),
        }[products]
        raise ValueError(
            f"products={products!r} multiplies {rows}, and storage={storage!r}: use {remedy}, or "
            "products='fp32'"
        )


def _scale(scale: Scale, bound: float) -> float:
    if scale is None:
        return 1.0
    if scale != "table":
        return float(scale)
    # Initial weights reach to between 1/4 and 1/2: in E4M3 less than one in a hundred is zero, and
    # there is room for nine hundred times as much.
    return 2.0 ** (math.frexp(bound)[1] + 1)


def _check(
    dim: int,
    num_labels: int,
    chunks: int,
    head_fraction: float,
    dropout: float,
    rounding: str,
    reduction: str,
) -> None:
    if dim < 1 or num_labels < 1:
        raise ValueError(f"dim={dim} and num_labels={num_labels} must be at least 1")
    if not 1 <= chunks <= num_labels:
        raise ValueError(f"chunks={chunks} is out of range: from 1 to the {num_labels} labels")
    if not 0 <= head_fraction <= 1:
        raise ValueError(f"head_fraction={head_fraction} is out of range: from 0 to 1")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout={dropout} is out of range: from 0 to 1, which is excluded")
    for name, value, choices in (
        ("rounding", rounding, get_args(Rounding)),
        ("reduction", reduction, get_args(Reduction)),
    ):
        if value not in choices:
            raise ValueError(f"{name}={value!r} is unknown: use {' or '.join(map(repr, choices))}")
