"""The library needs torch and numpy alone; the command line says what the lab needs."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SOURCE = Path(__file__).parent.parent / "src" / "subulp"
LIBRARY = ("numerics", "ops", "optim", "nn", "diagnostics")

BLOCKER = """
import sys

class Without:
    blocked = {blocked!r}

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name in self.blocked else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
"""


def _required_by(*names: str) -> set[str]:
    """Distributions, and everything that they require."""
    wanted, done = list(names), set()
    while wanted:
        name = canonicalize_name(wanted.pop())
        if name in done:
            continue
        done.add(name)
        for text in metadata.requires(name) or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                wanted.append(requirement.name)
    return done


@pytest.fixture(scope="module")
def blocked() -> str:
    """The beginning of a program that cannot import what neither torch nor numpy brings."""
    ours = _required_by("torch", "numpy") | {"subulp"}
    others = {
        module
        for module, owners in metadata.packages_distributions().items()
        if not set(map(canonicalize_name, owners)) & ours
    }
    assert others >= {"rich", "matplotlib", "cyclopts", "safetensors", "pyarrow", "pydantic"}
    return BLOCKER.format(blocked=others)


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "0"},
    )


def test_the_library_imports_torch_and_numpy_alone(blocked: str) -> None:
    parts = ", ".join(f"subulp.{part}" for part in LIBRARY)
    done = run(blocked + f"import subulp, {parts}")
    assert done.returncode == 0, done.stderr
    # The check can fail.
    assert run(blocked + "import rich").returncode == 1


def test_the_library_names_no_other_package() -> None:
    """Also where an import is inside a function, and where torch happens to need the package."""
    for part in LIBRARY:
        for path in sorted((SOURCE / part).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                names = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    names = [node.module or ""]
                for name in names:
                    top = name.partition(".")[0]
                    known = top in sys.stdlib_module_names or top in {"torch", "numpy", "triton"}
                    assert known, f"{path.relative_to(SOURCE)} imports {name}"


def test_an_optimizer_and_the_doctor_run_without_the_lab(blocked: str) -> None:
    program = """
import torch, subulp.optim
model = torch.nn.Linear(4, 4).bfloat16()
optimizer = subulp.optim.AdamW(model.parameters())
model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
optimizer.step()
from subulp.diagnostics import doctor
sys.exit(doctor.run())
"""
    done = run(blocked + program)
    assert done.returncode == 0, done.stderr
    assert "same bits" in done.stdout


def test_the_command_says_what_to_install(blocked: str) -> None:
    done = run(blocked + "from subulp.__main__ import main\nsys.exit(main())", "--help")
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: the subulp command needs cyclopts, which is not installed: ")
    # With its version where the installed package knows it; never as an extra of this package,
    # which pip would look for elsewhere when it came from a checkout.
    assert re.search("pip install '?cyclopts", line)
    assert "subulp[" not in line


def test_the_distribution_requires_torch_and_numpy() -> None:
    required = [Requirement(text) for text in metadata.requires("subulp") or ()]
    plain = {r.name for r in required if r.marker is None or r.marker.evaluate({"extra": ""})}
    assert plain == {"torch", "numpy"}
