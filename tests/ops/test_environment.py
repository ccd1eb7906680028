"""Environment variables as a step reads them, against ``os.environ``."""

from __future__ import annotations

import os

import pytest

from subulp.ops import backend, native
from subulp.ops.environment import variable

NAME = "SUBULP_TEST_VARIABLE"


def test_what_is_set_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)
    assert variable(NAME) == ""
    for value in ("cpu", "", "ä=\udcff"):
        monkeypatch.setenv(NAME, value)
        assert variable(NAME) == value
    monkeypatch.delenv(NAME)
    assert variable(NAME) == ""


@pytest.mark.parametrize("values", [{}, {NAME: "cpu"}])
def test_an_environment_that_is_a_plain_dict_is_read(
    values: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", values)
    assert variable(NAME) == values.get(NAME, "")


def test_every_step_reads_it_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUBULP_BACKEND", raising=False)
    monkeypatch.delenv("SUBULP_ISA", raising=False)
    widest = native.isa()
    assert not backend.is_forced()
    monkeypatch.setenv("SUBULP_BACKEND", "reference")
    monkeypatch.setenv("SUBULP_ISA", "plain")
    assert backend.is_forced()
    assert native.isa_name() == "plain"
    monkeypatch.delenv("SUBULP_BACKEND")
    monkeypatch.delenv("SUBULP_ISA")
    assert not backend.is_forced()
    assert native.isa() == widest
