"""What ``make bare`` runs: the wheel is installed beside PyTorch and NumPy; no compiler is there.

Not a test of pytest, which is not there either.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import torch

import subulp
from subulp import nn, optim
from subulp.diagnostics import doctor


def loaded(name: str) -> set[str]:
    """The files of this name that the process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {path for line in lines if name in Path(path := line.partition("/")[2]).name}


def main() -> int:
    """Train a few steps and run the doctor.

    Returns:
        Its exit code: 0 if every operation agrees with its reference.
    """
    assert not [
        name for name in ("cc", "c++", "gcc", "g++", "clang", "cmake") if shutil.which(name)
    ]
    assert not [name for name in ("pytest", "rich", "pydantic") if importlib.util.find_spec(name)]
    assert Path(subulp.__file__).is_relative_to(sys.prefix)

    torch.manual_seed(0)
    layers = nn.Linear(64, 128), torch.nn.GELU(), nn.Linear(128, 1)
    model = torch.nn.Sequential(*layers).to(torch.bfloat16)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(256, 64)
    losses = []
    for _ in range(20):
        loss = (model(x).squeeze(1) - x.mean(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2, losses

    # Threads of two runtimes would compete for the cores.
    runtimes = loaded("gomp") | loaded("omp5")
    assert len(runtimes) == 1, runtimes
    assert "torch/lib" in runtimes.pop()
    return doctor.run()


if __name__ == "__main__":
    sys.exit(main())
