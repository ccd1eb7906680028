"""The baselines that train on some of the labels: their gradients are autograd's."""

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from subulp.lab.engine.ranks import ALONE, Ranks
from subulp.lab.tasks.xmc.config import XMCConfig
from subulp.lab.tasks.xmc.sampled import (
    SHORTLISTED,
    SampledClassifier,
    ShortlistClassifier,
    clusters,
)
from subulp.lab.tasks.xmc.saved_parts import describe_head, head_of
from subulp.lab.tasks.xmc.task import check_ranks
from subulp.optim import RowSGD

LR, DECAY = 0.1, 0.01
LABELS, DIM = 200, 8
ROWS = torch.tensor([0, 0, 1, 2, 2])
COLS = torch.tensor([3, 70, 199, 3, 5])


def inputs(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, DIM, generator=generator).requires_grad_()


def logistic(x, weight, target, met):
    losses = F.binary_cross_entropy_with_logits(x @ weight.t(), target, reduction="none")
    return (losses * met).sum()


def dense(cols=COLS, labels=LABELS):
    target = torch.zeros(4, labels)
    target[ROWS, cols] = 1
    return target


def assert_same_step(head, x, parameters, expected):
    """A step is autograd's: the loss, the gradient of the inputs and the weights."""
    before = [p.detach().clone().requires_grad_() for p in parameters]
    wide = x.detach().clone().requires_grad_()
    wanted = expected(wide, *before)
    wanted.backward()
    RowSGD(head, lr=LR, weight_decay=DECAY)
    value = head(x, ROWS, COLS, loss=True)
    value.backward()
    torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad, wide.grad, rtol=1e-5, atol=1e-5)
    for parameter, old in zip(parameters, before, strict=True):
        seen = old.grad.abs().sum(1) > 0
        stepped = old.detach() * (1 - LR * DECAY * seen.unsqueeze(1)) - LR * old.grad
        torch.testing.assert_close(parameter.detach(), stepped, rtol=1e-5, atol=1e-6)
    return seen


def test_samples_are_the_batch_and_what_is_drawn():
    head, x = SampledClassifier(DIM, LABELS, 0, negatives=20), inputs()
    drawn = torch.from_numpy(np.random.default_rng((0, 0)).integers(LABELS, size=20))
    met = torch.zeros(LABELS)
    met[torch.cat((COLS, drawn))] = 1
    seen = assert_same_step(head, x, [head.weight], lambda y, w: logistic(y, w, dense(), met))
    assert torch.equal(seen, met.bool())


def test_each_step_draws_others_and_a_seed_the_same():
    def moved(seed, steps):
        head = SampledClassifier(DIM, LABELS, 0, negatives=20)
        head.seed = seed
        RowSGD(head, lr=LR)
        for _ in range(steps):
            before = head.weight.clone()
            head(inputs(), ROWS, COLS)
        return (head.weight != before).any(1)

    assert torch.equal(moved(0, 1), moved(0, 1))
    assert not torch.equal(moved(0, 1), moved(0, 2))
    assert not torch.equal(moved(0, 1), moved(1, 1))


def test_all_labels_drawn_is_the_whole_loss():
    head, x = SampledClassifier(DIM, LABELS, 0, negatives=20_000), inputs()
    assert assert_same_step(
        head, x, [head.weight], lambda y, w: logistic(y, w, dense(), torch.ones(LABELS))
    ).all()


def shortlist(labels=LABELS, most=4):
    generator = torch.Generator().manual_seed(3)
    return ShortlistClassifier(
        DIM, labels, 0, clusters(torch.randn(labels, 6, generator=generator), most)
    )


def test_a_shortlist_has_the_clusters_of_its_labels_and_the_best_others():
    head, x = shortlist(), inputs()
    assert len(head.members) > SHORTLISTED
    of = {int(label): c for c, row in enumerate(head.members) for label in row if label >= 0}
    own = torch.tensor([of[int(label)] for label in COLS])
    scores = (x @ head.cluster_weight.t()).detach()
    scores[ROWS, own] = math.inf
    met = torch.zeros(4, LABELS)
    for i, best in enumerate(scores.topk(SHORTLISTED).indices):
        labels = head.members[best].flatten()
        met[i, labels[labels >= 0]] = 1
    assert 0 < met.sum() < met.numel() / 2

    def expected(y, weight, cluster_weight):
        target = dense(own, len(cluster_weight))
        return logistic(y, weight, dense(), met) + logistic(y, cluster_weight, target, 1)

    assert_same_step(head, x, head.row_parameters, expected)


def test_an_instance_of_many_clusters_meets_some_of_its_labels():
    head = shortlist()
    RowSGD(head, lr=LR)
    own = head.members[: SHORTLISTED + 8, 0]
    x = inputs()
    value = head(x, torch.zeros(len(own), dtype=torch.int64), own, loss=True)
    value.backward()
    assert value.isfinite()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("k", [1, 5, 100])
def test_a_shortlist_ranks_by_the_product_of_probabilities(k):
    head, x = shortlist(), inputs().detach()
    values, labels = head.topk(x, k)
    assert labels.shape == (4, k)
    assert (labels >= 0).all()
    assert all(len(set(row.tolist())) == k for row in labels)
    assert (values[:, :-1] >= values[:, 1:]).all()
    of = head._cluster_of(labels)
    own, first = (x @ w.t() for w in head.row_parameters)
    product = (own.gather(1, labels).sigmoid() * first.gather(1, of).sigmoid()).double()
    torch.testing.assert_close(values.sigmoid().double(), product, rtol=1e-5, atol=1e-6)


def test_a_shortlist_of_all_clusters_finds_the_best_of_all():
    head, x = shortlist(60), inputs().detach()
    assert len(head.members) == SHORTLISTED
    own, first = (x @ w.t() for w in head.row_parameters)
    product = own.sigmoid() * first.sigmoid()[:, head._cluster_of(torch.arange(60))]
    assert torch.equal(head.topk(x, 3)[1], product.topk(3).indices)


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 1000])
def test_clusters_are_a_partition_of_equal_sizes(count):
    found = clusters(torch.randn(count, 5, generator=torch.Generator().manual_seed(1)))
    sizes = (found >= 0).sum(1)
    assert sorted(found[found >= 0].tolist()) == list(range(count))
    assert sizes.max() <= 32
    assert sizes.max() - sizes.min() <= 1


def test_clusters_are_of_labels_that_are_alike():
    kinds = torch.arange(128) % 4
    generator = torch.Generator().manual_seed(0)
    vectors = nn.functional.one_hot(kinds, 8) + 0.1 * torch.randn(128, 8, generator=generator)
    assert all(len(set(kinds[row].tolist())) == 1 for row in clusters(vectors))
    # Labels that no instance has are zero, and directions need none.
    assert len(clusters(torch.zeros(100, 3))) == 4


@pytest.mark.parametrize("head", [SampledClassifier(DIM, LABELS, 0), shortlist()])
def test_a_description_makes_the_same_classifier(head):
    found = head_of(describe_head(head))
    shapes = {name: tensor.shape for name, tensor in head.state_dict().items()}
    assert type(found) is type(head)
    assert {name: tensor.shape for name, tensor in found.state_dict().items()} == shapes


def test_bad_input():
    config = XMCConfig(precision=("sampled",))
    with pytest.raises(ValueError, match="precision=sampled is for one process, and there are 2"):
        check_ranks(config, Ranks(0, 2))
    check_ranks(config, ALONE)
    with pytest.raises(ValueError, match="shortlist has FP32 weights already"):
        dataclasses.replace(config, precision=("fp8", "shortlist"), refine_epochs=1)
    with pytest.raises(ValueError, match=r"linear=mor-2way has no effect on precision=sampled"):
        dataclasses.replace(config, linear=("mor-2way",))
