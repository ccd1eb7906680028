"""Gradients whose joint norm is limited."""

import dataclasses

import pytest

from subulp.lab.engine.loop import run
from subulp.lab.tasks.ctr.config import CTRConfig
from subulp.lab.tasks.image.config import ImageConfig
from subulp.lab.tasks.image.task import load as load_images
from subulp.lab.tasks.lm.config import LMConfig
from subulp.lab.tasks.lm.text import load_text
from subulp.lab.tasks.xmc.config import XMCConfig

BRIEF = {"steps": 8, "width": 4, "batch_size": 16, "watch_every": 2, "log_every": 1}
PLAIN = {"momentum": 0.0, "weight_decay": 0.0, "augment": False, "warmup": 0.0, "device": "cpu"}


def seen(config, data, precision):
    records = []
    summary = run(config, data, precision, 0, records.append)
    return records, summary


@pytest.mark.parametrize("precision", ["fp32", "nearest"])
def test_a_step_is_as_long_as_the_limit_allows(precision):
    """Plain SGD's update is the gradient times the rate."""
    limit = 0.75
    config = ImageConfig(**BRIEF, **PLAIN, precision=(precision,), dtype="bf16", max_norm=limit)
    records, _ = seen(config, load_images(config), precision)
    watched = [record for record in records if record.update_norm is not None]
    assert any(record.gradient_norm > 1.2 * limit for record in watched)
    for record in watched:
        expected = record.lr * min(record.gradient_norm, limit)
        # Norm, factor and product are rounded to the gradients' dtype.
        rounding = 1e-5 if precision == "fp32" else 2**-6
        assert record.update_norm == pytest.approx(expected, rel=rounding)


@pytest.mark.parametrize("precision", ["fp32", "master", "collage-plus"])
@pytest.mark.parametrize("limit", [1e-3, 0.5])
def test_a_fused_run_gives_the_same_numbers(small, precision, limit):
    config = small(precision=(precision,), max_norm=limit, log_every=1)
    text = load_text(config.data)
    plain, fused = (
        seen(dataclasses.replace(config, fuse_backward=fuse), text, precision)
        for fuse in (False, True)
    )
    assert [r.loss for r in plain[0]] == [r.loss for r in fused[0]]
    assert plain[1].metrics == fused[1].metrics
    unlimited, _ = seen(dataclasses.replace(config, max_norm=None), text, precision)
    assert [r.loss for r in unlimited] != [r.loss for r in plain[0]]


def test_a_limit_that_no_gradient_reaches_changes_nothing(small):
    config = small(precision=("collage-plus",), log_every=1)
    text = load_text(config.data)
    (free, one), (limited, two) = (
        seen(dataclasses.replace(config, max_norm=limit), text, "collage-plus")
        for limit in (None, 1e4)
    )
    assert [(r.loss, r.gradient_norm) for r in free] == [(r.loss, r.gradient_norm) for r in limited]
    assert one.metrics == two.metrics


def test_the_scale_of_the_loss_is_no_part_of_the_norm(small):
    """A power of two, so that nothing is rounded otherwise."""
    config = small(precision=("master",), max_norm=0.25, log_every=1)
    text = load_text(config.data)
    plain, scaled = (
        [r.loss for r in seen(dataclasses.replace(config, loss_scale=s), text, "master")[0]]
        for s in (1.0, 1024.0)
    )
    # Of the norm, 1e-6 is added to what the gradient is divided by, whatever its scale.
    assert plain == pytest.approx(scaled, rel=1e-5)


def test_fp8_gradients_are_limited_inside_the_backward_pass_alone(small):
    given = {"dtype": "e4m3", "precision": ("collage-light",)}
    with pytest.raises(ValueError, match=r"max_norm=0.5 is not available with dtype='e4m3': torch"):
        small(**given, max_norm=0.5)
    config = small(**given, max_norm=0.01, fuse_backward=True)
    text = load_text(config.data)
    limited, _ = seen(config, text, "collage-light")
    free, _ = seen(dataclasses.replace(config, max_norm=None), text, "collage-light")
    assert [r.loss for r in limited] != [r.loss for r in free]


@pytest.mark.parametrize("kind", [LMConfig, ImageConfig, CTRConfig, XMCConfig])
def test_a_limit_is_a_number_above_0(kind):
    for limit in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=rf"max_norm={limit} is out of range: give a number"):
            kind(max_norm=limit)
    # What the files of earlier versions lack.
    assert kind.earlier["max_norm"] is None
