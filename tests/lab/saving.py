"""Models as a run saves them, without the run."""

import json

from subulp.lab.engine.run_directory import MODELS
from subulp.lab.engine.saved_model import ModelName, save_model


def save(run, task, variant, seed, work):
    """Write a model into a folder that looks like a run directory; returns its name."""
    run.mkdir(exist_ok=True)
    if not (run / "config.json").exists():
        (run / "config.json").write_text(json.dumps({"task": task}))
    name = ModelName(variant, seed)
    save_model(run / MODELS, task, name, work, {}, None)
    return name
