# mypy: allow-untyped-calls
"""Embedding ops in Triton: all tables and features together, whatever their storages.

A lookup is one launch; an update is four: keys, a sort by them, sums of what many lookups share,
and the rows. Nothing waits for the GPU: kernels check the numbers themselves, and what they find is
raised when the host comes by, see :mod:`subulp.ops.triton.faults`. Bags of bad numbers are NaN
until then, and no row is updated; strange tags are found as an update comes to their set, as C++
finds them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from ...numerics.metrics import LANES
from ..pointers import run_ptrs
from ..triton import launch, tuning
from ..triton.choices import Configuration
from ..triton.faults import Record, record, tell
from . import triton_rows
from .faults import Fault, error_of
from .job import GRADIENT_SPAN, Job
from .triton_lookup import lookup_kernel
from .triton_update import PLACES, POSITIONS, order_kernel, spans_kernel, update_kernel

tell(Fault, error_of)

_MOST_KEYS = 2**63 - 1
_CHECKING_PROGRAMS = 4096


def run(job: Job) -> Tensor | None:
    """Run ``job``.

    Raises:
        TypeError: A tensor wraps others, as DTensor does.
        ValueError: Offsets do not fit, a tensor is not contiguous, a cache holds rows that its
            table does not have, or tables are too large for one update.
        IndexError: A row number is out of range.
        FloatingPointError: The gradient of an update or its weights are not finite.
        RuntimeError: The kernels do not run on the device of the tables, or a CUDA graph is being
            captured.
    """
    launch.check_device(update_kernel, job.device)
    launch.refuse_capture(job.device)
    faults = record(job.device)
    faults.check()
    on_gpu = job.device.type == "cuda"
    with torch.cuda.device(job.device) if on_gpu else contextlib.nullcontext():
        call = _Call(job, faults)
        result = None if job.kind == "update" else call.look_up()
        if result is None:
            call.update()
    faults.check_launched()
    return result


class _Call:
    """What the kernels of a call read."""

    def __init__(self, job: Job, faults: Record) -> None:
        self.job, self.faults = job, faults
        looked = job.lookups
        self.values, self.offsets = looked.values.contiguous(), looked.offsets.contiguous()
        self.weighted = looked.weights is not None
        # Without weights any pointer does: it is not read.
        self.weights = self.offsets
        if looked.weights is not None:
            self.weights = looked.weights.resolve_neg().contiguous()
        columns = looked.columns(job.tables)
        self.width = columns[-1]
        self.formats = triton_rows.formats_of(job)
        features = np.array(list(zip(looked.features, columns, strict=False)), dtype=np.int64)
        (self.tables,) = launch.kept(job.device, self._numbers(), _as_it_is)
        (self.features,) = launch.kept(job.device, features, _as_it_is)

    def _numbers(self) -> np.ndarray:
        job = self.job
        tensors: list[Tensor] = []
        for i, table in enumerate(job.tables):
            tensors += (table.codes, table.cache, table.tags)
            if job.updates:
                update = job.updates[i]
                tensors += (update.counts, update.stamps, update.accumulator)
        found = np.array(run_ptrs("a table", tensors), dtype=np.int64).reshape(len(job.tables), -1)
        # Of what has no elements it is 0.
        self.is_aligned = is_aligned(job) and not (found[:, :2] % launch.ALIGNMENT).any()
        missing = np.zeros((len(job.tables), 6 - found.shape[1]), dtype=np.int64)
        return triton_rows.numbers(job, np.concatenate((found, missing), axis=1), self.formats)

    def look_up(self) -> Tensor:
        """Pool the bags, or compute the gradient of their weights."""
        job, device = self.job, self.job.device
        pools, batch = job.kind == "pool", job.lookups.batch
        if pools:
            assert job.statistics is not None
            out = torch.empty(batch, self.width, dtype=torch.float32, device=device)
            statistics = job.statistics
        else:
            out = torch.zeros(self.values.shape, dtype=torch.float32, device=device)
            # The kernel takes the same argument and leaves it alone.
            statistics = self.features
        grad = out if pools else self._grad()
        bags = batch * len(job.lookups.features)
        if not bags:
            return out
        options = lookup_options(
            job, self.formats, pool=pools, weighted=self.weighted, aligned=self.is_aligned
        )

        def run(
            configuration: Configuration, out: Tensor, statistics: Tensor, faults: Record
        ) -> None:
            parts = triton.cdiv(batch, configuration["BAGS"])
            lookup_kernel[(parts * len(job.lookups.features),)](
                *(self.tables, self.features, self.values, self.offsets, self.weights),
                *(grad, out, statistics, faults.words, faults.found),
                *(self.values.numel(), batch, self.width),
                **options,
                **configuration,
                enable_fp_fusion=False,
            )

        def scratch() -> tuning.Run:
            if out.nbytes > tuning.share_of_memory(device):
                raise tuning.TooLargeError
            # Bad numbers are told of once, by the launch that is meant.
            others = torch.zeros_like(out), statistics.clone(), Record(device)
            return lambda configuration: run(configuration, *others)

        table = lookup_configurations_of(job, aligned=self.is_aligned)
        sizes = {"bags": tuning.rounded(bags, MOST)}
        configuration = self._chosen("lookup_kernel", table, options | sizes, scratch)
        run(configuration, out, statistics, self.faults)
        return out

    def update(self) -> None:
        """Update the rows."""
        job, device, count = self.job, self.job.device, self.values.numel()
        if triton_rows.bases(job)[-1] > _MOST_KEYS:
            raise ValueError(
                "the tables have too many rows and sets to be updated together: split them over "
                "several modules"
            )
        grad, bags = self._grad(), job.lookups.batch * len(job.lookups.features)
        keys = torch.empty(count, dtype=torch.int64, device=device)
        grad_at = torch.empty(count, dtype=torch.int64, device=device)
        programs = triton.cdiv(max(count, bags, grad.numel(), 1), POSITIONS)
        options = update_options(job, self.formats, weighted=self.weighted)
        order_kernel[(min(programs, _CHECKING_PROGRAMS),)](
            *(self.tables, self.features, self.values, self.offsets, grad, self.weights),
            *(keys, grad_at, self.faults.words, self.faults.found),
            *(count, bags, max(job.lookups.batch, 1), self.width, bags.bit_length()),
            **options["order"],
            enable_fp_fusion=False,
        )
        if not count or not bags:
            return
        keys, order = keys.sort(stable=True)
        shape = triton.cdiv(count, GRADIENT_SPAN), options["spans"]["BLOCK"]
        sums = torch.empty(shape, dtype=torch.float32, device=device)
        lookups = keys, order, grad, grad_at, self.weights, sums

        def scratch() -> tuning.Run:
            call = _Call(_copied(job), Record(device))
            # Where something was wrong no kernel looks at the rows.
            call.faults.found.copy_(self.faults.found)
            return lambda configuration: call.update_rows(configuration, lookups, options)

        table = configurations(job)
        configuration = self._chosen("update_kernel of tables", table, options["update"], scratch)
        self.update_rows(configuration, lookups, options)

    def update_rows(
        self,
        configuration: Configuration,
        lookups: tuple[Tensor, ...],
        options: dict[str, dict[str, Any]],
    ) -> None:
        """Sum up what many lookups share, and update the rows of sorted lookups."""
        tables, count = len(self.job.tables), self.values.numel()
        spans_kernel[(triton.cdiv(count, GRADIENT_SPAN),)](
            *(self.tables, tables, *lookups, self.faults.found, count),
            **options["spans"],
            **configuration,
            enable_fp_fusion=False,
        )
        evictions, record = self.job.evictions, (self.faults.words, self.faults.found)
        assert evictions is not None
        update_kernel[(triton.cdiv(count, PLACES),)](
            *(self.tables, tables, *lookups, evictions, *record, self.job.step, count),
            **options["update"],
            **configuration,
            enable_fp_fusion=False,
        )

    def _chosen(
        self,
        kernel: str,
        table: tuning.Table,
        options: dict[str, Any],
        scratch: Callable[[], tuning.Run],
    ) -> Configuration:
        flags = {name: value for name, value in options.items() if name != "LAYOUT"}
        flags["lookups"] = tuning.rounded(self.values.numel(), MOST)
        return tuning.choose(kernel, table, flags, self.job.device, scratch)

    def _grad(self) -> Tensor:
        assert self.job.grad is not None
        return self.job.grad.resolve_neg().contiguous()


def _copied(job: Job) -> Job:
    """The job on copies of all that an update changes."""
    assert job.evictions is not None
    tables = [(t, ("codes", "cache", "tags")) for t in job.tables]
    updates = [(u, ("counts", "stamps", "accumulator")) for u in job.updates]
    found = [getattr(part, name) for part, names in (*tables, *updates) for name in names]
    if sum(t.nbytes for t in found) > tuning.share_of_memory(job.device):
        raise tuning.TooLargeError

    def copy(part: Any, names: Sequence[str]) -> Any:
        return replace(part, **{name: getattr(part, name).clone() for name in names})

    return replace(
        job,
        tables=[copy(*table) for table in tables],
        updates=[copy(*update) for update in updates],
        evictions=job.evictions.clone(),
    )


def _as_it_is(table: np.ndarray) -> tuple[np.ndarray, ...]:
    return (table,)


# --------------------------------------------------------------------- what kernels are compiled fo


def lookup_options(
    job: Job, formats: list[str], *, pool: bool, weighted: bool, aligned: bool
) -> dict[str, Any]:
    """Options of lookups, but for their configuration."""
    names = {"LAYOUT": triton_rows.LAYOUT, "FORMATS": ",".join(formats)}
    flags = {"POOL": pool, "WEIGHTED": weighted, "ALIGNED": aligned}
    sizes = sizes_of(job)
    limit = launch.registers(WIDE_REGISTERS) if sizes["BLOCK"] >= 128 else {}
    return names | flags | sizes | limit


def update_options(job: Job, formats: list[str], *, weighted: bool) -> dict[str, dict[str, Any]]:
    """The same of an update's three kernels."""
    sizes = sizes_of(job)
    both = zip(job.tables, job.updates, strict=True)
    narrow = [t for t, u in both if u.stochastic and t.storage.name != "fp32"]
    common = {"LAYOUT": triton_rows.LAYOUT, "WEIGHTED": weighted}
    return {
        "order": {**common, "BLOCK": POSITIONS, "num_warps": 4},
        "spans": {**common, "SPAN": GRADIENT_SPAN, "BLOCK": sizes["BLOCK"]},
        "update": {
            **common,
            "FORMATS": ",".join(formats),
            "RULES": ",".join(sorted({update.rule for update in job.updates})),
            "RANDOM": bool(narrow),
            "PLACES": PLACES,
            "SPAN": GRADIENT_SPAN,
            **sizes,
        },
    }


def is_aligned(job: Job) -> bool:
    """Whether four elements of any row, cached or stored, are one load, if its tensors' are."""
    return all(t.dim % 4 == 0 and (not t.bits or t.codes.shape[1] % 4 == 0) for t in job.tables)


def sizes_of(job: Job) -> dict[str, int]:
    """Elements and ways of the widest table."""
    dim, ways = max(t.dim for t in job.tables), max(t.ways for t in job.tables)
    return {
        "WAYS": triton.next_power_of_2(ways),
        "BLOCK": max(LANES, triton.next_power_of_2(dim)),
    }


MOST = 1 << 22
"""Calls with more lookups are measured as one of so many."""

NARROW: tuning.Table = ({"num_warps": 1}, {"num_warps": 2})
WIDE: tuning.Table = ({"num_warps": 8}, {"num_warps": 16})

NARROW_LOOKUPS = ((8, 1, 1), (4, 2, 1), (8, 1, 4))
# A row of 128 numbers is a load of four by each lane of a warp; with more rows some assemblers run
# out of registers.
ROW_OF_A_WARP_LOOKUPS = ((4, 1, 1), (4, 2, 1), (2, 1, 2))
WIDE_LOOKUPS = ((4, 1, 8), (4, 1, 4))
"""Of lookups: elements that a thread has of each bag's row, lookups of a bag that are under way
together, and warps."""

WIDE_REGISTERS = 128
"""Of a thread, for lookups of rows of 128 numbers and more: enough for each of their shapes, and
for sixteen warps on a multiprocessor. What assemblers choose themselves is less, and a stack."""


def configurations(job: Job) -> tuning.Table:
    """Warps of a program, which sum up nothing between them but in an order that is given."""
    return NARROW if max(t.dim for t in job.tables) <= 128 else WIDE


def lookup_configurations(block: int, *, is_long: bool, aligned: bool) -> tuning.Table:
    """Bags of a program, lookups of a bag that are under way together, and warps.

    Args:
        block: Elements of a row, as :func:`sizes_of` has them.
        is_long: Whether the default is for bags of more than one lookup; a row of 128 numbers
            and more is enough for a program.
        aligned: Whether four elements of a row are one load. Where they are not, addresses of two
            rows of a bag do not fit the registers that some assemblers give a thread.
    """
    shapes: tuple[tuple[int, int, int], ...] = ROW_OF_A_WARP_LOOKUPS
    if block != 128:
        shapes = NARROW_LOOKUPS if block < 128 else WIDE_LOOKUPS
    table: list[Configuration] = []
    ahead_first = is_long and block < 128
    for elements, ahead, warps in sorted(shapes, key=lambda shape: (shape[1] > 1) != ahead_first):
        lanes = 32 * warps
        found = {"BAGS": max(1, lanes * elements // block), "AHEAD": ahead, "num_warps": warps}
        # Two of the widest rows would not fit either.
        fits = ahead == 1 or (aligned and block <= 8 * lanes)
        if fits and found not in table:
            table.append(found)
    return tuple(table)


def lookup_configurations_of(job: Job, *, aligned: bool) -> tuning.Table:
    """Those for a job: its bags are long if they have more than one lookup on average.

    Those of click logs are not: most features have one value.
    """
    looked = job.lookups
    is_long = looked.values.numel() > looked.batch * len(looked.features)
    return lookup_configurations(sizes_of(job)["BLOCK"], is_long=is_long, aligned=aligned)


def compile_lookup(
    target: launch.Target, job: Job, *, pool: bool, configuration: Configuration | None = None
) -> Any:
    """Compile the kernel of a job's lookups ahead of time, see :func:`.launch.compile_for`."""
    names = "tables", "features", "values", "offsets", "statistics", "words"
    arguments: dict[str, str | int] = {**dict.fromkeys(names, "*i64"), "found": "*i32"}
    arguments |= dict.fromkeys(("weights", "grad", "out"), "*fp32")
    arguments |= {"count": job.lookups.values.numel(), "batch": job.lookups.batch}
    arguments["width"] = job.lookups.columns(job.tables)[-1]
    formats = triton_rows.formats_of(job)
    aligned = is_aligned(job)
    options = lookup_options(job, formats, pool=pool, weighted=True, aligned=aligned)
    options |= configuration or lookup_configurations_of(job, aligned=aligned)[0]
    return launch.compile_for(lookup_kernel, target, arguments, **options)


def compile_update(
    target: launch.Target, name: str, job: Job, configuration: Configuration | None = None
) -> Any:
    """Compile ``"order"``, ``"spans"`` or ``"update"``, a kernel of a job's update."""
    names = "tables", "features", "values", "offsets", "keys", "grad_at", "words", "order"
    arguments: dict[str, str | int] = dict.fromkeys((*names, "evictions"), "*i64")
    arguments |= {**dict.fromkeys(("grad", "weights", "sums"), "*fp32"), "found": "*i32"}
    bags = job.lookups.batch * len(job.lookups.features)
    arguments |= {"count": job.lookups.values.numel(), "bags": bags, "search": bags.bit_length()}
    arguments |= {"batch": job.lookups.batch, "width": job.lookups.columns(job.tables)[-1]}
    arguments |= {"table_count": len(job.tables), "step": job.step}
    kernel = {"order": order_kernel, "spans": spans_kernel, "update": update_kernel}[name]
    taken = {key: value for key, value in arguments.items() if key in kernel.arg_names}
    options = update_options(job, triton_rows.formats_of(job), weighted=True)[name]
    if name != "order":
        options |= configuration or configurations(job)[0]
    return launch.compile_for(kernel, target, taken, **options)
