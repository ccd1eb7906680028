"""Sizes of DLRM that others have published for Criteo's data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ...engine.config import check_names


@dataclass(frozen=True)
class Preset:
    """A model.

    Attributes:
        bottom: Hidden layers of the MLP over the numbers.
        top: Hidden layers of the MLP over the dot products.
        dim: Numbers of a table's row.
        rows: Rows of each table, in the order of the columns.
        min_count: Training examples that a category needs to have a row of its own. The sizes are
            counts of categories: hashed to so many rows, 37 % of these would stay empty, and most
            categories share theirs.
    """

    bottom: tuple[int, ...]
    top: tuple[int, ...]
    dim: int
    rows: tuple[int, ...]
    min_count: int = 1

    def settings(self) -> dict[str, Any]:
        """The fields of the task's configuration that it sets."""
        return asdict(self)


# Table 1 of "Mixed-Precision Embedding Using a Cache", which sorts the sizes; the order is that of
# the columns of Kaggle's file.
_KAGGLE = (
    *(1_461, 584, 10_131_227, 2_202_608, 306, 24, 12_518, 634, 4, 93_146, 5_684, 8_351_593, 3_195),
    *(28, 14_993, 5_461_306, 11, 5_653, 2_173, 4, 7_046_547, 18, 16, 286_181, 105, 142_572),
)
# MLPerf's training benchmark, with its limit of 40 million rows a table.
_TERABYTE = (
    *(39_884_406, 39_043, 17_289, 7_420, 20_263, 3, 7_120, 1_543, 63, 38_532_951, 2_953_546),
    *(403_346, 10, 2_208, 11_938, 155, 4, 976, 14, 39_979_771, 25_641_295, 39_664_984, 585_935),
    *(12_972, 108, 36),
)

PRESETS = {
    "criteo-kaggle": Preset((512, 256, 64), (512, 256), 128, _KAGGLE),
    "criteo-kaggle-16": Preset((512, 256, 64), (512, 256), 16, _KAGGLE),
    "criteo-terabyte": Preset((512, 256), (1024, 1024, 512, 256), 128, _TERABYTE),
}
"""The cache paper's model, the same with the 16 numbers a row of DLRM's code, and MLPerf's."""


def preset(name: str) -> Preset:
    """The preset called ``name``.

    Raises:
        ValueError: There is none.
    """
    check_names("preset", (name,), sorted(PRESETS))
    return PRESETS[name]
