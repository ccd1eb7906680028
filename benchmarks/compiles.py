"""What the Triton kernels compile to, for GPUs that need not be there.

Every kernel at its main sizes, for four GPUs of NVIDIA and one of AMD: seconds, registers of a
thread, bytes of its stack and of shared memory, loads and stores of spilled registers, and
instructions, of the whole kernel and of each loop that has none inside. Instructions per element
are those of the whole kernel, its code for the ends of tensors with it, over the elements of a
block that a thread has.

    python benchmarks/compiles.py --out benchmarks/results/compiles-triton-3.9.json

With ``--only TEXT`` the cases whose names have it are compiled, and take their place in the record;
there may be several.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

# Known before Triton loads, here and in the workers.
os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from cyclopts import App, Parameter
from machine import describe

from subulp.ops.triton.launch import gpu_of

# The cases are the tests' own.
sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.ops import aot_worker
from tests.ops.compile_cases import CASES, TARGETS, measure

app = App(help=__doc__)

Entry = dict[str, Any]


def warm_up(target: str) -> None:
    """Load Triton and its back end, which the first case would be charged with."""
    torch.set_num_threads(1)
    aot_worker.compile_all_finite(torch.float16, TARGETS[target])


def compile_all(names: list[str], targets: list[str]) -> Iterator[tuple[str, str, Entry]]:
    """Compile cases for targets, in a process of its own with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            for target in targets:
                pool.submit(warm_up, target).result()
                for name in names:
                    yield name, target, pool.submit(measure, name, target).result()


def refusals() -> dict[str, str]:
    """Targets that the kernels refuse with this Triton, and what they say."""
    found = {}
    for name, target in TARGETS.items():
        try:
            gpu_of(target)
        except RuntimeError as error:
            found[name] = str(error)
    return found


def written(record: dict[str, Any]) -> str:
    """JSON with a line for each kernel and target."""
    lines = [f'"{key}": {json.dumps(record[key])},' for key in ("machine", "refused")]
    lines.append('"cases": {')
    for name, targets in record["cases"].items():
        lines.append(f" {json.dumps(name)}: {{")
        lines += [f"  {json.dumps(t)}: {json.dumps(entry)}," for t, entry in targets.items()]
        lines[-1] = lines[-1].removesuffix(",")
        lines.append(" },")
    lines[-1] = lines[-1].removesuffix(",")
    return "\n".join(["{", *lines, "}", "}", ""])


def show(cases: dict[str, dict[str, Entry]]) -> None:
    entries = {(name, t): entry for name, targets in cases.items() for t, entry in targets.items()}
    print(f"{len(entries)} kernels in {sum(e['seconds'] for e in entries.values()):.0f} s")
    for (name, target), entry in entries.items():
        if entry["stack"] or entry.get("local", 0):
            print(f"{name}, {target}: {entry['stack']} bytes on the stack")


@app.default
def run(
    only: Annotated[list[str] | None, Parameter(negative=())] = None,
    out: Annotated[Path | None, Parameter(negative=())] = None,
) -> None:
    """Compile, print and save.

    Args:
        only: Parts of the names of the cases to compile.
        out: JSON file for the record.
    """
    names = [name for name in CASES if only is None or any(part in name for part in only)]
    cases: dict[str, dict[str, Entry]] = {name: {} for name in CASES}
    if only is not None and out is not None and out.exists():
        before = json.loads(out.read_text())
        if before["machine"]["versions"]["triton"] != triton.__version__:
            raise SystemExit(f"{out} is the record of another Triton: leave out --only")
        cases |= {name: entry for name, entry in before["cases"].items() if name in CASES}
    machine, refused = describe(("triton",)), refusals()
    for name, target, entry in compile_all(names, [t for t in TARGETS if t not in refused]):
        cases[name][target] = entry
    cases = {name: targets for name, targets in cases.items() if targets}
    show({name: cases[name] for name in names})
    if out is not None:
        out.write_text(written({"machine": machine, "refused": refused, "cases": cases}))


if __name__ == "__main__":
    app()
