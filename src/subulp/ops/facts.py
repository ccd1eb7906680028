"""What the C++ kernels copy from Python's tables, and the codes that they know a table's rows by.

A row's place in its table is its code. ``subulp_facts()`` of the library spells its own copies out;
:mod:`.native` compares them with :func:`expected` when it loads the library.
"""

from __future__ import annotations

from typing import get_args

import torch

from ..numerics import E4M3, int_rows, metrics, random_bits
from ..numerics.formats import STORED
from ..numerics.mixture import RECIPES
from ..numerics.scaling import Scaling
from .embedding import job as embedding
from .step.job import SCALARS
from .strategy import TABLE, Strategy, low_scale

_ISAS = ("plain", "avx2", "avx512", "avx512-bf16", "amx-bf16", "plain-amx")
ISAS = {name: code for code, name in enumerate(_ISAS)}
"""From narrow to wide; ``"plain-amx"`` spells out the sums of ``"amx-bf16"``."""
FORMATS = {name: code for code, name in enumerate(map(str, (*STORED, *int_rows.INT_FORMATS)))}
DTYPES = {f.dtype: FORMATS[f.name] for f in STORED if f.dtype}
"""Codes of the formats that dtypes store."""
RULES = {name: code for code, name in enumerate(get_args(embedding.Update))}
RECIPE_CODES = {name: code for code, name in enumerate(RECIPES)}
METRICS = {name: code for code, name in enumerate(metrics.KNOWN)}
SCALINGS = {name: code for code, name in enumerate(get_args(Scaling))}

# Negative results of the embedding kernels.
BAD_OFFSETS, BAD_GRADIENT, BAD_WEIGHTS, BAD_TAGS = -2, -3, -4, -5
BAD_POSITIVES = -6
"""Negative result of the head's step."""
BLOCK_STEP = 32
"""Lines and numbers of a line by which blocks of a product begin."""

_CONSTANTS = {
    "BAD_OFFSETS": BAD_OFFSETS,
    "BAD_GRADIENT": BAD_GRADIENT,
    "BAD_WEIGHTS": BAD_WEIGHTS,
    "BAD_TAGS": BAD_TAGS,
    "BAD_POSITIVES": BAD_POSITIVES,
    "BLOCK_STEP": BLOCK_STEP,
    "E4M3_LOW_SCALE": low_scale(E4M3),
    "LANES": metrics.LANES,
    "PARAMETER_BYTES": int_rows.PARAMETER_BYTES,
    "COUNT_LIMIT": embedding.COUNT_LIMIT,
    "EMPTY": embedding.EMPTY,
    "BYPASS_SLOT": embedding.BYPASS_SLOT,
    "EVICT_SLOT": embedding.EVICT_SLOT,
    "GRADIENT_SPAN": embedding.GRADIENT_SPAN,
}
_C_TYPES = {"float32": "float", "uint32": "uint32_t", "uint64": "uint64_t"}
_HASHED = (0, 1, 0x12345678, 0x7FFFFFFF)


def expected(sizes: dict[str, int]) -> list[str]:
    """The lines of ``subulp_facts()``.

    Args:
        sizes: Bytes of each structure.
    """
    mixed = random_bits.mix(torch.tensor(_HASHED, dtype=torch.int64, device="cpu")).tolist()
    tables = {
        "isa": ISAS,
        "format": FORMATS,
        "rule": RULES,
        "recipe": RECIPE_CODES,
        "scaling": SCALINGS,
        "metric": METRICS,
    }
    return [
        *(f"{table} {name}" for table, codes in tables.items() for name in codes),
        *map(_strategy, TABLE),
        *(f"constant {name} {value:.0f}" for name, value in _CONSTANTS.items()),
        *(f"scalar {_C_TYPES[SCALARS[n].name]} {n}" for n in SCALARS.names or ()),
        *(f"size {name} {size}" for name, size in sizes.items()),
        *(f"mix {word}" for word in mixed),
    ]


def _strategy(s: Strategy) -> str:
    flags = " ".join(str(flag).lower() for flag in (s.wide_states, s.stochastic))
    weight = s.weight.replace("-", "_")
    return f"strategy {s.name} {weight} {s.slow_state} {flags} {s.dtype_set}"
