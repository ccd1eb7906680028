"""examples/peft_train.py: some steps of it."""

from __future__ import annotations

from .run import table


def test_adapters_learn_in_fewer_bytes() -> None:
    rows = table("peft_train.py", "--steps", "20")
    (wide, wide_loss), (narrow, _), (ours, our_loss) = rows.values()
    assert (wide, narrow, ours) == (16.0, 8.0, 12.0)
    assert abs(our_loss - wide_loss) < 0.02 * wide_loss
