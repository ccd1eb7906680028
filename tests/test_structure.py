"""No file of the package imports itself through others, and none reaches into another's classes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "subulp"

# Private members of other packages, which have no public name for what is needed.
THIRD_PARTY = {
    "_C": "torch: what it tells of itself in C++ alone",
    "_asdict": "public in spite of its name: namedtuple's fields are the user's",
    "_current_graph_task_id": "torch: whether a backward pass is running",
    "_disable_current_modes": "torch: leaving dispatch modes has no public name",
    "_engine_run_backward": "torch: whether a backward pass runs inside another one",
    "_execution_engine": "torch: the only way to be called at the end of a backward pass",
    "_exit": "os: ends a forked process without its parent's handlers",
    "_foreach_add": "torch: one call for many tensors, which its own optimizers use",
    "_foreach_add_": "the same, in place",
    "_foreach_clamp_max": "the same, of clamp(max=)",
    "_foreach_clamp_min": "the same, of clamp(min=)",
    "_foreach_copy_": "the same, of copies",
    "_foreach_mul": "the same, of products",
    "_foreach_norm": "the same, of norms",
    "_fsdp_param_group": "torch: which gradients FSDP2 has not reduced has no public name",
    "_get_fsdp_state": "the same",
    "_global_optimizer_pre_hooks": "torch: which hooks all optimizers have has no public name",
    "_get_tracing_state": "torch: whether torch.jit.trace records, which has no typed name",
    "_getframe": "sys: the caller's frames, without inspect's reading of source files",
    "_get_root_mesh": "torch: what a slice of a mesh was cut from has no public name",
    "_in_backward_optimizers": "torch, TorchRec: marks parameters that step in backward passes",
    "_indices": "torch: indices() refuses a sparse tensor that is not coalesced",
    "_last_lr": "torch: schedulers have no other way to change the rate that they print",
    "_modules": "torch: what a module has now, without a walk through all that it contains",
    "_parameters": "the same",
    "_partial_reduce_output": "torch: what FSDP2 has reduced over some ranks has no public name",
    "_replace": "public in spite of its name: namedtuple's fields are the user's",
    "_scaled_mm": "torch: the product of FP8 units",
    "_should_accumulate": "Lightning: whether a batch completes a step has no public name",
    "_values": "torch: values() refuses a sparse tensor that is not coalesced",
}


def modules(root: Path) -> dict[str, Path]:
    """The files of a package by dotted name."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def bound_names(path: Path) -> set[str]:
    """Names that the statements of a file bind, functions and classes left unread."""
    found: set[str] = set()
    pending = list(parsed(path).body)
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {a.asname or a.name.partition(".")[0] for a in node.names}
        else:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            pending += ast.iter_child_nodes(node)
    return found


def imports(name: str, files: dict[str, Path]) -> set[str]:
    """The files that a file imports anywhere in it: for type checking and in functions, too.

    ``from .package import x`` imports the file ``x`` of the package; or its ``__init__``, and with
    it all that it imports, where that binds ``x``. That importing a file also runs the ``__init__``
    of its own packages does not count: they could not re-export anything.
    """
    path = files[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                submodule = f"{source}.{alias.name}"
                if submodule in files:
                    found.add(submodule)
                if submodule not in files or alias.name in bound_names(files[source]):
                    found.add(source)
    return found & (files.keys() - {name})


def circles(root: Path) -> list[str]:
    """Every set of files that import each other, as one circle through it."""
    files = modules(root)
    graph = {name: imports(name, files) for name in files}
    found, seen = [], set()
    for start in graph:
        circle = _way_back(start, graph)
        if circle and not seen & set(circle):
            seen |= set(circle)
            found.append(" -> ".join([*circle, start]))
    return found


def _way_back(start: str, graph: dict[str, set[str]]) -> list[str]:
    """A shortest circle from a file to itself, or nothing."""
    before: dict[str, str] = {}
    queue = [start]
    for name in queue:
        for target in sorted(graph[name]):
            if target == start:
                way = [name]
                while way[-1] != start:
                    way.append(before[way[-1]])
                return way[::-1]
            if target not in before:
                before[target] = name
                queue.append(target)
    return []


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_members(tree: ast.Module) -> set[str]:
    """Names that the functions and classes of a file define for themselves or their instances."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        # Only what a class stores in itself: other.x = 1 defines nothing of this file.
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return found


def private_uses(path: Path) -> Iterator[str]:
    """Uses of private names that the file does not define.

    What a class inherits is its own: ``self._x``, ``cls._x`` and ``super()._x`` are left out.
    """
    tree = parsed(path)
    own = own_members(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if ast.unparse(node.value) in ("self", "cls", "super()"):
                continue
            if node.attr not in own | THIRD_PARTY.keys():
                yield f"{path.name}:{node.lineno} {ast.unparse(node)}"
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if is_private(alias.name):
                    yield f"{path.name}:{node.lineno} import {alias.name}"


def test_no_file_imports_itself_through_others() -> None:
    assert circles(SOURCE) == []


def test_no_file_uses_private_members_of_another() -> None:
    found = [use for path in sorted(SOURCE.rglob("*.py")) for use in private_uses(path)]
    assert found == []


def test_every_exception_is_used() -> None:
    text = "".join(path.read_text() for path in SOURCE.rglob("*.py"))
    assert not [name for name in THIRD_PARTY if f".{name}" not in text]


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"__init__.py": "", **files}.items():
        path = root / "package" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "package"


@pytest.mark.parametrize(
    "files",
    [
        {"a.py": "from . import b", "b.py": "from .a import x"},
        {"a.py": "from .b import x", "b.py": "from .c import x", "c.py": "import package.a"},
        {
            "a.py": "from .b import x",
            "b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import Y",
        },
        {"a.py": "from .b import x", "b.py": "def f():\n    from .a import y"},
        {
            "a.py": "from .p import b",
            "p/__init__.py": "from .b import b",
            "p/b.py": "import package.a",
        },
        {"p/__init__.py": "from .a import x", "p/a.py": "from . import x"},
        {"__init__.py": "from .a import x", "a.py": "from package import x"},
        {"p/__init__.py": "x = 1", "p/a.py": "from ..q import y", "q.py": "from .p.a import x"},
    ],
    ids=[
        "two",
        "three",
        "type checking",
        "function",
        "through init",
        "own init",
        "root",
        "folders",
    ],
)
def test_a_planted_circle_is_found(tmp_path: Path, files: dict[str, str]) -> None:
    assert len(circles(write(tmp_path, files))) == 1


def test_what_is_no_circle_is_none(tmp_path: Path) -> None:
    files = {
        "p/__init__.py": "from .a import x\nfrom .b import y",
        "p/a.py": "from . import b",
        "p/b.py": "import os\nfrom ..q import z",
        "q.py": "z = 1",
        "r.py": "from .p import x, y\nfrom .p import a",
    }
    assert circles(write(tmp_path, files)) == []


@pytest.mark.parametrize(
    "text",
    [
        "def f(other):\n    other._x()",
        "def f(other):\n    other._x = 1",
        "def f(other):\n    return other.part._x.y",
        "class A:\n    def f(self, other):\n        self.other._x = other",
        "from .a import _x",
        "def f():\n    from package.a import _x",
        "from . import a\na._x()",
        "from .a import A\nclass B(A):\n    def f(self, other):\n        return other._x",
    ],
)
def test_a_planted_use_is_found(tmp_path: Path, text: str) -> None:
    package = write(tmp_path, {"a.py": "class A:\n    _x = 1\n\n\n_x = 1", "b.py": text})
    assert list(private_uses(package / "a.py")) == []
    assert len(list(private_uses(package / "b.py"))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "class A:\n    def __init__(self):\n        self._x = 1\n    def f(self, other):\n"
        "        return other._x",
        "class B(A):\n    def f(self):\n        return self._x + super()._y()",
        "import sys\nsys._getframe()",
        "from ._version import version",
    ],
)
def test_what_is_its_own_is_no_use(tmp_path: Path, text: str) -> None:
    package = write(tmp_path, {"b.py": text, "_version.py": ""})
    assert list(private_uses(package / "b.py")) == []
