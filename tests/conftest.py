"""Triton kernels are interpreted where no GPU runs them; this must be known before Triton loads."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
