"""States come back exactly: every dtype, every float, every nesting."""

import json
import math

import pytest
import torch

from subulp.lab.engine.saved_state import flatten, rebuild

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
    torch.bool,
)


def round_trip(state):
    plain, tensors = flatten(state)
    return rebuild(json.loads(json.dumps(plain, allow_nan=False)), tensors)


@pytest.mark.parametrize(
    "state",
    [
        None,
        {"a": [1, True, "x", None], "b": {"c": (1.5, (2,))}},
        {0: {"step": 3}, 1: {}, "name": []},
        {"$": ["tensor", "x"], "tuple": ()},
        [math.inf, -math.inf, 5e-324, 1.7976931348623157e308, 0.1, 1e16, 2**127 + 1],
    ],
    ids=["none", "nested", "numbered", "escaped", "numbers"],
)
def test_plain_values_come_back(state):
    found = round_trip(state)
    assert found == state
    assert repr(found) == repr(state)


def test_nan_and_minus_zero_come_back():
    nan, zero = round_trip([math.nan, -0.0])
    assert math.isnan(nan)
    assert math.copysign(1, zero) == -1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_keep_their_bits_and_shape(dtype):
    raw = torch.arange(240, dtype=torch.uint8)
    tensor = raw.view(dtype) if dtype != torch.bool else raw > 100
    for value in (tensor, tensor.view(-1, 3), tensor[:0], tensor[0]):
        found = round_trip({"x": value})["x"]
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        assert torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (found, value)))


def test_one_tensor_under_two_names_is_stored_once():
    weight = torch.randn(4, 4)
    plain, tensors = flatten({"tokens": weight, "head": weight, "part": weight[0], "t": weight.t()})
    assert len(tensors) == 3
    assert plain["tokens"] == plain["head"]
    pointers = {t.untyped_storage().data_ptr() for t in tensors.values()}
    assert len(pointers) == 3
    assert torch.equal(rebuild(plain, tensors)["t"], weight.t())


def test_names_that_look_alike_stay_apart():
    state = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}
    found = round_trip(state)
    assert (found["a.b"].item(), found["a"]["b"].item()) == (0, 1)


@pytest.mark.parametrize("value", [{1, 2}, object(), print, 1j, {(1, 2): 3}])
def test_what_only_pickle_could_save_is_refused(value):
    with pytest.raises(TypeError, match="which is not saved"):
        flatten({"x": value})


@pytest.mark.parametrize(
    "plain",
    [
        {"$": ["tensor", "missing"]},
        {"$": ["float", "1e5"]},
        {"$": ["dict", [[[], 1]]]},
        {"$": ["tuple", 5]},
        {"$": 1, "x": 2},
    ],
    ids=str,
)
def test_what_stands_for_nothing_is_an_error(plain):
    with pytest.raises(ValueError, match="stands for nothing"):
        rebuild([plain], {})
