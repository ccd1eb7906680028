"""examples/transformers_train.py: some steps of it."""

from __future__ import annotations

from .run import table


def test_it_keeps_what_bf16_loses() -> None:
    rows = table("transformers_train.py", "--steps", "40")
    (wide, wide_loss), (narrow, narrow_loss), (ours, our_loss) = rows.values()
    assert (wide, narrow, ours) == (16.0, 8.0, 10.0)
    assert abs(our_loss - wide_loss) < 0.5 * abs(narrow_loss - wide_loss)
