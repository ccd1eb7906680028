"""Dependencies run one way: numerics <- ops <- optim, nn <- diagnostics <- integrations <- lab."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import subulp
from subulp.ops.backend import OPS

SOURCE = Path(__file__).parent.parent / "src" / "subulp"

# What each part may import besides itself.
MAY_IMPORT = {
    "numerics": set(),
    "ops": {"numerics"},
    "optim": {"numerics", "ops"},
    "nn": {"numerics", "ops"},
    "diagnostics": {"numerics", "ops", "optim", "nn", "_version"},
    "integrations": {"numerics", "ops", "optim", "nn", "diagnostics", "_version"},
    "lab": {"numerics", "ops", "optim", "nn", "diagnostics", "integrations", "_version"},
}


def imports(path: Path) -> set[str]:
    """Top-level parts of subulp that a file imports, relative imports resolved."""
    package = path.relative_to(SOURCE.parent).parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("subulp.")}
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            name = [*base, *(node.module.split(".") if node.module else [])]
            if name[:1] != ["subulp"]:
                continue
            found |= {name[1]} if len(name) > 1 else {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_imports_point_one_way(part: str) -> None:
    files = sorted((SOURCE / part).rglob("*.py"))
    assert files
    for path in files:
        upward = imports(path) - MAY_IMPORT[part] - {part}
        assert not upward, f"{path.relative_to(SOURCE)} imports {upward}"


def test_every_part_has_its_rule() -> None:
    parts = {p.name for p in SOURCE.iterdir() if (p / "__init__.py").exists()}
    assert parts == set(MAY_IMPORT)


def test_an_op_has_all_its_implementations() -> None:
    folders = {p.parent.name for p in (SOURCE / "ops").glob("*/__init__.py")}
    assert folders == {*OPS, "step", "triton"}
    for op in OPS:
        for name in ("reference.py", "cpu.py", "triton.py"):
            assert (SOURCE / "ops" / op / name).exists(), f"{op} lacks {name}"


def test_the_public_face_holds_what_it_names() -> None:
    for name in subulp.__all__:
        assert getattr(subulp, name).__name__ == f"subulp.{name}"
    assert subulp.__version__ == "0.1.0"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        subulp.nothing  # noqa: B018
