"""Mixtures: the same bits whoever computes, and the promises of torch.library."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from subulp.numerics import mixture, partition
from subulp.numerics.mixture import RECIPES
from subulp.ops import backend
from subulp.ops.mixture import DecodeJob, decode, encode, mixture_decode, mixture_encode
from subulp.ops.rows import encode as encode_rows

from .support import environment, interpreted, isas, threads

SIZES = [*partition.PARTITIONS, (16, 32), (200, 7)]
# Blocks of several tiles, or of more rows than one.
LARGE = ["tensor", "channel", "block-128x128", (200, 7)]
SCALINGS = ("gam", "amax", "e8m0", "groups")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads, and lose much where other tests run."""
    with threads(1):
        yield


def matrices(shape: tuple[int, int]) -> Iterator[torch.Tensor]:
    """Values of one magnitude, some with a few others; over many binades; with zeros, subnormal,
    infinite and huge numbers.
    """
    rows, columns = shape
    generator = torch.Generator().manual_seed(rows * columns)
    x = torch.randn(shape, generator=generator)
    yield x
    few = x.clone()
    few[rows // 2, columns // 2] = few[-1, -1] = 0.0
    few[rows // 3, columns // 3 :: 200] *= 2.0**-20
    yield few
    rough = x * (6 * torch.randn(rows, 1, generator=generator)).exp2()
    rough = rough * (6 * torch.randn(1, columns, generator=generator)).exp2()
    yield rough
    special = rough.clone()
    special[::3] = 0.0
    special[1::5] *= 2.0**-135
    special[0, 0] = -1e-45
    if rows > 3:
        special[1], special[2] = -0.0, 3e38
        special[3, 1], special[-1, -1] = torch.inf, torch.nan
        special.view(torch.int32)[-1, 0] = -0x7FFFFF
    yield special
    yield rough.bfloat16()
    yield rough.half()
    yield torch.where(x.abs() < 1, 1.0, x)


def calls(x: torch.Tensor, sizes=SIZES) -> Iterator[tuple]:
    """Arguments of the op."""
    for recipe, size, scaling in itertools.product(RECIPES, sizes, SCALINGS):
        block = partition.block_of(size, x.shape)
        groups = partition.grid_of(x.shape, block)
        if scaling == "amax":
            groups = (1, 1)
        elif scaling == "groups":
            groups, scaling = (2, 3), "gam"  # noqa: PLW2901
        yield x, recipe, block, groups, scaling, 0.045


def run(arguments: tuple, backend: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What the op stores, and what it decodes to."""
    with environment(SUBULP_BACKEND=backend), np.errstate(all="ignore"):
        stored = mixture_encode(*arguments)
        x, recipe, block, groups, scaling, *_ = arguments
        if scaling == "e8m0":
            groups = stored[3].shape
        wide = mixture.wide_format_of(x.dtype)
        values = mixture_decode(*stored[:5], recipe, block, groups, wide.name)
        return trimmed(stored, mixture.from_text(recipe), block, groups, wide), values


def trimmed(stored, recipe, block, groups, wide) -> list[torch.Tensor]:
    """What is stored, with the lower bytes that are of wide numbers alone, and one row of numbers.

    Between these, a backend may leave anything.
    """
    found = mixture.Mixture(*stored[:5], recipe.formats, block, tuple(groups), wide)
    numbers = stored[5]
    ends = numbers[:, -2].amax()[None], numbers[:, -1].amin()[None]
    return [*found.trimmed().tensors, torch.cat((numbers[:, :-2].sum(0), *ends))]


def same(arguments: tuple, backend: str, expected) -> None:
    stored, values = run(arguments, backend)
    where = [*map(str, arguments[1:]), tuple(arguments[0].shape), arguments[0].dtype]
    for i, (got, want) in enumerate(zip(stored[:5], expected[0][:5], strict=True)):
        assert got.shape == want.shape, (where, i)
        assert torch.equal(*(t.contiguous().view(torch.uint8) for t in (got, want))), (where, i)
    # Sums that no decision depends on.
    torch.testing.assert_close(stored[5], expected[0][5], rtol=1e-12, atol=0)
    torch.testing.assert_close(values, expected[1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 5), (40, 130), (9, 512), (257, 140), (2, 9001)], ids=str
)
def test_the_kernels_are_the_reference(shape):
    for x in matrices(shape):
        # Many columns and many rows are there for their tiles: small blocks have none.
        sizes = {9001: ["tensor", "channel", (2, 4100)], 140: LARGE}.get(shape[1], SIZES)
        for arguments in calls(x, sizes):
            expected = run(arguments, "reference")
            for isa in isas():
                with environment(SUBULP_ISA=isa):
                    same(arguments, "cpu", expected)


def test_threads_do_not_show():
    for x in matrices((300, 270)):
        for arguments in calls(x, ["tensor", "subchannel-32", "block-128x128"]):
            with threads(1):
                expected = run(arguments, "cpu")
            for count in (2, 3):
                with threads(count):
                    same(arguments, "cpu", expected)


def test_every_value_of_a_scaled_block():
    """Both formats' codes, the middles between them and their neighbours, under many scales."""
    for fmt in (torch.float8_e4m3fn, torch.float8_e5m2):
        codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(fmt).float()
        values = codes[codes.isfinite() & (codes > 0)].unique()
        x = torch.cat((values, (values[1:] + values[:-1]) / 2))
        x = torch.cat((x, x.nextafter(torch.tensor(torch.inf)), x.nextafter(torch.tensor(0.0))))
        x = x[x <= values[-1]]
        x = torch.stack([torch.cat((x, -x)) * 2.0**k for k in (-100, -3, 0, 1, 60)])
        for recipe in RECIPES:
            arguments = (x, recipe, (1, x.shape[1]), (1, 1), "amax", 0.9)
            expected = run(arguments, "reference")
            for isa in isas():
                with environment(SUBULP_ISA=isa):
                    same(arguments, "cpu", expected)


BACKENDS = ["reference", "cpu", pytest.param("triton", marks=interpreted)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_decisions_at_their_bounds(backend):
    """A span equal to E5M2's fits; an error equal to the threshold does not pass."""
    x = torch.full((2, 32), 2.0**-14)
    x[:, 0] = 57344.0
    x[1, 5] = x[1, 5].nextafter(torch.tensor(0.0))
    noise = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    whole = (noise, "tensor", (16, 16), (1, 1), "gam")
    for isa in isas() if backend == "cpu" else ["plain"]:
        with environment(SUBULP_ISA=isa):
            stored, _ = run((x, "subtensor-3way", (1, 32), (1, 1), "gam", 0.045), backend)
            assert stored[1].flatten().tolist() == [1, 2]
            # The mean of 256 errors is exact.
            error = np.float32(run((*whole, 1.0), backend)[0][5][-4] / 256)
            for threshold, kind in ((error, 1), (np.nextafter(error, np.float32(1)), 0)):
                assert run((*whole, float(threshold)), backend)[0][1].item() == kind


BLOCKS = ((128, 128), (1, 32), (60, 70))


# Every pair of recipe, scaling and block.
@pytest.mark.parametrize(("i", "recipe"), enumerate(RECIPES))
@pytest.mark.parametrize(("j", "scaling"), enumerate(["gam", "amax", "e8m0"]))
def test_opcheck(i, recipe, j, scaling):
    block = BLOCKS[(i + j) % 3]
    x = next(matrices((60, 70)))
    x[3, 4] = torch.inf
    # Powers of two are one group whatever the groups.
    groups = partition.grid_of(x.shape, block) if scaling == "gam" else (1, 1)
    arguments = (x, recipe, block, groups, scaling, 0.045)
    torch.library.opcheck(mixture_encode, arguments)
    stored = mixture_encode(*arguments)
    if scaling == "e8m0":
        groups = stored[3].shape
    torch.library.opcheck(mixture_decode, (*stored[:5], recipe, block, groups))


@pytest.mark.parametrize("recipe", RECIPES)
def test_encode_and_decode_are_the_definition(recipe):
    x = next(matrices((60, 70))).t()
    for scaling in ("gam", "amax", "e8m0"):
        got = encode(x, RECIPES[recipe], "subchannel-32", scaling=scaling)
        want = mixture.encode(x, RECIPES[recipe], "subchannel-32", scaling=scaling)
        assert got[0].nbytes == want[0].nbytes
        assert got[0].formats == want[0].formats
        assert torch.equal(decode(got[0]), mixture.decode(want[0]))
        assert torch.equal(mixture.decode(got[0]), decode(want[0]))
        assert got[1].elements == want[1].elements
        assert got[1].error == pytest.approx(want[1].error, rel=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(3, 4).int()}, "x has dtype"),
        ({"x": torch.ones(0, 4)}, r"x has shape \(0, 4\)"),
        ({"x": torch.ones(4, 3).t()}, "x has strides"),
        ({"recipe": "fp4"}, "recipe='fp4' is unknown"),
        ({"block": (0, 4)}, r"block=\(0, 4\) cannot apply"),
        ({"groups": (1,)}, r"groups=\(1,\) cannot apply"),
        ({"scaling": "log"}, "scaling='log' is unknown"),
    ],
    ids=str,
)
def test_bad_input(change, message):
    arguments = {
        "x": torch.ones(3, 4),
        "recipe": "tensor",
        "block": (1, 4),
        "groups": (1, 1),
        "scaling": "gam",
        "threshold": 0.045,
    }
    with pytest.raises(ValueError, match=message):
        mixture_encode(**arguments | change)


@interpreted
@pytest.mark.parametrize("size", ["tensor", "channel", "subchannel-32", (16, 32)], ids=str)
def test_triton_is_the_reference(size):
    """Ragged blocks of each type, some with infinities, of all that a kernel distinguishes."""
    x = list(matrices((20, 50)))
    for recipe in RECIPES:
        for matrix, scaling in ((x[2], "groups"), (x[1], "amax"), (x[3], "e8m0")):
            for arguments in calls(matrix, [size]):
                if arguments[1] == recipe and arguments[4] == scaling.replace("groups", "gam"):
                    same(arguments, "triton", run(arguments, "reference"))


@interpreted
@pytest.mark.parametrize("shape", [(260, 20), (2, 4112)], ids=str)
def test_triton_adds_tiles_in_order(shape):
    """A block of several tiles, down or across; of both at once the interpreter takes too long."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    arguments = (x, "subtensor-2way", shape, (1, 1), "gam", 0.045)
    same(arguments, "triton", run(arguments, "reference"))


@interpreted
@pytest.mark.parametrize("many", [False, True])
def test_triton_adds_chunks_of_blocks_in_order(many, monkeypatch):
    """A tensor of more blocks than are added up at once, by each program or beforehand."""
    if many:
        recipes = importlib.import_module("subulp.ops.mixture.triton_recipe")
        monkeypatch.setattr(recipes, "FEW", 1)
    x = torch.randn((70, 60), generator=torch.Generator().manual_seed(0))
    arguments = (x, "tensor", (1, 1), (70, 60), "e8m0", 0.02)
    same(arguments, "triton", run(arguments, "reference"))


@interpreted
def test_triton_reads_transposed_matrices():
    x = list(matrices((50, 20)))[2]
    for dtype in (torch.float32, torch.bfloat16):
        arguments = (x.to(dtype).t(), "subtensor-3way", (1, 32), (1, 1), "gam", 0.045)
        contiguous = (arguments[0].contiguous(), *arguments[1:])
        same(arguments, "triton", run(contiguous, "reference"))


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_triton_decodes_to_narrow_dtypes(recipe, dtype):
    """What rounding the FP32 values gives, on every backend."""
    for matrix in (list(matrices((20, 50)))[i] for i in (2, 3)):
        found, _ = mixture.encode(matrix, RECIPES[recipe], (16, 32))
        room = torch.empty(found.shape, dtype=dtype)
        expected = encode_rows(decode(found), room.clone())
        with environment(SUBULP_BACKEND="triton"), np.errstate(all="ignore"):
            got = backend.run("mixture", DecodeJob(found, room))
        assert torch.equal(got.view(torch.int16), expected.view(torch.int16))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3, 5), (257, 140), (300, 9001)], ids=str)
def test_gpu(shape):
    for x in matrices(shape):
        for arguments in calls(x, ["tensor", "channel", "subchannel-32", "block-128x128"]):
            expected = run(arguments, "cpu")
            moved = (x.cuda(), *arguments[1:])
            stored, values = run(moved, "triton")
            got = [t.cpu() for t in stored], values.cpu()
            for a, b in zip(got[0][:5], expected[0][:5], strict=True):
                assert torch.equal(*(t.contiguous().view(torch.uint8) for t in (a, b)))
            torch.testing.assert_close(got[1], expected[1], rtol=0, atol=0, equal_nan=True)
