"""Every configuration comes back from JSON as it was, defaults and presets resolved."""

import dataclasses
import json
from pathlib import Path

import pytest

from subulp.lab.engine.config_json import config_of, plain_fields
from subulp.lab.engine.task import TASKS
from subulp.lab.tasks.ctr.config import CTRConfig
from subulp.lab.tasks.image.config import ImageConfig
from subulp.lab.tasks.lm.config import LMConfig
from subulp.lab.tasks.xmc.config import XMCConfig

CONFIGS = {
    "lm": LMConfig(),
    "lm-changed": LMConfig(
        precision=("fp32",), seeds=(3, 1), data=Path("a/text.gz"), steps=7, loss_scale=4.0, lr=1
    ),
    "lm-linear": LMConfig(linear=("bf16", "mor-tensor"), mor_threshold=0.1),
    "lm-rollback": LMConfig(nonfinite="rollback", checkpoint_every=5, max_rollbacks=2),
    "image": ImageConfig(),
    "image-changed": ImageConfig(data="cifar10:x", grad_scaler=True, width=3, max_skips=7),
    "xmc": XMCConfig(),
    "xmc-steps": XMCConfig(warmup_steps=5, label_texts=False, data=Path("x"), checkpoint_every=0),
    "xmc-preset": XMCConfig(preset="amazon-3m-fp8", encoder="bert", epochs=3),
    "ctr": CTRConfig(),
    "ctr-preset": CTRConfig(preset="criteo-kaggle", data="criteo:x", dim=5, keep_checkpoints=9),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_comes_back_from_json(name):
    config = CONFIGS[name]
    saved = json.loads(json.dumps(plain_fields(config)))
    found = config_of(config.task, saved)
    assert type(found) is type(config)
    assert found == config
    for field in dataclasses.fields(config):
        ours, theirs = getattr(config, field.name), getattr(found, field.name)
        # A number that the user gave as an integer may come back as the float that it is.
        assert type(ours) is type(theirs) or (type(ours), type(theirs)) == (int, float), field.name
    assert found.variants == config.variants
    assert plain_fields(found) == plain_fields(config)


@pytest.mark.parametrize("task", TASKS)
def test_every_field_refuses_another_type(task):
    saved = plain_fields(CONFIGS[task])
    for name in saved:
        with pytest.raises(ValueError, match=rf"expected {name}\b.* to be .*another version"):
            config_of(task, {**saved, name: {"a": 1}})


def test_unknown_and_missing_fields_are_named():
    saved = plain_fields(LMConfig())
    with pytest.raises(ValueError, match="options of lm: unknown key stepz; another version"):
        config_of("lm", {**saved, "stepz": 1})
    with pytest.raises(ValueError, match="options of lm: steps is missing"):
        config_of("lm", {k: v for k, v in saved.items() if k != "steps"})
    with pytest.raises(ValueError, match="task='nope' is unknown"):
        config_of("nope", saved)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nonfinite": "rollback"}, "nonfinite=rollback and checkpoint_every=None contradict"),
        ({"nonfinite": "rollback", "checkpoint_every": 0}, "checkpoint_every=0 contradict"),
        ({"max_rollbacks": 2}, "max_rollbacks=2 has no effect"),
        ({"max_skips": 2}, "max_skips=2 has no effect"),
        ({"max_skips": 0, "nonfinite": "skip"}, "max_skips=0 is out of range"),
        ({"keep_checkpoints": 0}, "keep_checkpoints=0 is out of range"),
        ({"keep_checkpoints": 3, "checkpoint_every": 0}, "keep_checkpoints=3 has no effect on che"),
        ({"checkpoint_every": -1}, "checkpoint_every=-1 is out of range"),
    ],
)
def test_contradictions_are_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        LMConfig(**changes)
