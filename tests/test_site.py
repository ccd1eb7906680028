"""The site that ``make docs`` builds: without a warning, an entry for every public name."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("furo")
pytest.importorskip("myst_parser")
inventory = pytest.importorskip("sphinx.util.inventory")

ROOT = Path(__file__).parent.parent
MODULES = ("numerics", "ops", "optim", "nn", "diagnostics", "lab")


class Page(HTMLParser):
    """What a page links to, and what can be linked to in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name == "id":
                self.ids.add(value)
            elif value and name in ("href", "src"):
                self.links.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; one process builds it for all tests of this file."""
    built = tmp_path_factory.mktemp("site")
    arguments = ["--fail-on-warning", "--keep-going", "--quiet", "-c", "docs/site"]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *arguments, "-d", f"{built}-trees", ".", str(built)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return built


@pytest.fixture(scope="module")
def entries(site: Path) -> set[str]:
    """All names that the reference has."""
    with (site / "objects.inv").open("rb") as file:
        found = inventory.InventoryFile.load(file, "", os.path.join)
    return {name for kind in ("module", "class", "function", "data") for name in _of(found, kind)}


def _of(found: inventory.Inventory, kind: str) -> set[str]:
    return set(found.get(f"py:{kind}", {}))


def public(module: str) -> dict[str, object]:
    found = importlib.import_module(f"subulp.{module}")
    names = getattr(found, "__all__", ["load"])
    return {name: getattr(found, name) for name in names}


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_an_entry(entries: set[str], module: str) -> None:
    assert f"subulp.{module}" in entries
    for name, member in public(module).items():
        assert f"subulp.{module}.{name}" in entries
        if isinstance(member, ModuleType):
            functions = inspect.getmembers(member, inspect.isfunction)
            own = {n for n, f in functions if f.__module__ == member.__name__ and n[0] != "_"}
            missing = {n for n in own if f"{member.__name__}.{n}" not in entries}
            assert not missing


def test_every_integration_has_an_entry(entries: set[str]) -> None:
    found = pkgutil.iter_modules([str(ROOT / "src" / "subulp" / "integrations")])
    names = [module.name for module in found if module.name[0] != "_"]
    assert "torchrec" in names
    assert not [name for name in names if f"subulp.integrations.{name}" not in entries]


@pytest.mark.parametrize("module", MODULES)
def test_every_public_function_and_class_has_a_text(module: str) -> None:
    assert importlib.import_module(f"subulp.{module}").__doc__
    for name, member in public(module).items():
        if isinstance(member, ModuleType) or inspect.isroutine(member) or inspect.isclass(member):
            assert member.__doc__, f"subulp.{module}.{name} has no docstring"
        if inspect.isclass(member):
            for method, value in vars(member).items():
                if inspect.isfunction(value) and not method.startswith("_"):
                    assert inspect.getdoc(getattr(member, method)), f"{name}.{method}"


def test_the_names_of_the_readme_are_in_the_reference(entries: set[str]) -> None:
    names = re.findall(rf"`({'|'.join(MODULES)})\.(\w+)", (ROOT / "README.md").read_text())
    assert len(names) > 15
    assert not [f"{m}.{n}" for m, n in names if f"subulp.{m}.{n}" not in entries]


def test_every_page_is_on_the_site(site: Path) -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        assert (site / page.relative_to(ROOT).with_suffix(".html")).exists()


def test_links_between_pages_arrive(site: Path) -> None:
    pages = {path: Page(path) for path in site.rglob("*.html")}
    assert len(pages) > 30
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.exists(), f"{path.relative_to(site)} links to {link}"
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].ids, f"{path.name}: {link}"


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    """The site is read offline as it is online."""
    for path in site.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|img|link)[^>]+(?:src|href)="(https?:[^"]+)"', path.read_text()
        )
        assert not loaded, path


def test_the_search_finds_words_of_pages_and_docstrings(site: Path) -> None:
    index = (site / "searchindex.js").read_text()
    assert '"docs/expansions"' in index
    assert '"docs/reference/optim"' in index
