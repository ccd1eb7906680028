"""The classifier with FP8 products: what trains, what ranks, what is chosen where."""

import pytest
import torch
import torch.nn.functional as F

from subulp import nn, optim
from subulp.numerics import BF16, E4M3, round_to
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


def test_it_trains_as_well_as_fp32_products():
    losses = {}
    for products in ("fp32", "fp8"):
        head = make(products, lr=0.1)
        start = head(*batch(), loss=True).item()
        for step in range(30):
            head(*batch(step % 3))
        losses[products] = head(*batch(), loss=True).item()
    assert losses["fp8"] < 0.85 * start
    assert losses["fp8"] == pytest.approx(losses["fp32"], rel=0.02)


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


def test_auto_is_fp8_for_e4m3_rows_where_there_are_units(monkeypatch):
    heads = {s: make("auto", storage=s) for s in ("e4m3", "bf16", (4, 3))}
    assert {head.chosen_products for head in heads.values()} == {"fp32"}
    monkeypatch.setattr(fp8, "units_at", lambda device: True)
    assert {s: head.chosen_products for s, head in heads.items()} == {
        "e4m3": "fp8",
        "bf16": "fp32",
        (4, 3): "fp32",
    }
    assert make("fp32").chosen_products == "fp32"


@pytest.mark.parametrize("storage", ["fp32", "bf16", "fp16", (4, 3)], ids=str)
def test_other_rows_have_no_fp8_products(storage):
    with pytest.raises(ValueError, match=r"multiplies rows in E4M3, and storage=.*use storage='e4"):
        make("fp8", storage=storage)


def test_unknown_products():
    with pytest.raises(ValueError, match="products='int8' is unknown: use 'auto' or 'fp32' or"):
        make("int8")


def test_refined_rows_keep_the_products_that_they_can_have():
    head = make()
    features = [batch()]
    assert nn.refine(head, features, storage="e4m3").products == "fp8"
    assert nn.refine(head, features, storage="bf16").products == "auto"
