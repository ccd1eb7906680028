"""The pages about Transformers, PEFT and Lightning: their code runs."""

from __future__ import annotations

import pytest

from . import pages


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("page", ["transformers.md", "peft.md", "lightning.md"])
def test_code_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pages.run(page)
