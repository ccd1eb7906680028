"""No tensor reaches a kernel by its address unless its memory is what the kernel takes it for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, distribute_tensor

from subulp import nn, numerics, optim
from subulp.ops import all_finite, backend, mixture
from subulp.ops.embedding import embedding_pool, embedding_update, embedding_weight_grad
from subulp.ops.pointers import data_ptr, data_ptrs, run_ptr
from subulp.ops.rows import decode, decode_rows, encode, encode_rows

from .support import environment


def freed() -> Tensor:
    x = torch.ones(4)
    x.untyped_storage().resize_(0)
    return x


def shortened() -> Tensor:
    x = torch.ones(4)
    x.untyped_storage().resize_(8)
    return x


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(4)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: torch.ones(4, device="meta"), ValueError, "x lies on meta, where tensors hold no"),
        (lambda: torch.ones(4).double(), ValueError, "x has dtype torch.float64: expected"),
        (lambda: torch.ones(5), ValueError, r"x has shape \(5,\): expected \(4,\)"),
        (lambda: torch.ones(8)[::2], ValueError, r"x has strides \(2,\): expected a contiguous"),
        (lambda: torch.ones(4).to_sparse(), ValueError, "x has the layout torch.sparse_coo"),
        (lambda: torch._neg_view(torch.ones(4)), ValueError, "x has a tensor that is a negated"),
        (lambda: torch._efficientzerotensor(4), ValueError, "x has a tensor of .* without memory"),
        (freed, ValueError, "x has a tensor of shape .* without memory: it was freed"),
        (shortened, ValueError, "x of shape .* reaches beyond its storage of 8 bytes"),
        (fake, TypeError, "x is a FakeTensor: kernels take plain tensors"),
        (lambda: [1.0] * 4, TypeError, "x is a list: kernels take plain tensors"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused(make, error, message):
    # Not a parameter: torch cannot print all of these.
    with pytest.raises(error, match=message):
        data_ptr("x", make(), torch.float32, (4,))


def test_what_passes():
    x = torch.nn.Parameter(torch.ones(2, 3))
    assert data_ptr("x", x, torch.float32, (2, 3)) == x.data_ptr()
    assert data_ptr("x", x[1:], torch.float32) == x.data_ptr() + 12
    assert data_ptr("x", x[:0], torch.float32) == 0
    assert data_ptrs("x", [x, x.detach()[1]]) == [x.data_ptr(), x.data_ptr() + 12]
    assert data_ptrs("x", []) == []


def test_what_is_no_run_is_copied():
    x = torch.arange(4.0)
    assert run_ptr("x", x, torch.float32) == (x, x.data_ptr())
    whole = torch.arange(8.0)
    for odd, expected in ((whole[::2], [0, 2, 4, 6]), (torch._neg_view(x), [0, -1, -2, -3])):
        copy, at = run_ptr("x", odd, torch.float32)
        assert copy.tolist() == expected
        assert copy.is_contiguous()
        assert not copy.is_neg()
        assert at == copy.data_ptr() != odd.data_ptr()
    assert run_ptr("x", torch.ones(0), torch.float32)[1] == 0
    with pytest.raises(ValueError, match=r"x has dtype torch.float64: expected torch.float32"):
        run_ptr("x", x.double(), torch.float32)
    with pytest.raises(ValueError, match="without memory: it was freed"):
        run_ptr("x", freed(), torch.float32)
    with pytest.raises(ValueError, match=r"x has the layout torch.sparse_coo"):
        run_ptr("x", x.to_sparse(), torch.float32)
    with pytest.raises(TypeError, match="x is a FakeTensor"):
        run_ptr("x", fake(), torch.float32)


def test_torchs_transforms_are_refused():
    with pytest.raises(TypeError, match="x has a tensor without memory of its own"):
        torch.func.vmap(lambda x: data_ptr("x", x, torch.float32))(torch.ones(2, 3))


@pytest.mark.parametrize("make", [freed, fake, lambda: torch._neg_view(torch.ones(4))])
def test_roles_are_checked_too(make):
    with pytest.raises((TypeError, ValueError), match="grads"):
        data_ptrs("grads", [torch.ones(4), make()])


# ------------------------------------------------------------------------------------- the passes


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield DeviceMesh("cpu", [0])
    finally:
        dist.destroy_process_group()


def test_distributed_tensors_are_refused_by_name(mesh):
    def spread(x: Tensor) -> DTensor:
        return distribute_tensor(x, mesh, [Replicate()])

    # Optimizers step their parts; a kernel by itself takes none.
    with pytest.raises(TypeError, match="is a DTensor"):
        encode(spread(torch.ones(3, 4)), torch.zeros(3, 4, dtype=torch.bfloat16))
    bag = nn.CachedEmbeddingBag(20, 4)
    with pytest.raises(TypeError, match="values is a DTensor"):
        bag(spread(torch.tensor([[1, 2]])))
    head = nn.ExtremeClassifier(4, 20)
    optim.RowSGD(head)
    before, one = head.table.decode(0, 20), torch.tensor([0])
    with pytest.raises(TypeError, match="embeddings is a DTensor"):
        head(spread(torch.ones(2, 4)), one, one)
    with pytest.raises(TypeError, match="embeddings is a DTensor"):
        head.topk(spread(torch.ones(2, 4)))
    assert torch.equal(head.table.decode(0, 20), before)


def test_rows_are_checked():
    x, codes = torch.ones(3, 4), torch.zeros(3, 4, dtype=torch.bfloat16)
    stored = torch.zeros(3, 12, dtype=torch.uint8)
    for call in (
        lambda: encode(x.double(), codes),
        lambda: encode(x, codes[:2]),
        lambda: encode(x.t(), codes.t()),
        lambda: encode(x, codes.to("meta")),
        lambda: decode(codes, x[:2]),
        lambda: decode(codes, x.half()),
        lambda: decode_rows(stored, x[:, :3], 8),
        lambda: decode_rows(stored[:, :11], x, 8),
        lambda: decode_rows(stored.int(), x, 8),
        lambda: encode_rows(x, stored[:2], 8),
        lambda: encode_rows(x.flatten(), stored, 8),
        lambda: encode_rows(x.half(), stored, 8),
    ):
        with pytest.raises(ValueError, match=r"expected|float64"):
            call()


def test_cpu_kernels_are_not_forced_upon_other_devices():
    refused = pytest.raises(ValueError, match=r"SUBULP_BACKEND='cpu' runs .* are on cuda")
    with environment(SUBULP_BACKEND="cpu"), refused:
        backend.choose(torch.device("cuda"))


def test_a_negated_view_is_as_finite_as_what_it_negates():
    assert all_finite([torch._neg_view(torch.ones(4))])
    assert not all_finite([torch._neg_view(torch.tensor([1.0, torch.inf]))])


def test_mixtures_are_checked():
    encoded, _ = numerics.mixture.encode(
        torch.randn(32, 64) * 100, numerics.mixture.TWO_WAY, "block-128x128"
    )
    for name, value in (
        ("types", torch.full((1, 1), 7, dtype=torch.uint8)),
        ("wide", encoded.wide[:-1] if encoded.wide.numel() else torch.ones(3, dtype=torch.uint8)),
        ("exponents", torch.zeros(2, 2, dtype=torch.int8)),
        ("mantissa", encoded.mantissa.double()),
    ):
        with pytest.raises(ValueError, match=f"{name} (has|have|reach)"):
            mixture.decode(type(encoded)(**vars(encoded) | {name: value}))


# ------------------------------------------------------------------------ the embedding operators


def update_arguments() -> dict:
    return {
        "codes": [torch.zeros(10, 12, dtype=torch.uint8)],
        "caches": [torch.zeros(4, 4)],
        "tags": [torch.tensor([0, 1, 2, 3], dtype=torch.int32)],
        "counts": [torch.ones(10, dtype=torch.int32)],
        "stamps": [torch.zeros(0, dtype=torch.int32)],
        "floors": [torch.zeros(1, dtype=torch.int32)],
        "accumulators": [torch.zeros(10)],
        "evictions": torch.zeros(1, dtype=torch.int64),
        "bits": [8],
        "ways": [4],
        "mixed": [False],
        "stochastic": [False],
        "streams": [0],
        "lrs": [0.1],
        "weight_decays": [0.0],
        "eps": [1e-8],
        "seed": 0,
        "step": 1,
        "features": [0],
        "values": torch.tensor([7, 7, 8]),
        "offsets": torch.tensor([0, 1, 3]),
        "weights": None,
        "grad": torch.ones(2, 4),
    }


@pytest.mark.parametrize("name", ["cpu", "reference", "triton"])
@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"values": torch.tensor([7, 7, 10**9])}, IndexError),
        ({"values": torch.tensor([7, -1, 8])}, IndexError),
        ({"offsets": torch.tensor([0, 9, 3])}, ValueError),
        ({"offsets": torch.tensor([0, 1, 4])}, ValueError),
        ({"features": [1]}, ValueError),
        ({"features": [-1]}, ValueError),
        ({"codes": [torch.zeros(10, 11, dtype=torch.uint8)]}, ValueError),
        ({"codes": [torch.zeros(10, 12, dtype=torch.int8)]}, ValueError),
        ({"caches": [torch.zeros(3, 4)]}, ValueError),
        ({"tags": [torch.tensor([0, 1, 2, 10**9], dtype=torch.int32)]}, ValueError),
        ({"tags": [torch.tensor([0, 1, 2, -9], dtype=torch.int32)]}, ValueError),
        ({"tags": [torch.tensor([10**9, 1, 2, 3], dtype=torch.int32)]}, ValueError),
        ({"counts": [torch.ones(9, dtype=torch.int32)]}, ValueError),
        ({"floors": [torch.ones(0, dtype=torch.int32)]}, ValueError),
        ({"stamps": [torch.ones(3, dtype=torch.int32)]}, ValueError),
        ({"accumulators": [torch.ones(9)]}, ValueError),
        ({"accumulators": [torch.ones(10).double()]}, ValueError),
        ({"evictions": torch.ones(1)}, ValueError),
        ({"evictions": torch.zeros(0, dtype=torch.int64)}, ValueError),
        ({"ways": [0]}, ValueError),
        ({"ways": [3]}, ValueError),
        ({"streams": [-1]}, ValueError),
        ({"seed": -1}, ValueError),
        ({"step": 2**32}, ValueError),
        ({"grad": torch.ones(2, 3)}, ValueError),
        ({"weights": torch.ones(2)}, ValueError),
    ],
    ids=str,
)
def test_an_update_is_refused(change, error, name):
    arguments = update_arguments() | change
    before = {name: [t.clone() for t in arguments[name]] for name in ("codes", "caches")}
    # Rows 7 and 8 have more counts than the residents of their set, which are to leave it.
    arguments["counts"][0][7:9] = 5
    with environment(SUBULP_BACKEND=name), pytest.raises(error):
        embedding_update(**arguments)
    if "tags" in change and name != "reference":
        # Kernels find out as they come to a set: the rows that looked for a place bypass the cache.
        return
    for role, tensors in before.items():
        for old, new in zip(tensors, arguments[role], strict=True):
            assert torch.equal(old, new)


@pytest.mark.parametrize("name", ["cpu", "reference", "triton"])
@pytest.mark.parametrize("operator", [embedding_pool, embedding_weight_grad])
@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"values": torch.tensor([7, 7, 10**9])}, IndexError),
        ({"offsets": torch.tensor([0, 9, 3])}, ValueError),
        ({"features": [1]}, ValueError),
        ({"codes": [torch.zeros(10, 11, dtype=torch.uint8)]}, ValueError),
        ({"tags": [torch.zeros(3, dtype=torch.int32)]}, ValueError),
    ],
    ids=str,
)
def test_a_look_up_is_refused(operator, change, error, name):
    names = ("codes", "caches", "tags", "bits", "ways", "mixed", "features", "values", "offsets")
    arguments = {name: value for name, value in update_arguments().items() if name in names}
    arguments |= change
    arguments |= {"weights": None} if operator is embedding_pool else {"grad": torch.ones(2, 4)}
    with environment(SUBULP_BACKEND=name), pytest.raises(error):
        operator(**arguments)
