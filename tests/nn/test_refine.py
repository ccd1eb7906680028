"""Refinement in higher precision, a part of the labels at a time."""

import pytest
import torch

from subulp import nn, optim
from subulp.diagnostics.memory import track_memory

BATCHES, B, D, L = 6, 16, 12, 50


@pytest.fixture(scope="module")
def batches():
    """Features, and labels that a hidden classifier gives them."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(L, D, generator=generator)
    found = []
    for _ in range(BATCHES):
        x = torch.randn(B, D, generator=generator)
        rows, cols = (x @ hidden.t() > 4).nonzero(as_tuple=True)
        found.append((x, rows, cols))
    return found


@pytest.fixture(scope="module", params=[0.0, 0.3])
def head(request, batches):
    """An FP8 classifier that has learned what rounding to nearest lets it."""
    counts = torch.bincount(torch.cat([cols for _, _, cols in batches]), minlength=L)
    head = nn.ExtremeClassifier(
        D, L, seed=1, rounding="nearest", head_fraction=request.param, label_counts=counts, chunks=3
    )
    optim.RowSGD(head, lr=0.05)
    for _ in range(10):
        for batch in batches:
            head(*batch)
    return head


def loss(head, batches):
    with torch.no_grad():
        return sum(head(*batch, loss=True).item() for batch in batches)


def everything(head):
    return head.weight(torch.arange(head.num_labels))


def trained_on(head, batches, epochs, lr):
    """The head after as many steps as its refinement takes, with the same learning rates."""
    longer = nn.ExtremeClassifier(
        D, L, rounding="nearest", head_fraction=head.head_fraction, chunks=3
    )
    longer.load_state_dict(head.state_dict())
    sgd = optim.RowSGD(longer, lr=lr)
    for epoch in range(epochs):
        sgd.param_groups[0]["lr"] = lr * (1 - epoch / epochs)
        for batch in batches:
            longer(*batch)
    return longer


@pytest.mark.parametrize("storage", ["bf16", "fp32"])
def test_it_lowers_the_loss_of_an_fp8_head_and_leaves_it_as_it_is(head, batches, storage):
    before, weights = loss(head, batches), everything(head)
    refined = nn.refine(head, batches, storage=storage, epochs=10, lr=0.05)
    assert loss(refined, batches) < loss(trained_on(head, batches, 10, 0.05), batches) < before
    assert refined.table.format.name == storage
    assert torch.equal(everything(head), weights)


def test_it_starts_from_the_heads_weights(head, batches):
    same = nn.refine(head, batches, storage="fp32", lr=0.0)
    assert torch.equal(everything(same), everything(head))


@pytest.mark.parametrize("labels_at_a_time", [1, 7, 49, 1000])
def test_parts_change_no_more_than_summation_order(head, batches, labels_at_a_time):
    options = {"storage": "fp32", "epochs": 2, "weight_decay": 0.01}
    whole = everything(nn.refine(head, batches, **options))
    parts = nn.refine(head, batches, labels_at_a_time=labels_at_a_time, **options)
    torch.testing.assert_close(everything(parts), whole, rtol=1e-5, atol=1e-6)


def test_it_is_sgd_on_the_wide_weights(head, batches):
    refined = nn.refine(head, batches, storage="fp32", epochs=2, lr=0.1, weight_decay=0.01)
    weight = everything(head).clone().requires_grad_()
    for lr in (0.1, 0.05):
        for x, rows, cols in batches:
            y = torch.zeros(B, L)
            y[rows, cols] = 1
            z = x @ weight.t()
            total = torch.nn.functional.binary_cross_entropy_with_logits(z, y, reduction="sum")
            (grad,) = torch.autograd.grad(total / B + 0.005 * weight.square().sum(), weight)
            weight.data.sub_(grad, alpha=lr)
    torch.testing.assert_close(everything(refined), weight.detach(), rtol=1e-4, atol=1e-5)


def test_memory_is_that_of_a_part():
    labels, dim, part = 8_000, 64, 500
    head = nn.ExtremeClassifier(dim, labels, chunks=4, seed=0)
    x = torch.randn(4, dim)
    batch = (x, torch.arange(4), torch.arange(4))
    sgd = optim.RowSGD(head, lr=0.1)
    memory = track_memory(head, sgd)
    with memory:
        nn.refine(head, [batch], labels_at_a_time=part)
    added = memory.peak_bytes["total"] - head.table.codes.nbytes
    result = 2 * labels * dim
    # The part's rows, the FP32 copy that they come from, and a chunk's tile of them.
    assert result <= added <= result + 4 * 4 * part * dim


def test_the_mode_and_the_options_are_the_heads(head, batches):
    refined = nn.refine(head.eval(), batches)
    assert not refined.training
    head.train()
    assert (refined.chunks, refined.rounding, refined.reduction) == (3, "nearest", "mean")
    optim.RowSGD(refined.train(), lr=0.1)
    refined(*batches[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels_at_a_time": 0}, "labels_at_a_time=0 and epochs=1 must be at least 1"),
        ({"epochs": 0}, "epochs=0 must be at least 1"),
        ({"lr": -1.0}, "lr=-1.0 and weight_decay=0.0 must be at least 0"),
        ({"batches": []}, "batches is empty"),
        ({"batches": iter([])}, "batches is an iterator, which can be read once"),
        ({"storage": "fp9"}, "storage='fp9' is unknown"),
    ],
)
def test_bad_input(head, batches, change, message):
    arguments = {"batches": batches, **change}
    with pytest.raises(ValueError, match=message):
        nn.refine(head, arguments.pop("batches"), **arguments)


def test_a_label_that_no_part_has_is_refused(head, batches):
    x, rows, cols = batches[0]
    wrong = cols.clone()
    wrong[0] = L
    with pytest.raises(ValueError, match=r"labels of a batch are from \d+ to 50: expected 0 to 49"):
        nn.refine(head, [(x, rows, wrong)])


@pytest.mark.parametrize("storage", ["e4m3", "fp16", "int8"])
def test_a_scale_stays(storage):
    """Small weights of E4M3, which without the head's scale would be zero."""
    small = nn.ExtremeClassifier(D, 4_000, scale="table", seed=1)
    small.table.fill_uniform(2.0**-9, torch.Generator().manual_seed(0))
    batch = (torch.zeros(1, D), torch.tensor([0]), torch.tensor([0]))
    refined = nn.refine(small, [batch], storage=storage, lr=0.0)
    assert refined.table.scale == (1.0 if storage == "int8" else small.table.scale)
    before, after = everything(small), everything(refined)
    if storage == "int8":
        torch.testing.assert_close(after, before, atol=2.0**-16, rtol=0)
    else:
        assert torch.equal(after, before)
    assert (after == 0).all(1).sum() == 0


def test_the_size_of_the_parts_drops_no_other_weights(batches):
    head = nn.ExtremeClassifier(D, L, storage="fp32", dropout=0.3, seed=1)
    whole, *others = (
        everything(nn.refine(head, batches, storage="fp32", labels_at_a_time=n))
        for n in (L, 1, 7, 25, 49)
    )
    assert (whole - everything(head)).abs().max() > 0.01
    for other in others:
        torch.testing.assert_close(other, whole, rtol=0, atol=1e-6)


def test_batches_that_are_there_for_one_epoch_are_refused(batches):
    class Once:
        def __init__(self):
            self._left = iter(batches)

        def __iter__(self):
            return self._left

    head = nn.ExtremeClassifier(D, L, seed=1)
    with pytest.raises(ValueError, match="batches is empty in epoch 2 of 3: it can be read once"):
        nn.refine(head, Once(), epochs=3)
