"""Mixtures on a CPU: for now those of the reference."""

from __future__ import annotations

from .reference import run

__all__ = ["run"]
