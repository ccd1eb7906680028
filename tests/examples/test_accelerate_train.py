"""examples/accelerate_train.py: a few epochs of it."""

from __future__ import annotations

from .run import table


def test_it_keeps_what_bf16_loses() -> None:
    rows = table("accelerate_train.py", "--epochs", "6")
    (wide, wide_loss), (narrow, narrow_loss), (ours, our_loss) = rows.values()
    assert (wide, narrow, ours) == (16.0, 8.0, 12.0)
    assert abs(our_loss - wide_loss) < 0.5 * abs(narrow_loss - wide_loss)
