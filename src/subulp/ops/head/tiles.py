"""A chunk's step, tile by tile of rows: the order of operations that backends share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import get_args

import torch
from torch import Tensor

from ...numerics import Format, round_to
from ...numerics.ieee import as_fp32
from ...numerics.int_rows import IntFormat
from .. import bf16_product
from ..rows import decode, decode_rows, encode, encode_rows
from ..step.job import StepJob, new_scalars
from ..strategy import parse_strategy
from . import HeadJob, Rounding, fp8
from .exact_sum import ExactSum
from .logistic import Positives, logistic_

DROPOUT_SLOT = 1
"""Philox counter word that keeps dropout's bits apart from those of rounding."""


@dataclass
class _Tile:
    """Rows ``start`` to ``stop`` of the job and FP32 room for their weights and gradients."""

    start: int
    stop: int
    weight: Tensor
    gradient: Tensor


@dataclass(frozen=True)
class Place:
    """Where a job's rows lie in a tile of the whole chunk.

    Attributes:
        start: The first of them, counted in the job.
        stop: What comes after the last.
        before: Rows of the tile before them.
        size: Rows of the tile.
    """

    start: int
    stop: int
    before: int
    size: int

    @property
    def own(self) -> slice:
        """The job's rows of the tile."""
        return slice(self.before, self.before + self.stop - self.start)

    @property
    def whole(self) -> bool:
        """Whether the job has all rows of the tile."""
        return self.stop - self.start == self.size

    def clear_others(self, rows: Tensor) -> None:
        """Set to zero what a matrix has for rows of the tile that the job does not have."""
        rows[: self.own.start].zero_()
        rows[self.own.stop :].zero_()

    @classmethod
    def all_of(cls, job: HeadJob, size: int) -> list[Place]:
        """The tiles of ``size`` rows that have rows of the job."""
        begin, end = job.before, job.before + job.rows.shape[0]
        found = []
        for first in range(begin // size * size, end, size):
            last = min(first + size, job.chunk_rows)
            start, stop = max(first, begin), min(last, end)
            found.append(cls(start - begin, stop - begin, start - first, last - first))
        return found


@dataclass(frozen=True)
class Products:
    """What a tile's products multiply, and how.

    Attributes:
        x: The inputs as the logits take them, FP32 or E4M3.
        rounded: Whether operands are rounded, at most to BF16; then logits are BF16 numbers.
        bf16: Whether :func:`subulp.ops.bf16_product.bf16_mm` multiplies.
        stored: Whether it takes the rows as they are stored, so that nothing decodes them.
    """

    x: Tensor
    rounded: bool
    bf16: bool
    stored: bool

    @classmethod
    def of(cls, job: HeadJob) -> Products:
        """Those of ``job``."""
        fp8_operands = job.products == "fp8"
        # Weights scaled by dropout are no numbers of E4M3, nor always of BF16: they are rounded.
        dropped = job.train and job.dropout != 0.0
        units = fp8_operands and (dropped or bf16_product.units_at(job.device))
        bf16 = job.products == "bf16" or units
        return cls(
            x=fp8.inputs(job.x) if fp8_operands else job.x,
            rounded=job.products != "fp32",
            bf16=bf16,
            stored=bf16 and not dropped and _has_dtype(job),
        )

    def mm(self, a: Tensor, b: Tensor, out: Tensor, a_scale: float, b_scale: float) -> Tensor:
        """``(a * a_scale) @ (b * b_scale)``: scales of stored rows, else 1."""
        if self.bf16:
            return bf16_product.bf16_mm(a, b, out, a_scale=a_scale, b_scale=b_scale)
        return torch.mm(a, b, out=out)


def run(job: HeadJob, tile_rows: int, step_sgd: Callable[[StepJob], None]) -> None:
    """Run ``job``.

    Args:
        job: The chunk's step.
        tile_rows: Rows of a tile.
        step_sgd: The backend's :mod:`subulp.ops.sgd`, without the dispatcher.
    """
    dim = job.dim
    size = min(tile_rows, job.chunk_rows)
    weights = torch.empty(size, dim, dtype=torch.float32, device=job.device)
    gradients = torch.empty_like(weights) if job.train else weights
    logits = torch.empty(size, job.x.shape[0], dtype=torch.float32, device=job.device)
    partial = torch.empty(job.x.shape, dtype=torch.float32, device=job.device)
    products = Products.of(job)
    if products.rounded:
        job = replace(job, x=job.x.bfloat16().float())
    scale = job.scale if products.stored else 1.0
    loss = exact_loss(job)
    places = Place.all_of(job, size)
    pairs_of = _pairs(job, places)
    for i, place in enumerate(places):
        weight, gradient, all_g = (m[: place.size] for m in (weights, gradients, logits))
        tile = _Tile(place.start, place.stop, weight[place.own], gradient[place.own])
        rows, g = job.rows[place.start : place.stop], all_g[place.own]
        factor = whole_tile(rows, place) if products.stored else weight
        if not products.stored:
            _decode(job, rows, tile.weight)
            place.clear_others(weight)
        kept = _dropout(job, tile)
        x = products.x if products.bf16 else products.x.float()
        products.mm(factor, x.t(), all_g, scale, 1.0)
        pairs = pairs_of[i]
        terms = logistic_(
            g,
            Positives(
                job.positive_labels[pairs],
                job.positive_instances[pairs],
                job.first_label + place.start,
            ),
            job.gain,
            gradient=job.train or job.gradient,
            loss=loss is not None,
            narrow=products.rounded,
        )
        if loss is not None and terms is not None:
            loss.add(terms)
        if job.train or job.gradient:
            place.clear_others(all_g)
            # Not addmm: a product that starts from a large sum rounds each of its terms to it.
            job.grad_x.add_(products.mm(all_g.t(), factor, partial, 1.0, scale))
        if not job.train:
            continue
        products.mm(all_g, job.x, gradient, 1.0, 1.0)
        if kept is not None:
            tile.gradient.mul_(kept)
        _update(job, tile, step_sgd)
    if loss is not None and loss is not job.loss:
        loss.flush()


def _pairs(job: HeadJob, places: list[Place]) -> list[slice]:
    """Each tile's run of the positives, which are sorted by label.

    Of a device that the host would have to wait for, all of them for each tile: its kernels leave
    out those that are not the tile's.
    """
    if job.device.type != "cpu":
        return [slice(None)] * len(places)
    starts = [place.start for place in places] + [job.rows.shape[0]]
    starting = torch.tensor(starts, dtype=torch.int64, device="cpu").add_(job.first_label)
    bounds = torch.searchsorted(job.positive_labels, starting).tolist()
    return [slice(*pair) for pair in pairwise(bounds)]


def exact_loss(job: HeadJob) -> ExactSum | None:
    """The sum that a job's losses are added to; flushed by who made it."""
    return ExactSum(job.loss) if isinstance(job.loss, Tensor) else job.loss


def whole_tile(rows: Tensor, place: Place) -> Tensor:
    """A matrix of the job's rows of a tile, with zeros for those that the job does not have."""
    if place.whole:
        return rows
    tile = torch.zeros(place.size, rows.shape[1], dtype=rows.dtype, device=rows.device)
    tile[place.own] = rows
    return tile


def _has_dtype(job: HeadJob) -> bool:
    """Whether a stored value times the scale is a weight."""
    return isinstance(job.format, Format) and job.format.dtype is not None


def _dropout(job: HeadJob, tile: _Tile) -> Tensor | None:
    """Drop weights of the tile at random; return the factors of the weights and their gradients.

    The mask is a function of (seed, step, element), so nothing is stored for the backward pass.
    """
    if job.dropout == 0.0 or not job.train:
        return None
    address = job.random.after(tile.start * job.dim)
    bits = address.draw(tile.weight.shape, job.device, slot=DROPOUT_SLOT)
    kept = (bits >= round(job.dropout * 2**32)).to(torch.float32).div_(1.0 - job.dropout)
    tile.weight.mul_(kept)
    return kept


def _update(job: HeadJob, tile: _Tile, step_sgd: Callable[[StepJob], None]) -> None:
    precise = min(max(job.precise - tile.start, 0), tile.stop - tile.start)
    if precise:
        _update_precise(job, tile, precise)
    first = tile.start + precise
    if first < tile.stop:
        rows, gradient = job.rows[first : tile.stop], tile.gradient[precise:]
        if isinstance(job.format, IntFormat):
            wide = tile.weight[precise:]
            if job.dropout != 0.0:
                # Dropout has changed the tile's weights.
                _decode(job, rows, wide)
            _update_plain(job, wide, gradient, first, step_sgd)
            random = job.random.after(first * job.dim) if job.rounding == "stochastic" else None
            encode_rows(wide, rows, job.format.bits, random)
        elif job.format.dtype is None:
            _update_simulated(job, job.format, rows, gradient, first)
        else:
            _update_plain(job, rows, gradient, first, step_sgd)


def _decode(job: HeadJob, rows: Tensor, out: Tensor) -> Tensor:
    if isinstance(job.format, IntFormat):
        return decode_rows(rows, out, job.format.bits)
    return decode(rows, out, job.scale)


def _encode_nearest(job: HeadJob, wide: Tensor, rows: Tensor) -> None:
    if isinstance(job.format, IntFormat):
        encode_rows(wide, rows, job.format.bits)
    elif job.format.dtype is None:
        rows.copy_(round_to(wide * (1.0 / job.scale), job.format))
    else:
        encode(wide, rows, 1.0 / job.scale)


def _update_plain(
    job: HeadJob,
    rows: Tensor,
    gradient: Tensor,
    first: int,
    step_sgd: Callable[[StepJob], None],
) -> None:
    if job.scale != 1.0:
        # A stored value is 1 / scale of its weight, and so is its update.
        gradient.mul_(1.0 / job.scale)
    step_sgd(sgd_job(job, rows, gradient, first))


def sgd_job(job: HeadJob, rows: Tensor, gradient: Tensor, first: int) -> StepJob:
    """The step of the job's rows from ``first`` on, whose gradient is that of stored values."""
    name = "fp32" if rows.dtype == torch.float32 else job.rounding
    if name not in ("fp32", *get_args(Rounding)):
        raise ValueError(f"rounding={name!r} is unknown: use 'nearest' or 'stochastic'")
    scalars = new_scalars(
        [torch.tensor(job.random.step, dtype=torch.int64, device="cpu")],
        [job.random.stream],
        [job.random.offset + first * job.dim],
    )
    scalars["step_size"] = job.lr
    return StepJob(
        strategy=parse_strategy(name),
        params=[rows],
        grads=[gradient],
        fast=(),
        slow=(),
        extras=(),
        slow_lows=(),
        scalars=scalars,
        seed=job.random.seed,
        beta1=0.0,
        one_minus_beta1=1.0,
        weight_decay=as_fp32(job.weight_decay),
    )


def _update_precise(job: HeadJob, tile: _Tile, count: int) -> None:
    assert job.remainder is not None
    first = tile.start
    rows, remainder = job.rows[first : first + count], job.remainder[first : first + count]
    # Dropout has changed the tile's weights: decode them again.
    wide = _decode(job, rows, tile.weight[:count])
    wide.add_(remainder)
    gradient = tile.gradient[:count]
    if job.weight_decay != 0.0:
        gradient.add_(wide * as_fp32(job.weight_decay))
    wide.sub_(gradient.mul_(as_fp32(job.lr)))
    _encode_nearest(job, wide, rows)
    encode(wide.sub_(_decode(job, rows, gradient)), remainder)


def _update_simulated(
    job: HeadJob, fmt: Format, rows: Tensor, gradient: Tensor, first: int
) -> None:
    if job.weight_decay != 0.0:
        gradient.add_(rows * as_fp32(job.weight_decay), alpha=job.scale)
    wide = rows - gradient.mul_(1.0 / job.scale).mul_(as_fp32(job.lr))
    bits = None
    if job.rounding == "stochastic":
        address = job.random.after(first * job.dim)
        bits = address.draw(rows.shape, rows.device, width=fmt.random_width)
    rows.copy_(round_to(wide, fmt, job.rounding, bits=bits))
