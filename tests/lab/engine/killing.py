"""A program that trains in child processes, kills them, and resumes what they leave.

It imports everything once and forks a child for each attempt, so that an attempt takes as long as
its training. Run as ``python -m tests.lab.engine.killing CASE KILLS FOLDER``; it prints what
happened as JSON, and fails if the results are not those of a training that was never killed.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import torch

from subulp.lab import report
from subulp.lab.compare import compare, resume
from subulp.lab.engine import checkpoint
from subulp.lab.tasks.ctr import task as ctr_task
from subulp.lab.tasks.ctr.config import CTRConfig
from subulp.lab.tasks.image import task as image_task
from subulp.lab.tasks.image.config import ImageConfig
from subulp.lab.tasks.lm import task as lm_task
from subulp.lab.tasks.lm.config import LMConfig
from subulp.lab.tasks.xmc import task as xmc_task
from subulp.lab.tasks.xmc.config import XMCConfig
from tests.lab.engine.resuming import digest_of
from tests.lab.tasks.ctr.support import SMALL as SMALL_CTR
from tests.lab.tasks.ctr.support import write_clicks
from tests.lab.tasks.xmc.support import write_data

TASKS = (lm_task, image_task, xmc_task, ctr_task)
COMMON = {"device": "cpu", "checkpoint_every": 1, "watch_every": 3}


def lm(folder):
    text = folder / "text.txt"
    text.write_text("".join(f"{i} green bottles hanging on the wall,\n" for i in range(100)))
    shape = {"batch_size": 2, "context": 8, "width": 16, "layers": 1, "heads": 2, "dropout": 0.1}
    precision = ("collage-plus", "extra-bits-8")
    return LMConfig(**COMMON, **shape, data=text, precision=precision, steps=20, eval_every=5)


def image(folder):
    options = {"precision": ("nearest",), "width": 2, "epochs": 1, "batch_size": 128}
    return ImageConfig(**COMMON, **options, grad_scaler=True)


def xmc(folder):
    write_data(folder)
    options = {"width": 16, "epochs": 4, "batch_size": 16, "chunks": 3, "head_fraction": 0.3}
    return XMCConfig(**COMMON, **options, data=folder, precision=("fp8", "renee"))


def ctr(folder):
    options = {**SMALL_CTR, "cache_fraction": (0.02,), "policy": ("lru",), "shuffle_rows": 150}
    changes = {"precision": ("int4",), "rounding": ("stochastic",), "epochs": 2}
    return CTRConfig(**{**options, **COMMON, **changes, "data": write_clicks(folder)})


CASES = {"lm": lm, "image": image, "xmc": xmc, "ctr": ctr}


def results(out):
    """Digests of the last steps, summaries and records, timings aside."""
    summary = json.loads((out / "summary.json").read_text())
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for entry in (*summary["runs"], *records):
        for name in ("seconds", "seconds_per_step", "seconds_per_epoch"):
            entry.pop(name, None)
    runs = sorted((out / "checkpoints").iterdir())
    return summary, records, [digest_of(max(run.glob("step-*"))) for run in runs]


def attempt(config, out, die_at=None):
    """Train in a child process, and return its number."""
    child = os.fork()
    if child:
        return child
    try:
        # Drawing would take longer than training.
        report.write_run_report = lambda directory: None
        for task in TASKS:
            vars(task).pop("plot", None)
        if die_at is not None:
            die(die_at)
        if (out / "config.json").exists():
            resume(out, jobs=1)
        else:
            compare(config, out=out, jobs=1)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def die(at):
    """Let this process be killed before call number ``at`` of those that write a checkpoint."""
    calls = []

    def counting(function):
        def call(*args, **kwargs):
            calls.append(function)
            if len(calls) == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for name in ("save_file", "_write_json", "sync"):
        setattr(checkpoint, name, counting(getattr(checkpoint, name)))
    Path.rename = counting(Path.rename)


def unfinished(out):
    """Whether a checkpoint is being written, or was when its process died."""
    return any(out.glob("checkpoints/*/.step-*"))


def wait(child, seconds=None, inside=None):
    """Wait for a child, or kill it after some time.

    Args:
        child: Its number.
        seconds: How long to wait; ``None`` waits for its end.
        inside: A run directory: kill it while it writes a checkpoint there, or a moment later.

    Returns:
        Whether it came to its end.
    """
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        done, status = os.waitpid(child, 0 if end is None else os.WNOHANG)
        if done:
            break
        if time.monotonic() >= end and (inside is None or unfinished(inside)):
            os.kill(child, signal.SIGKILL)
            end = None
        else:
            time.sleep(0.001)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), f"a child ended with exit code {code}"
    return code == 0


def kill_at_every_call(config, folder):
    """Kill one attempt before each call of the first checkpoint that it writes."""
    out, found = folder / "calls", {"kills": 0, "inside": 0, "completed": 1}
    for at in range(1, 11):
        if not wait(attempt(config, out, at)):
            found["kills"] += 1
            found["inside"] += unfinished(out)
    if not (out / "summary.json").exists():
        assert wait(attempt(config, out))
    yield out
    yield found


def kill_at_random(config, folder, kills, seconds):
    """Kill attempts after random times, and begin anew when one comes to its end."""
    generator = random.Random(0)
    found = {"kills": 0, "inside": 0, "completed": 0}
    while True:
        out = folder / f"killed-{found['completed']}"
        # Enough were killed: let the last one end.
        patience = generator.uniform(0, seconds) if found["kills"] < kills else None
        inside = out if generator.random() < 0.5 else None
        if wait(attempt(config, out), patience, inside):
            found["completed"] += 1
            # The first training may have been slow.
            seconds *= 0.8
            yield out
            if found["kills"] >= kills:
                break
        else:
            found["kills"] += 1
            found["inside"] += unfinished(out)
    yield found


def main(case, kills, folder):
    torch.set_num_threads(1)
    data = folder / "data"
    data.mkdir(parents=True)
    config = CASES[case](data)
    begun = time.monotonic()
    assert wait(attempt(config, folder / "whole"))
    seconds = time.monotonic() - begun
    expected = results(folder / "whole")
    killing = (
        kill_at_random(config, folder, kills, seconds / 2)
        if kills
        else kill_at_every_call(config, folder)
    )
    *outs, found = killing
    for out in outs:
        assert results(out) == expected, f"{out} differs"
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
