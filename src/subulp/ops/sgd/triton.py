# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""SGD step in Triton: the same sequence of rounded operations as the reference."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ..step import triton as triton_step
from ..step import triton_scales
from ..step import triton_storage as storage
from ..step.job import StepJob
from ..triton import launch
from ..triton.choices import Configuration


def run(job: StepJob) -> None:
    """Update the tensors of a job in place.

    Raises:
        RuntimeError: The kernels do not run on the device of the tensors.
    """
    numbers = (job.beta1, job.one_minus_beta1, job.weight_decay)
    triton_step.run(sgd_step_kernel, job, numbers, _flags(job))


def compile_for(
    target: launch.Target, job: StepJob, configuration: Configuration | None = None
) -> Any:
    """Compile the kernel of a job ahead of time, see :func:`.launch.compile_for`."""
    numbers = ("momentum", "one_minus_dampening", "weight_decay")
    flags = _flags(job)
    return triton_step.compile_for(target, sgd_step_kernel, job, numbers, flags, configuration)


def _flags(job: StepJob) -> dict[str, Any]:
    return {
        "COUPLED": job.weight_decay != 0.0,
        "MOMENTUM": bool(job.slow),
        "NESTEROV": job.nesterov,
    }


@triton.jit
def sgd_step_kernel(
    programs,
    tensors,
    news,
    scales,
    momentum,
    one_minus_dampening,
    weight_decay,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    SLOW: tl.constexpr,
    WEIGHT: tl.constexpr,
    SLOW_KIND: tl.constexpr,
    K: tl.constexpr,
    TAIL_WIDTH: tl.constexpr,
    RANDOM: tl.constexpr,
    SHARDED: tl.constexpr,
    DITHERED: tl.constexpr,
    SCALED: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    COUPLED: tl.constexpr,
    MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIP: tl.constexpr,
):
    tensor, first, end = launch.work(programs)
    numel = triton_step.entry(tensors, tensor, "numel")
    whole = triton_step.entry(tensors, tensor, "whole")
    param = triton_step.entry(tensors, tensor, "param")
    grad = triton_step.entry(tensors, tensor, "grad")
    slow = triton_step.entry(tensors, tensor, "slow")
    extra = triton_step.entry(tensors, tensor, "extra")
    low = triton_step.entry(tensors, tensor, "slow_low")
    new = triton_step.new_of(tensors, tensor, news)
    offset, key, step = triton_step.random_address(tensors, tensor, new)
    fresh = triton_step.word(new, "first")
    slow_dither = triton_step.word(new, "slow_dither")
    extra_dither = triton_step.word(new, "extra_dither")
    lr = triton_step.number(new, "step_size")
    slow_decode = triton_scales.scale(scales, tensor, "slow_decode", SCALED)
    slow_encode = triton_scales.scale(scales, tensor, "slow_encode", SCALED)

    for masked in tl.static_range(2):
        begin, stop = storage.pieces(numel, first, whole, end, masked, BLOCK, STRIP)
        # What packs tails, computed once for all pieces, would fill registers.
        for index in tl.range(begin, stop, disable_licm=K > 0):
            start = index * (STRIP if masked else BLOCK)
            at = start + tl.arange(0, STRIP if masked else BLOCK)
            inside = at < numel if masked else None
            theta = storage.decode_parameter(param, extra, at, inside, PARAM, WEIGHT, K, TAIL_WIDTH)
            bits = triton_step.draw_bits(
                tensors,
                tensor,
                start,
                offset,
                key,
                step,
                PARAM,
                RANDOM,
                SHARDED,
                masked,
                STRIP if masked else BLOCK,
            )

            g = storage.load(grad, at, inside, GRAD)
            if MAXIMIZE:
                g = -g
            if COUPLED:
                g = g + theta * weight_decay
            if MOMENTUM:
                b = storage.decode_state(
                    slow, low, at, inside, slow_decode, SLOW, SLOW_KIND, SCALED
                )
                b = tl.where(fresh != 0, g, b * momentum + g * one_minus_dampening)
                g = g + b * momentum if NESTEROV else b
                slow_bits = triton_step.slow_bits(bits, slow_dither, PARAM, SLOW_KIND)
                storage.encode_state(
                    b,
                    slow,
                    low,
                    at,
                    inside,
                    slow_encode,
                    slow_bits,
                    SLOW,
                    SLOW_KIND,
                    SCALED,
                    DITHERED,
                )
            delta = g * lr

            storage.apply_update(
                theta,
                delta,
                param,
                extra,
                at,
                inside,
                start,
                numel,
                bits,
                extra_dither,
                PARAM,
                WEIGHT,
                K,
                TAIL_WIDTH,
                RANDOM,
                DITHERED,
                STRIP if masked else BLOCK,
            )
