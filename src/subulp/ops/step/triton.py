# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Steps of Adam and SGD by Triton kernels, which can also be compiled ahead of time."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from ...numerics import format_of
from ..triton import codec, launch, random_bits, tuning
from ..triton.choices import Configuration
from . import triton_news, triton_scales
from .job import NEWS, RUNS, StepJob
from .scales import SCALES

CONFIGURATIONS: tuning.Table = (
    {"BLOCK": 1024, "num_warps": 4},
    {"BLOCK": 512, "num_warps": 2, **launch.registers(128)},
    {"BLOCK": 1024, "num_warps": 8, **launch.registers(128)},
    {"BLOCK": 2048, "num_warps": 4, **launch.registers(255)},
)
"""Elements per block: eight for each thread by default. Every element is computed by itself, and
its random bits are counted by its place in the tensor: blocks change no bit."""

BLOCK = CONFIGURATIONS[0]["BLOCK"]

STRIP = 128
"""Elements, for each warp, of what is read through masks: four for each thread, or two where each
draws its own random bits or packs a tail. More would cost registers, also where whole blocks are
read."""

MOST = 1 << 26
"""Elements of all tensors of the largest step that is measured; of scratch tensors, at most."""

_ROLES = ("param", "grad", "fast", "slow", "extra", "slow_low")
# Columns of the table of tensors that a kernel reads.
_COLUMNS = {
    name: i for i, name in enumerate(("numel", "whole", "offset", *RUNS, "key", "news", *_ROLES))
}


def run(kernel: Any, job: StepJob, numbers: tuple[float, ...], flags: dict[str, Any]) -> None:
    """Launch a step kernel on a job's tensors, in place.

    Args:
        kernel: Kernel with arguments ``programs, tensors, news, scales``, numbers and constexprs.
        job: Its tensors and scalars.
        numbers: Hyperparameters, in the kernel's order.
        flags: Constexpr arguments beyond those that every step kernel has.

    Raises:
        RuntimeError: The kernel does not run on the device of the tensors.
    """
    launch.check_device(kernel, job.device)
    options = _options(job, flags)
    elements = sum(p.numel() for p in job.params)
    flags = {name: value for name, value in options.items() if name != "LAYOUT"}
    configuration = tuning.choose(
        kernel.__name__,
        CONFIGURATIONS,
        flags | {"elements": tuning.rounded(elements, MOST)},
        job.device,
        partial(_on_scratch, kernel, job, numbers, options),
    )
    table, news = _table(job, configuration["BLOCK"])
    held = None if job.counts is None else job.counts.held
    programs, tensors = launch.kept(job.device, table, _tables_of(configuration["BLOCK"]), held)
    if news is None:
        there, progress = triton_news.run(job)
    else:
        there, progress = launch.upload(job.device, news, triton_scales.progress(job))
    scales = triton_scales.run(job, progress)
    args = (tensors, there, scales, *numbers)
    launch.launch(kernel, job.device, programs, *args, **options, **sizes_of(job, configuration))


def _table(job: StepJob, block: int) -> tuple[np.ndarray, np.ndarray | None]:
    """The table of a job's tensors, and that of what is new; ``None`` where the device counts."""
    count = len(job.params)
    numel = np.array([p.numel() for p in job.params], dtype=np.int64)
    roles = np.stack(
        [np.array(job.addresses(name) or [0] * count, dtype=np.int64) for name in job.roles()]
    )
    offset = job.scalars["offset"].astype(np.int64)
    runs = [job.scalars[name].astype(np.int64) for name in RUNS]
    # Up to eight elements share a counter of the random bits, and whole blocks draw whole counters:
    # a shard of several runs has none.
    aligned = (roles % launch.ALIGNMENT == 0).all(axis=0) & (offset % 8 == 0) & (runs[0] == 0)
    whole = np.where(aligned, numel // block, 0)
    key = job.scalars["stream"].astype(np.int64) << 32 | job.seed
    news, row = _news(job)
    return np.stack((numel, whole, offset, *runs, key, row, *roles), axis=1), news


# The same function for the same blocks: what is kept on a device is found by it.
@cache
def _tables_of(block: int) -> launch.Make:
    return lambda table: (launch.plan(table[:, _COLUMNS["numel"]], block), table)


def _on_scratch(
    kernel: Any, job: StepJob, numbers: tuple[float, ...], options: dict[str, Any]
) -> tuning.Run:
    """Launches on copies of a job's first elements: a step is taken in place."""
    copied = _copied(job, tuning.share_of_memory(job.device))
    scales = None
    if copied.scaling is not None:
        shape = len(copied.params), len(SCALES)
        scales = torch.ones(shape, dtype=torch.float32, device=job.device)
    tables = {}
    for configuration in CONFIGURATIONS:
        block = configuration["BLOCK"]
        if block not in tables:
            table, news = _table(copied, block)
            if news is None:
                news = np.zeros((len(copied.params), len(NEWS)), dtype=np.int32)
            tables[block] = launch.upload(job.device, *_tables_of(block)(table), news)

    def run(configuration: Configuration) -> None:
        programs, tensors, news = tables[configuration["BLOCK"]]
        sizes = sizes_of(copied, configuration)
        args = (tensors, news, scales, *numbers)
        launch.launch(kernel, job.device, programs, *args, **options, **sizes)

    return run


def _copied(job: StepJob, most_bytes: int) -> StepJob:
    """The job on copies of its tensors, until there are :data:`MOST` elements of them."""
    numel, left = [], MOST
    for p in job.params:
        numel.append(min(p.numel(), left))
        left -= numel[-1]
        if not left:
            break
    roles = ("params", "grads", "fast", "slow", "extras", "slow_lows")
    parts = {}
    for role in roles:
        # Tails are packed: there are fewer words than elements.
        tensors = getattr(job, role)[: len(numel)]
        counts = [min(n, t.numel()) for n, t in zip(numel, tensors, strict=False)]
        # Dense, in whatever order of their dimensions.
        parts[role] = [
            t.detach().as_strided((n,), (1,)) for n, t in zip(counts, tensors, strict=True)
        ]
    if sum(t.numel() * t.element_size() for role in parts.values() for t in role) > most_bytes:
        raise tuning.TooLargeError
    copies: dict[str, Any] = {role: [t.clone() for t in part] for role, part in parts.items()}
    return replace(job, scalars=job.scalars[: len(numel)], **copies)


def _news(job: StepJob) -> tuple[np.ndarray | None, np.ndarray]:
    """What is new in a step, int32: a row for all tensors that are alike; and each tensor's row.

    Where the device counts, it is not known here, and each tensor has a row.
    """
    if job.counts is not None:
        return None, np.arange(len(job.params))
    rows = np.stack([job.scalars[name].view(np.int32) for name in NEWS], axis=1)
    if (rows == rows[0]).all():
        return rows[:1], np.zeros(len(rows), dtype=np.int64)
    _, first, row = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    # In the order of the tensors, which the next step shares: what is kept names rows.
    place = np.argsort(np.argsort(first))
    return rows[np.sort(first)], place[row.reshape(-1)]


def compile_for(
    target: launch.Target,
    kernel: Any,
    job: StepJob,
    numbers: tuple[str, ...],
    flags: dict[str, Any],
    configuration: Configuration | None = None,
) -> Any:
    """Compile the kernel that ``run`` would launch, in its default configuration or another."""
    types = {"programs": "*i64", "tensors": "*i64", "news": "*i32"}
    types |= dict.fromkeys(numbers, "fp32")
    options = _options(job, flags) | sizes_of(job, configuration or CONFIGURATIONS[0])
    if job.scaling is None:
        options["scales"] = None
    else:
        types["scales"] = "*fp32"
    return launch.compile_for(kernel, target, types, **options)


def _options(job: StepJob, flags: dict[str, Any]) -> dict[str, Any]:
    strategy, dtype = job.strategy, job.params[0].dtype
    return {
        "PARAM": format_of(dtype).name,
        "GRAD": format_of(job.grads[0].dtype).name,
        "SLOW": strategy.slow_format(dtype).name,
        "WEIGHT": strategy.weight,
        "SLOW_KIND": strategy.slow_state,
        "K": strategy.k,
        "TAIL_WIDTH": strategy.tail_width,
        "RANDOM": strategy.stochastic,
        # Their own kernel: where nothing is sharded, it would cost registers for nothing.
        "SHARDED": bool(job.scalars["run"].any()),
        "DITHERED": strategy.dithered,
        "SCALED": job.scaling is not None,
        "MAXIMIZE": job.maximize,
        "LAYOUT": launch.layout(_COLUMNS, triton_news.NEW_COLUMNS, triton_scales.SCALE_COLUMNS),
        **flags,
    }


def sizes_of(job: StepJob, configuration: Configuration) -> dict[str, int]:
    """What a launch takes from a configuration."""
    has_less = job.strategy.stochastic or job.strategy.k
    strip = (STRIP // 2 if has_less else STRIP) * configuration["num_warps"]
    return {**configuration, "STRIP": strip}


# -------------------------------------------------------------- what a kernel reads from the tables


@triton.constexpr_function
def columns():
    """Columns of the table of tensors."""
    return len(_COLUMNS)


@triton.constexpr_function
def column(name):
    """A column of the table of tensors."""
    return _COLUMNS[name]


@triton.jit
def entry(tensors, tensor, name: tl.constexpr):
    """Address of a role of a tensor, its number of elements, or a part of its random address."""
    return tl.load(tensors + tensor * columns() + column(name))


@triton.jit
def random_address(tensors, tensor, new):
    """Offset of a tensor in the whole one, and key and step of its random bits."""
    offset, key = entry(tensors, tensor, "offset"), entry(tensors, tensor, "key")
    return offset, key.to(tl.uint64), word(new, "step")


@triton.jit
def draw_bits(
    tensors,
    tensor,
    start,
    offset,
    key,
    step,
    param: tl.constexpr,
    random: tl.constexpr,
    sharded: tl.constexpr,
    masked: tl.constexpr,
    block: tl.constexpr,
):
    """Random bits of a block of a parameter; zeros if the strategy uses none.

    Args:
        tensors: The table of tensors.
        tensor: Row of the table.
        start: The block's first element in the tensor, int64 scalar.
        offset: The next three: see :func:`random_address`.
        key: uint64 scalar.
        step: uint32 scalar.
        param: Format of the parameter.
        random: Whether the strategy uses any.
        sharded: Whether a tensor of the job is several runs of a whole one.
        masked: Whether the block is no whole one.
        block: Number of elements, a power of two.
    """
    if random:
        width: tl.constexpr = codec.random_width(param)
        if sharded and masked:
            index = offset + whole_index(tensors, tensor, start + tl.arange(0, block))
            bits = random_bits.draw_at(index, key, step, 0, width)
        else:
            bits = random_bits.draw(offset + start, key, step, width, not masked, block)
    else:
        bits = tl.zeros((block,), tl.uint32)
    return bits


@triton.jit
def whole_index(tensors, tensor, at):
    """Elements of a shard in the whole tensor, see numerics' ``Region``; from its offset on."""
    run = entry(tensors, tensor, "run")
    index = at
    if run != 0:
        count_1, count_2 = entry(tensors, tensor, "count_1"), entry(tensors, tensor, "count_2")
        inner = at // run
        middle = inner // count_1
        outer = middle // count_2
        index = at % run + inner % count_1 * entry(tensors, tensor, "stride_1")
        index += middle % count_2 * entry(tensors, tensor, "stride_2")
        index += outer * entry(tensors, tensor, "stride_3")
    return index


@triton.jit
def slow_bits(bits, slow_dither, param: tl.constexpr, kind: tl.constexpr):
    """What rounds the slow state: the parameter's bits with their halves swapped, or its dither."""
    if kind == "stochastic":
        return random_bits.swap_halves(bits, codec.random_width(param))
    else:
        return slow_dither


@triton.jit
def new_of(tensors, tensor, news):
    """The row of what is new in this step for a tensor."""
    return news + entry(tensors, tensor, "news") * triton_news.new_columns()


@triton.jit
def word(new, name: tl.constexpr):
    """A word of a row, uint32, by its name in :data:`subulp.ops.step.job.SCALARS`; of a dither, it
    is the random bits of every element."""
    return tl.load(new + triton_news.new_column(name)).to(tl.uint32, bitcast=True)


@triton.jit
def number(new, name: tl.constexpr):
    """An FP32 scalar of a row, by its name there."""
    return tl.load(new + triton_news.new_column(name)).to(tl.float32, bitcast=True)
