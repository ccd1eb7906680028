"""Initial values: of layers made in FP8, and of all modules by ``reset_parameters()``."""

import pytest
import torch

from subulp import nn, optim

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
LAYERS = [
    lambda **options: nn.Linear(7, 5, **options),
    lambda **options: nn.Conv2d(3, 4, 3, **options),
    lambda **options: nn.Embedding(9, 4, **options),
]


def drawn(make, **options):
    torch.manual_seed(0)
    return make(**options)


@pytest.mark.parametrize("make", LAYERS)
@pytest.mark.parametrize("dtype", [*FP8, torch.bfloat16], ids=str)
def test_made_in_a_dtype_or_cast_to_it(make, dtype):
    layer, cast = drawn(make, dtype=dtype), drawn(make).to(dtype)
    assert all(p.dtype == dtype for p in layer.parameters())
    if dtype in FP8:
        for own, other in zip(layer.parameters(), cast.parameters(), strict=True):
            assert torch.equal(own.float(), other.float())


@pytest.mark.parametrize("make", LAYERS)
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_reset_draws_anew_and_keeps_the_parameters(make, dtype):
    layer = drawn(make, dtype=dtype)
    known = [(id(p), p.float()) for p in layer.parameters()]
    layer.reset_parameters()
    for p, (identity, before) in zip(layer.parameters(), known, strict=True):
        assert id(p) == identity
        assert p.dtype == dtype
        assert not torch.equal(p.float(), before)


@pytest.mark.parametrize("make", LAYERS)
def test_on_the_meta_device(make):
    layer = make(dtype=FP8[0], device="meta")
    assert all(p.is_meta and p.dtype == FP8[0] for p in layer.parameters())
    layer.to_empty(device="cpu").reset_parameters()
    assert all(p.float().isfinite().all() for p in layer.parameters())


def table(storage, **options):
    config = nn.EmbeddingTable(40, 4, storage=storage, cache_fraction=0.25)
    return nn.CachedEmbeddingBags([config, nn.EmbeddingTable(9, 3)], 0, seed=3, **options)


def head(storage, **options):
    return nn.ExtremeClassifier(8, 20, storage=storage, seed=3, **options)


def used(module):
    """Three steps on."""
    if module.row_optimizer is None:
        optim.RowSGD(module, lr=0.5)
    for _ in range(3):
        if isinstance(module, nn.ExtremeClassifier):
            x, pairs = torch.ones(2, 8, requires_grad=True), torch.tensor([[0, 1], [3, 7]])
            module(x, *pairs).backward()
        else:
            module(torch.tensor([1, 2, 3, 4]), torch.tensor([2, 0, 1, 1])).sum().backward()
    return module


def assert_same(module, expected):
    own, other = module.state_dict(), expected.state_dict()
    assert own.keys() == other.keys()
    for name, value in own.items():
        assert torch.equal(value.view(torch.uint8), other[name].view(torch.uint8)), name


@pytest.mark.parametrize("make", [table, head])
@pytest.mark.parametrize("storage", ["int4", "bf16", "e4m3"])
@pytest.mark.parametrize("origin", ["meta", "trained"])
def test_rows_are_as_new(make, storage, origin):
    """What torch's deferred initialisation calls after ``to_empty()``."""
    if origin == "meta":
        module = make(storage, device="meta").to_empty(device="cpu")
        for value in (*module.parameters(), *module.buffers()):
            value.detach().view(torch.uint8).fill_(0x55)
    else:
        module = used(make(storage))
    module.reset_parameters()
    assert_same(module, make(storage))
    assert_same(used(module), used(make(storage)))


def test_remainders_and_the_order_of_labels_are_new_too():
    counts = torch.arange(20)

    def new():
        return head("e4m3", head_fraction=0.25, label_counts=counts)

    module = used(new())
    module.reset_parameters()
    with pytest.raises(RuntimeError, match="label_counts"):
        used(module)
    module.set_label_counts(counts)
    assert_same(module, new())
    assert_same(used(module), used(new()))
