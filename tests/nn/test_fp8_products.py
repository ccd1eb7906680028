"""The classifier with narrow products: what trains, what ranks, what is chosen where."""

import pytest
import torch
import torch.nn.functional as F

from subulp import nn, optim
from subulp.numerics import BF16, E4M3, round_to
from subulp.ops import bf16_product
from subulp.ops.head import fp8

B, D, L = 12, 20, 211


def make(products="fp8", *, storage="e4m3", lr=0.5, **options):
    head = nn.ExtremeClassifier(D, L, storage=storage, seed=3, products=products, **options)
    optim.RowSGD(head, lr=lr)
    return head


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(B, D, generator=generator)
    pairs = torch.randperm(B * L, generator=generator)[:50]
    return x, pairs // L, pairs % L


def dense_logits(head, x):
    weight = head.weight(torch.arange(L)) if head.table.remainder is None else None
    if weight is None:
        weight = head.table.decode(0, L)[head.row_of]
    return round_to(round_to(x, E4M3) @ weight.t(), BF16)


def test_the_loss_and_the_gradient_are_those_of_narrow_operands():
    head = make()
    x, rows, cols = batch()
    z = dense_logits(head, x)
    weight = head.weight(torch.arange(L))
    y = torch.zeros_like(z)
    y[rows, cols] = 1
    expected = F.binary_cross_entropy_with_logits(z, y, reduction="sum") / B
    gradient = round_to((z.sigmoid() - y) / B, BF16) @ weight
    x.requires_grad_()
    loss = head(x, rows, cols, loss=True)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(x.grad, gradient, rtol=1e-5, atol=1e-6)
    # In eval(), the loss of the same logits.
    again = make().eval()(x.detach(), rows, cols)
    assert again.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("products", ["fp8", "bf16"])
def test_it_trains_as_well_as_fp32_products(products):
    losses = {}
    for kind in ("fp32", products):
        head = make(kind, lr=0.1)
        start = head(*batch(), loss=True).item()
        for step in range(30):
            head(*batch(step % 3))
        losses[kind] = head(*batch(), loss=True).item()
    assert losses[products] < 0.85 * start
    assert losses[products] == pytest.approx(losses["fp32"], rel=0.02)
    assert losses[products] != losses["fp32"]


@pytest.mark.parametrize("options", [{}, {"dropout": 0.2}, {"scale": "table"}], ids=str)
def test_chunks_change_nothing(options):
    """One instance of two dyadic numbers: no sum depends on its order."""
    x = torch.zeros(1, D)
    x[0, [2, 9]] = torch.tensor([1.0, -0.5])
    none = torch.zeros(0, dtype=torch.int64)
    results = []
    for chunks in (1, 2, 7, L):
        head = make(chunks=chunks, **options)
        for _ in range(2):
            head(x, none, none)
        results.append(head.weight(torch.arange(L)))
    for other in results[1:]:
        assert torch.equal(other, results[0])


@pytest.mark.parametrize("slice_rows", [7, 1000])
@pytest.mark.parametrize("permuted", [False, True])
def test_topk_ranks_by_the_logits_of_training(permuted, slice_rows, monkeypatch):
    monkeypatch.setattr("subulp.nn.row_table._SLICE", slice_rows * D)
    options = {"head_fraction": 0.3, "label_counts": torch.arange(L) % 9} if permuted else {}
    head = make(**options)
    x, _, _ = batch()
    scores, labels = head.topk(x, L)
    z = dense_logits(head, x)
    expected = z.sort(dim=1, descending=True, stable=True)
    assert torch.equal(scores, expected.values)
    assert torch.equal(labels, expected.indices)
    # They are BF16 numbers, and not those of FP32 products.
    assert torch.equal(scores, scores.bfloat16().float())
    assert not torch.equal(scores, make("fp32", **options).topk(x, L)[0])


def test_topk_on_fp8_units_is_that_on_tiles(monkeypatch):
    head = make(scale="table")
    x, _, _ = batch()
    tiles = head.topk(x, 7)
    monkeypatch.setattr(fp8, "units_at", lambda device: True)
    units = head.topk(x, 7)
    assert torch.equal(units[0], tiles[0])
    assert torch.equal(units[1], tiles[1])


@pytest.mark.parametrize("products", ["fp8", "bf16"])
def test_embeddings_of_any_layout(products):
    """Transposed, every second one, or one for all: what counts are the numbers."""
    x = torch.randn(2 * D, 2 * B, generator=torch.Generator().manual_seed(0))
    _, rows, cols = batch()
    for view in (x[:D, :B].t(), x.t()[::2, ::2], x[:1, :D].expand(B, D)):
        results = []
        for embeddings in (view, view.contiguous()):
            head = make(products)
            leaf = embeddings.detach().requires_grad_()
            head(leaf, rows, cols, loss=True).backward()
            results.append((head.table.decode(0, L), leaf.grad, *head.topk(embeddings, 3)))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("storage", ["e4m3", "bf16", (4, 3)], ids=str)
@pytest.mark.parametrize("permuted", [False, True])
def test_topk_of_bf16_products(storage, permuted, monkeypatch):
    """FP32 sums of BF16 operands: nothing rounds them."""
    monkeypatch.setattr("subulp.nn.row_table._SLICE", 7 * D)
    options = {"head_fraction": 0.3, "label_counts": torch.arange(L) % 9} if permuted else {}
    head = make("bf16", storage=storage, scale="table", **options)
    x, _, _ = batch()
    scores, labels = head.topk(x, 9)
    weight = head.table.decode(0, L)
    if permuted:
        weight = weight[head.row_of]
    z = round_to(x, BF16).double() @ weight.double().t()
    expected = z.topk(9)
    torch.testing.assert_close(scores.double(), expected.values, rtol=1e-5, atol=1e-6)
    assert torch.equal(labels, expected.indices)
    assert not torch.equal(scores, scores.bfloat16().float())


def test_topk_on_units_of_bf16_is_that_on_tiles(monkeypatch):
    head = make("fp8", scale="table")
    x, _, _ = batch()
    x = torch.zeros_like(x).scatter_(1, x.argmax(1, keepdim=True), 0.5)
    tiles = head.topk(x, 7)
    monkeypatch.setattr(bf16_product, "units_at", lambda device: True)
    units = head.topk(x, 7)
    assert torch.equal(units[0], tiles[0])
    assert torch.equal(units[1], tiles[1])


def test_auto_is_what_the_units_multiply(monkeypatch):
    storages = ("e4m3", "bf16", (4, 3), "fp16", "fp32", "int8", (4, 8))
    heads = {s: make("auto", storage=s) for s in storages}
    monkeypatch.setattr(bf16_product, "units_at", lambda device: False)
    assert {head.chosen_products for head in heads.values()} == {"fp32"}
    monkeypatch.setattr(bf16_product, "units_at", lambda device: True)
    in_bf16 = {s for s, head in heads.items() if head.chosen_products == "bf16"}
    assert in_bf16 == {"e4m3", "bf16", (4, 3)}
    assert {heads[s].chosen_products for s in storages if s not in in_bf16} == {"fp32"}
    monkeypatch.setattr(fp8, "units_at", lambda device: True)
    assert heads["e4m3"].chosen_products == "fp8"
    assert heads["bf16"].chosen_products == "bf16"
    assert make("fp32").chosen_products == "fp32"
    monkeypatch.undo()
    with_units = bf16_product.units_at(torch.device("cpu"))
    assert heads["bf16"].chosen_products == ("bf16" if with_units else "fp32")


@pytest.mark.parametrize("storage", ["fp32", "bf16", "fp16", (4, 3)], ids=str)
def test_other_rows_have_no_fp8_products(storage):
    with pytest.raises(ValueError, match=r"multiplies rows in E4M3, and storage=.*use storage='e4"):
        make("fp8", storage=storage)


@pytest.mark.parametrize("storage", ["fp32", "fp16", "int4", (4, 8)], ids=str)
def test_rows_that_bf16_would_round_have_no_bf16_products(storage):
    with pytest.raises(ValueError, match=r"multiplies rows of BF16 numbers, and storage=.*'bf16'"):
        make("bf16", storage=storage)


def test_unknown_products():
    with pytest.raises(ValueError, match="products='int8' is unknown: use 'auto' or 'fp32' or"):
        make("int8")


def test_refined_rows_keep_the_products_that_they_can_have():
    features = [batch()]
    kept = {
        (products, storage): nn.refine(make(products), features, storage=storage).products
        for products in ("fp8", "bf16", "fp32")
        for storage in ("e4m3", "bf16", "fp32")
    }
    assert kept == {
        ("fp8", "e4m3"): "fp8",
        ("fp8", "bf16"): "auto",
        ("fp8", "fp32"): "auto",
        ("bf16", "e4m3"): "bf16",
        ("bf16", "bf16"): "bf16",
        ("bf16", "fp32"): "auto",
        ("fp32", "e4m3"): "fp32",
        ("fp32", "bf16"): "fp32",
        ("fp32", "fp32"): "fp32",
    }
