"""How Triton's kernels run in the tests, and property tests."""

from __future__ import annotations

import os

# Before torch loads OpenMP. The tests make many short passes: threads that spin while they wait
# take the cores from other processes, and beside those the same tests take ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from hypothesis import HealthCheck, settings

# Interpreted where no GPU runs them; this must be known before Triton loads.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# How long an example takes is the machine's affair: no test fails for it.
settings.register_profile("subulp", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("subulp")
