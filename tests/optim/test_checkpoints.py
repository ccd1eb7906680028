"""torch.distributed.checkpoint: saved by two ranks, loaded by one, three and four."""

from __future__ import annotations

import pytest
import torch

from tests.optim import checkpoints


def assert_equal(found, expected, cases):
    for case, mine, theirs in zip(cases, found, expected, strict=True):
        for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert torch.equal(a, b), (case, i)


WAYS = {
    "all": (checkpoints.CASES, False, False, (3,)),
    "few": (checkpoints.FEW, False, False, (1, 4)),
    "flattened": (checkpoints.FEW, True, False, (3,)),
    "in-background": (checkpoints.FEW, False, True, (3,)),
}


@pytest.mark.parametrize(("cases", "flatten", "in_background", "counts"), WAYS.values(), ids=WAYS)
def test_goes_on_with_other_ranks(any_ranks, tmp_path, cases, flatten, in_background, counts):
    folder = str(tmp_path)
    expected, same = any_ranks.run(2, checkpoints.save_all, folder, cases, flatten, in_background)
    assert_equal(same, expected, cases)
    for count in counts:
        for found in any_ranks.run(count, checkpoints.load_all, folder, cases, flatten, True):
            assert_equal(found, expected, cases)
    (alone,) = any_ranks.run(1, checkpoints.load_all, folder, cases, flatten, False)
    assert_equal(alone, expected, cases)


def test_full_state_dict(ranks):
    ranks.run(2, checkpoints.full_round_trip)


def test_preparing_an_optimizer_changes_nothing(ranks):
    ranks.run(2, checkpoints.preparing_changes_nothing)
