"""What follows from peaks of memory that were measured."""

from __future__ import annotations

import pytest
import torch

from subulp.lab.reproduce.collage.memory import (
    FITTING,
    GROWTH,
    MEAN,
    PEAK,
    SAVED,
    SHARE,
    fitting,
    live_bytes,
    peak,
    savings,
)
from subulp.lab.reproduce.found import Found, Observation
from subulp.lab.tasks.lm.models import Shape
from tests.lab.reproduce import divided_model

SHAPE = {"vocabulary": 300, "context": 32, "width": 32, "layers": 2, "heads": 2}


def test_what_fits_into_the_memory_of_the_smallest():
    peaks = {"short": {"nearest": 1.0, "master": 2.0}, "long": {"nearest": 2.0, "master": 3.0}}
    found = Found(
        tuple(
            observation
            for name, own in peaks.items()
            for observation in (
                Observation(name, "million parameters", 1.0),
                *(Observation(f"{name} {o}", PEAK, gib) for o, gib in own.items()),
            )
        )
    )
    assert fitting(found, "master") == (
        Observation("short nearest", SHARE, 0.5),
        Observation("long nearest", SHARE, 1.0),
        Observation("nearest", FITTING, 2),
        Observation("short master", SHARE, 1.0),
        Observation("long master", SHARE, 1.5),
        Observation("master", FITTING, 1),
    )


def test_savings_grow_with_gpts_and_are_averaged():
    """The last model is of another kind: growth is without it."""
    peaks = {"small": (8.0, 10.0), "large": (14.0, 20.0), "other": (10.0, 20.0)}
    found = Found(
        tuple(
            observation
            for name, (nearest, master) in peaks.items()
            for observation in (
                Observation(name, "million parameters", 1.0),
                Observation(f"{name} nearest", PEAK, nearest),
                Observation(f"{name} master", PEAK, master),
            )
        )
    )
    assert savings(found, "master") == (
        Observation("small nearest", SAVED, pytest.approx(20)),
        Observation("large nearest", SAVED, pytest.approx(30)),
        Observation("other nearest", SAVED, pytest.approx(50)),
        Observation("nearest", GROWTH, pytest.approx(10)),
        Observation("GPTs nearest", MEAN, pytest.approx(25)),
        Observation("all nearest", MEAN, pytest.approx(100 / 3)),
    )


def test_a_peak_grows_by_what_is_kept_of_each_sequence():
    """Activations are of the second step: were they the first one's, they would not grow."""
    shape = Shape(**SHAPE, model="llama")
    one, two, three = (live_bytes(shape, "collage-plus", batch, None) for batch in (1, 2, 3))
    assert two > one
    assert abs((three - two) / (two - one) - 1) < 0.05


def test_gradients_that_are_added_up_stay():
    """The second batch meets those of the first, and a third one's peak is no higher."""
    shape = Shape(**SHAPE, model="gpt")
    one, two, three = (live_bytes(shape, "nearest", 1, None, count) for count in (1, 2, 3))
    assert one < two == three


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_a_rank_of_many_keeps_what_real_ranks_keep(ranks, model):
    """The first of ranks of which the others are nowhere, beside the first of real ones."""
    shape = Shape(**SHAPE, model=model)
    (alone,) = (
        peak("it", ["collage-light"], SHAPE, 2, model, 2).values("it collage-light", PEAK).values()
    )
    runs = [
        ranks.run(2, divided_model.live_bytes_of_rank, shape, "collage-light", 2) for _ in range(3)
    ]
    # The thread of a real collective may let go of a tensor a moment later.
    real = [min(own) for own in zip(*runs, strict=True)]
    assert [round(alone * 2**30)] * 2 == real
    # Norms and the residual stream are on all ranks.
    whole = live_bytes(shape, "collage-light", 2, None)
    assert whole / 2 < real[0] < whole


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_a_divided_model_is_the_whole_one(ranks, model):
    """In FP32, so that sums in another order differ little."""
    shape = Shape(**SHAPE, model=model)
    loss, gradients = divided_model.of_one_process(shape, 2)
    for own_loss, own in ranks.run(2, divided_model.of_ranks, shape):
        torch.testing.assert_close(own_loss, loss, rtol=1e-5, atol=0)
        assert own.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(own[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_ranks_that_do_not_divide_the_heads_are_refused(ranks):
    shape = Shape(**SHAPE | {"width": 30, "heads": 3})
    for message in ranks.run(2, divided_model.refusal, shape):
        assert message == "2 ranks do not divide 3 heads"
