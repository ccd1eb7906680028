"""Lookups in tables whose parts lie on several ranks: what each rank receives, adds up and sends.

Forward, numbers of words are exchanged, then lookups, then the sums of runs; backward, the bags'
gradients, and one word of each rank about whether all may update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.embedding import calls
from ..ops.embedding.job import Lookups, Table
from .lookup_routes import Routes, Sizes, Slots, find_routes, regrouped, times, transposed
from .table_ranks import TableRanks


@dataclass
class PartLookups:
    """What all ranks look up in the part of a table that lies here, in the whole batch's order.

    Attributes:
        values: int64 row numbers of the part.
        weights: FP32 factors, or ``None``.
        run_ends: int64: where runs begin among the values, and the end.
        bag_ends: int64: where bags begin, and the end.
    """

    values: Tensor
    weights: Tensor | None
    run_ends: Tensor
    bag_ends: Tensor

    def runs(self) -> Lookups:
        """Every run as a bag."""
        return Lookups([0], self.values, self.run_ends, self.weights)

    def bags(self) -> Lookups:
        """The bags, as far as their rows lie here."""
        return Lookups([0], self.values, self.bag_ends, self.weights)


@dataclass
class Exchange:
    """The lookups of one forward pass: those of this rank, and those of all that ended here.

    Attributes:
        slots: The slots.
        routes: The lookups of this rank.
        parts: The lookups of each part here.
        run_counts: Runs of each slot from each rank.
        row_counts: Lookups.
        bag_counts: Bags.
        call: A number of the call, the same on all ranks.
    """

    slots: Slots
    routes: Routes
    parts: list[PartLookups]
    run_counts: Sizes
    row_counts: Sizes
    bag_counts: Sizes
    call: int


def exchange_lookups(
    ranks: TableRanks,
    slots: Slots,
    values: Tensor | None,
    offsets: Tensor | None,
    weights: Tensor | None,
    *,
    parts: int,
    rows_alone: bool,
    fault: Exception | None,
    digest: int,
) -> Exchange:
    """Send every lookup to the rank that has its row.

    Args:
        ranks: The ranks.
        slots: The slots.
        values: int64 row numbers of this rank, which exist; ``None`` if they are at fault.
        offsets: int64 starts of bags, which fit.
        weights: FP32 factors, or ``None``.
        parts: Number of parts.
        rows_alone: See :func:`.lookup_routes.find_routes`.
        fault: What is wrong with this rank's lookups.
        digest: A number that must be the same on all ranks.

    Raises:
        Exception: On all ranks, if one has a fault or another digest.
    """
    routes = None
    counts = torch.zeros(ranks.size, len(slots), 3, dtype=torch.int64, device="cpu")
    if values is not None and offsets is not None and fault is None:
        routes = find_routes(slots, values, offsets, ranks.size, rows_alone=rows_alone)
        sizes = (routes.run_counts, routes.row_counts, routes.bag_counts)
        counts = torch.stack([torch.tensor(s, dtype=torch.int64) for s in sizes], -1)
        counts = counts.transpose(0, 1)
    header = torch.tensor([[int(fault is not None), digest]] * ranks.size, device="cpu")
    sent = torch.cat((header, counts.flatten(1)), 1).to(ranks.device)
    even = [sent.shape[1]] * ranks.size
    received = ranks.exchange(sent.flatten(), even, even).view(ranks.size, -1).cpu()
    heads = received[:, :2].tolist()
    if any(fault for fault, _ in heads):
        ranks.raise_faults(fault)
    if any(other != digest for _, other in heads):
        raise RuntimeError(
            "the ranks' tables differ in state, options or the call (which module's and which of "
            "its calls, train, eval, frozen tables, per_sample_weights): every rank makes the same "
            "calls, in the same order, with the same settings"
        )
    assert routes is not None
    assert values is not None
    from_ranks = received[:, 2:].view(ranks.size, len(slots), 3).permute(2, 1, 0)
    runs, rows, bags = (part.tolist() for part in from_ranks)
    given = None if weights is None else weights[routes.lookups].view(torch.int32)
    words = _send_words(ranks, routes, given, runs, rows)
    found = _by_part(slots, parts, words, (runs, rows, rows))
    received_parts = [
        _part_lookups(*found[p], weighted=weights is not None, device=values.device)
        for p in range(parts)
    ]
    return Exchange(slots, routes, received_parts, runs, rows, bags, digest)


def _send_words(
    ranks: TableRanks, routes: Routes, weights: Tensor | None, runs: Sizes, rows: Sizes
) -> list[Tensor]:
    """Runs, row numbers and weights of all ranks by slot and rank, from one exchange of words."""
    fields = [(routes.runs, routes.run_counts, runs), (routes.rows, routes.row_counts, rows)]
    if weights is not None:
        fields.append((weights, routes.row_counts, rows))
    sent, received = [], []
    for flat, counts, incoming in fields:
        to_ranks = [sum(column) for column in transposed(counts)]
        sent.append(regrouped(flat, counts).split_with_sizes(to_ranks))
        received.append([sum(column) for column in transposed(incoming)])
    payload = torch.cat([field[r] for r in range(ranks.size) for field in sent])
    expected = [sum(field[r] for field in received) for r in range(ranks.size)]
    totals = [sum(field[r].numel() for field in sent) for r in range(ranks.size)]
    words = ranks.exchange(payload, totals, expected)
    pieces = words.split_with_sizes([field[r] for r in range(ranks.size) for field in received])
    count = len(fields)
    return [
        regrouped(torch.cat(pieces[i::count]), transposed(incoming))
        for i, (_, _, incoming) in enumerate(fields)
    ]


def _by_part(
    slots: Slots, parts: int, fields: Sequence[Tensor], sizes: Sequence[Sizes]
) -> list[list[Tensor]]:
    """Fields by slot and rank, part by part."""
    split = [
        flat.split_with_sizes([sum(row) for row in counts])
        for flat, counts in zip(fields, sizes, strict=False)
    ]
    of_part = [[k for k, p in enumerate(slots.parts) if p == part] for part in range(parts)]
    return [
        [
            field[own[0]] if len(own) == 1 else torch.cat([field[k] for k in own] or [field[0][:0]])
            for field in split
        ]
        for own in of_part
    ]


def _part_lookups(
    runs: Tensor,
    rows: Tensor,
    weights: Tensor | None = None,
    *,
    weighted: bool,
    device: torch.device,
) -> PartLookups:
    ends = torch.zeros(runs.numel() + 1, dtype=torch.int64, device=device)
    torch.cumsum(runs.abs(), 0, out=ends[1:])
    fresh = (runs < 0).nonzero().squeeze(1)
    return PartLookups(
        rows.long(),
        weights.view(torch.float32) if weighted and weights is not None else None,
        ends,
        torch.cat((ends[fresh], ends[-1:])),
    )


def send_floats(
    ranks: TableRanks, flat: Tensor, counts: Sizes, incoming: Sizes, wire: torch.dtype
) -> Tensor:
    """FP32 numbers ordered by slot and rank to these ranks, and theirs by slot and rank.

    Args:
        ranks: The ranks.
        flat: FP32 numbers.
        counts: How many of each slot go to each rank.
        incoming: How many come.
        wire: What they travel in; also those that stay where they are are rounded to it.
    """
    narrow = regrouped(flat, counts).to(wire)
    totals = [[sum(column) for column in transposed(sizes)] for sizes in (counts, incoming)]
    return regrouped(ranks.exchange(narrow, *totals), transposed(incoming)).float()


def pool(
    ranks: TableRanks,
    exchange: Exchange,
    tables: Sequence[Table],
    statistics: Tensor,
    wire: torch.dtype,
) -> Tensor:
    """The sums of this rank's bags, FP32 ``(batch, sum of dims)``; and all others'."""
    slots, routes = exchange.slots, exchange.routes
    sums = [
        calls.pool([table], lookups.runs(), statistics[p : p + 1]).flatten()
        for p, (table, lookups) in enumerate(zip(tables, exchange.parts, strict=True))
    ]
    mine = _by_slot(exchange, sums, exchange.run_counts)
    outgoing, incoming = (
        times(exchange.run_counts, slots.dims),
        times(routes.run_counts, slots.dims),
    )
    flat = send_floats(ranks, mine, outgoing, incoming, wire)
    runs = [
        piece.view(-1, dim)
        for piece, dim in zip(
            flat.split_with_sizes([sum(n) for n in incoming]), slots.dims, strict=True
        )
    ]
    tags = torch.empty(0, dtype=torch.int32, device=flat.device)
    temporary = [Table(x, x.new_empty(0, x.shape[1]), tags, 0, 1, False) for x in runs]
    lookups = Lookups(list(range(len(slots))), routes.places, routes.ends, None)
    counted = torch.zeros(len(slots), 2, dtype=torch.int64, device=flat.device)
    return calls.pool(temporary, lookups, counted)


def _by_slot(exchange: Exchange, by_part: Sequence[Tensor], counts: Sizes) -> Tensor:
    """Vectors by slot, from those by part and slot."""
    slots = exchange.slots
    pieces: dict[int, Tensor] = {}
    for p, flat in enumerate(by_part):
        own = [k for k, part in enumerate(slots.parts) if part == p]
        sizes = [sum(counts[k]) * slots.dims[k] for k in own]
        pieces.update(zip(own, flat.split_with_sizes(sizes), strict=True))
    return torch.cat([pieces[k] for k in range(len(slots))])


def send_gradients(
    ranks: TableRanks, exchange: Exchange, grad: Tensor, sent: Sequence[bool], wire: torch.dtype
) -> list[Tensor]:
    """The gradients of the bags that have lookups in each part here: FP32 ``(bags, dim)``.

    Args:
        ranks: The ranks.
        exchange: The forward pass.
        grad: FP32 ``(batch, sum of dims)``.
        sent: Whether the gradients of a part are wanted; others are empty.
        wire: What they travel in.
    """
    slots, routes, columns = exchange.slots, exchange.routes, exchange.slots.columns
    wanted = [int(sent[p]) for p in slots.parts]
    bags = routes.bags.split_with_sizes([sum(row) for row in routes.bag_counts])
    pieces = [
        grad[:, columns[k] : columns[k + 1]].index_select(0, bags[k]).flatten()
        for k in range(len(slots))
        if wanted[k]
    ]
    dims = [dim * want for dim, want in zip(slots.dims, wanted, strict=True)]
    incoming = times(exchange.bag_counts, dims)
    flat = send_floats(
        ranks,
        torch.cat(pieces) if pieces else grad.new_empty(0),
        times(routes.bag_counts, dims),
        incoming,
        wire,
    )
    found = _by_part(slots, len(exchange.parts), [flat], [incoming])
    part_dims = dict(zip(slots.parts, slots.dims, strict=True))
    return [flat.view(-1, part_dims.get(p, 1)) for p, (flat,) in enumerate(found)]


def weight_gradients(
    ranks: TableRanks,
    exchange: Exchange,
    tables: Sequence[Table],
    grads: Sequence[Tensor],
    count: int,
) -> Tensor:
    """The gradient of this rank's weights: FP32 ``(count,)``; parts of a row are added in order."""
    slots, routes = exchange.slots, exchange.routes
    ones = [1] * len(slots)
    pieces: dict[int, Tensor] = {}
    for p in sorted(set(slots.parts)):
        flat = calls.weight_grad([tables[p]], exchange.parts[p].bags(), grads[p])
        own = [k for k, part in enumerate(slots.parts) if part == p]
        pieces.update(
            zip(own, flat.split_with_sizes([sum(exchange.row_counts[k]) for k in own]), strict=True)
        )
    flat = send_floats(
        ranks,
        torch.cat([pieces[k] for k in range(len(slots))]),
        times(exchange.row_counts, ones),
        routes.row_counts,
        torch.float32,
    )
    result = flat.new_zeros(count)
    sizes = [sum(row) for row in routes.row_counts]
    for at, piece in zip(
        routes.lookups.split_with_sizes(sizes), flat.split_with_sizes(sizes), strict=True
    ):
        result[at] += piece
    return result
