# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Adam step in Triton: the same sequence of rounded operations as the reference."""

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

_NUMBERS = ("beta1", "one_minus_beta1", "beta2", "one_minus_beta2", "eps", "weight_decay")


def run(job: StepJob) -> None:
    """Update the tensors of a job in place.

    Raises:
        RuntimeError: The kernels do not run on the device of the tensors.
    """
    numbers = tuple(getattr(job, name) for name in _NUMBERS)
    triton_step.run(adam_step_kernel, job, numbers, _flags(job))


def compile_for(
    target: launch.Target, job: StepJob, configuration: Configuration | None = None
) -> Any:
    """Compile the kernel of a job ahead of time, see :func:`.launch.compile_for`."""
    flags = _flags(job)
    return triton_step.compile_for(target, adam_step_kernel, job, _NUMBERS, flags, configuration)


def _flags(job: StepJob) -> dict[str, Any]:
    return {
        "FAST": job.strategy.fast_format(job.params[0].dtype).name,
        "COUPLED": not job.decoupled and job.weight_decay != 0.0,
        "DECOUPLED": job.decoupled,
    }


@triton.jit
def adam_step_kernel(
    programs,
    tensors,
    news,
    scales,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    weight_decay,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    FAST: tl.constexpr,
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
    DECOUPLED: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIP: tl.constexpr,
):
    tensor, first, end = launch.work(programs)
    numel = triton_step.entry(tensors, tensor, "numel")
    whole = triton_step.entry(tensors, tensor, "whole")
    param = triton_step.entry(tensors, tensor, "param")
    grad = triton_step.entry(tensors, tensor, "grad")
    fast = triton_step.entry(tensors, tensor, "fast")
    slow = triton_step.entry(tensors, tensor, "slow")
    extra = triton_step.entry(tensors, tensor, "extra")
    low = triton_step.entry(tensors, tensor, "slow_low")
    new = triton_step.new_of(tensors, tensor, news)
    offset, key, step = triton_step.random_address(tensors, tensor, new)
    fast_dither = triton_step.word(new, "fast_dither")
    slow_dither = triton_step.word(new, "slow_dither")
    extra_dither = triton_step.word(new, "extra_dither")
    step_size = triton_step.number(new, "step_size")
    inv_sqrt_bias2 = triton_step.number(new, "inv_sqrt_bias2")
    decay = triton_step.number(new, "decay")
    fast_decode = triton_scales.scale(scales, tensor, "fast_decode", SCALED)
    fast_encode = triton_scales.scale(scales, tensor, "fast_encode", SCALED)
    slow_decode = triton_scales.scale(scales, tensor, "slow_decode", SCALED)
    slow_encode = triton_scales.scale(scales, tensor, "slow_encode", SCALED)
    floor = triton_scales.scale(scales, tensor, "slow_floor", SCALED)

    for masked in tl.static_range(2):
        begin, stop = storage.pieces(numel, first, whole, end, masked, BLOCK, STRIP)
        # What packs tails, computed once for all pieces, would fill registers.
        for index in tl.range(begin, stop, disable_licm=K > 0):
            start = index * (STRIP if masked else BLOCK)
            at = start + tl.arange(0, STRIP if masked else BLOCK)
            inside = at < numel if masked else None
            theta = storage.decode_parameter(param, extra, at, inside, PARAM, WEIGHT, K, TAIL_WIDTH)
            m = storage.decode_state(fast, low, at, inside, fast_decode, FAST, "plain", SCALED)
            v = storage.decode_state(slow, low, at, inside, slow_decode, SLOW, SLOW_KIND, SCALED)

            g = storage.load(grad, at, inside, GRAD)
            if MAXIMIZE:
                g = -g
            if COUPLED:
                g = g + theta * weight_decay
            m = m * beta1 + g * one_minus_beta1
            v = v * beta2 + (g * one_minus_beta2) * g
            known = tl.where(v < floor, floor, v) if SCALED else v
            denominator = tl.sqrt_rn(known) * inv_sqrt_bias2 + eps
            delta = tl.div_rn(m * step_size, denominator)
            if DECOUPLED:
                delta = tl.where(decay != 0.0, delta + theta * decay, delta)

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
            storage.encode_state(
                m, fast, low, at, inside, fast_encode, fast_dither, FAST, "plain", SCALED, DITHERED
            )
            slow_bits = triton_step.slow_bits(bits, slow_dither, PARAM, SLOW_KIND)
            storage.encode_state(
                v, slow, low, at, inside, slow_encode, slow_bits, SLOW, SLOW_KIND, SCALED, DITHERED
            )
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
