"""What a GPU's figures are held to: aims for an H100, judged from its record.

Needs a record alone, so that old ones can be judged again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Rates = Mapping[str, Any]
Judged = tuple[str, float | None, str, float]
"""Name of an aim, value, how that is to compare (a key of ``COMPARE``), and with what."""

COMPARE = {">=": operator.ge, ">": operator.gt, "<=": operator.le}

DEVICE = "H100"
"""Which devices the aims are of; others have none."""

# Without sparsity, as the data sheets have them, with the clocks that they assume: operations a
# second of BF16 and FP8. The longer name first, where one begins with another.
PEAKS = {
    "A100": {"bf16": 312e12},
    "H100 PCIe": {"bf16": 756e12, "fp8": 1513e12},
    "H100 NVL": {"bf16": 835e12, "fp8": 1671e12},
    "H100": {"bf16": 989e12, "fp8": 1979e12},
    "H200": {"bf16": 989e12, "fp8": 1979e12},
    "L40S": {"bf16": 362e12, "fp8": 733e12},
    "L4": {"bf16": 121e12, "fp8": 242e12},
    "B200": {"bf16": 2250e12, "fp8": 4500e12},
}


def peaks_of(device: str | None) -> dict[str, float]:
    """Nominal operations a second by operands' format; none of a device that is not known."""
    return next((peaks for name, peaks in PEAKS.items() if name in (device or "")), {})


def optimizers(rates: Rates) -> Iterator[Judged]:
    for name, row in rates.items():
        yield f"{name}: share of a copy's bandwidth", row["share_of_copy_bandwidth"], ">=", 0.85


def tables(rates: Rates) -> Iterator[Judged]:
    """Narrow rows against the fastest of FBGEMM's narrow rows."""
    for name, row in rates.items():
        if row["peer"] or not row["narrow"]:
            continue
        ratios = [row.get(f"times_fbgemm {kind}") for kind in ("fp16", "int8")]
        found = [ratio for ratio in ratios if ratio is not None]
        yield f"{name}: rate of FBGEMM's", min(found, default=None), ">=", 1.0


def heads(rates: Rates) -> Iterator[Judged]:
    for name, row in rates.items():
        if row["products"] == "fp32" or row["peer"]:
            continue
        if row["bare"]:
            yield f"{name}: share of the peak", row["share_of_peak"], ">=", 0.55
        else:
            yield f"{name}: time of its products", row["time_of_products"], "<=", 1.25


def mixtures(rates: Rates) -> Iterator[Judged]:
    for name, row in rates.items():
        if row["judged"]:
            yield f"{name}: rate of BF16's", row["times_bf16"], ">", 1.0


def memory(rates: Rates) -> Iterator[Judged]:
    for name, row in rates.items():
        nbytes = row["peak_bytes"]
        yield f"{name}: GiB at the peak", nbytes and nbytes / 2**30, "<=", 5.0


AIMS: dict[str, Callable[[Rates], Iterator[Judged]]] = {
    f.__name__: f for f in (optimizers, tables, heads, mixtures, memory)
}


def judge(section: str, rates: Rates, device: str | None) -> dict[str, list[Any]]:
    """What became of a section's aims.

    Args:
        section: Its name; one without aims has an empty result.
        rates: The numbers of each method, as gpu_rates.py prints them.
        device: The GPU's name.

    Returns:
        By name: the value, the aim as text, and whether it is met: ``None`` is not judged, because
        the device is another or there is no value.
    """
    found = {}
    for name, value, direction, aim in AIMS[section](rates) if section in AIMS else ():
        met = None
        if value is not None and DEVICE in (device or ""):
            met = COMPARE[direction](value, aim)
        found[name] = [value, f"{direction} {aim:g}", met]
    return found


def verdict(met: bool | None) -> str:
    return "not judged" if met is None else "met" if met else "missed"
