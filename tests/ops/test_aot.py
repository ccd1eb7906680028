"""Every kernel compiles for GPUs that are not there: no spills, IEEE arithmetic, wide loads."""

from __future__ import annotations

import contextlib
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton

from subulp.numerics.int_rows import INT2, INT8
from subulp.ops.strategy import all_names
from subulp.ops.triton import launch

from . import aot_worker
from .support import BF16, DTYPES, E4M3, FP16, FP32, Setup, setups, short

# Words of one, an odd number of and many bits; one that fills a half-word, and one beyond it.
WIDTHS = (1, 7, 8, 16)
NIGHTLY = pytest.mark.nightly


def is_typical(setup: Setup) -> bool:
    """All but SGD's kernels that differ from other ones in a few operations."""
    return setup.op == "adam" or (
        setup.strategy.k in (0, 8) and setup.dtype in (setup.strategy.dtypes[0], E4M3)
    )


ALL = [pytest.param(s, marks=[] if is_typical(s) else NIGHTLY) for s in setups(all_names(*WIDTHS))]
REPRESENTATIVE = (
    Setup("adam", "fp32", FP32),
    Setup("adam", "stochastic", BF16),
    Setup("adam", "collage-plus", BF16, grad_dtype=FP32),
    Setup("adam", "stochastic", E4M3),
    Setup("adam", "extra-bits-7-stochastic", FP16),
    Setup("sgd", "kahan", BF16),
    Setup("sgd", "extra-bits-8", BF16, nesterov=True),
)
# Hopper's code for all; the others', which comes from the same passes, for some.
CAPABILITIES = (80, 89, 90, 100)
AMD = pytest.mark.skipif(launch.TRITON_VERSION < (3, 7), reason="Triton 3.6 is refused")


# As exact as a quotient, see test_reciprocals_are_the_assemblers_own.
RECIPROCAL = re.compile(
    r"""\s*rcp\.approx\.ftz\.f32\ near,\ (%\w+);
    \s*neg\.f32\ minus,\ \1;
    \s*fma\.rn\.f32\ rest,\ minus,\ near,\ 0f3F800000;
    \s*fma\.rn\.f32\ %\w+,\ near,\ rest,\ near;""",
    re.VERBOSE,
)


def check(compiled) -> None:
    check_registers(compiled)
    without_places = re.sub(r"^\s*\.loc.*\n", "", compiled.text, flags=re.M)
    text = RECIPROCAL.sub("", without_places)
    forbidden = re.findall(r"\S*(?:\.ftz|\.approx|div\.full|fma\.)\S*", text)
    assert not forbidden, "not IEEE arithmetic, or contracted"


def check_registers(compiled) -> None:
    # Spilled registers lie on the stack.
    found = compiled.resources()
    assert found["stack"] == 0
    assert found["local"] == 0


@pytest.mark.parametrize("setup", ALL, ids=str)
def test_hopper(compiler, setup):
    compiled = compiler.submit(aot_worker.compile_step, setup, 90).result()
    check(compiled)
    assert re.search(r"ld\.global\.v[24]\.b32", compiled.text)


@pytest.mark.parametrize("capability", [80, 89, 100])
@pytest.mark.parametrize("setup", REPRESENTATIVE, ids=str)
def test_others(compiler, setup, capability):
    check(compiler.submit(aot_worker.compile_step, setup, capability).result())


@pytest.mark.parametrize(
    "capability", [pytest.param(c, marks=[] if c == 90 else NIGHTLY) for c in CAPABILITIES]
)
@pytest.mark.parametrize(
    "setup",
    [
        Setup("adam", "stochastic", BF16),
        Setup("adam", "stochastic", E4M3),
        Setup("adam", "extra-bits-7-stochastic", FP16),
        Setup("sgd", "extra-bits-8", BF16, nesterov=True),
    ],
    ids=str,
)
def test_shards(compiler, setup, capability):
    """Kernels of their own, which find the place of an element in a whole tensor."""
    check(compiler.submit(aot_worker.compile_step, setup, capability, True).result())


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_scales(compiler, dtype):
    compiled = compiler.submit(aot_worker.compile_scales, "adam", dtype, 90).result()
    check(compiled)
    assert re.search(r"ld\.global\.v4\.b32", compiled.text)
    # 0.99 in FP64, as the host has it.
    assert "0d3FEFAE147AE147AE" in compiled.text


@pytest.mark.parametrize("given", [False, True], ids=["sought", "given"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_scales_of_momenta(compiler, capability, given):
    check(compiler.submit(aot_worker.compile_scales, "sgd", E4M3, capability, given).result())


@pytest.mark.parametrize("rate", [None, FP32, torch.float64], ids=str)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("op", "dtype"), [("adam", E4M3), ("adam", BF16), ("sgd", BF16)])
def test_counts(compiler, op, dtype, capability, rate):
    compiled = compiler.submit(aot_worker.compile_counts, op, dtype, capability, rate).result()
    check(compiled)
    # The division of the host.
    assert ("div.rn.f64" in compiled.text) == (op == "adam")


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_all_finite(compiler, dtype):
    compiled = compiler.submit(aot_worker.compile_all_finite, dtype, 90).result()
    check(compiled)
    assert re.search(r"ld\.global\.v4\.b32", compiled.text)


@pytest.mark.parametrize(
    ("dtype", "capability", "sizes"),
    [
        pytest.param(
            *(dtype, capability, sizes),
            id=f"{short(dtype)}-{capability}-{'x'.join(map(str, sizes))}",
            marks=[]
            if capability == 90 or (sizes == aot_worker.MAIN and dtype in (FP32, E4M3))
            else NIGHTLY,
        )
        for dtype in (FP32, BF16, FP16, E4M3)
        for capability in CAPABILITIES
        for sizes in (aot_worker.MAIN, aot_worker.RAGGED, aot_worker.ONES)
    ],
)
def test_head(compiler, dtype, capability, sizes):
    compiled = compiler.submit(aot_worker.compile_head, dtype, capability, sizes).result()
    # The product is a sum of fused multiply-adds; the rounded operations after it are not.
    check_registers(compiled)


def test_names_that_come_to_be_known_between_compilations(fresh_compiler):
    """Triton takes a global that has changed for an error."""
    fresh_compiler.submit(aot_worker.compile_after_new_names).result()


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", [FP32, E4M3], ids=short)
@pytest.mark.parametrize("kernel", ["update", "dropped"])
def test_head_with_dropout_and_remainders(compiler, kernel, dtype, capability):
    check_registers(compiler.submit(aot_worker.compile_dropout, kernel, dtype, capability).result())


@pytest.mark.parametrize("sizes", [aot_worker.MAIN, aot_worker.RAGGED], ids=str)
def test_rows_of_a_rank(compiler, sizes):
    check(compiler.submit(aot_worker.compile_part, 90, sizes).result())


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_head_of_bf16_operands(compiler, capability):
    call = partial(aot_worker.compile_head, E4M3, capability, products="bf16")
    compiled = compiler.submit(call).result()
    check_registers(compiled)
    # Blackwell's have one name for both formats of 16 bits.
    assert re.search(r"mma\S*(\.bf16|kind::f16)", compiled.text), "not on the units of BF16"


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("loss", [False, True])
@pytest.mark.parametrize("narrow", [False, True])
def test_logistic(compiler, capability, loss, narrow):
    call = partial(aot_worker.compile_logistic, capability, loss=loss, narrow=narrow)
    check(compiler.submit(call).result())


@pytest.mark.parametrize("sizes", [aot_worker.RAGGED, aot_worker.ONES])
def test_logistic_of_other_sizes(compiler, sizes):
    call = partial(aot_worker.compile_logistic, 90, loss=True, narrow=True, sizes=sizes)
    check(compiler.submit(call).result())


@pytest.mark.parametrize("sizes", [aot_worker.MAIN, aot_worker.RAGGED, aot_worker.ONES], ids=str)
@pytest.mark.parametrize("kernel", ["check", "split", "zero"])
def test_batch_of_a_head(compiler, kernel, sizes):
    call = partial(aot_worker.compile_batch, kernel, 90, sizes, permuted=sizes != aot_worker.MAIN)
    check(compiler.submit(call).result())


@pytest.mark.parametrize("sizes", [aot_worker.MAIN, aot_worker.RAGGED, aot_worker.ONES], ids=str)
def test_inputs_and_scores_of_a_head(compiler, sizes):
    check(compiler.submit(aot_worker.compile_inputs, 90, sizes).result())
    check(compiler.submit(aot_worker.compile_keys, 90, sizes).result())


@pytest.mark.parametrize("fmt", [INT8, INT2], ids=str)
@pytest.mark.parametrize("kernel", ["decode", "step"])
def test_head_of_integers(compiler, kernel, fmt):
    check(compiler.submit(aot_worker.compile_integers, kernel, fmt, 90).result())


def test_loss(compiler):
    check(compiler.submit(aot_worker.compile_total, 90).result())


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_sum(compiler, capability):
    check(compiler.submit(aot_worker.compile_sum, capability).result())


TABLES = (
    ("fp32", "sgd", "lfu", 64),
    ("bf16", "adagrad", "lru", 128),
    ("fp16", "rowwise", "lfu", 100),
    ("e4m3", "rowwise", "lru", 64),
    ("int8", "rowwise", "lfu", 128),
    ("int4", "rowwise", "lfu", 128),
    ("int2", "adagrad", "lru", 19),
)


@pytest.mark.parametrize(
    ("storage", "rule", "policy", "dim", "capability"),
    [
        pytest.param(
            *(*table, capability),
            marks=[] if capability == 90 or table[0] in ("e4m3", "int4") else NIGHTLY,
        )
        for table in TABLES
        for capability in CAPABILITIES
    ],
)
def test_embedding(compiler, storage, rule, policy, dim, capability):
    table = storage, rule, policy, dim
    for kernel in aot_worker.TABLE_KERNELS:
        check(compiler.submit(aot_worker.compile_embedding, capability, kernel, table).result())


@pytest.mark.parametrize("sizes", [(26, 1777), (3, 1), (1, 1)])
@pytest.mark.parametrize("kernel", aot_worker.TABLE_KERNELS)
def test_embedding_of_other_sizes(compiler, kernel, sizes):
    """The last batch of an epoch is another kernel, and so is all that there is one of."""
    table = "e4m3", "rowwise", "lru", 64
    check(compiler.submit(aot_worker.compile_embedding, 90, kernel, table, sizes).result())


@pytest.mark.parametrize(
    ("block", "capability"),
    [
        pytest.param(
            *(block, capability),
            id=f"{block}-{capability}",
            marks=[] if capability == 90 or block == (128, 128) else NIGHTLY,
        )
        for block in ((128, 128), (1, 32))
        for capability in CAPABILITIES
    ],
)
@pytest.mark.parametrize("kernel", aot_worker.MIXTURE_KERNELS)
def test_mixture(compiler, kernel, block, capability):
    check(compiler.submit(aot_worker.compile_mixture, kernel, block, FP32, capability).result())


@pytest.mark.parametrize("capability", [80, 89, 90])
@pytest.mark.parametrize("kernel", ["candidates", "write"])
def test_mixture_converts_where_a_gpu_can(compiler, kernel, capability):
    call = partial(aot_worker.compile_mixture, kernel, (128, 128), BF16, capability)
    text = compiler.submit(call).result().text
    found = {name for name in ("e4m3x2", "e5m2x2") if f"cvt.rn.satfinite.{name}.f32" in text}
    if capability < 89:
        assert found == set()
    else:
        # What the first candidate is, write_kernel leaves as it is.
        assert found == ({"e4m3x2", "e5m2x2"} if kernel == "candidates" else {"e5m2x2"})


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_reciprocals_are_the_assemblers_own(compiler, capability):
    """Where neither a number nor its reciprocal is subnormal, ``rcp.rn.f32`` is these operations,
    but for an addition of zero that changes a sign.
    """
    call = partial(compiler.submit, aot_worker.compile_reciprocal)
    ours, own = (call(which, capability).result().instructions() for which in (True, False))
    on_numbers = "MUFU", "FFMA", "FADD", "FMUL"
    assert [name for name in ours if name.startswith(on_numbers)] == ["MUFU.RCP", "FFMA", "FFMA"]
    # Then comes what it does with other numbers.
    own = [name for name in own if name.startswith(on_numbers)]
    assert own[:4] == ["MUFU.RCP", "FFMA", "FADD.FTZ", "FFMA"]


@pytest.mark.parametrize("size", ["flat", "ragged"])
@pytest.mark.parametrize("kernel", aot_worker.MIXTURE_KERNELS)
def test_mixture_of_other_sizes(compiler, kernel, size):
    call = partial(aot_worker.compile_mixture, kernel, (128, 128), BF16, 90, size)
    check(compiler.submit(call).result())


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("kernel", ["measure", "candidates", "write"])
def test_mixture_that_is_kept(compiler, kernel, capability):
    check(compiler.submit(aot_worker.compile_kept_mixture, kernel, BF16, capability).result())


@pytest.mark.parametrize(
    ("dtype", "side", "size", "capability"),
    [
        pytest.param(
            *(dtype, side, size, capability),
            id=f"{short(dtype)}-{side}-{size}-{capability}",
            marks=[] if capability == 90 or (side, size) == (128, "square") else NIGHTLY,
        )
        for dtype, side, size in (
            (BF16, 128, "square"),
            (FP32, 32, "square"),
            (FP16, 128, "ragged"),
        )
        for capability in CAPABILITIES
    ],
)
@pytest.mark.parametrize("kernel", aot_worker.BOTH_KERNELS)
def test_mixture_along_both(compiler, kernel, dtype, side, size, capability):
    arguments = kernel, side, dtype, capability, size
    check(compiler.submit(aot_worker.compile_mixture_both, *arguments).result())


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=short)
@pytest.mark.parametrize("kernel", ["measure", "candidates", "write", "decode"])
def test_mixture_of_narrow_input(compiler, kernel, dtype):
    check(compiler.submit(aot_worker.compile_mixture, kernel, (128, 128), dtype, 90).result())


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "rows", "constant"),
    [
        pytest.param(BF16, 512, False, id="bf16-blocks"),
        pytest.param(BF16, 512, True, id="bf16-tensor"),
        pytest.param(BF16, 64, False, id="bf16-few-rows", marks=NIGHTLY),
        pytest.param(FP16, 512, False, id="fp16-blocks", marks=NIGHTLY),
    ],
)
def test_mixture_product(compiler, dtype, rows, constant, transposed, capability):
    arguments = capability, dtype, rows, transposed, constant
    compiled = compiler.submit(aot_worker.compile_mixture_product, *arguments).result()
    check_registers(compiled)
    fp8 = re.search(r"mma\S*(?:e4m3\.e4m3|kind::f8f6f4)", compiled.text)
    # The first with units of FP8 is Ada.
    assert (fp8 is not None) == (capability >= 89)


@pytest.mark.parametrize("capability", [89, 90, 100])
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, True)], ids=str)
def test_mixture_product_of_fp32(compiler, transposed, constant, capability):
    """Where there are units of FP8; elsewhere PyTorch multiplies."""
    arguments = capability, FP32, 512, transposed, constant
    check_registers(compiler.submit(aot_worker.compile_mixture_product, *arguments).result())


@pytest.mark.parametrize("sizes", [(4096, 4096, 1024), (1001, 300, 77)], ids=str)
def test_mixture_product_of_other_sizes(compiler, sizes):
    rows, columns, length = sizes
    arguments = 90, BF16, rows, (False, True), False, columns, length
    check_registers(compiler.submit(aot_worker.compile_mixture_product, *arguments).result())


@AMD
@pytest.mark.parametrize("setup", REPRESENTATIVE, ids=str)
def test_amd(compiler, setup):
    compiled = compiler.submit(aot_worker.compile_step, setup, "gfx942").result()
    found = compiled.resources()
    assert found["stack"] == found["spilled_registers"] == 0
    # Subnormal numbers are kept.
    assert re.search(r"\.amdhsa_float_denorm_mode_32 3$", compiled.text, re.M)
    used = " ".join(compiled.instructions())
    # The way to a quotient, or to a root, is made of them, and only that.
    fused = re.search(r"v_(pk_)?(fma|fmac|mac|mad)_f", used)
    assert bool(fused) == (setup.op == "adam")
    assert ("v_sqrt_f32" in used) == (setup.op == "adam")
    assert "v_rsq" not in used


@AMD
def test_counts_for_amd(compiler):
    compiled = compiler.submit(aot_worker.compile_counts, "adam", E4M3, "gfx942", FP32).result()
    found = compiled.resources()
    assert found["stack"] == found["spilled_registers"] == 0
    used = " ".join(compiled.instructions())
    # A quotient as IEEE has it ends so.
    assert "v_div_fixup_f64" in used


@AMD
def test_head_and_tables_for_amd(compiler):
    compiled = [
        compiler.submit(aot_worker.compile_head, E4M3, "gfx942", products="bf16").result(),
        compiler.submit(aot_worker.compile_sum, "gfx942").result(),
        compiler.submit(aot_worker.compile_embedding, "gfx942", "update", TABLES[4]).result(),
    ]
    assert [c.resources()["stack"] for c in compiled] == [0, 0, 0]
    assert any("mfma_f32" in name and "bf16" in name for name in compiled[0].instructions())


def test_amds_compiler_is_told_no_registers(monkeypatch):
    assert launch.registers(128) == {"maxnreg": 128}
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert launch.registers(128) == {}


def test_what_amd_refuses(monkeypatch):
    """Before 3.7, Triton's root of a subnormal number is that of zero."""
    launch.refuse_amd((3, 7))
    with pytest.raises(RuntimeError, match=r"Triton 3\.6 computes square roots"):
        launch.refuse_amd((3, 6))
    with pytest.raises(ValueError, match="gfx1100"):
        launch.gpu_of("gfx1100")
    kernel, gpu = triton.JITFunction(launch.work.fn), torch.device("cuda")
    monkeypatch.setattr(launch, "TRITON_VERSION", (3, 6))
    launch.check_device(kernel, gpu)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(RuntimeError, match="square roots"):
        launch.check_device(kernel, gpu)
    monkeypatch.setattr(launch, "TRITON_VERSION", (3, 7))
    for name, is_refused in (("gfx942:sramecc+:xnack-", False), ("gfx1100", True)):
        chip = SimpleNamespace(gcnArchName=name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, chip=chip: chip)
        expected = contextlib.nullcontext()
        if is_refused:
            expected = pytest.raises(RuntimeError, match=r"which is gfx1100: .* gfx9 alone")
        with expected:
            launch.check_device(kernel, gpu)
