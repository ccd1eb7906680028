"""Recipes that users write, and all metrics: the same bits whoever computes, nothing in silence."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from subulp.nn import MoR
from subulp.numerics import E4M3, E5M2, Format, metrics, mixture, partition, simulated
from subulp.numerics.mixture import ALWAYS_E4M3, RECIPES, Entry, Recipe, to_text
from subulp.ops.mixture import decode, encode, mixture_decode, mixture_encode

from .support import environment, interpreted, isas, threads
from .test_mixture import SCALINGS, matrices, trimmed

E3M4, E6M1, IEEE = simulated(3, 4), simulated(6, 1), simulated(4, 3)
SIX_BITS = simulated(2, 3, has_infinity=False)
OWN = [
    Recipe(
        "with-e3m4",
        (
            Entry(E3M4, mixture.better_than(E3M4, E4M3)),
            Entry(E4M3, mixture.no_worse_than(E4M3, E5M2)),
            Entry(E5M2, mixture.fits_range(E5M2)),
        ),
    ),
    Recipe(
        "all-kinds",
        (
            Entry(SIX_BITS, mixture.below_threshold(SIX_BITS, 0.03)),
            # A format that shares its name with another, which only a test asks for.
            Entry(IEEE, (mixture.better_than(IEEE, E6M1), mixture.no_worse_than(IEEE, E4M3))),
            Entry(E6M1, (mixture.fits_range(E6M1), mixture.below_threshold(E6M1))),
        ),
    ),
    Recipe("one", (Entry(E3M4, mixture.below_threshold(E3M4)),), "tensor"),
    Recipe("always", (Entry(E5M2, mixture.always),)),
    *RECIPES.values(),
]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with threads(1):
        yield


def calls(x: torch.Tensor, sizes, start: int) -> Iterator[tuple]:
    """Arguments of the op: each recipe and block, with a scaling and a metric that vary."""
    for i, (recipe, size) in enumerate(itertools.product(OWN, sizes), start):
        scaling, metric = SCALINGS[i % 4], list(metrics.KNOWN)[i % 3]
        block = partition.block_of(size, x.shape)
        groups = partition.grid_of(x.shape, block)
        if scaling == "amax":
            groups = (1, 1)
        elif scaling == "groups":
            groups, scaling = (2, 3), "gam"
        yield x, to_text(recipe), block, groups, scaling, 0.045, metric


def run(arguments: tuple, backend: str) -> list[torch.Tensor]:
    x, recipe, block, groups, scaling, *_ = arguments
    with environment(SUBULP_BACKEND=backend), np.errstate(all="ignore"):
        stored = mixture_encode(*arguments)
        if scaling == "e8m0":
            groups = stored[3].shape
        wide = mixture.wide_format_of(x.dtype)
        values = mixture_decode(*stored[:5], recipe, block, groups, wide.name)
        return [*trimmed(stored, mixture.from_text(recipe), block, groups, wide), values]


def check(arguments: tuple, backend: str, expected: list[torch.Tensor]) -> None:
    found = run(arguments, backend)
    for i, (got, want) in enumerate(zip(found, expected, strict=True)):
        if i == 5:
            # Sums that no decision depends on.
            torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
        elif i == 6:
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        else:
            assert got.shape == want.shape, (arguments[1:], i)
            assert torch.equal(
                got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)
            ), (arguments[1:], i)


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (40, 130), (257, 140), (2, 9001)], ids=str)
def test_the_kernels_are_the_reference(shape):
    for k, x in enumerate(matrices(shape)):
        sizes = {9001: [(2, 4100)], 140: ["tensor", (200, 7)]}.get(
            shape[1], ["channel", "subchannel-32", (16, 32)]
        )
        for arguments in calls(x, sizes, k):
            expected = run(arguments, "reference")
            for isa in isas():
                with environment(SUBULP_ISA=isa):
                    check(arguments, "cpu", expected)


def test_threads_do_not_show():
    x = list(matrices((300, 270)))[3]
    for arguments in calls(x, ["subchannel-32"], 0):
        expected = run(arguments, "cpu")
        with threads(3):
            check(arguments, "cpu", expected)


@interpreted
@pytest.mark.parametrize("size", ["tensor", "channel", (16, 32)], ids=str)
def test_triton_is_the_reference(size):
    x = list(matrices((20, 50)))
    for k, matrix in enumerate((x[3], x[2].half(), x[1].bfloat16())):
        for arguments in calls(matrix, [size], k):
            check(arguments, "triton", run(arguments, "reference"))


@pytest.mark.parametrize("own", OWN, ids=lambda recipe: recipe.name)
def test_copies_and_other_names_are_the_same_kernels(own, monkeypatch):
    """No copy leaves the kernels: the definition in plain PyTorch is never called."""
    x = next(matrices((40, 130)))
    expected, _ = mixture.encode(x, own, "subchannel-32")
    monkeypatch.setattr(mixture, "encode_blocks", None)
    for recipe in (copy.deepcopy(own), Recipe("another", own.entries, own.granularity)):
        found, summary = encode(x, recipe, "subchannel-32")
        assert all(map(torch.equal, found.tensors, expected.tensors))
        assert summary.names[:-1] == tuple(f.name for f in own.formats)
    assert torch.equal(decode(found), mixture.decode(expected))


def test_opcheck():
    x = next(matrices((20, 50))).half()
    x[3, 4] = torch.inf
    arguments = x, to_text(OWN[1]), (1, 32), (20, 2), "gam", 0.045, "underflow"
    torch.library.opcheck(mixture_encode, arguments)
    stored = mixture_encode(*arguments)
    decoded = *stored[:5], to_text(OWN[1]), (1, 32), (20, 2), "fp16"
    torch.library.opcheck(mixture_decode, decoded)


def test_always_is_fused_by_any_name():
    x = next(matrices((40, 130)))
    mine = Recipe("mine", ALWAYS_E4M3.entries, "tensor")
    for metric in metrics.KNOWN:
        found, summary = encode(x, mine, metric=metric)
        expected, other = mixture.encode(x, ALWAYS_E4M3, metric=metric)
        assert torch.equal(found.codes, expected.codes)
        assert summary.error == pytest.approx(other.error)


def test_a_python_metric_is_named():
    x = next(matrices((4, 40)))
    metrics.register("mine", lambda scaled, rounded: (scaled - rounded).abs())
    try:
        mor = MoR("tensor", metric="mine")
        with pytest.warns(UserWarning, match="metric='mine' is a registered Python function"):
            mor.encode(x)
        with environment(SUBULP_BACKEND="reference"), warnings.catch_warnings():
            warnings.simplefilter("error")
            mor.encode(x)
        with (
            environment(SUBULP_BACKEND="cpu"),
            pytest.raises(RuntimeError, match="no kernel can run"),
        ):
            mor.encode(x)
    finally:
        metrics.unregister("mine")
    with pytest.raises(ValueError, match="metric='mine' is unknown"):
        mor.encode(x)


def test_formats_are_what_they_are_not_what_they_are_called():
    """A simulated E4M3 with infinities is none for the units of FP8."""
    codec = pytest.importorskip("subulp.ops.triton.codec")
    names = [codec.name_of(fmt) for fmt in (E4M3, IEEE, Format("e4m3", 3, 4))]
    assert [name == "e4m3" for name in names] == [True, False, False]


def test_scales_are_those_of_the_chosen_format():
    """The first format has another mantissa than the one that all blocks take."""
    e3m4_never = Entry(E3M4, mixture.below_threshold(E3M4, 1e-9))
    x = next(matrices((16, 32)))
    found, summary = encode(x, Recipe("second", (e3m4_never, Entry(E4M3, mixture.always))))
    alone, _ = encode(x, Recipe("alone", (Entry(E4M3, mixture.always),)))
    assert summary.sole == "e4m3"
    assert torch.equal(found.scales(1).per_block(), alone.scales(0).per_block())
    assert torch.equal(decode(found), decode(alone))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metric": "mine"}, "metric='mine' is unknown"),
        ({"groups": (2, 3), "scaling": "amax"}, r"groups=\(2, 3\) cannot apply to scaling='amax'"),
        ({"recipe": "{"}, "recipe='{' is unknown"),
        ({"recipe": "[" * 100_000}, "is unknown"),
        ({"recipe": "null"}, "recipe='null' is unknown"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_input(change, message):
    arguments = {
        "x": torch.ones(3, 4), "recipe": "tensor", "block": (1, 4), "groups": (1, 1),
        "scaling": "gam", "threshold": 0.045,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        mixture_encode(**arguments | change)


def test_a_huge_block_is_the_whole_matrix():
    x = next(matrices((3, 5)))
    huge = (1 << 63) - 1
    for recipe in ("tensor", to_text(OWN[0])):
        expected = mixture_encode(x, recipe, (3, 5), (1, 1), "gam", 0.045)
        values = mixture_decode(*expected[:5], recipe, (3, 5), (1, 1))
        for sizes in ((1 << 40, 1 << 40), (huge, huge)):
            found = mixture_encode(x, recipe, sizes, sizes, "gam", 0.045)
            assert all(map(torch.equal, found, expected))
            assert torch.equal(mixture_decode(*found[:5], recipe, sizes, sizes), values)


@pytest.mark.parametrize(
    ("place", "tensor", "message"),
    [
        (0, torch.zeros(6, 8), "codes have dtype torch.float32"),
        (1, torch.full((6, 2), 3, dtype=torch.uint8), "types reach 3"),
        (1, torch.zeros(5, 2, dtype=torch.uint8), r"types have shape \(5, 2\)"),
        (2, torch.ones(1, 1, 1), r"mantissa have shape \(1, 1, 1\)"),
        (3, torch.zeros(6, 2), "exponents have dtype"),
        (4, torch.zeros(3, dtype=torch.uint8), r"wide has shape \(3,\)"),
    ],
)
def test_stored_tensors_are_checked(place, tensor, message):
    """Kernels trust their sizes: nothing that is not a mixture's reaches them."""
    stored = list(mixture_encode(torch.randn(6, 8), "subtensor-3way", (1, 4), (2, 1), "gam", 0.045))
    stored[place] = tensor
    with pytest.raises(ValueError, match=message):
        mixture_decode(*stored[:5], "subtensor-3way", (1, 4), (2, 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_default_dtype_changes_nothing(dtype):
    x = list(matrices((40, 130)))[3]
    for arguments in calls(x, ["subchannel-32"], 0):
        for backend in ("cpu", "reference"):
            expected = run(arguments, backend)
            torch.set_default_dtype(dtype)
            try:
                check(arguments, backend, expected)
            finally:
                torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("rows", [33, 48, 65, 75, 127, 200])
def test_sums_of_any_number_of_rows_have_their_room(rows):
    """They are added up by halves, of a power of two: many narrow blocks beside each other."""
    x = next(matrices((rows, 520)))
    for recipe, columns in itertools.product((*RECIPES.values(), OWN[0]), (1, 2, 32)):
        block = (min(rows, 127), columns)
        arguments = x, to_text(recipe), block, (1, 1), "gam", 0.045
        expected = run(arguments, "reference")
        for isa in isas():
            with environment(SUBULP_ISA=isa):
                check(arguments, "cpu", expected)
