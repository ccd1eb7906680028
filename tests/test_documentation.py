"""Every Python block of the README and of docs/ runs; each page is one program."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKING = [*ROOT.glob("*.md"), *PAGES[1:], ROOT / "benchmarks" / "README.md"]
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_MAKE = re.compile(r"(?:`|\$ |run: )make ([a-z]+(?: [a-z]+)*)(?=`| {2,}|$)", re.MULTILINE)
_LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_code_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {}
    for block in _BLOCK.finditer(page.read_text()):
        line = page.read_text()[: block.start(1)].count("\n")
        # Padding makes a traceback name the page's own line.
        exec(compile("\n" * line + block[1], str(page), "exec"), names)


@pytest.mark.parametrize("page", LINKING, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_point_at_files(page: Path) -> None:
    for target in _LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_page_is_linked_to() -> None:
    found = {
        (page.parent / target).resolve()
        for page in LINKING
        for target in _LINK.findall(page.read_text())
    }
    assert {page.resolve() for page in PAGES[1:]} <= found


def test_the_readme_has_code() -> None:
    assert _BLOCK.search((ROOT / "README.md").read_text())


def test_the_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited
    assert cited[1] == project["version"]


def test_workflows_and_pages_name_targets_that_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    texts = [path.read_text() for path in (*LINKING, *(ROOT / ".github").rglob("*.yml"))]
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    named = {line.split()[1] for line in lines if line.startswith("make ")}
    for words in _MAKE.findall("\n".join(texts)):
        named |= set(words.split())
    assert named >= {"test", "docs", "wheel"}
    assert not named - targets


def test_the_makefile_names_files_that_exist() -> None:
    named = re.findall(r"(?:tests|benchmarks)/[\w/]+\.py", (ROOT / "Makefile").read_text())
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_page_has_the_versions_that_the_suite_runs_with() -> None:
    page = (ROOT / "docs" / "what-ran-where.md").read_text()
    table = page.partition("| framework |")[2].partition("\n\n")[0]
    named = dict(re.findall(r"^\| ([\w-]+) \| ([\d.]+) \|", table, re.MULTILINE))
    pinned: dict[str, str] = {}
    for path in ("constraints.txt", "tests/integrations/requirements.txt"):
        pinned |= dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / path).read_text(), re.MULTILINE))
    frameworks = {"transformers", "peft", "accelerate", "lightning", "torchtitan", "torchrec"}
    assert named.keys() >= frameworks
    assert named == {name: pinned[name] for name in named}
