"""track_memory counts what can be counted by hand."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from subulp.diagnostics.memory import CATEGORIES, track_memory
from tests.ranks import mesh_of

PARAMETERS = 100 * 200 + 200 * 10


def model_and_optimizer(**options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(100, 200, bias=False), torch.nn.ReLU(), torch.nn.Linear(200, 10, bias=False)
    )
    return model, torch.optim.AdamW(model.parameters(), foreach=False, **options)


def step(model, optimizer, x):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_weights_gradients_and_states_are_exact():
    model, optimizer = model_and_optimizer()
    x = torch.randn(50, 100)
    step(model, optimizer, x)
    with track_memory(model, optimizer) as memory:
        step(model, optimizer, x)
    steps = 2 * 4  # AdamW keeps an FP32 step count for each of the two weights
    assert memory.peak_bytes["weights"] == 4 * PARAMETERS
    assert memory.peak_bytes["states"] == 8 * PARAMETERS + steps
    assert memory.category_peak_bytes["gradients"] == 4 * PARAMETERS
    assert memory.peak_bytes["total"] == sum(memory.peak_bytes[c] for c in CATEGORIES)


def test_states_made_inside_the_block_are_states():
    model, optimizer = model_and_optimizer()
    with track_memory(model, optimizer) as memory:
        step(model, optimizer, torch.randn(50, 100))
    assert memory.category_peak_bytes["states"] == 8 * PARAMETERS + 8


def test_activations_of_a_forward_pass_are_counted_by_hand():
    model, optimizer = model_and_optimizer()
    x = torch.randn(50, 100)
    with track_memory(model, optimizer) as memory:
        y = model(x)
    # The product, and its ReLU before the product is freed. x is older than the block.
    assert memory.category_peak_bytes["activations"] == 4 * (50 * 200 + 50 * 200)
    assert memory.category_peak_bytes["gradients"] == 0
    del y


def test_gradients_older_than_the_block_are_counted():
    model, optimizer = model_and_optimizer()
    model(torch.randn(2, 100)).sum().backward()
    with track_memory(model, optimizer) as memory:
        pass
    assert memory.peak_bytes == {
        "weights": 4 * PARAMETERS,
        "gradients": 4 * PARAMETERS,
        "states": 0,
        "activations": 0,
        "total": 8 * PARAMETERS,
    }


def test_gradients_consumed_inside_backward_are_never_all_alive():
    model, optimizer = model_and_optimizer()
    handles = [
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        for p in model.parameters()
    ]
    x = torch.randn(50, 100)
    with track_memory(model, optimizer) as memory:
        model(x).square().mean().backward()
    largest = 4 * 100 * 200
    assert memory.category_peak_bytes["gradients"] == largest
    for handle in handles:
        handle.remove()


def test_views_and_in_place_results_are_counted_once():
    model, optimizer = model_and_optimizer()
    old = torch.zeros(1000)
    with track_memory(model, optimizer) as memory:
        old[:500].add_(1)
        new = torch.zeros(1000)
        new.view(10, 100).t().mul_(2)
    assert memory.category_peak_bytes["activations"] == 4000


def test_freed_tensors_do_not_add_up():
    model, optimizer = model_and_optimizer()
    with track_memory(model, optimizer) as memory:
        for _ in range(5):
            torch.zeros(1000)
    assert memory.category_peak_bytes["activations"] == 4000


def test_a_resized_storage_counts_its_new_size():
    model, optimizer = model_and_optimizer()
    with track_memory(model, optimizer) as memory:
        out = torch.empty(10)
        torch.mm(torch.zeros(20, 1), torch.zeros(1, 20), out=out.resize_(20, 20))
    assert memory.category_peak_bytes["activations"] == 4 * (20 + 20 + 400)


def test_the_timeline_is_counted_by_hand():
    model, optimizer = model_and_optimizer()
    x = torch.randn(50, 100)
    with track_memory(model, optimizer) as memory:
        memory.mark("one")
        y = x + 1
        memory.mark("two")
        y = y[:1].clone()
    found = [(m.mark, m.bytes["weights"], m.bytes["activations"]) for m in memory.timeline]
    older = [("", 4 * size, 0) for size in (100 * 200, PARAMETERS)]
    assert found == [
        *older,
        ("one", 4 * PARAMETERS, 20_000),
        ("two", 4 * PARAMETERS, 20_400),
        ("two", 4 * PARAMETERS, 400),
    ]
    seconds = [m.seconds for m in memory.timeline]
    assert seconds == sorted(seconds)
    assert seconds[0] >= 0


def test_the_timeline_holds_the_peaks():
    model, optimizer = model_and_optimizer()
    with track_memory(model, optimizer) as memory:
        for _ in range(2):
            step(model, optimizer, torch.randn(50, 100))
    for name, highest in memory.category_peak_bytes.items():
        assert max(m.bytes[name] for m in memory.timeline) == highest
    assert memory.peak_bytes in [m.bytes for m in memory.timeline]
    assert all(m.bytes["total"] == sum(m.bytes[c] for c in CATEGORIES) for m in memory.timeline)


def test_the_timeline_knows_categories_from_birth():
    model, optimizer = model_and_optimizer()
    with track_memory(model, optimizer) as memory:
        memory.mark("forward")
        loss = model(torch.randn(50, 100)).square().mean()
        memory.mark("backward")
        loss.backward()
        memory.mark("step")
        optimizer.step()
    highest = {
        mark: max(m.bytes["states"] for m in memory.timeline if m.mark == mark)
        for mark in ("forward", "backward", "step")
    }
    assert highest == {"forward": 0, "backward": 0, "step": 8 * PARAMETERS + 8}


def test_a_second_block_starts_anew():
    model, optimizer = model_and_optimizer()
    memory = track_memory(model, optimizer)
    for _ in range(2):
        with memory:
            memory.mark("inside")
            torch.zeros(1000)
        assert memory.peak_bytes["weights"] == 4 * PARAMETERS
        assert [m.mark for m in memory.timeline] == ["", "", "inside", "inside"]


def test_training_is_the_same_with_and_without():
    results = []
    for tracked in (False, True):
        model, optimizer = model_and_optimizer()
        x = torch.randn(50, 100, generator=torch.Generator().manual_seed(1))
        if tracked:
            with track_memory(model, optimizer):
                step(model, optimizer, x)
        else:
            step(model, optimizer, x)
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_hooks_are_removed_even_after_an_error():
    model, optimizer = model_and_optimizer()
    with pytest.raises(RuntimeError, match="boom"), track_memory(model, optimizer) as memory:
        raise RuntimeError("boom")
    step(model, optimizer, torch.randn(2, 100))
    assert memory.peak_bytes["gradients"] == 0


def peaks_of_a_dtensor() -> list[int]:
    """Live bytes at the peak of two operations on this rank's half of 8 x 6 numbers."""
    mesh = mesh_of((2,))
    model = torch.nn.Linear(1, 1)
    peaks = []
    for dim in (0, 1):
        half = torch.ones((4, 6) if dim == 0 else (8, 3))
        x = DTensor.from_local(half, mesh, (Shard(dim),), run_check=False)
        # Twice: the first time DTensor finds out shapes with tensors that have no memory.
        for _ in range(2):
            with track_memory(model) as memory:
                y = x * 2
                z = y.full_tensor()
            peaks.append(memory.peak_bytes["total"] - memory.peak_bytes["weights"])
            del y, z
    return peaks


def test_what_a_dtensor_makes_on_its_rank_counts(ranks):
    """The whole of a tensor whose columns are divided is put together from a copy of all rows."""
    half, whole = 4 * 24, 4 * 48
    for rows, rows_again, columns, columns_again in ranks.run(2, peaks_of_a_dtensor):
        assert rows == rows_again == half + whole
        assert columns == columns_again == half + 2 * whole
