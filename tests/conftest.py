"""How Triton's kernels run in the tests, property tests, and tests under other default dtypes."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

# Before torch loads OpenMP. The tests make many short passes: threads that spin while they wait
# take the cores from other processes, and beside those the same tests take ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Workers share the cores: a thread each. Tests of threads ask for theirs.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from tests import default_dtype
from tests.ranks import Ranks

# Interpreted where no GPU runs them; this must be known before Triton loads.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Property tests import it themselves: where it is missing, as beside a GPU, all others run.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    # How long an example takes is the machine's affair: no test fails for it.
    settings.register_profile("subulp", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("subulp")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--default-dtype",
        choices=default_dtype.DTYPES,
        help=f"what the library takes for torch's default dtype, for {default_dtype.FOLDERS}",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--default-dtype") is None:
        return
    for item in items:
        # Dynamo asks for it where it goes through a mode of torch functions.
        item.add_marker(pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes that run a function as the ranks of ``torch.distributed``."""
    ranks = Ranks()
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def gpu_ranks() -> Iterator[Ranks]:
    """The same with a GPU each."""
    ranks = Ranks("cuda")
    yield ranks
    ranks.close()


@pytest.fixture(params=["ranks", pytest.param("gpu_ranks", marks=pytest.mark.gpu)])
def any_ranks(request: pytest.FixtureRequest) -> Ranks:
    """One after the other."""
    ranks: Ranks = request.getfixturevalue(request.param)
    return ranks


@pytest.fixture(autouse=True)
def library_default_dtype(request: pytest.FixtureRequest) -> Iterator[None]:
    name = request.config.getoption("--default-dtype")
    folder = request.path.relative_to(Path(__file__).parent).parts[0]
    if name is None or folder not in default_dtype.FOLDERS:
        yield
        return
    with default_dtype.library_default(name):
        yield
