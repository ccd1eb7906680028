"""The reference that `make docs` builds has an entry with a text for every public name."""

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

pdoc = pytest.importorskip("pdoc")
render = pytest.importorskip("pdoc.render")

ROOT = Path(__file__).parent.parent
MODULES = ("numerics", "ops", "optim", "nn", "diagnostics")


@pytest.fixture(scope="module")
def pages():
    modules = {}
    render.configure(docformat="google")
    for name in MODULES:
        found = importlib.import_module(f"subulp.{name}")
        modules[name] = pdoc.doc.Module(found)
    return {
        name: (module, render.html_module(module, all_modules={}))
        for name, module in modules.items()
    }


def public_names(name):
    """What a module offers, without modules in it, which have pages of their own."""
    module = importlib.import_module(f"subulp.{name}")
    return [n for n in module.__all__ if not isinstance(getattr(module, n), ModuleType)]


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_has_an_entry(pages, name):
    module, page = pages[name]
    for public in public_names(name):
        assert f'id="{public}"' in page, f"subulp.{name}.{public} is not in the reference"
    assert module.docstring
    whole = importlib.import_module(f"subulp.{name}")
    parts = [n for n in whole.__all__ if isinstance(getattr(whole, n), ModuleType)]
    assert all(getattr(whole, part).__doc__ for part in parts)


@pytest.mark.parametrize("name", MODULES)
def test_every_public_function_and_class_has_a_text(pages, name):
    module, _ = pages[name]
    for public in public_names(name):
        member = module.members[public]
        if isinstance(member, pdoc.doc.Function | pdoc.doc.Class):
            assert member.docstring, f"subulp.{name}.{public} has no docstring"
        if isinstance(member, pdoc.doc.Class):
            for method in member.own_members:
                if isinstance(method, pdoc.doc.Function) and not method.name.startswith("_"):
                    assert method.docstring, f"{public}.{method.name} has no docstring"


def test_the_names_of_the_readme_are_in_the_reference(pages):
    names = re.findall(rf"`({'|'.join(MODULES)})\.(\w+)", (ROOT / "README.md").read_text())
    assert len(names) > 15
    for module, name in names:
        found = getattr(importlib.import_module(f"subulp.{module}"), name)
        # A module in it has a page of its own.
        assert isinstance(found, ModuleType) or f'id="{name}"' in pages[module][1], name


def test_make_docs_covers_the_same_modules():
    makefile = (ROOT / "Makefile").read_text()
    target = makefile.split("pdoc --docformat", 1)[1].split("\n\n", 1)[0]
    assert re.findall(r"subulp\.(\w+)", target) == list(MODULES)
