"""A process that compiles kernels, for all files."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from .support import environment


@pytest.fixture(scope="session")
def compiler(tmp_path_factory) -> Iterator[ProcessPoolExecutor]:
    """Triton cannot compile where it interprets."""
    yield from _compiler(tmp_path_factory)


@pytest.fixture
def fresh_compiler(tmp_path_factory) -> Iterator[ProcessPoolExecutor]:
    """One that has compiled nothing yet."""
    yield from _compiler(tmp_path_factory)


def _compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    aot_worker = pytest.importorskip("tests.ops.aot_worker", reason="Triton is not installed")
    cache = str(tmp_path_factory.mktemp("triton"))
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        # The first job starts the process, which keeps this environment.
        with environment(TRITON_INTERPRET="0", TRITON_CACHE_DIR=cache):
            pool.submit(aot_worker.start).result()
        yield pool
