"""Models as a run saves them, without the run."""

import json

from subulp.lab.engine.run_directory import MODELS
from subulp.lab.engine.saved_model import ModelName, save_model
from subulp.lab.engine.sealed import fingerprint, sealed


def save(run, task, variant, seed, work):
    """Write a model into a folder that looks like a run directory; returns its name."""
    run.mkdir(exist_ok=True)
    if not (run / "config.json").exists():
        (run / "config.json").write_text(json.dumps({"task": task}))
    name = ModelName(variant, seed)
    save_model(run / MODELS, task, name, work, {}, None)
    return name


def reseal(description):
    """Give a description the sums of the files that it names, as a foe would."""
    fields = json.loads(description.read_text())
    del fields["sha256"]
    fields["files"] = {name: fingerprint(description.parent / name) for name in fields["files"]}
    description.write_text(sealed(fields))
