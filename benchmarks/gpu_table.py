"""The tables of a GPU's record, in Markdown, as README.md has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from gpu_aims import verdict

Cell = Callable[[dict[str, Any]], str]


def number(key: str, scale: float = 1.0, digits: int = 2) -> Cell:
    """How a cell shows one of a row's numbers, in units of ``scale``; empty where it has none."""

    def cell(row: dict[str, Any]) -> str:
        value = row.get(key)
        return "" if value is None else f"{value / scale:,.{digits}f}"

    return cell


def best(*prefixes: str) -> Cell:
    """The smallest ratio to the peers whose keys begin with one of some words."""

    def cell(row: dict[str, Any]) -> str:
        found = [v for key, v in row.items() if key.startswith(prefixes) and v is not None]
        return f"{min(found):.2f}" if found else ""

    return cell


COLUMNS: dict[str, dict[str, Cell]] = {
    "optimizers": {
        "ms": number("seconds", 1e-3),
        "of a copy's bandwidth": number("share_of_copy_bandwidth"),
        "times torch, fused FP32": number("times_torch fused FP32"),
        "times torch-optimi": best("times_torch-optimi"),
        "times FlashOptim": number("times_FlashOptim"),
    },
    "tables": {
        "M lookups/s": number("lookups_per_second", 1e6, 1),
        "times torch": best("times_torch"),
        "times FBGEMM, FP32": number("times_fbgemm fp32"),
        "FP16": number("times_fbgemm fp16"),
        "INT8": number("times_fbgemm int8"),
    },
    "heads": {
        "ms": number("seconds", 1e-3),
        "TFLOP/s": number("flops_per_second", 1e12, 1),
        "of the peak": number("share_of_peak"),
        "times its products": number("time_of_products"),
        "times torch": number("times_torch"),
    },
    "mixtures": {
        "ms": number("seconds", 1e-3),
        "TFLOP/s": number("flops_per_second", 1e12, 1),
        "times BF16": number("times_bf16"),
    },
    "memory": {
        "peak, GiB": number("peak_bytes", 2**30),
        "encoder, million parameters": number("parameters", 1e6, 1),
        "step, s": number("seconds"),
    },
}

TITLES = {
    "optimizers": "Steps of optimizers",
    "tables": "Embedding tables",
    "heads": "A classifier over 131,072 labels",
    "mixtures": "Linear layers, forward and backward",
    "memory": "Three million labels behind an encoder",
}


def tables_of(record: dict[str, Any]) -> str:
    """All tables of a record, and its aims; a section without a result says why it has none."""
    machine, sections = record["machine"], record["sections"]
    versions = ", ".join(
        f"{name} {version}" for name, version in machine["versions"].items() if version
    )
    lines = [f"{machine['gpu'] or 'No GPU'}, {machine['date']}; {versions}."]
    for name, title in TITLES.items():
        lines += ["", f"### {title}", "", *of_section(name, sections.get(name))]
    lines += ["", "### Aims", "", *aims(sections)]
    return "\n".join(lines)


def of_section(name: str, found: dict[str, Any] | None) -> Iterator[str]:
    result = found and found.get("result")
    if result is None:
        yield "Not yet run." if found is None else f"No figures: {found['status']}."
        return
    columns = COLUMNS[name]
    yield from header("", *columns)
    for method, row in result["rates"].items():
        yield line(method, *(cell(row) for cell in columns.values()))
    peers = result["peers"]
    if peers["absent"]:
        yield from ("", f"Not installed: {', '.join(peers['absent'])}.")
    if peers["failed"]:
        yield from ("", f"Failed: {', '.join(peers['failed'])}.")


def aims(sections: dict[str, Any]) -> Iterator[str]:
    yield from header("", "value", "aim", "")
    for found in sections.values():
        for name, (value, aim, met) in found.get("aims", {}).items():
            yield line(name, "" if value is None else f"{value:.2f}", aim, verdict(met))


def header(*cells: str) -> tuple[str, str]:
    return line(*cells), "|" + "---|" * len(cells)


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")
