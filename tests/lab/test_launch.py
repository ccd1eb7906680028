"""``subulp train`` in several processes, as users start it: by ``--ranks`` and by ``torchrun``."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

from subulp.lab.engine.launched import speaker_of

LM = [
    *("train", "lm", "--precision", "stochastic", "--batch-size", "4", "--context", "8"),
    *("--width", "16", "--layers", "1", "--heads", "2", "--watch-every", "20"),
]
STEPS = ["--steps", "60", "--eval-every", "30"]
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
SECONDS = 120


def begin(*words, by_torchrun=False):
    """A command that has just been started, on the CPU unless it says otherwise."""
    device = () if "--device" in words or "--resume" in words else ("--device", "cpu")
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            *(TORCHRUN if by_torchrun else []),
            "subulp",
            *map(str, (*words, *device)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def ended(process):
    """Exit code, standard output and errors of a command."""
    out, err = process.communicate(timeout=SECONDS)
    return process.returncode, out, err


def wait_for(path):
    deadline = time.monotonic() + SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} was never written"
        time.sleep(0.05)


def ranks_of(process):
    """The processes of the ranks that a launcher has started, by their number."""
    children = psutil.Process(process.pid).children()
    found = {int(child.environ()["RANK"]): child for child in children if "RANK" in child.environ()}
    assert sorted(found) == [0, 1]
    return found


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "small.txt"
    path.write_text("".join(f"{i} green bottles hanging on the wall,\n" for i in range(100)))
    return ["--data", path]


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """Metrics of a run that two ranks have made without a stop, and what was printed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    code, printed, said = ended(begin(*LM, *STEPS, *data, "--ranks", 2, "--out", out))
    assert code == 0, said
    return metrics(out), printed, said


def metrics(out):
    """What a run has found, without times, memory and how sums over shards are rounded."""
    (run,) = json.loads((out / "summary.json").read_text())["runs"]
    return {k: run[k] for k in ("val_loss", "train_loss", "ranks", "steps", "lost_arithmetic")}


def test_one_rank_speaks(whole):
    _, printed, said = whole
    assert printed.count("descent") == 1
    assert printed.count("stochastic") == 1
    assert said.count("step 60/60") == 1
    assert said.count("wrote ") == 1
    assert "Warning" not in said


def test_torchrun_starts_the_same(whole, data, tmp_path):
    out = tmp_path / "run"
    words = [*LM, *STEPS, *data, "--parallel", "fsdp", "--json", "--out", out]
    code, printed, said = ended(begin(*words, by_torchrun=True))
    assert code == 0, said
    (run,) = json.loads(printed)["runs"]
    assert metrics(out) == whole[0]
    assert run["val_loss"] == whole[0]["val_loss"]


@pytest.mark.parametrize("lost", [0, 1])
def test_all_end_with_a_rank_that_is_killed_and_resume(whole, data, tmp_path, lost, monkeypatch):
    out, temporary = tmp_path / "run", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    words = [*LM, *STEPS, *data, "--checkpoint-every", "5", "--ranks", 2, "--out", out]
    process = begin(*words)
    wait_for(out / "checkpoints" / "stochastic-seed-0" / "step-00000010")
    ranks = ranks_of(process)
    ranks[lost].kill()
    code, printed, said = ended(process)
    assert (code, printed) == (1, "")
    assert f"error: rank {lost} was killed by SIGKILL" in said
    who = "rank 1: " if lost == 0 else ""
    assert f"error: {who}another rank has ended; continue with subulp train --resume {out}" in said
    assert said.count("error: ") == 2
    assert "Traceback" not in said
    assert not any(child.is_running() for child in ranks.values())

    # As many ranks as before, without a word.
    resumed = begin("train", "--resume", out)
    wait_for(out / "checkpoints" / "stochastic-seed-0" / "step-00000030")
    resumed.send_signal(signal.SIGTERM if lost else signal.SIGINT)
    code, _, said = ended(resumed)
    assert code == (143 if lost else 130)
    assert said.count(f"stopped; continue with\n  subulp train --resume {out}") == 1
    assert "Traceback" not in said

    code, printed, said = ended(begin("train", "--resume", out))
    assert code == 0, said
    assert metrics(out) == whole[0]
    # torch alone keeps something: the compiler's cache.
    assert not [left for left in temporary.iterdir() if "torchinductor" not in left.name]


def test_ranks_end_with_their_launcher(data, tmp_path):
    out = tmp_path / "run"
    process = begin(*LM, *data, "--steps", "100000", "--ranks", 2, "--out", out)
    wait_for(out / "config.json")
    ranks = ranks_of(process)
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(list(ranks.values()), timeout=30)
    assert not alive


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*LM, "--ranks", "2", "--data", "missing.txt"], "missing.txt does not exist"),
        ([*LM, "--ranks", "0"], "ranks=0 is out of range"),
        ([*LM, "--parallel", "fsdp"], "parallel=fsdp has no effect on one process"),
        (["train", "--resume", "missing", "--ranks", "2"], "resume=missing holds no run"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_said_once(words, message, tmp_path):
    code, printed, said = ended(begin(*words))
    assert (code, printed) == (2, "")
    assert said.count("error: ") == 1
    assert message in said


def test_another_number_than_torchrun_has_started_is_refused(data):
    code, _, said = ended(begin(*LM, *data, "--ranks", 3, by_torchrun=True))
    assert code == 1  # torchrun's own
    assert said.count("error: ranks=3 and the 2 processes that were started contradict") == 1


def test_the_first_rank_speaks_even_if_it_is_late(tmp_path):
    """The launcher ends it as soon as another one has ended."""
    script = tmp_path / "late.py"
    script.write_text(
        "import os, sys, time\n"
        "time.sleep(5 if os.environ['RANK'] == '0' else 0)\n"
        "from subulp.lab.cli import main\n"
        "sys.exit(main(['train', 'lm', '--data', 'missing.txt']))\n"
    )
    words = ["-m", *TORCHRUN[:-1], script]
    result = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert result.stderr.count("error: ") == 1, result.stderr
    assert "\nerror: " in f"\n{result.stderr}"
    assert "missing.txt does not exist" in result.stderr


def test_a_rank_that_is_alone_with_an_error_speaks(monkeypatch):
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in {**ranks, "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    assert speaker_of(ValueError("missing")) == "rank 1: "
    assert waited == [60]
    assert speaker_of(KeyboardInterrupt()) is None
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert speaker_of(ValueError("missing")) is None
    assert waited == [60]


def test_a_file_of_options_has_them_too(whole, data, tmp_path):
    """Also the configuration of an earlier run."""
    source = tmp_path / "run.toml"
    lines = ("ranks = 2", "parallel = 'fsdp'", "steps = 4", "eval_every = 2", "log = 'tensorboard'")
    source.write_text("\n".join(lines))
    out = tmp_path / "run"
    code, _, said = ended(begin(*LM, *data, "--config", source, "--out", out))
    assert code == 0, said
    assert list((out / "tensorboard").iterdir())
    config = json.loads((out / "config.json").read_text())
    assert (config["ranks"], config["parallel"], config["jobs"]) == (2, "fsdp", 1)
    again = tmp_path / "again"
    # torchrun would take --log for the beginning of an option of its own.
    words = ["train", "lm", "--config", out / "config.json", "--out", again, "--log", "tensorboard"]
    code, _, said = ended(begin(*words))
    assert code == 0, said
    assert metrics(again) == metrics(out)


@pytest.mark.gpu
def test_ranks_take_a_gpu_each(data, tmp_path):
    out = tmp_path / "run"
    words = [*LM, *STEPS, *data, "--device", "cuda", "--ranks", 2, "--parallel", "fsdp"]
    code, _, said = ended(begin(*words, "--out", out))
    if torch.cuda.device_count() < 2:
        assert code == 2
        assert "device=cuda has 1 GPUs here for 2 ranks: start fewer, or use cpu" in said
    else:
        assert code == 0, said
        assert metrics(out)["ranks"] == 2
