"""What follows from peaks of memory that were measured."""

from __future__ import annotations

from subulp.lab.reproduce.collage.memory import FITTING, PEAK, SHARE, fitting, peak
from subulp.lab.reproduce.found import Found, Observation

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


def test_a_peak_grows_by_what_is_kept_of_each_sequence():
    """Activations are of the second step: were they the first one's, they would not grow."""
    one, two, three = (
        peak("tiny", ["collage-plus"], SHAPE, batch).values("tiny collage-plus", PEAK)[None]
        for batch in (1, 2, 3)
    )
    assert two > one
    assert abs((three - two) / (two - one) - 1) < 0.05
