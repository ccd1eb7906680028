"""The reference, C++ for every instruction set, and Triton give the same bits."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from subulp.numerics import extra_bits, format_of, random_bits, round_to
from subulp.ops import parse_strategy
from subulp.ops.strategy import FIXED, all_names

from .support import (
    BF16,
    DEVICES,
    DTYPES,
    E4M3,
    FP16,
    FP32,
    SIZES,
    Setup,
    State,
    arguments,
    assert_same,
    environment,
    fresh_state,
    gradients,
    interpreted,
    isas,
    parameters,
    patterns,
    setups,
    short,
    take_step,
    threads,
    train,
)

EXTRA_BITS = tuple(name for name in all_names(*range(1, 17)) if name not in FIXED)
# One strategy for each code path.
SOME = (
    Setup("adam", "fp32", FP32),
    Setup("adam", "nearest", FP16),
    Setup("sgd", "stochastic", BF16),
    Setup("adam", "stochastic", E4M3),
    Setup("sgd", "kahan", BF16),
    Setup("sgd", "collage-light", FP16),
    Setup("adam", "collage-plus", BF16),
    Setup("sgd", "collage-plus", E4M3),
    Setup("adam", "master", BF16),
    Setup("sgd", "extra-bits-8", BF16),
    Setup("adam", "extra-bits-5-stochastic", FP16),
)
VARIANTS = {
    "maximize": {"maximize": True},
    "coupled": {"decoupled": False},
    "no-decay": {"weight_decay": 0.0},
    "nesterov": {"nesterov": True},
    "plain-sgd": {"momentum": None},
}
# No element, whole blocks and a ragged one, a group of packed words and a part of one.
FEW = (0, 300, 33)
# The same for the larger blocks of Triton.
TRITON_SIZES = (1100, 0, 33)


def check_cpu(setup: Setup, sizes: tuple[int, ...], **kwargs) -> None:
    expected = train(setup, "reference", sizes, **kwargs)
    for isa in isas():
        with environment(SUBULP_ISA=isa):
            assert_same(train(setup, "cpu", sizes, **kwargs), expected)


def check_triton(setup: Setup, sizes: tuple[int, ...], *, device: str = "cpu", **kwargs) -> None:
    expected = train(setup, "reference", sizes, **kwargs)
    assert_same(train(setup, "triton", sizes, device=device, **kwargs), expected)


def variants() -> list:
    cases = []
    for name, change in VARIANTS.items():
        for setup in SOME:
            if (name == "coupled") > (setup.op == "adam"):
                continue
            if (name in ("nesterov", "plain-sgd")) > (setup.op == "sgd"):
                continue
            cases.append(pytest.param(dataclasses.replace(setup, **change), id=f"{setup}-{name}"))
    return cases


# ------------------------------------------------------------------------------------------- C++


@pytest.mark.parametrize("setup", setups(FIXED), ids=str)
def test_cpu(setup):
    check_cpu(setup, SIZES, steps=4)


@pytest.mark.parametrize("setup", setups(EXTRA_BITS), ids=str)
def test_cpu_extra_bits(setup):
    check_cpu(setup, FEW, steps=2)


@pytest.mark.parametrize("setup", variants())
def test_cpu_options(setup):
    check_cpu(setup, FEW, steps=2)


@pytest.mark.parametrize("grad_dtype", DTYPES, ids=short)
@pytest.mark.parametrize("setup", SOME, ids=str)
def test_cpu_gradient_dtypes(setup, grad_dtype):
    check_cpu(dataclasses.replace(setup, grad_dtype=grad_dtype), FEW, steps=2)


@pytest.mark.parametrize("precision", ["stochastic", "extra-bits-7-stochastic"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=short)
def test_cpu_offsets(precision, dtype):
    """Also where the index leaves 32 bits, and the counter's low word overflows."""
    setup = Setup("adam", precision, dtype)
    offsets = (0, 1, 3, 8, 2**32 - 5, 2**34 + 7, 2**35 - 60, 77)
    check_cpu(setup, SIZES, steps=1, offsets=offsets)


@pytest.mark.parametrize("setup", SOME, ids=str)
def test_threads_do_not_matter(setup):
    results = []
    for count in (1, 2):
        with threads(count):
            results.append(train(setup, "cpu", (20_000, 777, 40_001), steps=2))
    assert_same(results[1], results[0])


# ---------------------------------------------------------------------------------------- Triton


@interpreted
@pytest.mark.parametrize(
    "setup",
    [s for s in setups(FIXED) if s.op == "adam" or s.precision in ("fp32", "stochastic", "kahan")],
    ids=str,
)
def test_triton(setup):
    check_triton(setup, TRITON_SIZES, steps=2)


@interpreted
@pytest.mark.parametrize("precision", EXTRA_BITS)
def test_triton_extra_bits(precision):
    """Every width of the packed words, several groups of 32."""
    dtype = FP16 if parse_strategy(precision).k % 2 else BF16
    setup = Setup("sgd", precision, dtype, momentum=None)
    check_triton(setup, (70,), steps=2)


@interpreted
@pytest.mark.parametrize("setup", variants())
def test_triton_options(setup):
    check_triton(setup, (70,), steps=2)


@interpreted
@pytest.mark.parametrize("grad_dtype", DTYPES, ids=short)
def test_triton_gradient_dtypes(grad_dtype):
    setup = Setup("adam", "nearest", BF16, grad_dtype=grad_dtype)
    check_triton(setup, (70,), steps=1)


@interpreted
@pytest.mark.parametrize("setup", [Setup("adam", "stochastic", d) for d in (BF16, FP16)], ids=str)
def test_triton_offsets(setup):
    sizes, offsets = (1030, 70, 1030), (2**35 - 64, 2**32 - 5, 3)
    check_triton(setup, sizes, steps=1, offsets=offsets)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("setup", SOME, ids=str)
def test_triton_many_blocks_in_one_program(setup, device, monkeypatch):
    """Few programs: each works through several blocks, and packed words stay with their owner."""
    triton_launch = pytest.importorskip("subulp.ops.triton.launch")
    monkeypatch.setattr(triton_launch, "_PROGRAMS", 2)
    # What is kept was planned for many.
    monkeypatch.setattr(triton_launch, "_made", triton_launch._made.__wrapped__)
    check_triton(setup, (3100, 40), steps=1, device=device)


# ---------------------------------------------------------------------- laws that hold everywhere


def backends() -> list:
    return ["reference", "cpu", pytest.param("triton", marks=interpreted)]


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize(
    "setup",
    [s for s in SOME if s.strategy.stochastic] + [Setup("adam", "collage-plus", E4M3)],
    ids=str,
)
def test_a_part_of_many_runs_is_that_part_of_the_whole(setup, backend):
    """Also where a run is shorter and where it is longer than what kernels draw at a time."""
    for shape, place in (
        ((6, 5, 4, 4), (slice(1, 5), slice(2, 5), slice(0, 3), slice(1, 3))),
        ((3, 1400), (slice(0, 3), slice(3, 1230))),
    ):
        size = torch.Size(shape).numel()
        (whole,) = parameters(setup, [size])
        number = torch.arange(size).view(shape)[place]
        region = random_bits.Region.of(number.shape, number.stride(), int(number.flatten()[0]))
        held = number.flatten()
        together, part = fresh_state(setup, [whole]), fresh_state(setup, [whole[held]])
        for t in (1, 2):
            (g,) = gradients(setup, [size], t)
            g[0] = 8.0
            most = g.float().abs().max()[None]
            take_step(setup, together, [g], t, [0], backend="reference")
            options = {"runs": region.runs, "gradient_amaxes": most}
            take_step(setup, part, [g[held]], t, [region.offset], backend=backend, **options)
        for name, role in together.roles().items():
            if name == "extras" and setup.strategy.coding:
                continue
            for mine, all_of_them in zip(part.roles()[name], role, strict=True):
                mine_only = all_of_them[held] if all_of_them.dim() else all_of_them
                assert (patterns(mine) == patterns(mine_only)).all(), name


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("setup", SOME, ids=str)
def test_sharded_is_whole(setup, backend):
    """Two shards with offsets, cut at an odd element, hold the bits of the whole tensor."""
    size, cut = 300, 160 if "extra-bits" in setup.precision else 131
    (whole,) = parameters(setup, [size])
    together = fresh_state(setup, [whole])
    apart = fresh_state(setup, [whole[:cut], whole[cut:]])
    for t in (1, 2):
        (g,) = gradients(setup, [size], t)
        # FP8 states are scaled by the largest gradient: both shards have the same.
        g[0] = g[-1] = 8.0
        take_step(setup, together, [g], t, [5], backend=backend)
        for i, (part, offset) in enumerate(((g[:cut], 5), (g[cut:], 5 + cut))):
            shard = State(**{name: role[i : i + 1] for name, role in apart.roles().items()})
            take_step(setup, shard, [part], t, [offset], backend=backend)
    joined = State(
        **{
            name: [torch.cat(role)] if role else []
            for name, role in apart.roles().items()
            if name != "amaxes"
        },
        amaxes=apart.amaxes[:1],
    )
    assert_same(joined, together)


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("setup", SOME, ids=str)
def test_tensors_together_are_tensors_alone(setup, backend):
    sizes = (40, 0, 7)
    together = fresh_state(setup, parameters(setup, sizes))
    alone = together.map(torch.clone)
    grads = gradients(setup, sizes, 1)
    take_step(setup, together, grads, 1, backend=backend)
    for i, g in enumerate(grads):
        one = State(**{name: role[i : i + 1] for name, role in alone.roles().items()})
        with environment(SUBULP_BACKEND=backend):
            setup.operator(**arguments(setup, one, [g], 1) | {"streams": [i]})
    assert_same(alone, together)


@pytest.mark.parametrize("backend", ["cpu", pytest.param("triton", marks=interpreted)])
@pytest.mark.parametrize("setup", SOME, ids=str)
def test_unaligned_storage(setup, backend):
    """Tensors that begin at an odd element of their storage; what lies around them stays."""
    (param,) = parameters(setup, [200])
    (grad,) = gradients(setup, [200], 1)
    expected = fresh_state(setup, [param])
    take_step(setup, expected, [grad], 1, backend="reference")

    storages = []

    def shifted(x: torch.Tensor) -> torch.Tensor:
        if x.ndim == 0:
            return x
        padded = torch.zeros(x.numel() + 2, dtype=x.dtype)
        padded[1:-1] = x
        storages.append(padded)
        return padded[1:-1]

    actual = fresh_state(setup, [param]).map(shifted)
    take_step(setup, actual, [shifted(grad)], 1, backend=backend)
    assert_same(actual, expected)
    for padded in storages:
        assert padded[[0, -1]].float().eq(0).all()


@pytest.mark.parametrize("backend", ["cpu", pytest.param("triton", marks=interpreted)])
@pytest.mark.parametrize("setup", [s for s in SOME if "stochastic" not in s.precision], ids=str)
def test_several_dimensions(setup, backend):
    params = [p.view(6, 5, 4) for p in parameters(setup, [120])]
    grads = [g.view(6, 5, 4) for g in gradients(setup, [120], 1)]
    expected, actual = fresh_state(setup, params), fresh_state(setup, params)
    take_step(setup, expected, grads, 1, backend="reference")
    take_step(setup, actual, grads, 1, backend=backend)
    assert_same(actual, expected)


# ------------------------------------------------------------------------------ special values


SPECIAL = (
    *(0.0, -0.0, 1e-45, -1e-40, 1.2e-38, 6e-8, -6e-5, 2.0**-9, 1.0, -448.0, 449.0, 6e4, -65520.0),
    *(1e30, -3.3895314e38, 3.4028235e38, float("inf"), -float("inf"), float("nan")),
)


def special_case(setup: Setup) -> tuple[State, torch.Tensor]:
    """Every pair of a special parameter and a special gradient, with arbitrary states."""
    values = torch.tensor(SPECIAL)
    weights, grads = torch.cartesian_prod(values, values).T.contiguous()
    state = fresh_state(setup, [weights.to(setup.dtype)])
    generator = torch.Generator().manual_seed(5)
    for role in (state.fast, state.slow, state.lows):
        for x in role:
            choice = torch.randint(len(SPECIAL), x.shape, generator=generator)
            x.copy_(values[choice])
    # A second moment is a sum of squares.
    if setup.op == "adam":
        for x in state.slow:
            x.copy_(x.float().abs())
    return state, grads.to(setup.grad_dtype or setup.dtype)


@pytest.mark.parametrize("grad_dtype", [None, FP32], ids=["same", "fp32"])
@pytest.mark.parametrize("backend", ["cpu", pytest.param("triton", marks=interpreted)])
@pytest.mark.parametrize(
    "setup", setups((*FIXED, "extra-bits-4", "extra-bits-9-stochastic")), ids=str
)
def test_special_values(setup, backend, grad_dtype):
    setup = dataclasses.replace(setup, grad_dtype=grad_dtype)
    expected, grad = special_case(setup)
    start = expected.map(torch.clone)
    take_step(setup, expected, [grad], 2, backend="reference")
    for isa in isas() if backend == "cpu" else ["plain"]:
        actual = start.map(torch.clone)
        with environment(SUBULP_ISA=isa):
            take_step(setup, actual, [grad], 2, backend=backend)
        assert_same(actual, expected)


@pytest.mark.parametrize(
    "setup", setups(("nearest", "collage-plus", "kahan", "stochastic")), ids=str
)
def test_finite_gradients_never_overflow(setup):
    """Updates beyond the largest value saturate; nothing finite becomes infinite or NaN."""
    setup = dataclasses.replace(setup, lr=1e3, weight_decay=0.0)
    state = train(setup, "cpu", [500])
    for role in state.roles().values():
        for x in role:
            assert x.float().isfinite().all()


@pytest.mark.parametrize("backend", ["cpu", pytest.param("triton", marks=interpreted)])
@pytest.mark.parametrize("dtype", [E4M3, FP16], ids=short)
def test_each_element_at_the_threshold_of_its_bits(dtype, backend):
    """Above every code: the last value that an element's random bits round down, the first up."""
    fmt = format_of(dtype)
    codes = torch.arange(fmt.max_code, dtype=torch.int16 if dtype == FP16 else torch.uint8)
    low, high = (c.view(dtype).double().repeat(3) for c in (codes, codes + 1))
    address = {"seed": 7, "stream": 0, "step": 2, "offset": 5}
    bits = random_bits.draw(low.shape, **address)
    target = (low + (high - low) * (2**32 - bits) * 2.0**-32).float()
    neighbours = torch.tensor([-torch.inf, 0.0, torch.inf]).repeat_interleave(len(codes))
    x = torch.where(neighbours == 0, target, target.nextafter(neighbours))
    x[::2] *= -1
    expected = round_to(x, fmt, "stochastic", bits=bits).to(dtype)
    up = (expected.double().abs() > low).view(3, -1)
    assert not up[0].any()
    assert up[2].all()

    setup = Setup("sgd", "stochastic", dtype, weight_decay=0.0, momentum=None, lr=1.0)
    for isa in isas() if backend == "cpu" else ["plain"]:
        state = fresh_state(setup, [torch.zeros(x.shape, dtype=dtype)])
        with environment(SUBULP_ISA=isa):
            take_step(setup, state, [-x], 2, [5], backend=backend)
        assert (patterns(state.params[0]) == patterns(expected)).all()


def every_sum() -> list[Setup]:
    """Steps that only add, under each strategy of 16 bits, and Adam's, which have states."""
    options = {"weight_decay": 0.0, "momentum": None, "lr": 1.0}
    return [
        setup
        for setup in (*setups(FIXED, **options), *setups(EXTRA_BITS, **options))
        if setup.dtype.itemsize == 2 and (setup.op == "sgd" or setup.precision in FIXED)
    ]


@pytest.mark.parametrize("setup", every_sum(), ids=str)
def test_every_number_with_any_rest_and_any_gradient(setup):
    """Rests that no step makes are among them, and sums from 2**-149 to infinity and NaN."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(setup.dtype)
    start = fresh_state(setup, [codes])
    for rest in start.extras:
        patterns = rest.view(torch.uint8)
        patterns.copy_(torch.randint(256, patterns.shape, generator=generator))
    anything = torch.randint(-(2**31), 2**31, codes.shape, generator=generator).int()
    beside = torch.randn(codes.shape, generator=generator) * codes.float().nan_to_num()
    for grad in (torch.zeros(codes.shape), anything.view(FP32), beside):
        expected = start.map(torch.clone)
        take_step(setup, expected, [grad], 2, backend="reference")
        for isa in isas():
            actual = start.map(torch.clone)
            with environment(SUBULP_ISA=isa):
                take_step(setup, actual, [grad], 2, backend="cpu")
            assert_same(actual, expected)


@pytest.mark.parametrize("backend", ["reference", "cpu", pytest.param("triton", marks=interpreted)])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=short)
def test_master_weights_beyond_the_largest_number_stay(dtype, backend):
    """The parameter is the largest number, which is such a master weight rounded."""
    setup = Setup("sgd", "master", dtype, weight_decay=0.0, momentum=None, lr=1.0)
    largest = torch.tensor([format_of(dtype).max, -format_of(dtype).max])
    state = fresh_state(setup, [largest.to(dtype)])
    master = largest * (1 + 2.0**-8)
    state.extras[0].copy_(master)
    step = (2.0**-10 * largest).to(dtype)
    for isa in isas() if backend == "cpu" else ["plain"]:
        moved = state.map(torch.clone)
        with environment(SUBULP_ISA=isa):
            take_step(setup, moved, [step], 2, backend=backend)
        assert moved.extras[0].equal(master - step.float())
        assert moved.params[0].equal(state.params[0])


@pytest.mark.parametrize("backend", ["cpu", pytest.param("triton", marks=interpreted)])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=short)
def test_heads_that_were_rounded_up_into_a_binade(dtype, backend):
    """The tails of these powers of two count steps of the binade below."""
    setup = Setup("sgd", "extra-bits-5-stochastic", dtype, weight_decay=0.0, momentum=None)
    fmt = format_of(dtype)
    codes = torch.arange(1 << fmt.mantissa_bits, fmt.max_code, 1 << fmt.mantissa_bits)
    tails = torch.arange(32) + 32
    state = fresh_state(setup, [codes.short().view(dtype).repeat_interleave(32)])
    state.extras[0].copy_(extra_bits.pack(tails.repeat(len(codes)), 6))
    expected, nothing = state.map(torch.clone), torch.zeros_like(state.params[0])
    take_step(setup, expected, [nothing], 2, backend="reference")
    for isa in isas() if backend == "cpu" else ["plain"]:
        actual = state.map(torch.clone)
        with environment(SUBULP_ISA=isa):
            take_step(setup, actual, [nothing], 2, backend=backend)
        assert_same(actual, expected)


@pytest.mark.parametrize("backend", ["cpu", pytest.param("triton", marks=interpreted)])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=short)
def test_extra_bits_saturate_at_the_last_step(dtype, backend):
    """Half a step beyond the last one that a tail can hold, no random bit carries out of it."""
    setup = Setup("sgd", "extra-bits-5-stochastic", dtype, weight_decay=0.0, momentum=None, lr=1.0)
    fmt = format_of(dtype)
    start = fresh_state(setup, [torch.full((64,), fmt.max).to(dtype)])
    start.extras[0].copy_(extra_bits.pack(torch.full((64,), 31), 6))
    half_a_step = 2.0 ** (fmt.max_exponent - fmt.mantissa_bits - 6)
    grad = torch.full((64,), -half_a_step).to(dtype)
    for isa in isas() if backend == "cpu" else ["plain"]:
        state = start.map(torch.clone)
        with environment(SUBULP_ISA=isa):
            take_step(setup, state, [grad], 2, backend=backend)
        assert_same(state, start)


def test_missing_tails_are_zero():
    """The packed words of the last group hold nothing beyond the tensor."""
    setup = Setup("adam", "extra-bits-16", BF16)
    for backend in ("reference", "cpu", "triton"):
        if backend == "triton" and interpreted.args[0]:
            continue
        (words,) = train(setup, backend, [33], steps=1).extras
        assert extra_bits.unpack(words, 64, 16)[33:].eq(0).all()


# --------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("setup", setups(all_names(*range(1, 17))), ids=str)
def test_gpu(setup):
    offsets = [*(3 * i for i in range(len(SIZES))), 64]
    check_triton(setup, (*SIZES, 5000), steps=4, offsets=offsets, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("setup", variants())
def test_gpu_options(setup):
    check_triton(setup, SIZES, steps=4, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("grad_dtype", [None, FP32], ids=["same", "fp32"])
@pytest.mark.parametrize(
    "setup", setups((*FIXED, "extra-bits-4", "extra-bits-9-stochastic")), ids=str
)
def test_gpu_special_values(setup, grad_dtype):
    """Subnormal numbers in every role among them: nothing is flushed."""
    setup = dataclasses.replace(setup, grad_dtype=grad_dtype)
    expected, grad = special_case(setup)
    actual = expected.map(lambda t: t.cuda())
    take_step(setup, expected, [grad], 2, backend="reference")
    take_step(setup, actual, [grad.cuda()], 2, backend="triton")
    assert_same(actual.map(lambda t: t.cpu()), expected)
