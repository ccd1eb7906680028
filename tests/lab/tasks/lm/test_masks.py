import pytest
import torch

from subulp.lab.tasks.lm.masks import MaskedBatches, masked, masked_evaluation_batches
from subulp.lab.tasks.lm.models import IGNORED

MASK = 50


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("context", "predicted"), [(1, 1), (8, 1), (20, 3), (64, 10)])
def test_every_sequence_has_as_many_predicted_tokens(context, predicted):
    tokens = torch.randint(MASK, (16, context))
    _, targets = masked(tokens, MASK, generator())
    assert ((targets != IGNORED).sum(1) == predicted).all()


def test_what_is_not_predicted_is_seen_and_what_is_predicted_is_the_truth():
    tokens = torch.randint(MASK, (64, 40))
    inputs, targets = masked(tokens, MASK, generator())
    open_ = targets == IGNORED
    assert torch.equal(inputs[open_], tokens[open_])
    assert torch.equal(targets[~open_], tokens[~open_])


def test_most_predicted_tokens_are_masked_some_are_others_and_some_are_seen():
    tokens = torch.randint(MASK, (2000, 40))
    inputs, targets = masked(tokens, MASK, generator())
    predicted = targets != IGNORED
    seen, truth = inputs[predicted], tokens[predicted]
    assert (seen == MASK).float().mean().item() == pytest.approx(0.8, abs=0.02)
    # A token drawn in place of another is the same one by chance.
    assert (seen == truth).float().mean().item() == pytest.approx(0.1 + 0.1 / MASK, abs=0.02)
    assert seen.max() == MASK


def test_masks_are_drawn_anew_and_resume():
    tokens = torch.randint(MASK, (500,))
    batches = MaskedBatches(tokens, 4, 16, 3, MASK)
    first, state = batches.draw(), batches.state_dict()
    second = batches.draw()
    assert not torch.equal(first[1], second[1])
    again = MaskedBatches(tokens, 4, 16, 99, MASK)
    again.load_state_dict(state)
    assert all(map(torch.equal, again.draw(), second))
    assert second[0].shape == (4, 16)


def test_evaluations_have_the_same_masks():
    tokens = torch.randint(MASK, (100,))
    one, two = (masked_evaluation_batches(tokens, 4, 16, MASK) for _ in range(2))
    assert sum(len(x) for x, _ in one) == 6
    assert all(
        torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(one, two, strict=True)
    )
