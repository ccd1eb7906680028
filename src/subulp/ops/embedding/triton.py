"""Embedding ops on a CPU."""

from __future__ import annotations

from .reference import run

__all__ = ["run"]
