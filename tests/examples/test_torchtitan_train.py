"""examples/torchtitan_train.py: a few steps of it."""

from __future__ import annotations

from .run import table


def test_the_losses_are_alike_at_their_bytes() -> None:
    rows = table("torchtitan_train.py", "--steps", "4")
    assert [size for size, _ in rows.values()] == [16.0, 8.0, 12.0, 12.0]
    losses = [loss for _, loss in rows.values()]
    assert max(losses) - min(losses) < 0.02 * max(losses)
