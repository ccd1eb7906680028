"""The axis of linear layers: its names, its grid, its contradictions."""

from typing import get_args

import pytest

from subulp.lab.engine.linear_operands import PartitionName, Variant
from subulp.lab.tasks.lm.config import LMConfig
from subulp.lab.tasks.xmc.config import XMCConfig
from subulp.numerics.partition import PARTITIONS


def test_partitions_are_those_of_the_arithmetic():
    assert get_args(PartitionName) == tuple(PARTITIONS)


def test_without_the_axis_runs_are_the_precisions():
    config = LMConfig()
    assert config.variants == ("master", "nearest", "collage-light", "collage-plus")
    # What "auto" is before a comparison has decided.
    assert config.settings("master") == {"precision": "master", "activations": "fp32"}
    assert not config.has_mixtures


def test_several_kinds_of_layers_take_master_weights_alone():
    config = LMConfig(linear=("bf16", "e4m3", "mor-tensor", "mor-2way", "mor-3way"))
    assert config.variants == (
        "master",
        "master e4m3",
        "master mor-tensor",
        "master mor-2way",
        "master mor-3way",
    )
    layers = {"precision": "master", "activations": "fp32"}
    assert config.settings("master") == layers | {"linear": "bf16"}
    assert config.settings("master mor-2way") == layers | {
        "linear": "mor-2way",
        "partition": "block-128x128",
    }
    assert config.has_mixtures


def test_names_say_what_varies():
    config = LMConfig(
        precision=("master", "nearest"),
        linear=("bf16", "mor-tensor"),
        partition=("tensor", "channel"),
        mor_threshold=0.03,
    )
    assert config.variants == (
        "master",
        "master mor-tensor tensor",
        "master mor-tensor channel",
        "nearest",
        "nearest mor-tensor tensor",
        "nearest mor-tensor channel",
    )
    assert config.grid["nearest mor-tensor channel"] == Variant(
        "nearest", "mor-tensor", "channel", 0.03
    )
    alone = LMConfig(linear=("mor-2way",))
    assert alone.variants == LMConfig().variants
    assert alone.settings("nearest")["linear"] == "mor-2way"


def test_an_encoder_in_fp32_keeps_its_layers():
    config = XMCConfig(precision=("fp32", "fp8"), linear=("bf16", "mor-2way"))
    assert config.variants == ("fp32", "fp8", "fp8 mor-2way")


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (LMConfig, {"linear": ()}, "linear is empty"),
        (LMConfig, {"linear": ("bf16", "bf16")}, "linear repeats bf16"),
        (
            LMConfig,
            {"linear": ("fp4",)},
            "linear='fp4' is unknown: use one of bf16, e4m3",
        ),
        (LMConfig, {"linear": ("fp8",)}, "linear='fp8' is unknown"),
        (
            LMConfig,
            {"linear": ("mor-2way",), "partition": ("row",)},
            "partition='row' is unknown: use one of tensor, channel",
        ),
        (LMConfig, {"partition": ("tensor",)}, "partition=tensor has no effect on linear=bf16"),
        (
            LMConfig,
            {"linear": ("e4m3", "mor-2way"), "mor_threshold": 0.1},
            "mor_threshold=0.1 has no effect: .* mor-tensor among linear=e4m3,mor-2way",
        ),
        (
            LMConfig,
            {"linear": ("bf16",), "mor_gradients": "e5m2"},
            "mor_gradients=e5m2 has no effect on linear=bf16",
        ),
        (
            LMConfig,
            {"linear": ("e4m3",), "mor_gradients": "bf16"},
            "mor_gradients='bf16' is unknown: use one of e4m3, e5m2",
        ),
        (
            LMConfig,
            {"linear": ("mor-tensor",), "mor_threshold": 1.0},
            "mor_threshold=1.0 is out of range",
        ),
        (
            LMConfig,
            {"linear": ("mor-tensor",), "mor_threshold": 0.0},
            "mor_threshold=0.0 has no effect: give more than 0",
        ),
        (
            XMCConfig,
            {"linear": ("mor-2way",), "precision": ("fp32", "renee")},
            "linear=mor-2way has no effect on precision=fp32,renee, whose encoder is in FP32",
        ),
    ],
)
def test_contradictions_are_errors(config, fields, message):
    with pytest.raises(ValueError, match=message):
        config(**fields)
