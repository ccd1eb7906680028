"""One table of narrow rows, with a small FP32 cache of some of them.

"Mixed-Precision Embedding Using a Cache", section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor

from ..numerics import Format
from ..numerics.int_rows import RowRounding
from ..numerics.whole import is_whole
from ..ops.big_memory import full, zeros
from ..ops.embedding import Table
from ..ops.embedding.job import EMPTY, FLUSH_SLOT, MAX_WAYS, Policy
from ..ops.embedding.rows import encode, find, set_of
from .fixed_dtypes import FixedDtypes
from .row_parameter import RowParameter, memory_of, rows_that_train
from .row_table import (
    LAYOUT,
    RowTable,
    Storage,
    differing,
    parse_storage,
    slice_rows,
    wrong_dtypes,
)
from .table_part import TablePart

Hash = Literal["modulo", "mixed"]

_MAX_ROWS = 2**31 - 1


@dataclass(frozen=True)
class EmbeddingTable:
    """How a table is stored, cached and rounded.

    Attributes:
        num_embeddings: Number of rows.
        embedding_dim: Numbers per row.
        storage: ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"e4m3"``, ``"int8"``, ``"int4"`` or
            ``"int2"`` (default: ``"int8"``).
        cache_fraction: FP32 cached rows as a share of all rows; 0 for no cache (default: 0.05).
        policy: Eviction policy: ``"lfu"`` keeps the rows with the most lookups in training so far
            (a count for every row), ``"lru"`` those updated last (a time stamp for every cached
            row; none for a direct-mapped cache) (default: ``"lfu"``).
        ways: Rows per set of the cache, a power of two up to 64; 1 is a direct-mapped cache. A
            cache smaller than one set is one set of as many rows as fit, a power of two and at
            least one (default: 32).
        rounding: ``"stochastic"`` or ``"nearest"``, for rows written to the table (default:
            ``"stochastic"``).
        hash: How a row's set is found: ``"modulo"`` takes the row number modulo the number of
            sets, ``"mixed"`` mixes its bits first, for row numbers with a pattern (default:
            ``"modulo"``).

    Raises:
        ValueError: A number or name is out of range.
    """

    num_embeddings: int
    embedding_dim: int
    storage: Storage = "int8"
    cache_fraction: float = 0.05
    policy: Policy = "lfu"
    ways: int = 32
    rounding: RowRounding = "stochastic"
    hash: Hash = "modulo"

    def __post_init__(self) -> None:
        for name in ("num_embeddings", "embedding_dim", "ways"):
            if not is_whole(value := getattr(self, name)):
                raise ValueError(f"{name}={value!r} is not a whole number")
        if self.num_embeddings < 1 or self.embedding_dim < 1:
            raise ValueError(
                f"a table of {self.num_embeddings} rows x {self.embedding_dim} is empty: give at "
                "least 1 x 1"
            )
        if self.num_embeddings > _MAX_ROWS:
            raise ValueError(
                f"num_embeddings={self.num_embeddings} is out of range: tags of the cache hold row "
                f"numbers up to {_MAX_ROWS}"
            )
        fmt = parse_storage(self.storage)
        if isinstance(fmt, Format) and fmt.dtype is None:
            raise ValueError(f"storage={self.storage!r} is simulated: a table stores real formats")
        if not 0 <= self.cache_fraction <= 1:
            raise ValueError(
                f"cache_fraction={self.cache_fraction} is out of range: the cache holds from none "
                "of the rows (0) to all of them (1)"
            )
        if not (1 <= self.ways <= MAX_WAYS and self.ways & (self.ways - 1) == 0):
            raise ValueError(f"ways={self.ways} is not a power of two from 1 to {MAX_WAYS}")
        for name, choices in (("policy", Policy), ("rounding", RowRounding), ("hash", Hash)):
            if getattr(self, name) not in get_args(choices):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is unknown: use "
                    f"{' or '.join(map(repr, get_args(choices)))}"
                )

    def cache_shape(self) -> tuple[int, int]:
        """Number of sets of the cache, and rows per set."""
        if self.cache_fraction == 0:
            return 0, self.ways
        # The product of a decimal fraction may lie a rounding error below a whole number.
        rows = max(1, math.floor(self.cache_fraction * self.num_embeddings * (1 + 1e-12)))
        ways = min(self.ways, 1 << (rows.bit_length() - 1))
        return rows // ways, ways


@dataclass(frozen=True)
class CacheMemory:
    """Bytes of embedding tables, by what they hold (the paper's appendix A).

    Attributes:
        codes: Stored rows without their scales and biases.
        quantisation: FP32 scale and bias of each row of integers.
        cache: FP32 cached rows.
        tags: int32 numbers of the cached rows.
        counters: int32 access counts (LFU) or time stamps (LRU).
        floors: int32 per set, a lower bound of LFU's least count, which saves comparing all of
            them; not part of the paper's formula.
        optimizer: FP32 state of the optimizer, which is not part of the table.
        fp32: The same tables in FP32.
    """

    codes: int = 0
    quantisation: int = 0
    cache: int = 0
    tags: int = 0
    counters: int = 0
    floors: int = 0
    optimizer: int = 0
    fp32: int = 0

    def __add__(self, other: CacheMemory) -> CacheMemory:
        return CacheMemory(*(a + b for a, b in zip(_values(self), _values(other), strict=True)))

    @property
    def total(self) -> int:
        """All bytes except those of the optimizer."""
        return sum(_values(self)[:6])

    @property
    def compression(self) -> float:
        """The paper's equation 2: codes, scales and biases, cache, tags and counters over FP32."""
        return sum(_values(self)[:5]) / self.fp32


def _values(memory: CacheMemory) -> tuple[int, ...]:
    return tuple(vars(memory).values())


_CACHE = ("number of the cache's sets", "rows of a set", "hash of the row numbers, 1 for mixed")
# What a table's tensors have been made by.
_MADE_BY = frozenset(("config", "part", "sets", "ways"))


class CachedTable(FixedDtypes):
    """A table and its cache, which is empty at first.

    Args:
        config: How it is stored, cached and rounded.
        device: Device of the table (default: torch's).
        part: Which of its rows and columns these are (default: all).

    Attributes:
        config: How it is stored, cached and rounded; its sizes are those of the whole table.
        part: Which rows and columns of it these are; ``None`` if they are all.
        table: The stored rows; those of cached rows are out of date.
        cache: FP32 ``(sets * ways, dim)``.
        tags: int32 ``(sets * ways,)``: the row cached there, -1 for none.
        counts: LFU: int32 ``(rows,)`` lookups in training so far; else ``None``.
        stamps: LRU, unless direct-mapped: int32 ``(sets * ways,)``; else ``None``.
    """

    cache: Tensor
    tags: Tensor
    counts: Tensor | None
    stamps: Tensor | None
    floors: Tensor | None

    def __init__(
        self,
        config: EmbeddingTable,
        device: torch.device | str | None = None,
        part: TablePart | None = None,
    ) -> None:
        super().__init__()
        self.config, self.part = config, part
        sets, self.ways = config.cache_shape()
        rows, dim, cached = config.num_embeddings, config.embedding_dim, sets > 0
        if part is not None:
            rows, dim = part.rows, part.dim
            sets = part.taken if cached else 0
        self.sets = sets
        places = self.sets * self.ways
        self.table = RowTable(
            rows, dim, config.storage, whole=not cached, part=part is not None, device=device
        )

        def integers(count: int, value: int = 0) -> Tensor:
            return full((count,), value, torch.int32, device)

        self.register_buffer("cache", zeros((places, dim), torch.float32, device))
        self.register_buffer("tags", integers(places, EMPTY))
        lfu = cached and config.policy == "lfu"
        stamped = cached and config.policy == "lru" and self.ways > 1
        self.register_buffer("counts", integers(rows) if lfu else None)
        self.register_buffer("stamps", integers(places) if stamped else None)
        self.register_buffer("floors", integers(self.sets) if lfu else None, persistent=False)
        self._refuses = False

    def __setattr__(self, name: str, value: Any) -> None:
        # A table that had other ones would go on as before, or astray.
        if name in _MADE_BY and name in self.__dict__:
            raise AttributeError(
                f"{name} of a table cannot be set: its rows and cache were made by it. Make a "
                "table with another one, and give it the rows with load_weights"
            )
        super().__setattr__(name, value)

    # Out of the module's own dicts: each step asks this of all tables, and attributes that are
    # tensors or modules take longer to find than all else here together.
    @property
    def codes(self) -> RowParameter:
        """The stored rows."""
        try:
            return self._modules["table"]._parameters["codes"]  # type: ignore[union-attr,return-value]
        except KeyError:
            return rows_that_train(None)

    @property
    def _rows(self) -> RowTable:
        return self._modules["table"]  # type: ignore[return-value]

    def as_op(self) -> Table:
        """The table in the form that :mod:`subulp.ops.embedding` takes."""
        self._rows.check_dtype()
        codes, cache, tags = self.stored()
        return Table(
            codes=memory_of(codes),
            cache=cache,
            tags=tags,
            bits=self._rows.bits,
            ways=self.ways,
            mixed=self.config.hash == "mixed",
            part=None if self.part is None else self.part.as_op(),
        )

    def stored(self) -> tuple[RowParameter, Tensor, Tensor]:
        """The stored rows, the cached rows and their tags."""
        kept: dict[str, Any] = self._buffers
        return self.codes, kept["cache"], kept["tags"]

    def options(self) -> tuple[object, ...]:
        """What :meth:`as_op` depends on beside tensors, and the policy."""
        return self._rows.storage, self.ways, self.config, self.part

    def policy_state(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """What the cache's policy keeps, ``None`` where it has no use for it.

        Returns:
            ``counts`` of each row (int32, ``(num_embeddings,)``; LFU), ``stamps`` of each place
            (int32, ``(places,)``; LRU of several ways), ``floors`` of each set (int32,
            ``(sets,)``; LFU).
        """
        kept = self._buffers
        return kept["counts"], kept["stamps"], kept["floors"]

    def checked_policy_state(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """As :meth:`policy_state`.

        Raises:
            ValueError: What the policy needs is missing, which kernels would take for another one.
        """
        counts, stamps, floors = self.policy_state()
        lfu = self.sets > 0 and self.config.policy == "lfu"
        stamped = self.sets > 0 and self.config.policy == "lru" and self.ways > 1
        for name, kept, count in (
            ("counts", counts, self._rows.rows if lfu else None),
            ("stamps", stamps, self.sets * self.ways if stamped else None),
        ):
            if count and (kept is None or not kept.numel()):
                raise ValueError(
                    f"a table of policy={self.config.policy!r} has no {name}: expected {count}; "
                    "load its state dict again"
                )
        return counts, stamps, floors

    def reset(self, seed: int) -> None:
        """Be as new: initial rows, and nothing cached or counted."""
        self.cache.zero_()
        self.tags.fill_(EMPTY)
        for counted in (self.counts, self.stamps, self.floors):
            if counted is not None:
                counted.zero_()
        self.fill_uniform(seed)

    def fill_uniform(self, seed: int) -> None:
        """Draw initial rows from ``[-1 / sqrt(rows), 1 / sqrt(rows))``, rounded to nearest.

        A part gets the numbers that the whole table has there.
        """
        generator = torch.Generator().manual_seed(seed)
        bound = 1 / math.sqrt(self.config.num_embeddings)
        if self.part is None:
            self.table.fill_uniform(bound, generator)
        elif self.table.rows and not self.tags.is_meta:
            self._fill_part(self.part, bound, generator)

    def _fill_part(self, part: TablePart, bound: float, generator: torch.Generator) -> None:
        columns = slice(part.column, part.column + part.dim)
        step = slice_rows(part.whole_dim)
        for start in range(0, part.whole_rows, step):
            stop = min(start + step, part.whole_rows)
            drawn = torch.empty(stop - start, part.whole_dim, dtype=torch.float32, device="cpu")
            drawn.uniform_(-bound, bound, generator=generator)
            rows, first = part.run(start, stop)
            self.table.store(first, drawn[rows, columns].to(self.tags.device))

    def resident(self) -> Tensor:
        """The rows in the cache, ascending: int64."""
        tags = self.tags.long()
        return tags[tags >= 0].sort().values

    def access_counts(self) -> Tensor:
        """Lookups of each row in training so far: int32 ``(rows,)``.

        Raises:
            RuntimeError: Only the policy ``"lfu"`` with a cache counts them.
        """
        if self.counts is None:
            raise RuntimeError("a cache of policy='lfu' counts accesses, and this table has none")
        return self.counts.clone()

    @torch.no_grad()
    def weight(self, rows: Tensor) -> Tensor:
        """FP32 values of some rows ``(count, dim)``, cached ones from the cache.

        Raises:
            IndexError: A row does not exist.
        """
        values = self.table.gather(rows)
        places = find(self.as_op(), rows)
        cached = places >= 0
        values[cached] = self.cache[places[cached]]
        return values

    @torch.no_grad()
    def weight_slice(self, start: int, stop: int) -> Tensor:
        """FP32 values of the rows ``start`` to ``stop``.

        Raises:
            ValueError: They are out of range.
        """
        if not 0 <= start <= stop <= self.table.rows:
            raise ValueError(
                f"rows {start} to {stop} are out of range: from 0 to {self.table.rows}"
            )
        values = self.table.decode(start, stop)
        inside = ((self.tags >= start) & (self.tags < stop)).nonzero().squeeze(1)
        values[self.tags[inside].long() - start] = self.cache[inside]
        return values

    @torch.no_grad()
    def load(self, weights: Tensor, start: int = 0) -> None:
        """Round FP32 rows to nearest into the table from row ``start`` on; drop cached copies.

        Raises:
            ValueError: The rows do not fit, or the table is on ``"meta"``.
        """
        rows, dim = self.table.rows, self.table.dim
        if weights.dim() != 2 or weights.shape[1] != dim or weights.dtype != torch.float32:
            raise ValueError(
                f"weights have shape {tuple(weights.shape)} and dtype {weights.dtype}: expected "
                f"FP32 (count, {dim})"
            )
        if not 0 <= start <= start + weights.shape[0] <= rows:
            raise ValueError(
                f"{weights.shape[0]} rows from row {start} on do not fit into a table of {rows}"
            )
        if self.tags.is_meta:
            raise ValueError(
                "the table is on 'meta', where tensors hold no data: make it where it is to be, or "
                "load a state dict with assign=True"
            )
        values = weights.to(self.table.codes.device)
        inside = (self.tags >= start) & (self.tags < start + weights.shape[0])
        self.tags.masked_fill_(inside, EMPTY)
        for first in range(0, values.shape[0], self.table.slice_rows):
            self.table.store(start + first, values[first : first + self.table.slice_rows])
        if self.floors is not None:
            self.floors.zero_()

    @torch.no_grad()
    def flush(self, *, seed: int, stream: int, step: int) -> None:
        """Round the cached rows into the table and empty the cache.

        Args:
            seed: Philox key word.
            stream: Philox key word of the table.
            step: Number of the last step.
        """
        occupied = (self.tags >= 0).nonzero().squeeze(1)
        table = self.as_op()
        for places in occupied.split(self.table.slice_rows):  # type: ignore[no-untyped-call]
            encode(
                table,
                self.tags[places].long(),
                self.cache[places],
                stochastic=self.config.rounding == "stochastic",
                seed=seed,
                stream=stream,
                step=step,
                slot=FLUSH_SLOT,
            )
        self.empty_cache()

    @torch.no_grad()
    def empty_cache(self) -> None:
        """Drop the cached rows without writing them to the table."""
        self.tags.fill_(EMPTY)
        self.cache.zero_()
        if self.stamps is not None:
            self.stamps.zero_()
        if self.floors is not None:
            self.floors.zero_()

    def memory(self) -> CacheMemory:
        """Bytes of storage."""
        sizes = self.table.nbytes()
        counters = [t.nbytes for t in (self.counts, self.stamps) if t is not None]
        return CacheMemory(
            codes=sizes["codes"],
            quantisation=sizes.get("quantisation", 0),
            cache=self.cache.nbytes,
            tags=self.tags.nbytes,
            counters=sum(counters),
            floors=0 if self.floors is None else self.floors.nbytes,
            fp32=4 * self._real_rows * self.table.dim,
        )

    @property
    def _real_rows(self) -> int:
        """Rows without those that fill up a part's last round."""
        return self.table.rows if self.part is None else self.part.real_rows

    # ------------------------------------------------------------------------------- state

    def layout(self) -> tuple[int, ...]:
        """How the stored and the cached rows are to be read: numbers, those of the table first.

        A part's sets are those of the whole table.
        """
        sets, ways = self.config.cache_shape()
        mixed = int(self.config.hash == "mixed")
        return *self.table.layout(), sets, ways if sets else 0, mixed

    def misread(self, saved: Sequence[int]) -> str | None:
        """What is wrong with a layout, as of :meth:`.row_table.RowTable.misread`."""
        fault = self.table.misread(saved[: len(LAYOUT)])
        if fault is None and self.config.cache_shape()[0]:
            own = self.layout()
            fault = differing(_CACHE, saved[len(LAYOUT) :], own[len(LAYOUT) :])
        return fault

    def faults(self, state_dict: Mapping[str, Any], prefix: str) -> list[str]:
        """Sentences about a state dict's tensors that this table cannot be made of."""
        found = wrong_dtypes(self, state_dict, prefix)
        found += self.table.faults(state_dict, f"{prefix}table.")
        tags = state_dict.get(f"{prefix}tags")
        if not found and isinstance(tags, Tensor) and tags.shape == self.tags.shape:
            found += self._wrong_tags(f"{prefix}tags", tags)
        for name in ("counts", "stamps"):
            saved = state_dict.get(prefix + name)
            if not isinstance(saved, Tensor) or saved.is_meta or found:
                continue
            if bool((saved < 0).any()):
                found.append(f"{prefix}{name} has a negative entry: the state is damaged")
        return found

    def refuse(self) -> None:
        """Leave all as it is when the state dict that is being loaded comes to it."""
        self._refuses = True
        self.table.refuse()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        was_meta = self.tags.is_meta
        super()._apply(fn, recurse)
        if was_meta and not self.tags.is_meta:
            # to_empty() leaves whatever the memory held: tags that name no row.
            self.empty_cache()
            if self.counts is not None:
                self.counts.zero_()
        return self

    # As torch calls it; the last of the others collects errors.
    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *others: Any
    ) -> None:
        refuses, self._refuses = self._refuses, False
        if refuses:
            return
        if faults := self.faults(state_dict, prefix):
            others[-1].extend(faults)
            self.table.refuse()
            return
        super()._load_from_state_dict(state_dict, prefix, *others)
        for name, kept in self._buffers.items():
            if kept is not None and not kept.is_contiguous():
                # load_state_dict(assign=True) has brought a view.
                setattr(self, name, kept.contiguous())
        if self.floors is not None:
            # Zero is a lower bound whatever rows are cached.
            self.floors = torch.zeros_like(self.floors, device=self.tags.device)

    def _wrong_tags(self, name: str, tags: Tensor) -> list[str]:
        """A sentence, if cached rows are unknown, twice there, or where no look-up finds them."""
        if tags.is_meta or not self.sets:
            return []
        known = (tags >= EMPTY) & (tags < self.table.rows)
        if not bool(known.all()):
            return [f"{name} names rows that a table of {self.table.rows} does not have"]
        place = torch.arange(len(tags), dtype=torch.int64, device=tags.device)
        mixed = self.config.hash == "mixed"
        right = set_of(tags.long(), self.sets, mixed=mixed) == place // self.ways
        if not bool((right | (tags == EMPTY)).all()):
            return [
                f"{name} has rows in sets that they do not belong to: make the module with the "
                "ways= and hash= that it had when its state was saved"
            ]
        resident = tags[tags != EMPTY]
        if bool((resident.sort().values.diff() == 0).any()):
            return [f"{name} names a row twice, and either of two cached copies may be its"]
        return []

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        c = self.config
        cache = f"cache={self.sets}x{self.ways}, policy={c.policy}" if self.sets else "no cache"
        return f"{cache}, rounding={c.rounding}, hash={c.hash}"
