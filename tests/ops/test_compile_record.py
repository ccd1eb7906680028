"""The records of what kernels compile to are those of these kernels, and no kernel has a stack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import triton

from . import compile_cases

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
VERSIONS = ("3.6", "3.7", "3.8", "3.9")
INSTALLED = triton.__version__.rpartition(".")[0]

MOST_SECONDS = 15.0
"""That a kernel may take to compile: ten times what most take, on two cores that are shared."""

COMPARED = (
    "Adam, stochastic, bf16",
    "Adam, stochastic, e4m3",
    "SGD, extra-bits-8, bf16, Nesterov",
    "head, e4m3, products in bf16",
    "logits, bf16",
    "tables, order",
    "tables, lookup, int4, row-wise, LFU",
    "tables, update, e4m3, row-wise, LRU",
    "mixture, measure",
    "mixture, candidates",
    "mixture, write",
    "mixture, product",
)
"""Cases that are compiled again for sm_90."""

ELSEWHERE = ("Adam, stochastic, bf16", "mixture, product")
"""Those that are for others too."""

WITHOUT_ELEMENTS = {
    *("scales, given", "counts, Adam", "counts, SGD"),
    *("mixture, blocks", "mixture, chunks", "loss"),
}
"""Cases that take a few numbers of each tensor or tile, and no blocks of elements."""


def name_of(version: str) -> str:
    return f"compiles-triton-{version}.json"


@pytest.fixture(params=VERSIONS)
def record(request) -> dict[str, Any]:
    found = json.loads((RESULTS / name_of(request.param)).read_text())
    assert found["machine"]["versions"]["triton"].startswith(f"{request.param}.")
    return found


def test_records_are_whole(record):
    expected = compile_cases.TARGETS.keys() - record["refused"].keys()
    assert record["cases"].keys() == compile_cases.CASES.keys()
    for targets in record["cases"].values():
        assert targets.keys() == expected


def test_what_is_refused(record):
    is_first = record["machine"]["versions"]["triton"].startswith("3.6.")
    assert list(record["refused"]) == (["gfx942"] if is_first else [])


def has_stack(entry: dict[str, float]) -> bool:
    names = "stack", "local", "local_loads", "local_stores", "spilled_registers"
    return any(entry.get(name, 0) for name in names)


def test_no_kernel_has_a_stack():
    found = set()
    for version in VERSIONS:
        cases = json.loads((RESULTS / name_of(version)).read_text())["cases"]
        found |= {name for name, targets in cases.items() if any(map(has_stack, targets.values()))}
    assert found == set()


def test_kernels_compile_in_seconds(record):
    slow = {
        f"{name}, {target}": entry["seconds"]
        for name, targets in record["cases"].items()
        for target, entry in targets.items()
        if entry["seconds"] > MOST_SECONDS
    }
    assert slow == {}


def test_instructions_per_element_are_there(record):
    for name, targets in record["cases"].items():
        for entry in targets.values():
            assert ("instructions_per_element" in entry) == (name not in WITHOUT_ELEMENTS), name


@pytest.mark.parametrize("target", ["sm_89", "sm_90", "sm_100"])
def test_encoding_takes_few_instructions(record, target):
    """Of a thread, for an element: in the loop over it, where GPUs convert to FP8."""
    for name, candidates in {"mixture, candidates": 2, "mixture, write": 1}.items():
        entry = record["cases"][name][target]
        of_thread = entry["instructions"] / entry["instructions_per_element"]
        assert max(entry["loops"]) / of_thread / candidates <= 30


_HERE = [(name, "sm_90") for name in COMPARED]
_HERE += [(name, target) for name in ELSEWHERE for target in ("sm_80", "sm_100")]
_NIGHTLY = [
    pytest.param(name, target, marks=pytest.mark.nightly)
    for name in compile_cases.CASES
    for target in compile_cases.TARGETS
    if (name, target) not in _HERE
]


@pytest.mark.skipif(INSTALLED not in VERSIONS, reason="this Triton has no record")
@pytest.mark.parametrize(("name", "target"), [*_HERE, *_NIGHTLY])
def test_record_is_of_these_kernels(compiler, name, target):
    record = json.loads((RESULTS / name_of(INSTALLED)).read_text())
    if record["machine"]["versions"]["triton"] != triton.__version__:
        pytest.skip("the record is of another release of this Triton")
    if target in record["refused"]:
        pytest.skip("this Triton refuses the target")
    now = compiler.submit(compile_cases.measure, name, target).result()
    before = record["cases"][name][target]
    names = {n for n in before if n not in ("seconds", "instructions_per_element")}
    assert {n: now[n] for n in names} == {n: before[n] for n in names}, (
        f"{name} compiles to other code: python benchmarks/compiles.py --out "
        f"benchmarks/results/{name_of(INSTALLED)} --only '{name}', with each Triton that has one"
    )
