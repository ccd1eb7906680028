"""examples/torchrec_dlrm.py: a few steps of it."""

from __future__ import annotations

from .run import table


def test_narrow_tables_learn_as_wide_ones() -> None:
    rows = table("torchrec_dlrm.py", "--steps", "40")
    (_, wide, wide_loss), *narrow = rows.values()
    assert [size for size, _, _ in narrow] == sorted((s for s, _, _ in narrow), reverse=True)
    for _, size, loss in narrow:
        assert size < wide / 6
        assert abs(loss - wide_loss) < 0.02
