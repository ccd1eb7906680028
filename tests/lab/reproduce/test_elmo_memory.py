"""ELMO's memory before a step and beside it, and gradients by the number of labels."""

import pytest
import torch

from subulp.lab.reproduce.elmo import initial, overflow, transients
from subulp.lab.reproduce.found import Found, Observation


def value(found, case, quantity, seed=None):
    return found.values(case, quantity)[seed]


def test_bytes_of_rows_without_data():
    found = initial.stored(1000, 64, 0.2)
    weights = 1000 * 64 / 2**30
    sizes = {"fp32": 4, "bf16": 2, "fp8": 1, initial.HEAD: 1 + 0.2 * 2 + 2 * 8 / 64}
    for name, size in sizes.items():
        assert value(found, name, initial.CLASSIFIER) == pytest.approx(size * weights)


def test_a_step_has_logits_and_the_baseline_a_copy():
    found = initial.steps(128, 1280, 16, 4, 8)
    assert value(found, "renee", initial.WEIGHTS) == 6
    assert value(found, "bf16", initial.WEIGHTS) == 2
    assert value(found, "fp8", initial.WEIGHTS) == 1
    logits = 4 * 1280 / 2**20
    assert value(found, "renee", initial.LOGITS) == 2 * logits
    # FP32, an eighth of the labels.
    assert value(found, "bf16", initial.LOGITS) == 4 * logits / 8
    assert value(found, "renee", initial.CLASSIFIER) == pytest.approx(
        8 * 1280 * 16 / 2**30, rel=0.01
    )


def test_encoders_are_read_at_their_layers():
    shape = {"vocabulary": 50, "width": 16, "heads": 2, "context": 8}
    line, built = (initial.encoders(shape, n) for n in (3, 2))
    three = value(line, "renee", initial.ENCODER) * 2**30
    two = value(built, "renee", initial.ENCODER) * 2**30
    assert two == initial._kept(shape, 2, torch.float32, "fp32")
    assert three == pytest.approx(initial._kept(shape, 3, torch.float32, "fp32"))
    narrow = value(line, "bf16", initial.ENCODER)
    assert narrow == pytest.approx(value(line, "renee", initial.ENCODER) * 8 / 12, rel=0.01)


def test_parts_are_added_up():
    numbers = ((initial.CLASSIFIER, 2.0), (initial.ENCODER, 1.0), (initial.LOGITS, 512.0))
    found = Found(tuple(Observation(n, q, v) for n in ("renee", "bf16", "fp8") for q, v in numbers))
    assert [o.value for o in initial.together(found)] == [3.5] * 3


def test_chunks_divide_what_a_step_needs(monkeypatch):
    found = transients.by_chunks(["bf16"], [1, 4], 512, 16, 4)
    one, four = (value(found, transients.case_of("bf16", n), transients.TRANSIENT) for n in (1, 4))
    assert 3.5 < one / four <= 4
    # As if chunks were one.
    exact = transients.classifier
    monkeypatch.setattr(
        transients, "classifier", lambda s, labels, dim, _: exact(s, labels, dim, 1)
    )
    found = transients.by_chunks(["bf16"], [1, 4], 512, 16, 4)
    assert len({o.value for o in found.observations}) == 1


def test_the_callers_backend_comes_back(monkeypatch):
    monkeypatch.setenv("SUBULP_BACKEND", "cpu")
    with transients.plain():
        assert transients.os.environ["SUBULP_BACKEND"] == "reference"
    assert transients.os.environ["SUBULP_BACKEND"] == "cpu"


def test_labels_make_the_gradient_of_the_inputs_larger():
    found = overflow.growth([64, 1024], 16, 8, 6, [0])
    few, many = (f"fp32, {n} labels" for n in ("64", "1,024"))
    inputs, rows = (
        value(found, many, quantity, 0) / value(found, few, quantity, 0)
        for quantity in (overflow.INPUTS, overflow.ROWS)
    )
    assert inputs > 8
    assert rows < 1.5
    assert value(found, f"renee{many[4:]}", overflow.SKIPPED, 0) == 0


def test_an_overflow_is_counted(monkeypatch):
    monkeypatch.setattr("subulp.lab.tasks.xmc.renee.INITIAL_LOSS_SCALE", 2.0**24)
    found = overflow.growth([64], 16, 8, 3, [0])
    assert value(found, "renee, 64 labels", overflow.SKIPPED, 0) > 0
    assert value(found, "bf16, 64 labels", overflow.SKIPPED, 0) == 0
