"""Runs and comparisons that are stopped, and what they must leave."""

import contextlib
import dataclasses
import hashlib
import os
import signal

import torch

from subulp.lab import compare as comparison
from subulp.lab.engine import checkpoint
from subulp.lab.engine.loop import run
from subulp.lab.engine.run_checkpoints import RunCheckpoints
from subulp.lab.engine.saved_state import flatten
from subulp.lab.engine.stopping import Stopped


def without_times(value):
    """A summary or record without what no two runs have in common."""
    names = ("seconds_per_step", "seconds_per_epoch", "seconds")
    changes = {name: 0.0 for name in names if hasattr(value, name)}
    return dataclasses.replace(value, **changes)


def numbers(found):
    """What a comparison found, timings aside."""
    return [repr(without_times(value)) for value in (*found.summaries, *found.records)]


def stopped_after(count, monkeypatch, *, signum=signal.SIGTERM):
    """Let a signal arrive after so many logged steps."""
    add = comparison.RunDirectory.add_record
    seen = []

    def add_record(self, record):
        add(self, record)
        seen.append(record)
        if len(seen) == count:
            os.kill(os.getpid(), signum)

    monkeypatch.setattr(comparison.RunDirectory, "add_record", add_record)


def digest_of(path):
    """SHA-256 of everything in a checkpoint but its times."""
    _, state = checkpoint.read(path)
    tally = state["tally"]
    tally["records"] = [{**record, "seconds": 0} for record in tally["records"]]
    del tally["seconds"], tally["plain_seconds"]
    plain, tensors = flatten(state)
    total = hashlib.sha256(repr(plain).encode())
    for name in sorted(tensors):
        total.update(name.encode())
        total.update(tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def results(folder, config, data, variant, *, stopping=False):
    """Summary, records and digest of the last step of a run as texts, timings aside.

    Args:
        folder: For its checkpoints.
        config: With ``checkpoint_every``, so that there is one of the last step.
        data: What the task loaded.
        variant: Of the run.
        stopping: Stop and resume it after every step.
    """
    records, begin, summary = [], None, None
    while summary is None:
        checkpoints = RunCheckpoints(folder, config, variant, 0)
        options = {"checkpoints": checkpoints, "begin": begin, "stop": lambda: stopping}
        with contextlib.suppress(Stopped):
            summary = run(config, data, variant, 0, records.append, **options)
        found = checkpoints.newest()
        begin = found.path
    assert found.step == summary.steps
    # As text: NaN is what it is.
    texts = [repr(without_times(value)) for value in (summary, *records)]
    return [*texts, digest_of(begin)]


def assert_resumes(tmp_path, config, data, variant):
    """A run that is stopped after every step is the run that never stops, bit for bit."""
    config = dataclasses.replace(config, checkpoint_every=1000)
    whole = results(tmp_path / "whole", config, data, variant)
    resumed = results(tmp_path / "resumed", config, data, variant, stopping=True)
    assert resumed == whole
