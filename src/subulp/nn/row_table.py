"""A giant table of rows in a narrow format, the first of which may be kept precise.

Embedding tables and classifiers are both such tables: one is read row by row, the other multiplied
as a whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..numerics import Format, round_to
from ..numerics.formats import simulated
from ..numerics.int_rows import PARAMETER_BYTES, ROW_FORMATS, IntFormat
from ..ops.big_memory import zeros
from ..ops.rows import decode, decode_rows, encode, encode_rows
from .dtensors import is_dtensor
from .fixed_dtypes import FixedDtypes
from .ranks import Ranks
from .row_exchange import from_whole, permuted, to_dtensor, whole_fault
from .row_parameter import RowParameter, memory_of, rows_that_train
from .row_shards import RowShards, Run

Storage = str | tuple[int, int] | Format | IntFormat

# FP32 values made or read at a time, so that an FP32 copy of the whole table never exists.
_SLICE = 1 << 22


def slice_rows(dim: int) -> int:
    """Number of rows of ``dim`` numbers whose FP32 copy is small."""
    return max(1, _SLICE // dim)


def parse_storage(storage: Storage) -> Format | IntFormat:
    """The format that a ``storage=`` argument names.

    Args:
        storage: ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"e4m3"``; ``"int8"``, ``"int4"``, ``"int2"``:
            integers with a scale and a bias for each row (:mod:`subulp.numerics.int_rows`); or a
            pair (exponent bits, mantissa bits), simulated in FP32 storage.

    Raises:
        ValueError: It is unknown, or a width is out of range.
    """
    if isinstance(storage, Format | IntFormat):
        return storage
    if isinstance(storage, tuple):
        return simulated(*storage)
    if storage not in ROW_FORMATS:
        raise ValueError(
            f"storage={storage!r} is unknown: use one of {', '.join(ROW_FORMATS)}, or a pair "
            "(exponent bits, mantissa bits) to simulate"
        )
    return ROW_FORMATS[storage]


LAYOUT = (
    "exponent bits",
    "mantissa bits",
    "bits of an integer",
    "numbers of a row",
    "power of two that scales the rows",
)
"""The numbers of :meth:`RowTable.layout`."""


class RowTable(FixedDtypes):
    """A matrix of ``rows`` x ``dim`` numbers in a narrow format.

    ``requires_grad_(False)``, of the table or of a module around it, freezes the rows.

    Args:
        rows: Number of rows.
        dim: Numbers per row.
        storage: See :func:`parse_storage`.
        precise_rows: Number of rows, from the first on, that keep what rounding took from them as a
            BF16 remainder (default: 0).
        scale: Power of two that stored values are multiplied by; 1 for rows of integers, which have
            their own scales (default: 1).
        whole: Whether the stored rows are all there is to a row; a cache keeps some of them
            elsewhere (default: ``True``).
        ranks: The ranks that share the table. This one has and makes its own rows only, in the
            order of :class:`.row_shards.RowShards`, and rows that methods name are its own by
            place, unless they say otherwise; the state dict has whole tables as DTensors. ``None``
            for one process that has all rows (default: ``None``).
        part: Whether these are the rows that a rank has of a table, perhaps none (default:
            ``False``).
        device: Device of the table (default: torch's).

    Attributes:
        codes: A :class:`.row_parameter.RowParameter`, which has no gradient: ``(rows, dim)`` stored
            values of the storage's dtype; or rows of integers, uint8
            ``(rows, row_bytes(dim, bits))``, the FP32 scale and bias first and then the packed
            integers, so that a row is one run of memory.
        remainder: BF16 ``(precise_rows, dim)``, or ``None``.
        storage: The format of the rows.
        dim: Numbers per row.
        scale: A stored value times ``scale`` is the weight.

    Raises:
        ValueError: A size is out of range, or ``scale`` is not a power of two, or not 1 for rows of
            integers.
    """

    codes: RowParameter
    remainder: Tensor | None
    ranks: Ranks | None = None

    def __init__(
        self,
        rows: int,
        dim: int,
        storage: Storage,
        *,
        precise_rows: int = 0,
        scale: float = 1.0,
        whole: bool = True,
        ranks: Ranks | None = None,
        part: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if rows < (0 if part else 1) or dim < 1:
            raise ValueError(f"a table of {rows} rows x {dim} is empty: give at least 1 x 1")
        if not 0 <= precise_rows <= rows:
            raise ValueError(f"precise_rows={precise_rows} is out of range: from 0 to {rows}")
        if not (scale > 0 and math.frexp(scale)[0] == 0.5):
            raise ValueError(f"scale={scale} is not a power of two: other factors would round")
        if not 2.0**-126 <= scale <= 2.0**126:
            raise ValueError(f"scale={scale} is out of range: from 2**-126 to 2**126, as in FP32")
        self.storage = parse_storage(storage)
        if self.bits and scale != 1.0:
            raise ValueError(f"scale={scale} does not go with {self.storage}: its rows have theirs")
        self.dim, self.scale = dim, scale
        self._refuses = False
        has_remainder = precise_rows > 0
        if ranks is not None:
            self.ranks = ranks
            self.shards = RowShards(rows, precise_rows, ranks.size)
            rows, precise_rows = (
                self.shards.count(ranks.rank),
                self.shards.precise_count(ranks.rank),
            )
        if isinstance(self.storage, IntFormat):
            shape = rows, self.storage.row_bytes(dim)
        else:
            shape = rows, dim
        shard = part or ranks is not None
        codes = zeros(shape, self._dtype, device)
        self.codes = RowParameter(codes, numbers=whole and not self.bits, shard=shard)
        remainder = None
        if has_remainder:
            remainder = torch.zeros(precise_rows, dim, dtype=torch.bfloat16, device=device)
        if shard and remainder is not None:
            # A parameter: as a buffer, DistributedDataParallel would send it to the other ranks.
            self.register_parameter("remainder", RowParameter(remainder, shard=True))
        else:
            self.register_buffer("remainder", remainder)

    @property
    def rows(self) -> int:
        """Number of rows of the whole table."""
        return self.codes.shape[0] if self.ranks is None else self.shards.rows

    @property
    def own_rows(self) -> int:
        """Number of rows that this process has."""
        return self.codes.shape[0]

    @property
    def precise_rows(self) -> int:
        """Number of rows of the whole table that have a remainder."""
        if self.ranks is not None:
            return self.shards.precise
        return 0 if self.remainder is None else self.remainder.shape[0]

    def _precise_shards(self, ranks: Ranks) -> RowShards:
        """Rows with a remainder, which are cut as a table of their own."""
        return RowShards(self.precise_rows, 0, ranks.size)

    def runs(self) -> list[Run]:
        """The runs of rows of the whole table that this process has."""
        if self.ranks is None:
            return [Run(0, 0, self.rows)]
        return self.shards.runs(self.ranks.rank)

    @property
    def bits(self) -> int:
        """Bits per integer; 0 if the storage is a floating-point format."""
        return self.storage.bits if isinstance(self.storage, IntFormat) else 0

    @property
    def format(self) -> Format:
        """The storage's floating-point format.

        Raises:
            ValueError: The rows are integers.
        """
        if isinstance(self.storage, IntFormat):
            raise ValueError(f"rows of {self.storage} have no floating-point format")
        return self.storage

    @property
    def stored(self) -> Tensor:
        """``codes`` as a plain tensor."""
        return memory_of(self.codes)

    @property
    def frozen(self) -> bool:
        """Whether ``requires_grad_(False)`` keeps the rows as they are."""
        return rows_that_train(self.codes).frozen

    def check_dtype(self) -> None:
        """Raise RuntimeError if somebody has cast the rows to another dtype than their format's."""
        if self.codes.dtype != self._dtype:
            raise RuntimeError(
                f"rows of {self.storage} are stored in {self._dtype}, and are {self.codes.dtype} "
                "now: their .data was cast, as models are that are cast parameter by parameter; "
                "leave out those that are RowParameters"
            )

    @property
    def _dtype(self) -> torch.dtype:
        if isinstance(self.storage, IntFormat):
            return torch.uint8
        return self.storage.dtype or torch.float32

    def decode(self, start: int, stop: int) -> Tensor:
        """FP32 weights of the rows ``start`` to ``stop``, without remainders, as in products."""
        return self._values(self.stored[start:stop])

    def _values(self, codes: Tensor) -> Tensor:
        out = torch.empty(codes.shape[0], self.dim, dtype=torch.float32, device=codes.device)
        if self.bits:
            return decode_rows(codes, out, self.bits)
        return decode(codes, out, self.scale)

    def wide(self, start: int, stop: int) -> Tensor:
        """FP32 weights of the rows ``start`` to ``stop``, remainders added."""
        values = self.decode(start, stop)
        if self.remainder is not None:
            kept = self.remainder[start:stop]
            values[: kept.shape[0]].add_(kept)
        return values

    def floats(self) -> list[Tensor]:
        """All floating-point numbers that make up the weights: the stored ones, or a copy of the
        scales and biases of integer rows; and the remainders.
        """
        codes = self.stored
        if self.bits:
            codes = (
                codes[:, :PARAMETER_BYTES]
                .clone(memory_format=torch.contiguous_format)
                .view(torch.float32)
            )
        return [codes] if self.remainder is None else [codes, self.remainder]

    @torch.no_grad()
    def store(self, start: int, values: Tensor) -> None:
        """Round FP32 ``(count, dim)`` weights to nearest into the rows from ``start`` on."""
        stop = start + values.shape[0]
        codes, values = self.stored[start:stop], values.contiguous()
        if self.bits:
            encode_rows(values, codes, self.bits)
        elif self.format.dtype is None:
            codes.copy_(round_to(values * (1.0 / self.scale), self.format))
        else:
            encode(values, codes, 1.0 / self.scale)
        if self.remainder is not None:
            kept = self.remainder[start:stop]
            count = kept.shape[0]
            encode((values - self.decode(start, stop))[:count].contiguous(), kept)

    def gather(self, rows: Tensor) -> Tensor:
        """FP32 weights of some rows ``(count, dim)``, remainders added.

        Raises:
            IndexError: A row does not exist.
        """
        self.check_rows(rows)
        values = self._values(_bytes(self.stored)[rows].view(self.codes.dtype))
        if self.remainder is not None:
            precise = rows < self.remainder.shape[0]
            values[precise] += self.remainder[rows[precise]]
        return values

    def check_rows(self, rows: Tensor) -> None:
        """Raise IndexError unless all of these row numbers exist."""
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < self.own_rows:
            raise IndexError(
                f"rows from {int(rows.min())} to {int(rows.max())} are asked for: the table has 0 "
                f"to {self.own_rows - 1}"
            )

    @torch.no_grad()
    def permute(self, order: Tensor) -> None:
        """Make row ``i`` what row ``order[i]`` was; remainders move where both rows have one.

        On a mesh, ``order`` is of the whole table and the same on all ranks, which all call this.
        """
        if self.codes.is_meta:
            return
        if self.remainder is not None:
            count = self.precise_rows
            source = order[:count]
            had = source < count
            if self.ranks is None:
                moved = torch.zeros_like(self.remainder)
                moved[had] = self.remainder[source[had]]
            else:
                shards = self._precise_shards(self.ranks)
                source = source.clamp(max=count - 1)
                moved = permuted(self.ranks, shards, memory_of(self.remainder), source)
                moved[~had[shards.numbers(self.ranks.rank, order.device)]] = 0.0
            self.remainder.copy_(moved)
        if self.ranks is None:
            self.stored.copy_(_bytes(self.stored)[order].view(self.codes.dtype))
        else:
            self.stored.copy_(permuted(self.ranks, self.shards, self.stored, order))

    @torch.no_grad()
    def fill_uniform(self, bound: float, generator: torch.Generator | None = None) -> None:
        """Draw every weight from ``[-bound, bound)``, the same numbers for any storage.

        A rank draws through the numbers of rows that others have: rows are the same on any mesh.
        """
        if self.codes.is_meta:
            return
        last = max((run.first + run.count for run in self.runs()), default=0)
        for start in range(0, last, self.slice_rows):
            stop = min(start + self.slice_rows, self.rows)
            drawn = torch.empty(stop - start, self.dim, dtype=torch.float32, device="cpu")
            drawn.uniform_(-bound, bound, generator=generator)
            for run in self.runs():
                own = run.cut(start, stop)
                if own.count:
                    values = drawn[own.first - start : own.first - start + own.count]
                    self.store(own.place, values.to(self.codes.device))

    @torch.no_grad()
    def fill_columns(self, first: int, value: float) -> None:
        """Set the columns from ``first`` on to ``value``, rounded to nearest."""
        for start, stop in self.slices():
            values = self.wide(start, stop)
            values[:, first:] = value
            self.store(start, values)

    def slices(self) -> Iterator[tuple[int, int]]:
        """Ranges of rows whose FP32 copy is small."""
        for start in range(0, self.own_rows, self.slice_rows):
            yield start, min(start + self.slice_rows, self.own_rows)

    def slices_of_whole(self) -> Iterator[tuple[Run, int, int]]:
        """The process's rows by slices that the whole table is cut into, the same on any mesh.

        Yields:
            Rows, and how many rows of their slice lie before and after them, with other ranks.
        """
        size = self.slice_rows
        for run in self.runs():
            for start in range(run.first // size * size, run.first + run.count, size):
                stop = min(start + size, self.rows)
                own = run.cut(start, stop)
                yield own, own.first - start, stop - own.first - own.count

    @property
    def slice_rows(self) -> int:
        """Number of rows whose FP32 copy is small."""
        return slice_rows(self.dim)

    def nbytes(self) -> dict[str, int]:
        """Bytes of storage by content; ``"quantisation"`` is the scales and biases of rows."""
        sizes = {"codes": self.codes.nbytes}
        if self.bits:
            sizes["quantisation"] = PARAMETER_BYTES * self.own_rows
            sizes["codes"] -= sizes["quantisation"]
        if self.remainder is not None:
            sizes["remainder"] = self.remainder.nbytes
        return sizes

    # ------------------------------------------------------------------------------- state

    def layout(self) -> tuple[int, ...]:
        """How the stored rows are to be read, as the numbers that :data:`LAYOUT` names."""
        if isinstance(self.storage, IntFormat):
            return 0, 0, self.bits, self.dim, 0
        exponent = math.frexp(self.scale)[1] - 1
        return self.format.exponent_bits, self.format.mantissa_bits, 0, self.dim, exponent

    def misread(self, saved: Sequence[int]) -> str | None:
        """What is wrong with rows that had another layout when they were saved, if anything.

        Args:
            saved: What :meth:`layout` was of the rows that a state dict brings.
        """
        return differing(LAYOUT, saved, self.layout())

    def faults(self, state_dict: Mapping[str, Any], prefix: str) -> list[str]:
        """Sentences about a state dict's tensors that this table cannot be made of."""
        found = wrong_dtypes(self, state_dict, prefix)
        for name, shape in (
            ("codes", (self.rows, self.codes.shape[1])),
            ("remainder", (self.precise_rows, self.dim)),
        ):
            saved = state_dict.get(prefix + name)
            if isinstance(saved, Tensor) and getattr(self, name) is not None:
                fault = whole_fault(self.ranks, prefix + name, saved, shape)
                found += [] if fault is None else [fault]
        return found

    def refuse(self) -> None:
        """Leave the rows as they are when the state dict that is being loaded comes to them."""
        self._refuses = True

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("codes", "remainder") and is_dtensor(value):
            # How fully_shard takes over a parameter; nn.Module without a __setattr__ of its own
            # would not be asked.
            raise RuntimeError(
                "the rows of a table update themselves, and FSDP would cut them up and gather them "
                "as weights with a gradient: fully_shard(model, "
                "ignored_params=set(table.parameters())), or fully_shard(encoder) alone"
            )
        super().__setattr__(name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = dict(self.named_parameters(recurse=False))
        super()._apply(fn, recurse)
        self._keep(before)
        return self

    def _keep(self, before: Mapping[str, nn.Parameter]) -> None:
        """Go on with the parameters that optimizers know."""
        for name, rows in before.items():
            now = getattr(self, name)
            if now is not rows and isinstance(rows, RowParameter):
                rows.become(now)
                setattr(self, name, rows)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        if self.ranks is not None:
            destination[f"{prefix}codes"] = to_dtensor(self.ranks, self.shards, self.stored)
            if self.remainder is not None:
                shards = self._precise_shards(self.ranks)
                kept = to_dtensor(self.ranks, shards, memory_of(self.remainder))
                destination[f"{prefix}remainder"] = kept
            return
        # Rows of one rank refuse detach(), which is how others would take them.
        super()._save_to_state_dict(destination, prefix, keep_vars or self.codes.shard)
        if not keep_vars:
            destination[f"{prefix}codes"] = self.stored

    # As torch calls it; the last of the others collects errors.
    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *others: Any
    ) -> None:
        refuses, self._refuses = self._refuses, False
        if refuses:
            return
        if faults := self.faults(state_dict, prefix):
            others[-1].extend(faults)
            return
        if self.ranks is not None:
            state_dict = {**state_dict, **self._own_rows_of(state_dict, prefix, self.ranks)}
        before = dict(self.named_parameters(recurse=False))
        super()._load_from_state_dict(state_dict, prefix, *others)
        self._keep(before)
        if isinstance(kept := self._buffers.get("remainder"), Tensor):
            # Also if load_state_dict(assign=True) has brought a view.
            self.remainder = kept.contiguous()

    def _own_rows_of(
        self, state_dict: Mapping[str, Any], prefix: str, ranks: Ranks
    ) -> dict[str, Tensor]:
        """What this rank needs of a state dict's whole tables."""
        own = {}
        for name, shards in (
            ("codes", self.shards),
            ("remainder", self._precise_shards(ranks)),
        ):
            saved = state_dict.get(prefix + name)
            if isinstance(saved, Tensor) and getattr(self, name) is not None:
                own[prefix + name] = from_whole(ranks, shards, saved)
        return own

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        precise = "" if self.remainder is None else f", precise_rows={self.remainder.shape[0]}"
        part = "" if self.ranks is None else f" ({self.own_rows} of them here)"
        return f"{self.rows}{part}, {self.dim}, storage={self.storage}{precise}, scale={self.scale}"


def differing(names: Sequence[str], saved: Sequence[int], own: Sequence[int]) -> str | None:
    """The first number that differs, in words; ``None`` if all are the same."""
    if len(saved) != len(own):
        return f"the state dict describes rows by {len(saved)} numbers: expected {len(own)}"
    for name, theirs, ours in zip(names, saved, own, strict=True):
        if theirs != ours:
            return (
                f"the {name} of the saved rows: {theirs}, of these: {ours}; make the module as it "
                "was when its state was saved"
            )
    return None


def wrong_dtypes(module: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> list[str]:
    """Sentences about a state dict's tensors that are of another dtype than the module's own."""
    found = []
    own = itertools.chain(
        module.named_parameters(recurse=False), module.named_buffers(recurse=False)
    )
    for name, tensor in own:
        saved = state_dict.get(prefix + name)
        if isinstance(saved, Tensor) and saved.dtype != tensor.dtype:
            found.append(
                f"{prefix}{name} is saved as {saved.dtype}, this table stores {tensor.dtype}: make "
                "the module as it was when its state was saved"
            )
    return found


def _bytes(codes: Tensor) -> Tensor:
    """FP8 rows as bytes, which torch can index on every device."""
    return codes.view(torch.uint8) if codes.dtype.itemsize == 1 else codes
