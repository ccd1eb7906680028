"""The doctor finds what is wrong, and says so."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from subulp.diagnostics import doctor
from subulp.diagnostics.self_check import Check, self_check
from subulp.ops import native
from subulp.ops.backend import OPS


def test_a_healthy_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = doctor.run(), capsys.readouterr().out
    assert code == 0
    assert torch.__version__ in text
    assert text.count("ok: same bits in") == len(OPS)
    assert "FAILED" not in text


def test_unknown_words_are_refused_where_the_command_line_is_missing() -> None:
    command = [sys.executable, "-m", "subulp.diagnostics.doctor", "--jsn"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert "unrecognized arguments: --jsn" in found.stderr
    assert not found.stdout


def spoil(result: Any) -> None:
    """Change the first number of what an op wrote or returned."""
    result.view(-1).view(torch.uint8)[:1] ^= 1


WRITTEN: dict[str, Callable[[Any, Any], Tensor]] = {
    "adam": lambda job, _: job.params[0],
    "sgd": lambda job, _: job.params[0],
    "all_finite": lambda _, result: result,
    "head": lambda job, _: job.rows,
    "embedding": lambda job, result: job.tables[0].codes if result is None else result,
    "mixture": lambda _, result: result[0] if isinstance(result, tuple) else result,
}


@pytest.mark.parametrize("op", OPS)
def test_a_kernel_that_differs_is_found(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = importlib.import_module(f"subulp.ops.{op}.cpu")
    run = kernel.run

    def spoilt(job: Any) -> Any:
        result = run(job)
        spoil(WRITTEN[op](job, result))
        return result

    assert self_check(op, "cpu").error is None
    monkeypatch.setattr(kernel, "run", spoilt)
    assert "differs from its reference" in str(self_check(op, "cpu").error)


@pytest.mark.parametrize(
    ("op", "error"),
    zip(OPS, [RuntimeError, ValueError, TypeError, OSError, AssertionError, KeyError], strict=True),
)
def test_a_kernel_that_raises_is_found(
    op: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = importlib.import_module(f"subulp.ops.{op}.cpu")

    def broken(job: Any) -> Any:
        raise error("broken")

    monkeypatch.setattr(kernel, "run", broken)
    assert "broken" in str(self_check(op, "cpu").error)


def test_broken_kernels_fail_the_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(job: Any) -> Any:
        raise KeyError("broken")

    for op in ("head", "embedding"):
        monkeypatch.setattr(importlib.import_module(f"subulp.ops.{op}.cpu"), "run", broken)
    code, lines = doctor.run(), capsys.readouterr().out.splitlines()
    assert code == 1
    verdicts = {op: next(line for line in lines if line.split()[:1] == [op]) for op in OPS}
    assert {op for op, line in verdicts.items() if "FAILED: KeyError" in line} == {
        "head",
        "embedding",
    }
    assert all("ok: same bits" in verdicts[op] for op in OPS if op not in ("head", "embedding"))


@pytest.mark.parametrize("op", OPS)
def test_each_op_is_compared_with_its_own_reference(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As often by the kernel as by the reference, in every case that is counted."""
    runs = {"cpu": 0, "reference": 0}

    def counted(name: str, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(job: Any) -> Any:
            runs[name] += 1
            return run(job)

        return call

    for name in runs:
        module = importlib.import_module(f"subulp.ops.{op}.{name}")
        monkeypatch.setattr(module, "run", counted(name, module.run))
    check = self_check(op, "cpu")
    assert check.error is None
    assert runs["cpu"] == runs["reference"] >= check.cases > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_default_dtype_changes_nothing(dtype: torch.dtype) -> None:
    expected = [self_check(op, "cpu") for op in ("mixture", "all_finite", "adam", "sgd")]
    torch.set_default_dtype(dtype)
    try:
        found = [self_check(check.name, "cpu") for check in expected]
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == expected


def test_what_differs_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Check("head", 3, "fp32 differs from its reference")
    monkeypatch.setattr(doctor, "self_check", lambda op, device: found)
    assert doctor.run() == 1
    assert "FAILED: fp32 differs from its reference" in capsys.readouterr().out


def test_a_missing_library_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path
) -> None:
    native.library.cache_clear()
    monkeypatch.setattr(native, "library_path", lambda: tmp_path / "libsubulp.so")
    try:
        code, text = doctor.run(), capsys.readouterr().out
    finally:
        native.library.cache_clear()
    assert code == 1
    assert "SUBULP_BACKEND=reference" in text
