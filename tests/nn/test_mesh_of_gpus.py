"""Heads and tables over a mesh of GPUs: what they train is what one GPU trains."""

from __future__ import annotations

import pytest
import torch

from .mesh import gpus

COUNTS = [1, 2, 4]


def check_head(found, expected):
    for part in found:
        assert torch.allclose(part["losses"], expected["losses"], rtol=1e-3)
        # Products over fewer labels may be summed in another order, and a code be rounded
        # otherwise: rarely, and to the next one.
        assert (part["rows"] != expected["rows"]).double().mean() < 0.01
        scale = expected["rows"].abs().max()
        assert (part["rows"] - expected["rows"]).abs().max() < 0.2 * scale
        assert torch.equal(part["rows"], found[0]["rows"])
    scores = torch.cat([part["scores"] for part in found])
    assert torch.allclose(scores, expected["scores"], rtol=1e-2, atol=1e-2)


def check_tables(found, expected):
    for name, value in expected.items():
        parts = [part[name] for part in found]
        if name.startswith("out"):
            assert torch.equal(torch.cat(parts), value), name
        else:
            assert all(torch.equal(part, value) for part in parts), name


@pytest.mark.gpu
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", gpus.HEADS)
def test_heads(gpu_ranks, count, name):
    found = gpu_ranks.run(count, gpus.head_on_mesh, name)
    check_head(found, gpus.head_of(name, "cuda", slice(0, gpus.EXAMPLES)))


@pytest.mark.gpu
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("planned", ["rows", "tables"])
def test_tables(gpu_ranks, count, planned):
    check_tables(gpu_ranks.run(count, gpus.tables_on_mesh, planned), gpus.tables_alone("cuda"))


def test_the_same_on_the_cpu(ranks):
    """Keeps the tests above whole where there are no GPUs; there, all bits are equal."""
    for name in gpus.HEADS:
        found = ranks.run(2, gpus.head_on_mesh, name)
        whole = gpus.head_of(name, "cpu", slice(0, gpus.EXAMPLES))
        check_head(found, whole)
        assert torch.equal(found[1]["rows"], whole["rows"])
    for planned in ("rows", "tables"):
        check_tables(ranks.run(2, gpus.tables_on_mesh, planned), gpus.tables_alone("cpu"))
