"""The site: README, pages and the reference of the docstrings, built by ``make docs``.

The source folder is the root of the repository, so that a link between files means the same on the
site and in a checkout. The lists of pages and of modules are read where they stand already: in
docs/index.md, and in the packages' ``__all__``.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType

from sphinx.application import Sphinx
from sphinx.domains.python import PyObject
from torch.library import CustomOpDef

from subulp import __version__

ROOT = Path(__file__).parents[2]

project = "subulp"
author = "the subulp authors"
copyright = author
release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = [
    *("*.md", "docs/*.md", "docs/figures/README.md", "docs/reference/*.md"),
    "benchmarks/README.md",
]
exclude_patterns = [".venv", "build", "csrc", "dist", "runs", "src", "tests"]

html_theme = "furo"
html_title = "subulp"
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False
html_static_path = ["static"]
html_css_files = ["site.css"]
templates_path = ["templates"]
# Whoever opens the folder arrives at docs/index.
html_additional_pages = {"index": "first.html"}

# Headings have the anchors that code hosts give them.
myst_heading_anchors = 4

autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
# None of them is needed to read the docstrings of what is for them.
autodoc_mock_imports = ["accelerate", "lightning", "peft", "torchrec", "torchtitan", "transformers"]
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

_SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
_PAGE = re.compile(r"^- \[([^\]]+)\]\(([^)#]+)\.md\)", re.MULTILINE)


def _contents(text: str) -> str:
    """The links of docs/index.md, section by section, as the tables of contents of the sidebar."""
    found = ""
    heads = [*_SECTION.finditer(text)]
    for head, end in zip(heads, [*(h.start() for h in heads[1:]), len(text)], strict=True):
        pages = "\n".join(
            f"{title.replace('`', '')} <{page}>"
            for title, page in _PAGE.findall(text, head.end(), end)
        )
        found += f"\n\n```{{toctree}}\n:hidden:\n:caption: {head[1]}\n\n{pages}\n```\n"
    return found


def _modules(package: str) -> list[str]:
    """A package, the modules that it offers, and those for frameworks, which it never imports."""
    found = importlib.import_module(package)
    offered = getattr(found, "__all__", [])
    parts = [name for name in offered if isinstance(getattr(found, name), ModuleType)]
    if package == "subulp.integrations":
        parts = [m.name for m in pkgutil.iter_modules(found.__path__) if m.name[0] != "_"]
    return [package, *(f"{package}.{part}" for part in parts)]


def _entries(package: str) -> str:
    first, *parts = _modules(package)
    text = f"\n\n```{{eval-rst}}\n.. automodule:: {first}\n```\n"
    # Formats and types have no docstring of their own.
    found = importlib.import_module(package)
    for name in getattr(found, "__all__", []):
        member = getattr(found, name)
        if not (inspect.isroutine(member) or isinstance(member, type | ModuleType)):
            entry = f".. py:data:: {name}\n   :module: {package}\n   :value: {member!r}"
            text += f"\n```{{eval-rst}}\n{entry}\n```\n"
    for part in parts:
        text += f"\n\n## {part}\n\n```{{eval-rst}}\n.. automodule:: {part}\n```\n"
    return text


def _show_functions_of_operators() -> None:
    """Put the functions in the place of the operators, which have neither signature nor text."""
    for package in ("subulp.ops", "subulp.nn"):
        found = importlib.import_module(package)
        for name, member in vars(found).copy().items():
            if isinstance(member, CustomOpDef):
                setattr(found, name, member._init_fn)


def _complete(app: Sphinx, name: str, source: list[str]) -> None:
    if name == root_doc:
        source[0] += _contents(source[0])
    elif name.startswith("docs/reference/"):
        source[0] += _entries(f"subulp.{Path(name).name}")


def setup(app: Sphinx) -> None:
    """Register what Sphinx has no setting for.

    Args:
        app: The program that builds the site.
    """
    _show_functions_of_operators()
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"
    app.connect("source-read", _complete)
