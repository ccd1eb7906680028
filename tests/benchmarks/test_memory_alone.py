"""The bound by memory alone: different rows of a batch are touched, each where it lies."""

from __future__ import annotations

import os

import pytest
import torch

from subulp import nn, optim

from .scripts import script

ROWS, DIM = 500, 24
BATCH = torch.tensor([3, 3, 7, 499, 0, 7, 120])


def bag(storage: str, fraction: float) -> nn.CachedEmbeddingBag:
    made = nn.CachedEmbeddingBag(ROWS, DIM, storage, cache_fraction=fraction, ways=4, seed=0)
    optim.RowAdagrad(made)
    generator = torch.Generator().manual_seed(0)
    for _ in range(9):
        # Some of the batch are looked up most often.
        rows = torch.cat((BATCH[:3], torch.randint(ROWS, (57,), generator=generator)))
        made(rows, torch.arange(0, 60, 3)).sum().backward()
    return made


@pytest.mark.parametrize(("storage", "fraction"), [("fp32", 0.0), ("int8", 0.0), ("int4", 0.05)])
def test_rows_are_touched_where_they_lie(storage, fraction):
    made = bag(storage, fraction)
    memory = script("memory_alone").MemoryAlone(made, BATCH)
    (table,) = made.tables
    codes, cache, tags = table.stored()
    different = set(BATCH.tolist())
    cached = different & set(tags.tolist())
    assert bool(cached) == (fraction > 0)
    assert len(cached) < len(different)
    kinds = {"rows": codes, "cached": cache, "sums": made.row_optimizer.accumulator(table.codes)}
    if fraction:
        kinds |= {"tags": tags, "counts": table.policy_state()[0]}
    found: dict[str, list[tuple[int, int]]] = {}
    for runs in memory._passes:
        for at, nbytes, written in runs.tolist():
            (name,) = (
                n
                for n, t in kinds.items()
                if t.data_ptr() <= at and at + nbytes <= t.data_ptr() + t.nbytes
            )
            found.setdefault(name, []).append((written, at))
    stored = len(different) - len(cached)
    assert sorted(w for w, _ in found["rows"]) == [0] * stored + [1] * stored
    assert sorted(w for w, _ in found.get("cached", [])) == [0] * len(cached) + [1] * len(cached)
    assert [w for w, _ in found["sums"]] == [1] * len(different)
    if fraction:
        assert [w for w, _ in found["tags"]] == [0] * 2 * len(different)
        assert [w for w, _ in found["counts"]] == [1] * len(different)


@pytest.mark.parametrize("threads", [1, 3])
def test_touching_changes_nothing(threads):
    benchmark, made = script("memory_alone"), bag("int8", 0.05)
    if benchmark.loop() is None:
        pytest.skip("needs a C compiler")
    before = {n: t.clone() for n, t in made.state_dict().items() if isinstance(t, torch.Tensor)}
    count = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        benchmark.MemoryAlone(made, BATCH).touch()
    finally:
        torch.set_num_threads(count)
    after = made.state_dict()
    assert all(
        torch.equal(after[n].view(torch.uint8), t.view(torch.uint8))
        for n, t in before.items()
        if t.dim()
    )


def test_sums_beside_touching_change_nothing():
    benchmark = script("memory_alone")
    library = benchmark.loop()
    if library is None:
        pytest.skip("needs a C compiler")
    made = bag("int8", 0.05)
    before = {n: t.clone() for n, t in made.state_dict().items() if isinstance(t, torch.Tensor)}
    runs = benchmark.MemoryAlone(made, BATCH).reads
    near, to = torch.arange(64 * 16, dtype=torch.float32), torch.zeros(4)
    for chunk in (1, 3, 100):
        library.touch_beside_sums(
            runs.ctypes.data, len(runs), chunk, 2, near.data_ptr(), to.data_ptr()
        )
        assert torch.equal(to, len(runs) * near[:32].view(8, 4).sum(0))
    after = made.state_dict()
    assert all(
        torch.equal(after[n].view(torch.uint8), t.view(torch.uint8))
        for n, t in before.items()
        if t.dim()
    )


def test_a_number_goes_from_core_to_core():
    benchmark = script("memory_alone")
    if benchmark.loop() is None:
        pytest.skip("needs a C compiler")
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    # Nanoseconds; a busy machine has a thread wait for its turn.
    assert 1e-9 < min(benchmark.between_cores(200) for _ in range(5)) < 1e-3


def test_rounds_are_told_apart_by_the_caches_of_the_cores():
    waits = [[3e-8, 5e-8], [2e-7, 1.7e-7], [3e-8, 2e-7], [None, None], [4e-8, None], [4e-8, 4e-8]]
    found = script("embeddings").rounds_by_cache(waits)
    assert found == {"one cache": [0, 5], "a cache each": [1]}
    assert script("embeddings").rounds_by_cache([[None, None]]) == {}
