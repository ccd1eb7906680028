"""Logits of a classifier's rows for prediction, a slice of the labels at a time."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..numerics import Format
from ..ops import bf16_product
from ..ops.bf16_product import bf16_mm
from ..ops.head import Products, fp8
from .row_shards import Run
from .row_table import RowTable

Logits = Callable[[Run, int, int], Tensor]
"""From rows, and how many rows of their slice lie before and after them with other ranks, to FP32
``(batch, count)``. The product is that of the whole slice: how it rounds depends on its shape."""


def logits_of(table: RowTable, products: Products, x: Tensor) -> Logits:
    """The logits of embeddings, FP32 ``(batch, dim)``.

    Args:
        table: The rows.
        products: Operands of the products; with ``"fp8"`` logits are rounded to BF16 as in
            training.
        x: The embeddings.
    """
    decoded, stored = _Slices(table, stored=False), _Slices(table, stored=True)
    if products == "fp32":
        return decoded.times(lambda rows: x @ rows.t())
    if products == "bf16":
        if isinstance(table.storage, Format) and table.storage.dtype is not None:
            return stored.times(lambda rows: bf16_mm(x, rows.t(), b_scale=table.scale))
        return decoded.times(lambda rows: bf16_mm(x, rows.t()))
    if fp8.units_at(x.device):
        units, scales, batch = fp8.unit_inputs(x), fp8.scales(table.scale, x.device), x.shape[0]
        return stored.times(
            lambda rows: fp8.unit_logits(rows, units, scales)[:, :batch].float().t()
        )
    narrow = fp8.inputs(x)
    if bf16_product.units_at(x.device):
        return stored.times(
            lambda rows: fp8.to_bf16_(bf16_mm(narrow, rows.t(), b_scale=table.scale))
        )
    wide = narrow.float()
    return decoded.times(lambda rows: fp8.to_bf16_(wide @ rows.t()))


class _Slices:
    """Rows of a table as products take them: decoded, or as they are stored."""

    def __init__(self, table: RowTable, *, stored: bool) -> None:
        self._table, self._stored = table, stored

    def times(self, product: Callable[[Tensor], Tensor]) -> Logits:
        """What ``product`` gives for all rows of a slice, for those that are here."""

        def logits(own: Run, before: int, after: int) -> Tensor:
            start, stop = own.place, own.place + own.count
            rows = (
                self._table.stored[start:stop] if self._stored else self._table.decode(start, stop)
            )
            if not before and not after:
                return product(rows)
            whole = rows.new_zeros(before + own.count + after, rows.shape[1])
            whole[before : before + own.count] = rows
            return product(whole)[:, before : before + own.count]

        return logits
