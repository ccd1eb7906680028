"""The doctor finds what is wrong, and says so."""

from __future__ import annotations

import pytest
import torch

from subulp.diagnostics import doctor
from subulp.ops import native
from subulp.ops.adam import cpu


def test_a_healthy_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = doctor.run(), capsys.readouterr().out
    assert code == 0
    assert torch.__version__ in text
    assert "ok: same bits in 23 cases" in text
    assert "FAILED" not in text


def test_a_kernel_that_differs_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu, "run", lambda job: job.params[0].zero_())
    code, text = doctor.run(), capsys.readouterr().out
    assert code == 1
    assert "FAILED: fp32 with torch.float32 differs from its reference" in text


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
