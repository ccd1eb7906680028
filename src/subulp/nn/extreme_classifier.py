"""A linear classifier over millions of labels that updates its own rows.

ELMO ("Efficiency via Low-precision and Peak Memory Optimization in Large Output Spaces"). The rows
stay narrow, there is no gradient, momentum or master copy of them, and logits exist for one chunk
of labels at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, nn

from ..numerics import Format
from ..numerics.int_rows import IntFormat
from ..ops import backend, bf16_product, look_ahead
from ..ops.graph_breaks import between_graphs
from ..ops.head import (
    HeadJob,
    Products,
    RandomAddress,
    Rounding,
    exact_sum,
    finds_positives,
    fp8,
    head_step,
    new_sums,
    sorted_pairs,
)
from ..ops.head.faults import check_finite, check_range
from ..ops.pointers import check_plain
from ..ops.row_protocols import RowRule
from .derivatives import check_no_tangent, is_tracing, once_differentiable
from .fixed_dtypes import FixedDtypes
from .head_batch import HeadBatch, dtype_number, gathered, merged, new_batch, weights_of, wide
from .head_logits import logits_of
from .head_options import (
    EDITABLE,
    EncoderGradients,
    HeadOptions,
    ProductsChoice,
    Reduction,
    Scale,
    has_products,
)
from .label_order import check_counts, checksum, damaged_order, frequent_first, wrong_order
from .module_state import KEY, check_state, new_state, read_state
from .narrow import without_autocast
from .ranks import Ranks, Told
from .row_parameter import memory_of
from .row_table import RowTable, Storage
from .seeds import seed_of
from .top_k import TopK
from .training import check_one_process, inside_backward

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


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

    With ``mesh``, the ranks of a device mesh share the labels: each has, and updates, the rows of
    its own labels only. All ranks call the same methods in the same order, each with its own part
    of the batch, of any size, or none. Embeddings and labels are gathered in the order of the
    ranks, and the embeddings' gradient, summed up over the ranks in FP32, comes back in parts.
    Stored rows, losses and top labels have the bits of one process that is given the whole batch,
    for the same number of threads. An error on one rank is an error on all of them, before anything
    is updated.

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
            torch's generator, so that heads differ and ``torch.manual_seed`` repeats them; on a
            mesh, all ranks take the first one's (default: ``None``).
        mesh: A ``torch.distributed.device_mesh.DeviceMesh`` of one dimension, whose ranks share the
            labels; ``None`` for one process that has them all. Every rank that trains these labels
            must be in it: in a mesh of several dimensions, copies of a head along another one would
            drift apart (default: ``None``).
        encoder_gradients: How the gradients that the ranks of the mesh have for the encoder's
            weights become one: ``"mean"``, which ``DistributedDataParallel`` and ``fully_shard``
            take, or ``"sum"``. With ``"mean"`` a rank's gradient is multiplied by the number of
            ranks, so that the mean is the gradient of the loss of the whole batch, as the sum is
            without that factor (default: ``"mean"``).
        device: Device of the rows; on ``"meta"`` there are none until ``load_state_dict`` assigns
            them with ``assign=True`` (default: torch's).

    Attributes:
        table: The rows, those with a remainder first.
        ranks: The ranks that share the labels, or ``None``.
        row_optimizer: Set by :class:`subulp.optim.RowSGD`.
        steps: Number of updates so far, which random bits are counted by; in the state dict, with
            the seed.
        labels_before: Labels of a larger head that come before these, where random bits are
            counted by label: 0, but in parts of a head that :func:`refine` trains.

    Raises:
        TypeError: ``mesh`` is no DeviceMesh.
        ValueError: An argument is out of range or does not fit the others, or differs between the
            ranks of a mesh.
    """

    row_of: Tensor | None
    label_of: Tensor | None

    labels_before: int = 0
    # The options as they were checked last.
    _checked: HeadOptions | None = None

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
        mesh: DeviceMesh | None = None,
        encoder_gradients: EncoderGradients = "mean",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.ranks = None if mesh is None else Ranks(mesh)

        def find_out() -> Told[HeadOptions]:
            options = HeadOptions(
                *(dim, num_labels, storage, chunks, head_fraction, dropout),
                *(rounding, reduction, scale, products, encoder_gradients),
            )
            own_seed = seed_of(seed)
            given = {
                "whether label_counts are given": label_counts is not None,
                "seed": -1 if seed is None else seed,
            }
            return Told(options, {**options.numbers(), **given}, [own_seed])

        if self.ranks is None:
            told = find_out()
            made, self.seed = told.value, told.own[0]
        else:
            made, everyone = self.ranks.agree(find_out)
            self.seed = everyone[0][0]
        self.products = products
        self.chunks, self.dropout, self.head_fraction = chunks, dropout, head_fraction
        self.rounding, self.reduction = rounding, reduction
        self.encoder_gradients = encoder_gradients
        self.row_optimizer: RowRule | None = None
        self.steps = 0
        self.table = RowTable(
            num_labels,
            dim,
            storage,
            precise_rows=math.ceil(head_fraction * num_labels),
            scale=made.factor,
            ranks=self.ranks,
            device=device,
        )
        self.register_buffer("row_of", None)
        self.register_buffer("label_of", None)
        self._bound = made.bound
        self.reset_parameters()
        if label_counts is not None:
            self.set_label_counts(label_counts)

    def reset_parameters(self) -> None:
        """Be as new: the initial rows of its seed, no remainders, no updates, no order of labels.

        Where some rows alone have remainders, :meth:`set_label_counts` has to follow. As of torch's
        layers, this gives a module that ``to_empty()`` has moved its values.
        """
        self.steps = 0
        self.row_of = self.label_of = None
        self._needs_counts = 0 < self.head_fraction < 1
        if self.table.remainder is not None:
            memory_of(self.table.remainder).zero_()
        # Xavier's uniform distribution, drawn on the CPU: the same weights on every device.
        self.table.fill_uniform(self._bound, torch.Generator(device="cpu").manual_seed(self.seed))

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
        return has_products(storage, products)

    @property
    def chosen_products(self) -> Products:
        """``products``, with ``"auto"`` resolved for the device of the rows."""
        if self.products != "auto":
            return self.products
        device, storage = self.table.codes.device, self.table.storage
        if fp8.units_at(device) and has_products(storage, "fp8"):
            return "fp8"
        if bf16_product.units_at(device) and has_products(storage, "bf16"):
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
            ValueError: ``counts`` has another shape, is not made of integers, or differs between
                the ranks of a mesh.
        """
        if self.ranks is not None:
            labels = self.num_labels
            self.ranks.agree(lambda: Told(None, {"label_counts": checksum(counts, labels)}))
        check_counts(counts, self.num_labels)
        self._needs_counts = False
        precise = self.table.precise_rows
        if precise in (0, self.num_labels):
            return
        device = self.table.codes.device
        everything = torch.arange(self.num_labels, dtype=torch.int64, device=device)
        before = self._rows(everything)
        label_of = frequent_first(counts, precise).to(before.device)
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
            embeddings: ``(batch, dim)``, FP32, BF16 or FP16; on a mesh, this rank's part of the
                batch.
            label_rows: Integers ``(count,)``: the instances of positive pairs, in any order.
            label_cols: Integers ``(count,)``: their labels; a repeated pair counts once.
            loss: Compute the value of the loss, one more pass over each chunk's logits; always done
                where nothing is updated (default: ``False``).

        Returns:
            FP32 tensor (): the loss, NaN unless its value is computed; its ``backward()`` gives
            the embeddings' gradient. On a mesh it is the loss of the whole batch, the same on all
            ranks.

        Raises:
            TypeError: A tensor wraps others, as DTensor does; nothing was updated.
            ValueError: A shape, dtype, device or index does not fit; nothing was updated.
            FloatingPointError: The embeddings are not finite; nothing was updated. On a GPU, unless
                on a mesh, this and an index are found by kernels: loss and gradient are NaN, and
                the next call raises the error; ``CUDA_LAUNCH_BLOCKING=1`` has the same one do it.
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
        batch = self._batch(embeddings, label_rows, label_cols, loss)
        value: Tensor
        if batch.trains:
            value = _TrainStep.apply(embeddings, self, batch, loss)  # type: ignore[no-untyped-call]
        elif batch.gradient:
            value = _Evaluate.apply(embeddings, self, batch)  # type: ignore[no-untyped-call]
        else:
            value = self._visit(batch, None)[0]
        return value

    def _batch(self, x: Tensor, label_rows: Tensor, label_cols: Tensor, loss: bool) -> HeadBatch:
        """The batch, of all ranks on a mesh, once all of it is found to be good."""
        grads = torch.is_grad_enabled()
        late = self._checks_late
        flags: dict[str, Any] = {
            "trains": self.training and grads and not self.table.frozen,
            "gradient": grads and getattr(x, "requires_grad", False),
        }

        def find_out() -> Told[tuple[Tensor, Tensor]]:
            self._check_edits()
            pairs = self._targets(x, label_rows, label_cols)
            if not late:
                check_finite(wide(x))
            if flags["trains"]:
                self._check_trainable()
            if self.ranks is None:
                return Told(pairs)
            own = [x.shape[0], pairs[0].shape[0], int(flags["gradient"])]
            return Told(pairs, self._same(x, flags["trains"], loss), own)

        if late:
            instances, labels = find_out().value
            checked = sorted_pairs(wide(x), instances, labels, self.row_of, self.num_labels)
            return HeadBatch(*checked, counts=None, **flags)
        if self.ranks is None:
            pairs, sizes = find_out().value, [[x.shape[0]]]
        else:
            pairs, sizes = self.ranks.agree(find_out)
            flags["gradient"] = any(wanted for _, _, wanted in sizes)
        return new_batch(self.ranks, x, pairs, sizes, flags)

    def _check_edits(self) -> None:
        """Raise ValueError if an option was set meanwhile to what the constructor refuses."""
        now = {name: getattr(self, name) for name in EDITABLE}
        if any(getattr(self._checked, name, None) != value for name, value in now.items()):
            table = self.table
            self._checked = HeadOptions(
                table.dim,
                table.rows,
                table.storage,
                head_fraction=self.head_fraction,
                scale=None if isinstance(table.storage, IntFormat) else table.scale,
                **now,
            )

    def _check_trainable(self) -> None:
        if self.ranks is None:
            remedy = "Share the labels out: ExtremeClassifier(..., mesh=)"
            check_one_process(type(self).__name__, remedy)
        if self.row_optimizer is None:
            raise RuntimeError("the rows have no optimizer: make one with optim.RowSGD(head, lr=)")
        if self._needs_counts:
            raise RuntimeError(
                "head_fraction needs the labels' training counts: pass label_counts, or call "
                "set_label_counts"
            )

    def _same(self, x: Tensor, trains: bool = False, loss: bool = False) -> dict[str, float]:
        """What must be equal on all ranks of a mesh for what is to be done."""
        assert self._checked is not None
        same: dict[str, float] = {
            "the embeddings' dtype (0 FP32, 1 BF16, 2 FP16, 3 FP64)": dtype_number(x),
            "train() with gradients, and rows that are not frozen": int(trains),
            "loss=": int(loss),
            "the number of updates": self.steps,
            "the seed": self.seed,
            "the options that were set since, by a checksum,": self._checked.checksum(),
            "chosen_products, by number,": get_args(Products).index(self.chosen_products),
            "the backend, by number,": backend.BACKENDS.index(backend.choose(x.device).backend),
        }
        if trains:
            same |= self._options()
            same["being inside of a backward pass"] = int(inside_backward())
        return same

    def _options(self) -> dict[str, float]:
        """What an update reads."""
        assert self.row_optimizer is not None
        (group,) = self.row_optimizer.groups_of((self.table.codes,))
        return {name: float(group[name]) for name in ("lr", "weight_decay")}

    def _targets(self, x: Tensor, rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor]:
        """Instances, and rows of the whole table, of positive pairs; or labels, to be checked."""
        self._check_place(x)
        check_plain("label_rows", rows)
        check_plain("label_cols", cols)
        self._check_shape(x)
        if rows.shape != cols.shape or rows.dim() != 1:
            raise ValueError(
                f"label_rows and label_cols have shapes {tuple(rows.shape)} and "
                f"{tuple(cols.shape)}: expected one pair for each label of an instance"
            )
        for name, index, count in (
            ("label_rows", rows, x.shape[0]),
            ("label_cols", cols, self.num_labels),
        ):
            if index.dtype not in _INTEGERS:
                raise ValueError(f"{name} have dtype {index.dtype}: expected integers")
            if not self._checks_late or index.device.type == "cpu":
                check_range(name, index, count)
        device = self.table.codes.device
        rows, cols = rows.to(device, torch.int64), cols.to(device, torch.int64)
        return rows, cols if self._checks_late else self._rows(cols)

    def _check_shape(self, x: Tensor) -> None:
        if x.dim() != 2 or x.shape[1] != self.table.dim or not x.is_floating_point():
            raise ValueError(
                f"embeddings have shape {tuple(x.shape)} and dtype {x.dtype}: expected floating-"
                f"point (batch, {self.table.dim})"
            )

    @property
    def _checks_late(self) -> bool:
        """Whether kernels check a batch: the host would wait. The ranks of a mesh agree instead."""
        return self.ranks is None and finds_positives(self.table.codes.device)

    def _check_place(self, x: Tensor) -> None:
        """Raise unless embeddings are where the rows are, and both are there at all."""
        check_plain("embeddings", x)
        check_no_tangent("embeddings", x)
        self.table.check_dtype()
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
        if self.ranks is not None and self.ranks.device.type != device.type:
            raise ValueError(
                f"the rows lie on {device}, and the mesh is of {self.ranks.device.type} devices: "
                "move the head there"
            )

    def _rows(self, labels: Tensor) -> Tensor:
        if self.row_of is None or self.label_of is None:
            return labels
        rows = self.row_of[labels]
        # On a GPU the host would have to wait.
        if rows.device.type == "cpu" and not torch.equal(self.label_of[rows], labels):
            raise damaged_order()
        return rows

    def _visit(
        self, batch: HeadBatch, step: dict[str, Any] | None, *, gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Process all chunks.

        Args:
            batch: The batch, of all ranks.
            step: The options of an update, ``None`` for no update.
            gradient: Whether to compute the gradient of the embeddings without an update (default:
                ``False``).

        Returns:
            The loss, FP32 (), NaN unless asked for; and the gradient of this rank's embeddings.
        """
        x, labels = batch.x, batch.rows
        wanted = step is None or step["loss"]
        parts, grad_x = new_sums(x, loss=wanted, late=self._checks_late)
        loss = None if parts is None else exact_sum.ExactSum(parts)
        gain = 1.0 / max(1, x.shape[0]) if self.reduction == "mean" else 1.0
        table, dim, products = self.table, self.table.dim, self.chosen_products
        operands: dict[str, Tensor] = {}
        for run in table.runs():
            for start, stop in self._chunks():
                own = run.cut(start, stop)
                if not own.count:
                    continue
                last = own.first + own.count
                pairs = slice(None)
                if not finds_positives(labels.device):
                    bounds = torch.tensor([own.first, last], dtype=torch.int64, device=x.device)
                    pairs = slice(*torch.searchsorted(labels, bounds).tolist())
                places = slice(own.place, own.place + own.count)
                head_step(
                    HeadJob(
                        rows=table.stored[places],
                        format=table.storage,
                        remainder=None if table.remainder is None else table.remainder[places],
                        x=x,
                        grad_x=grad_x,
                        positive_instances=batch.instances[pairs],
                        positive_labels=labels[pairs],
                        first_label=own.first,
                        gain=gain,
                        lr=step["lr"] if step else 0.0,
                        weight_decay=step["weight_decay"] if step else 0.0,
                        rounding=self.rounding,
                        random=RandomAddress(
                            self.seed,
                            0,
                            step["number"] if step else 0,
                            (self.labels_before + own.first) * dim,
                        ),
                        scale=table.scale,
                        dropout=self.dropout,
                        train=step is not None,
                        gradient=gradient,
                        loss=loss,
                        products=products,
                        before=own.first - start,
                        after=stop - last,
                        operands=operands,
                    )
                )
        if loss is not None:
            loss.flush()
        if self.ranks is not None and batch.counts is not None:
            if parts is not None:
                self.ranks.add_(parts)
            if batch.gradient:
                grad_x = self.ranks.add_and_scatter(grad_x, batch.counts)
                if self.encoder_gradients == "mean":
                    grad_x.mul_(self.ranks.size)
        if parts is None:
            return torch.full((), math.nan, dtype=torch.float32, device=x.device), grad_x
        return exact_sum.rounded_total(parts, gain), grad_x

    def _step(self, batch: HeadBatch, loss: bool) -> tuple[Tensor, Tensor]:
        """Update the rows; the loss, NaN unless asked for, and the gradient of the embeddings."""
        number = self.steps + 1
        found = self._visit(batch, {**self._options(), "number": number, "loss": loss})
        # A step that was refused is none.
        self.steps = number
        return found

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
            embeddings: ``(batch, dim)``, of any floating-point dtype; on a mesh, this rank's
                instances.
            k: Number of labels, at most ``num_labels`` (default: 5).

        Returns:
            Logits, FP32 ``(batch, k)``, descending, and labels, int64 ``(batch, k)``; of equal
            logits, the lower label comes first. With ``products="fp8"`` logits are BF16 numbers, so
            many are equal; with ``"bf16"`` they are sums of FP32, which nothing here has to round.
            Logits of embeddings that are not finite in FP32 are NaN, and their labels any.

        Raises:
            TypeError: ``embeddings`` wrap others, as DTensors do.
            ValueError: ``k`` is out of range, or a shape, dtype or device does not fit.
        """
        if torch.compiler.is_exporting():
            self._check_k(k)
            found: tuple[Tensor, Tensor] = torch.ops.subulp.classifier_topk(
                *self._parts(), embeddings, k
            )
            return found

        if is_tracing():
            raise RuntimeError(
                "torch.jit.trace of an ExtremeClassifier: its kernels leave no trace, and the "
                "program would return what memory holds; use torch.export"
            )

        def find_out() -> Told[None]:
            self._check_edits()
            self._check_k(k)
            self._check_place(embeddings)
            self._check_shape(embeddings)
            same = {} if self.ranks is None else {"k": k, **self._same(embeddings)}
            return Told(None, same, [embeddings.shape[0]])

        if self.ranks is None:
            counts = find_out().own
        else:
            counts = [count for (count,) in self.ranks.agree(find_out)[1]]
        x = gathered(self.ranks, embeddings, counts)
        best = TopK(x.shape[0], k, x.device)
        logits = logits_of(self.table, self.chosen_products, x)
        for own, before, after in self.table.slices_of_whole():
            with without_autocast(x):
                scores = logits(own, before, after)
            labels = self._labels(own.first, own.first + own.count)
            if own.first < self.table.precise_rows < own.first + own.count:
                # They ascend among the precise rows and among the others, not across the border.
                labels, order = labels.sort()
                scores = scores[:, order]
            best.add(scores, labels)
        if self.ranks is not None:
            best = merged(self.ranks, best, counts, k)
        return best.scores, best.labels

    def _check_k(self, k: int) -> None:
        if not 1 <= k <= self.num_labels:
            raise ValueError(f"k={k} is out of range: from 1 to {self.num_labels} labels")

    def _labels(self, start: int, stop: int) -> Tensor:
        """The labels of rows of the whole table."""
        if self.label_of is not None and self.row_of is not None:
            labels = self.label_of[start:stop]
            rows = torch.arange(start, stop, dtype=torch.int64, device=labels.device)
            if labels.device.type == "cpu" and not torch.equal(self.row_of[labels], rows):
                raise damaged_order()
            return labels
        return torch.arange(start, stop, dtype=torch.int64, device=self.table.codes.device)

    def _parts(self) -> tuple[Any, ...]:
        """What the head is to operators of an exported program."""
        if self.training:
            raise RuntimeError(
                "torch.export of an ExtremeClassifier in train(): its rows update themselves, "
                "which no exported program does; call eval() first"
            )
        if self.ranks is not None:
            raise RuntimeError(
                "torch.export of an ExtremeClassifier on a mesh: a program runs in one process; "
                "load the state into a head without mesh, and export that"
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

        On a mesh, each rank asks for its own labels, and all ranks call this.

        Raises:
            IndexError: A label does not exist.
            ValueError: Labels are not integers.
        """
        if self.ranks is None:
            wide = _wide_labels(labels)
            self.table.check_rows(wide)
            return self.table.gather(self._rows(wide))

        def find_out() -> Told[Tensor]:
            wide = _wide_labels(labels)
            self._check_labels(wide)
            return Told(wide.reshape(-1).to(self.table.codes.device), own=[wide.numel()])

        own, everyone = self.ranks.agree(find_out)
        counts = [count for (count,) in everyone]
        weights = weights_of(self.table, self.ranks, self._rows(own), counts)
        return weights.view(*labels.shape, self.table.dim)

    def _check_labels(self, labels: Tensor) -> None:
        if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < self.num_labels:
            raise IndexError(
                f"labels from {int(labels.min())} to {int(labels.max())} are asked for: there are "
                f"0 to {self.num_labels - 1}"
            )

    # As torch calls it; the last of the others collects errors, the third missing keys.
    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *others: Any
    ) -> None:
        faults = check_state(state_dict, prefix, {"table": self.table})
        faults += wrong_order(state_dict, prefix, self.num_labels)
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
    def forward(ctx: Any, embeddings: Tensor, head: ExtremeClassifier, batch: HeadBatch) -> Tensor:
        value, ctx.grad_x = head._visit(batch, None, gradient=True)
        ctx.dtype = embeddings.dtype
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # The factor that the loss was multiplied by comes first: FP16 may need it.
        return (ctx.grad_x * grad).to(ctx.dtype), None, None


class _TrainStep(torch.autograd.Function):
    """A step in the forward pass; within a backward pass, in this step's own backward pass.

    The gradient is no saved tensor: where ``torch.utils.checkpoint`` drops those, it would run the
    step again for it.
    """

    @staticmethod
    def forward(
        ctx: Any, embeddings: Tensor, head: ExtremeClassifier, batch: HeadBatch, loss: bool
    ) -> Tensor:
        ctx.dtype, ctx.grad_x, ctx.later = embeddings.dtype, None, None
        if inside_backward():
            # Of FP32 they are the caller's own, who may edit them until the rows step.
            batch = replace(batch, x=batch.x.clone())
            ctx.later = head, batch
            if loss:
                return head._visit(batch, None)[0]
            return torch.full((), math.nan, dtype=torch.float32, device=batch.x.device)
        value, ctx.grad_x = head._step(batch, loss)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.later is not None:
            head, batch = ctx.later
            if look_ahead.is_under_way():
                _, ahead = head._visit(batch, None, gradient=True)
                return (ahead * grad).to(ctx.dtype), None, None, None
            _, ctx.grad_x = head._step(batch, loss=False)
            ctx.later = None
        # The factor that the loss was multiplied by comes first: FP16 may need it.
        return (ctx.grad_x * grad).to(ctx.dtype), None, None, None


def _wide_labels(labels: Tensor) -> Tensor:
    """Labels as int64: bytes would be taken for a mask."""
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"labels have dtype {labels.dtype}: expected integers")
    return labels.to(torch.int64)
