"""The seed decides the order; an epoch sees an example at most once; an order can be continued."""

from itertools import chain

import torch

from subulp.lab.data.batches import ShuffledBatches


def draws(batches, count):
    return [batches.draw().tolist() for _ in range(count)]


def test_the_seed_decides_the_order():
    first, second = (draws(ShuffledBatches(100, 10, 0), 12) for _ in range(2))
    assert first == second != draws(ShuffledBatches(100, 10, 1), 12)


def test_an_epoch_sees_every_example_at_most_once():
    for count in (9, 10):
        epochs = draws(ShuffledBatches(count, 3, 0), 6)
        seen = [set(chain(*epochs[i : i + 3])) for i in (0, 3)]
        assert [len(epoch) for epoch in seen] == [9, 9]
        assert epochs[:3] != epochs[3:]


def test_an_order_is_continued():
    batches = ShuffledBatches(10, 3, 0)
    draws(batches, 5)
    again = ShuffledBatches(10, 3, 7)
    again.load_state_dict(batches.state_dict())
    assert draws(again, 7) == draws(batches, 7)
    assert torch.equal(again.generator.get_state(), batches.generator.get_state())
