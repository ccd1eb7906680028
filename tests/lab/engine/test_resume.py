"""Comparisons that are stopped, killed, damaged, and resumed."""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from subulp.lab import compare as comparison
from subulp.lab.cli import main
from subulp.lab.compare import compare, resume
from subulp.lab.engine import parallel
from subulp.lab.engine.lock import Lock
from subulp.lab.engine.run_checkpoints import RunCheckpoints
from subulp.lab.engine.stopping import (
    Interrupted,
    SharedStopRequest,
    StopRequest,
    stop_requests,
)
from tests.lab.engine.resuming import numbers, stopped_after


def lines(directory):
    """``metrics.jsonl``, timings aside."""
    found = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{**record, "seconds": 0} for record in found]


@pytest.fixture(scope="module")
def config(small):
    return small(steps=12, checkpoint_every=4, seeds=(0, 1))


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    return compare(config, out=tmp_path_factory.mktemp("whole") / "out", jobs=1)


@pytest.fixture
def stopped(config, tmp_path, monkeypatch):
    """A comparison of four runs that was stopped in the third."""
    out = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        stopped_after(25, patch)
        with pytest.raises(Interrupted) as caught:
            compare(config, out=out, jobs=1)
    assert (caught.value.directory, caught.value.signum) == (out, signal.SIGTERM)
    return out


def newest(out, variant="nearest", seed=0):
    folder = out / "checkpoints" / f"{variant}-seed-{seed}"
    return sorted(path for path in folder.iterdir() if path.name.startswith("step-"))[-1]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_resumed_comparison_is_the_one_that_never_stopped(stopped, whole, jobs):
    finished = stopped / "checkpoints" / "master-seed-1" / "finished.json"
    before = finished.read_bytes()
    found = resume(stopped, jobs=jobs)
    assert numbers(found) == numbers(whole)
    assert finished.read_bytes() == before, "a finished run was made again"
    if jobs == 1:
        assert lines(stopped) == lines(whole.directory)
    assert {p.name for p in stopped.iterdir()} == {p.name for p in whole.directory.iterdir()}
    assert not found.was_complete


def test_what_is_complete_is_only_read(whole, config, monkeypatch):
    monkeypatch.setattr(comparison, "run_all", None)
    found = resume(whole.directory)
    assert found.was_complete
    assert numbers(found) == numbers(whole)
    assert found.data == whole.data


def test_without_its_report_only_that_is_made(whole, tmp_path, monkeypatch):
    """A training that was killed while it drew."""
    out = tmp_path / "out"
    shutil.copytree(whole.directory, out)
    (out / "report.html").unlink()
    (out / "loss.png").unlink()
    monkeypatch.setattr(parallel, "run", None)
    found = resume(out, jobs=1)
    assert not found.was_complete
    assert numbers(found) == numbers(whole)
    assert {p.name for p in out.iterdir()} == {p.name for p in whole.directory.iterdir()}


def test_the_newest_and_the_best_checkpoints_stay(whole, config):
    """Every evaluation of this run is better than the ones before it."""
    for variant in config.variants:
        folder = whole.directory / "checkpoints" / f"{variant}-seed-0"
        names = sorted(path.name for path in folder.iterdir())
        assert names == ["finished.json", "step-00000009", "step-00000012"]


def test_only_checkpoints_that_are_due_or_asked_for(small, tmp_path, monkeypatch):
    """Ten minutes have not gone by, so there is one when the run is stopped, and only then."""
    found = compare(small(), out=tmp_path / "a", jobs=1)
    assert [p.name for p in tmp_path.rglob("step-*")] == []
    stopped_after(2, monkeypatch)
    with pytest.raises(Interrupted):
        compare(small(), out=tmp_path / "b", jobs=1)
    assert [p.name for p in tmp_path.rglob("step-*")] == ["step-00000002"]
    monkeypatch.undo()
    assert numbers(resume(tmp_path / "b", jobs=1)) == numbers(found)


def test_a_checkpoint_every_ten_minutes_without_an_option(small, tmp_path):
    times = iter(range(0, 10_000, 250))
    checkpoints = RunCheckpoints(tmp_path, small(), "master", 0, clock=lambda: next(times))
    assert [checkpoints.due(step, None) for step in (1, 2, 3)] == [False, False, True]
    checkpoints.write(3, None, {})
    assert [checkpoints.due(step, None) for step in (4, 5, 6)] == [False, False, True]


# ----------------------------------------------------------------------------- what may go wrong


def test_a_damaged_checkpoint_is_left_for_the_one_before(stopped, whole, capsys):
    before = newest(stopped)
    assert before.name > "step-00000004"
    (before / "tensors.safetensors").write_bytes(b"cut")
    (before.parent / ".step-00000099.new").mkdir()
    assert main(["train", "--resume", str(stopped), "--jobs=1", "--json"]) == 0
    printed = capsys.readouterr()
    assert "warning: " in printed.err
    assert "tensors.safetensors is damaged: it has 3 of " in printed.err
    assert "nearest-seed-0 resumes from step " in printed.err
    assert before.with_name(f"{before.name}.damaged").is_dir()
    assert not list(before.parent.glob(".*"))
    assert numbers(resume(stopped)) == numbers(whole)


def test_if_none_is_whole_the_run_is_not_begun_anew_unasked(stopped):
    folder = newest(stopped).parent
    for path in folder.iterdir():
        (path / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"no checkpoint in .*nearest-seed-0 is intact"):
        resume(stopped)
    shutil.rmtree(folder)
    resume(stopped, jobs=1)


def test_a_checkpoint_of_another_run_is_refused(stopped):
    path = newest(stopped)
    other = stopped / "checkpoints" / "nearest-seed-1"
    shutil.copytree(path, other / path.name)
    with pytest.raises(ValueError, match=r"has seed=0, and this run has seed=1"):
        resume(stopped)


def test_another_configuration_is_refused(stopped):
    path = stopped / "config.json"
    saved = json.loads(path.read_text())
    path.write_text(json.dumps({**saved, "lr": 0.5}))
    message = r"was written with lr=0\.001, and config\.json has lr=0\.5"
    with pytest.raises(ValueError, match=message):
        resume(stopped)
    path.write_text(json.dumps({**saved, "new_option": 1}))
    with pytest.raises(ValueError, match=r"config\.json: options of lm: unknown key new_option"):
        resume(stopped)


@pytest.mark.parametrize("kind", ["complete", "stopped"])
def test_finished_runs_of_another_configuration_are_refused(stopped, whole, tmp_path, kind, capsys):
    """They would have stood in one table with runs of this one."""
    out = tmp_path / "edited"
    shutil.copytree(whole.directory if kind == "complete" else stopped, out)
    file = out / "config.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps({**fields, "lr": 0.3}))
    assert main(["train", "--resume", str(out)]) == 2
    message = capsys.readouterr().err
    assert "finished.json was written with lr=" in message
    assert "config.json has lr=0.3: a run is resumed with the options it was started" in message
    file.write_text(json.dumps(fields))
    assert main(["train", "--resume", str(out)]) == 0


def test_other_data_are_refused(small, text_file, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_bytes(text_file.read_bytes())
    stopped_after(2, monkeypatch)
    with pytest.raises(Interrupted):
        compare(small(data=text), out=tmp_path / "out", jobs=1)
    raw = bytearray(text.read_bytes())
    raw[100:102] = raw[101:99:-1]
    text.write_bytes(raw)
    with pytest.raises(ValueError, match=r"was started on other data than data=.*text\.txt"):
        resume(tmp_path / "out")


def test_data_that_has_moved(small, text_file, tmp_path, monkeypatch, capsys):
    text = tmp_path / "text.txt"
    text.write_bytes(text_file.read_bytes())
    whole = compare(small(data=text), out=tmp_path / "whole", jobs=1)
    stopped_after(2, monkeypatch)
    with pytest.raises(Interrupted):
        compare(small(data=text), out=tmp_path / "out", jobs=1)
    monkeypatch.undo()
    text.rename(tmp_path / "moved.txt")
    assert main(["train", "--resume", str(tmp_path / "out")]) == 2
    path = tmp_path / "out" / "config.json"
    message = f"text.txt does not exist.*; if the data has moved, change its path in {path}\n"
    assert re.search(message, capsys.readouterr().err)
    path.write_text(path.read_text().replace("text.txt", "moved.txt"))
    assert numbers(resume(tmp_path / "out", jobs=1)) == numbers(whole)


def test_a_damaged_result_is_named(stopped):
    path = stopped / "checkpoints" / "master-seed-0" / "finished.json"
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ValueError, match=r"finished\.json is damaged .*: remove it"):
        resume(stopped)


def test_a_damaged_configuration_is_named(stopped, capsys):
    path = stopped / "config.json"
    path.write_text(path.read_text()[:300])
    assert main(["train", "--resume", str(stopped)]) == 2
    assert re.search(rf"error: {path}:\d+: expected a JSON object", capsys.readouterr().err)


@pytest.mark.parametrize("kind", ["missing", "empty", "other"])
def test_what_holds_no_run(tmp_path, kind, capsys):
    path = tmp_path / kind
    if kind != "missing":
        path.mkdir()
    if kind == "other":
        (path / "config.json").write_text("{}")
    assert main(["train", "--resume", str(path)]) == 2
    assert f"resume={path} holds no run" in capsys.readouterr().err


def test_a_full_disk_ends_the_run_with_the_checkpoints_before_it(
    config, tmp_path, monkeypatch, whole
):
    from subulp.lab.engine import checkpoint  # noqa: PLC0415

    save, calls = checkpoint.save_file, []

    def full(tensors, path):
        calls.append(path)
        if len(calls) == 3:
            path.write_bytes(b"a part")
            raise OSError(28, "No space left on device")
        save(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(
        OSError, match=r"^the checkpoint .* cannot be written: No space .* --resume"
    ):
        compare(config, out=tmp_path / "out", jobs=1)
    assert newest(tmp_path / "out", "master").name == "step-00000004"
    monkeypatch.undo()
    assert numbers(resume(tmp_path / "out", jobs=1)) == numbers(whole)


def test_a_full_disk_for_metrics_is_a_failure_and_no_wrong_input(
    small, tmp_path, monkeypatch, capsys
):
    def full(self, *args, **kwargs):
        raise OSError(28, "No space left on device")

    config = small()
    monkeypatch.setattr("subulp.lab.engine.run_directory.to_json", lambda *_, **__: "{}")
    monkeypatch.setattr("pathlib.Path.open", full)
    directory = comparison.RunDirectory(tmp_path, None)
    with pytest.raises(OSError, match=r"metrics\.jsonl cannot be written: No space left") as caught:
        directory.add_record(config)
    assert "[Errno" not in str(caught.value)


READ_ONLY = "mount -t tmpfs -o ro tmpfs {0} && {1} -m subulp train lm --steps 2 --out {0}/run"


def test_a_read_only_disk_is_an_error_before_any_training(tmp_path):
    namespace = ["unshare", "--user", "--map-root-user", "--mount"]
    possible = shutil.which("unshare") and not subprocess.call([*namespace, "true"])
    if not possible:
        # Without a namespace to mount in, a file in the way stands for it.
        (tmp_path / "run").touch()
        assert main(["train", "lm", "--steps=2", f"--out={tmp_path}/run/run"]) == 2
        return
    script = READ_ONLY.format(tmp_path, sys.executable)
    command = [*namespace, "sh", "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == (
        f"error: out={tmp_path}/run cannot be made: read-only file system; give a folder that you "
        "may write to\n"
    )


# --------------------------------------------------------------------------------- one at a time


def test_two_processes_in_one_run_directory(whole, stopped, small, monkeypatch):
    monkeypatch.setattr("subulp.lab.engine.lock._PATIENCE", 0.0)
    monkeypatch.setattr(Lock.__init__, "__defaults__", (0.0,))
    before = (stopped / "metrics.jsonl").read_bytes()
    with Lock(stopped):
        for act in (
            lambda: resume(stopped),
            lambda: compare(small(), out=stopped, overwrite=True),
        ):
            with pytest.raises(BlockingIOError, match=rf"is in use: the process {os.getpid()} tr"):
                act()
    assert (stopped / "metrics.jsonl").read_bytes() == before
    resume(stopped, jobs=1)


def _hold(lock, pipe):
    pipe.send("held")
    pipe.recv()


def test_a_worker_holds_the_lock_of_its_parent(tmp_path):
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    lock = Lock(tmp_path)
    worker = context.Process(target=_hold, args=(lock, theirs))
    worker.start()
    assert ours.recv() == "held"
    lock.release()
    with pytest.raises(BlockingIOError):
        Lock(tmp_path, patience=0)
    ours.send("done")
    worker.join()
    Lock(tmp_path, patience=0).release()


# --------------------------------------------------------------------------------------- signals


def arguments(config, out, jobs):
    sizes = ("steps", "batch_size", "context", "width", "layers", "heads")
    options = (*sizes, "checkpoint_every", "log_every")
    changed = [f"--{name.replace('_', '-')}={getattr(config, name)}" for name in options]
    return ["lm", "--data", str(config.data), "--out", str(out), f"--jobs={jobs}", *changed]


@contextlib.contextmanager
def interruptible():
    """SIGINT as a terminal's processes have it: those of a shell's background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("signum", "jobs"), [(signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_a_signal_ends_the_command_with_the_way_to_go_on(small, tmp_path, signum, jobs):
    out = tmp_path / "a run"
    config = small(steps=100_000, checkpoint_every=50, log_every=1)
    command = [sys.executable, "-m", "subulp", "train", *arguments(config, out, jobs)]
    with interruptible():
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not list(out.glob("checkpoints/*/step-*/manifest.json")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signum)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signum
    assert errors.endswith(f"stopped; continue with\n  subulp train --resume '{out}'\n")
    assert "Traceback" not in errors
    # What trained has a checkpoint of the step where it was stopped.
    last = {record["precision"]: record["step"] for record in lines(out)}
    assert last
    assert {precision: int(newest(out, precision).name[5:]) for precision in last} == last
    Lock(out, patience=0).release()


def test_the_first_signal_asks_and_the_second_one_ends():
    with interruptible(), stop_requests() as stop:
        asked = []
        stop.on_request = lambda: asked.append(stop.signum)
        assert not stop()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop()
        assert asked == [signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_ignored_signals_stay_ignored_and_other_threads_get_none():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with stop_requests() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert not stop()
    finally:
        signal.signal(signal.SIGTERM, before)
    found = []

    def elsewhere():
        with stop_requests() as stop:
            found.append(stop())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [False]


def test_a_stop_before_the_first_step_makes_no_run(config, tmp_path, monkeypatch):
    stop = StopRequest()
    stop.request(signal.SIGTERM)
    monkeypatch.setattr(comparison, "stop_requests", lambda ranks: contextlib.nullcontext(stop))
    with pytest.raises(Interrupted):
        compare(config, out=tmp_path / "out", jobs=1)
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_when_one_run_fails_the_others_can_go_on(small, tmp_path, monkeypatch):
    """Master weights survive a learning rate that FP16 does not."""
    config = dataclasses.replace(
        small(dtype="fp16", precision=("nearest", "master")), steps=3000, lr=1e30, nonfinite="raise"
    )
    with pytest.raises(FloatingPointError, match="step "):
        compare(config, out=tmp_path / "out", jobs=2)
    Lock(tmp_path / "out", patience=0).release()


def test_workers_end_with_a_parent_that_was_killed(small, tmp_path):
    out = tmp_path / "out"
    config = small(steps=100_000, checkpoint_every=10)
    command = [sys.executable, "-m", "subulp", "train", *arguments(config, out, 2)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while not list(out.glob("checkpoints/*/step-*/manifest.json")):
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    # Nobody writes any more once the lock is free.
    with Lock(out, patience=30):
        before = sorted(out.rglob("*"))
        time.sleep(0.5)
        assert sorted(out.rglob("*")) == before
    assert parallel.default_jobs(1) == 1


def test_a_signal_while_the_ranks_agree_stops_them_all_one_step_later():
    """Only one of them has it then; stopping at once would leave the others waiting for it."""

    class Two:
        def highest(self, value):
            agreed = max(value, others)
            stop.request(signal.SIGINT)
            return agreed

    stop = SharedStopRequest(Two())
    others = 0
    assert not stop()
    assert stop()
    assert stop.signum == signal.SIGINT


def test_the_request_of_another_rank_is_one():
    class Two:
        def highest(self, value):
            return max(value, signal.SIGTERM)

    stop = SharedStopRequest(Two())
    assert stop()
    assert stop.signum == signal.SIGTERM
