import dataclasses

import pytest

from subulp.lab.tasks.lm.config import LMConfig


def test_a_config_cannot_change_after_its_checks():
    with pytest.raises(dataclasses.FrozenInstanceError):
        LMConfig().steps = 0


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("steps", 1, "steps=1 is out of range: give from 2 to 10"),
        ("watch_every", 1, "watch_every=1 is out of range: give at least 2"),
        ("batch_size", -1, "batch_size=-1 is out of range"),
        ("eval_every", 0, "eval_every=0 is out of range"),
        ("threads", 0, "threads=0 is out of range"),
        ("warmup", 1.5, "warmup=1.5 is out of range: give from 0 to 1"),
        ("beta2", 1.0, "beta2=1.0 is out of range: give from 0 to 1, which is excluded"),
        ("lr", float("nan"), "lr=nan is out of range"),
        ("lr", float("inf"), "lr=inf is out of range"),
        ("weight_decay", -0.1, "weight_decay=-0.1 is out of range"),
        ("dropout", 1.0, "dropout=1.0 is out of range"),
        ("seeds", (-1,), "seeds=-1 is out of range"),
        ("seeds", (), "seeds is empty"),
        ("seeds", (1, 1), "seeds repeats 1: give each once"),
        ("precision", ("master", ""), "precision is empty, or has an empty entry"),
        ("precision", ("master", "master"), "precision repeats master"),
        ("activations", "bf17", "activations='bf17' is unknown: use one of auto, fp32, bf16"),
        ("activations", None, "activations=None is unknown"),
        ("width", 130, "width=130 is not a multiple of heads=4"),
    ],
)
def test_a_field_out_of_range_is_named_with_its_value_and_the_remedy(field, value, message):
    with pytest.raises(ValueError, match=message):
        LMConfig(**{field: value})


@pytest.mark.parametrize("precision", ["master", "fp32"])
def test_bf16_activations_are_refused_for_fp16_parameters(precision):
    with pytest.raises(ValueError, match="activations='bf16' is not available with dtype='fp16'"):
        LMConfig(activations="bf16", dtype="fp16", precision=(precision,))
    assert LMConfig(activations="fp32", dtype="fp16").used_activations == "fp32"


def test_a_tied_head_is_refused_where_its_gradients_cannot_be_added():
    with pytest.raises(ValueError, match="tie_head=True is not available with dtype='e4m3'"):
        LMConfig(tie_head=True, dtype="e4m3")
