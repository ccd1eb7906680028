"""What Triton would compile where kernels are launched, and what is compiled ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from subulp.numerics import format_of
from subulp.ops import adam, sgd
from subulp.ops.adam import triton as adam_triton
from subulp.ops.all_finite import FiniteJob
from subulp.ops.all_finite import triton as all_finite_triton
from subulp.ops.capture import Held
from subulp.ops.embedding import triton as embedding_triton
from subulp.ops.head import triton as head_triton
from subulp.ops.head import triton_logistic, triton_sum
from subulp.ops.head.exact_sum import LOWEST, PARTS, WIDTH, new_parts
from subulp.ops.mixture import DecodeJob, EncodeBothJob, KeptEncoding, triton_encode
from subulp.ops.mixture import triton as mixture_triton
from subulp.ops.mixture.operand import Operand, ProductJob
from subulp.ops.sgd import triton as sgd_triton
from subulp.ops.step import triton_news, triton_scales
from subulp.ops.triton import launch

from .aot_worker import table_job
from .head_jobs import job as head_job
from .support import Setup, arguments, fresh_state

Source = tuple[str, dict[str, str], dict[Any, Any], dict[Any, Any], dict[str, Any]]
"""Name, types, constants, what is known of arguments, and the compiler's options."""


def at_launch(
    function: Any, target: launch.Target, *values: Any, **options: Any
) -> tuple[ASTSource, dict[str, Any]]:
    """What Triton itself compiles, and the options that are not the kernel's."""
    backend = make_backend(launch.gpu_of(target))
    binder = create_function_from_signature(function.signature, function.params, backend)
    bound, specialisation, left = binder(*values, **options)
    _, signature, constants, attributes = function._pack_args(
        backend, {"enable_fp_fusion": False, **options}, bound, specialisation, left
    )
    # Triton 3.6 reads letters of constexpr texts as what is known of them, which changes nothing.
    types = list(signature.values())
    attributes = {
        p: known for p, known in attributes.items() if known and types[p[0]] != "constexpr"
    }
    return ASTSource(function, signature, constants, attributes), left


def source(made: ASTSource, options: dict[str, Any]) -> Source:
    known = {"num_warps": 4, **options}
    return made.fn.fn.__name__, made.signature, made.constants, made.attrs, known


def of_launches(run: Callable[[], Any]) -> list[Source]:
    """What a call on CPU tensors would compile; its kernels are left out."""
    found = []

    def note(function: Any, *values: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.append(source(*at_launch(function, 90, *values, **options)))

    # These tensors lie on the CPU.
    known = patch.object(triton_encode, "converts_at", lambda device: launch.converts(90))
    with patch.object(JITFunction, "run", note), patch.object(launch, "check_device"), known:
        run()
    return found


def of_compiles(*calls: Callable[[], Any]) -> list[Source]:
    """What calls compile ahead of time."""
    found = []

    def note(made: ASTSource, target: Any, options: dict[str, Any]) -> None:
        found.append(source(made, options))

    with patch.object(triton, "compile", note):
        for call in calls:
            call()
    return found


def step(setup: Setup) -> tuple[list[Source], list[Source]]:
    param = torch.zeros(4096, dtype=setup.dtype)
    grad = param.to(setup.grad_dtype or setup.dtype)
    args = arguments(setup, fresh_state(setup, [param]), [grad], 1)
    op, kernels = {"adam": (adam, adam_triton), "sgd": (sgd, sgd_triton)}[setup.op]
    job = op.make_job(**args)
    compiles = [partial(kernels.compile_for, 90, job)]
    if job.scaling is not None:
        compiles.insert(0, partial(triton_scales.compile_for, 90, job))
    return of_launches(partial(kernels.run, job)), of_compiles(*compiles)


def counts(setup: Setup, rate: torch.dtype | None) -> tuple[list[Source], list[Source]]:
    param = torch.zeros(4096, dtype=setup.dtype)
    lr = 0.1 if rate is None else torch.tensor(0.1, dtype=rate)
    args = arguments(setup, fresh_state(setup, [param]), [param], 0, lr=lr, held=Held())
    job = {"adam": adam, "sgd": sgd}[setup.op].make_job(**args)
    return of_launches(partial(triton_news.run, job)), of_compiles(
        partial(triton_news.compile_for, 90, job)
    )


def all_finite(dtype: torch.dtype) -> tuple[list[Source], list[Source]]:
    job = FiniteJob([torch.zeros(10, dtype=dtype)])
    return of_launches(partial(all_finite_triton.run, job)), of_compiles(
        partial(all_finite_triton.compile_for, 90, dtype)
    )


def head(
    dtype: torch.dtype, products: str, sizes: tuple[int, int, int]
) -> tuple[list[Source], list[Source]]:
    labels, dim, batch = sizes
    job = head_job(
        format_of(dtype), labels=labels, dim=dim, batch=batch, products=products, weight_decay=0.1
    )
    count, narrow = job.positive_labels.numel(), products != "fp32"
    logistic = partial(triton_logistic.compile_for, 90, (labels, batch), count=count, first=0)
    return of_launches(partial(head_triton.run, job)), of_compiles(
        partial(logistic, loss=True, narrow=narrow), partial(head_triton.compile_for, 90, job)
    )


def exact_sum(count: int) -> tuple[list[Source], list[Source]]:
    terms = torch.zeros(count, dtype=torch.float64)
    # On the CPU, losses are summed by other means.
    parts = new_parts(torch.device("cpu"))
    add = partial(triton_sum.add, terms, parts, LOWEST, WIDTH)
    compiled = partial(triton_sum.compile_for, 90, count, PARTS, LOWEST, WIDTH)
    return of_launches(add), of_compiles(compiled)


def mixture(
    block: tuple[int, int], shape: tuple[int, int], kept: bool
) -> tuple[list[Source], list[Source]]:
    """Encoding, decoding and a product with itself."""
    made = mixture_triton.encode_job(shape, block, torch.bfloat16, kept=kept)
    x = torch.zeros(shape, dtype=torch.bfloat16)
    job = replace(made, x=x, kept=KeptEncoding() if kept else None)
    found: list[Any] = [Operand(mixture_triton.encoded(made), None)]

    def run() -> None:
        *stored, _numbers = mixture_triton.run(job)
        there = replace(found[0], mixture=replace(found[0].mixture, **_named(stored)))
        mixture_triton.run(DecodeJob(there.mixture))
        mixture_triton.run(ProductJob(there, there, torch.bfloat16, None, units=True))

    jobs = [made] * len(mixture_triton.launches_of(made))
    names = [each.name for each in mixture_triton.launches_of(made)]
    jobs += [DecodeJob(found[0].mixture), ProductJob(*found * 2, torch.bfloat16, None, units=True)]
    names += ["decode", "product"]
    return of_launches(run), of_compiles(
        *(
            partial(mixture_triton.compile_for, 90, name, each)
            for name, each in zip(names, jobs, strict=True)
        )
    )


def mixture_both(side: int, shape: tuple[int, int]) -> tuple[list[Source], list[Source]]:
    """Encoding along rows and columns."""
    made = mixture_triton.encode_both_job(shape, side, torch.bfloat16)
    x = torch.zeros(shape, dtype=torch.bfloat16)
    job = EncodeBothJob(replace(made.along_rows, x=x), replace(made.along_columns, x=x.t()))
    names = [each.name for each in mixture_triton.launches_of(made)]
    return of_launches(partial(mixture_triton.run, job)), of_compiles(
        *(partial(mixture_triton.compile_for, 90, name, made) for name in names)
    )


def _named(stored: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(zip(("codes", "types", "mantissa", "exponents", "wide"), stored, strict=True))


def tables(kind: str, sizes: tuple[int, int]) -> tuple[list[Source], list[Source]]:
    job = table_job("e4m3", "rowwise", "lru", 64, *sizes)
    lookups = replace(job.lookups, weights=torch.ones(job.lookups.values.numel()))
    width = lookups.columns(job.tables)[-1]
    job = replace(
        job,
        kind=kind,
        lookups=lookups,
        grad=torch.zeros(lookups.batch, width),
        statistics=torch.zeros(len(job.tables), 2, dtype=torch.int64),
        evictions=torch.zeros(len(job.tables), dtype=torch.int64),
    )
    run = partial(embedding_triton.run, job)
    if kind != "update":
        pool = kind == "pool"
        return of_launches(run), of_compiles(
            partial(embedding_triton.compile_lookup, 90, job, pool=pool)
        )
    names = "order", "spans", "update"
    return of_launches(run), of_compiles(
        *(partial(embedding_triton.compile_update, 90, name, job) for name in names)
    )
