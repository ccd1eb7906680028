"""Draw the documentation's figures again from the records in benchmarks/results, without training.

    python benchmarks/draw_records.py --out docs/figures

Figures of curves over training are not among them: records hold results alone.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from cyclopts import App
from memory_figures import plot_peaks
from xmc_formats import draw_sweep
from xmc_memory import plot as plot_xmc_memory

from subulp.lab.engine.run_directory import COMPRESSION_PLOT, CONFIG, SUMMARY
from subulp.lab.report import write_run_report

RESULTS = Path(__file__).parent / "results"

app = App(help=__doc__)


@app.default
def main(*, out: Path) -> None:
    """Write xmc-memory.png, xmc-formats.png, memory-peaks.png and ctr-compression.png.

    Args:
        out: Folder of the figures.
    """
    plot_xmc_memory(_record("xmc-memory-epyc-zen4-2cores")["rows"], out / "xmc-memory.png")
    draw_sweep(_record("xmc-formats"), out / "xmc-formats.png")
    memory = _record("memory-epyc-zen4-2cores")
    measured = [row for row in memory["cases"] if "refused" not in row]
    plot_peaks(measured, memory["parameters"], out / "memory-peaks.png")
    _draw_compression(_record("ctr-seeds-0-1-2"), out / "ctr-compression.png")


def _record(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def _draw_compression(summary: dict[str, Any], path: Path) -> None:
    """The figure of a run directory that has this summary."""
    settings = ("rounding", "cache_fraction", "policy", "ways")
    for run in summary["runs"]:
        cache = [run["policy"], f"{100 * run['cache_fraction']:g}%"] if run["policy"] else []
        name = [run["precision"], *([run["rounding"]] if run["rounding"] else []), *cache]
        run["variant"] = " ".join(name)
    with tempfile.TemporaryDirectory() as folder:
        config = {"task": "ctr", **{name: [] for name in settings}}
        (Path(folder) / CONFIG).write_text(json.dumps(config))
        (Path(folder) / SUMMARY).write_text(json.dumps(summary))
        write_run_report(Path(folder))
        path.write_bytes((Path(folder) / COMPRESSION_PLOT).read_bytes())


if __name__ == "__main__":
    app()
