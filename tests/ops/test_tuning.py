"""Which configuration runs: what is measured, kept, read again and refused, with a given clock."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton.runtime.errors import OutOfResources

from subulp.ops.triton import choices, tuning

GPU = torch.device("cuda", 0)
TABLE = {"TILE": 64, "num_warps": 4}, {"TILE": 128, "num_warps": 8}, {"TILE": 32, "num_warps": 4}
FLAGS = {"FORMAT": "bf16", "rows": 1024}


class Clock:
    """Times of configurations, instead of a GPU's; what it has timed, and how often scratch tensors
    were made."""

    def __init__(self, *seconds: float | Exception) -> None:
        self.seconds, self.timed, self.made = seconds, [], 0

    def scratch(self) -> tuning.Run:
        self.made += 1
        return self.timed.append

    def time(self, call, device) -> float:
        assert device == GPU
        call()
        found = self.seconds[TABLE.index(self.timed[-1])]
        if isinstance(found, Exception):
            raise found
        return found

    def choose(self, kernel: str = "a kernel", flags=FLAGS, device=GPU) -> tuning.Configuration:
        return tuning.choose(kernel, TABLE, flags, device, self.scratch)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """The file of choices, where a GPU is pretended and nothing is known of it."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("SUBULP_CACHE", str(folder))
    monkeypatch.delenv("SUBULP_TUNE", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(tuning, "_chosen", {})
    monkeypatch.setattr(tuning, "_files", {})
    return folder / choices.FILE_NAME


@pytest.fixture
def clock(cache, monkeypatch):
    """Makes the clock that times."""

    def make(*seconds: float | Exception) -> Clock:
        made = Clock(*seconds)
        monkeypatch.setattr(tuning, "timer", made.time)
        monkeypatch.setenv("SUBULP_TUNE", "1")
        return made

    return make


def test_nothing_is_measured_unless_asked_for(cache, clock, monkeypatch):
    used = clock(3.0, 1.0, 2.0)
    for value in ("", "0"):
        monkeypatch.setenv("SUBULP_TUNE", value)
        assert used.choose() == TABLE[0]
    monkeypatch.delenv("SUBULP_TUNE")
    assert used.choose() == TABLE[0]
    assert used.made == 0
    assert not cache.parent.exists()
    assert [choice.source for choice in tuning.chosen()] == ["default"]
    # From then on, also what has been launched before.
    monkeypatch.setenv("SUBULP_TUNE", "1")
    assert used.choose() == TABLE[1]


def test_the_fastest_is_measured_once(clock):
    used = clock(3.0, 1.0, 2.0)
    assert [used.choose() for _ in range(3)] == [TABLE[1]] * 3
    assert used.timed == list(TABLE)
    assert used.made == 1
    assert [(c.source, c.configuration) for c in tuning.chosen()] == [("measured", TABLE[1])]


@pytest.mark.parametrize(("seconds", "best"), [((1.0, 0.98, 2.0), 0), ((1.0, 0.96, 0.95), 2)])
def test_the_default_stays_unless_another_is_clearly_faster(clock, seconds, best):
    assert clock(*seconds).choose() == TABLE[best]


def test_another_process_reads_what_was_measured(clock, cache, monkeypatch):
    assert clock(3.0, 1.0, 2.0).choose() == TABLE[1]
    tuning.forget()
    later = clock(1.0, 2.0, 3.0)
    assert later.choose() == TABLE[1]
    tuning.forget()
    monkeypatch.delenv("SUBULP_TUNE")
    assert later.choose() == TABLE[1]
    assert later.made == 0
    assert [choice.source for choice in tuning.chosen()] == ["file"]
    # Another configuration's file is another choice.
    monkeypatch.setenv("SUBULP_CACHE", str(cache.parent / "other"))
    tuning.forget()
    assert later.choose() == TABLE[0]


def test_what_was_looked_up_is_not_read_again(clock, monkeypatch):
    def refuse(*args):
        raise AssertionError("looked up again")

    used = clock(3.0, 1.0, 2.0)
    used.choose()
    for name in ("read", "add", "path"):
        monkeypatch.setattr(choices, name, refuse)
    for name in ("get_device_name", "get_device_capability", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    assert used.choose() == TABLE[1]
    monkeypatch.delenv("SUBULP_TUNE")
    assert used.choose() == TABLE[1]


def test_everything_that_decides_has_a_choice_of_its_own(clock, monkeypatch):
    used = clock(3.0, 1.0, 2.0)
    used.choose()
    used.choose("another kernel")
    used.choose(flags={**FLAGS, "rows": 2048})
    used.choose(flags={**FLAGS, "FORMAT": "fp16"})
    assert used.made == 4
    for owner, name, value in (
        (torch.cuda, "get_device_name", lambda device: "another GPU"),
        (torch.cuda, "get_device_capability", lambda device: (10, 0)),
        (tuning.triton, "__version__", "3.99.0"),
    ):
        tuning.forget()
        monkeypatch.setattr(owner, name, value)
        made = used.made
        used.choose()
        used.choose()
        assert used.made == made + 1, name


def test_sizes_are_powers_of_two():
    assert [tuning.rounded(n) for n in (0, 1, 2, 3, 1024, 1025)] == [1, 1, 2, 4, 1024, 2048]
    assert [tuning.rounded(n, 64) for n in (64, 65, 10**9)] == [64, 64, 64]


def test_what_a_table_does_not_have_is_ignored(clock, cache, monkeypatch):
    used = clock(3.0, 1.0, 2.0)
    used.choose()
    record = json.loads(cache.read_text())
    (name,) = record["choices"]
    for strange in (
        {"TILE": 96, "num_warps": 4},
        {"TILE": 64},
        {**TABLE[1], "BATCH": 1},
        {},
        {"TILE": "128", "num_warps": 8},
        [1],
        None,
    ):
        cache.write_text(json.dumps({**record, "choices": {name: strange}}))
        tuning.forget()
        monkeypatch.setenv("SUBULP_TUNE", "0")
        assert used.choose() == TABLE[0]
        assert used.made == 1
    # It is replaced by what is measured.
    monkeypatch.setenv("SUBULP_TUNE", "1")
    assert used.choose() == TABLE[1]
    assert json.loads(cache.read_text())["choices"] == {name: TABLE[1]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"[]",
        b"3",
        b"{}",
        b'{"version": 0, "choices": {}}',
        b'{"version": 1, "choices": []}',
        b"[" * 100_000,
    ],
    ids=lambda content: repr(content[:20]),
)
def test_a_file_that_is_none_is_ignored_by_name(clock, cache, content, monkeypatch):
    cache.parent.mkdir()
    cache.write_bytes(content)
    used = clock(3.0, 1.0, 2.0)
    monkeypatch.setenv("SUBULP_TUNE", "0")
    with pytest.warns(RuntimeWarning, match=f"{cache}.*SUBULP_CACHE"):
        assert used.choose() == TABLE[0]
    monkeypatch.setenv("SUBULP_TUNE", "1")
    with pytest.warns(RuntimeWarning, match=str(cache)):
        assert used.choose() == TABLE[1]
    tuning.forget()
    with warnings.catch_warnings(action="error"):
        assert used.choose() == TABLE[1]
    assert used.made == 1


def test_where_nothing_can_be_kept_a_process_keeps_what_it_measured(clock, tmp_path, monkeypatch):
    used = clock(3.0, 1.0, 2.0)
    Path(tmp_path, "file").touch()
    monkeypatch.setenv("SUBULP_CACHE", str(tmp_path / "file" / "below"))
    with pytest.warns(RuntimeWarning) as told:
        assert used.choose() == TABLE[1]
    words = {str(warning.message).split("(")[0] for warning in told}
    file = choices.path()
    assert words == {f"{file} cannot be read ", f"{file} cannot be written "}
    with warnings.catch_warnings(action="error"):
        assert used.choose() == TABLE[1]
    assert used.made == 1


def test_a_file_is_replaced_as_a_whole_or_not_at_all(clock, cache, monkeypatch):
    used = clock(3.0, 1.0, 2.0)
    used.choose()
    before = cache.read_bytes()

    def fail(*args):
        raise OSError("no space left")

    monkeypatch.setattr(choices.os, "replace", fail)
    with pytest.warns(RuntimeWarning, match=f"{cache} cannot be written .no space left"):
        used.choose("another kernel")
    assert cache.read_bytes() == before
    assert list(cache.parent.iterdir()) == [cache]


@pytest.mark.parametrize("value", ["2", "true", "yes", " 1", "-1", "on"])
def test_strange_values_are_refused(clock, value, monkeypatch):
    used = clock(3.0, 1.0, 2.0)
    monkeypatch.setenv("SUBULP_TUNE", value)
    with pytest.raises(ValueError, match=f"SUBULP_TUNE='{value}' is unknown"):
        used.choose()


def test_a_file_is_no_folder(clock, tmp_path, monkeypatch):
    Path(tmp_path, "file").touch()
    monkeypatch.setenv("SUBULP_CACHE", str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"SUBULP_CACHE='.*file' is a file: name a folder"):
        clock(1.0, 2.0, 3.0).choose()


def test_where_the_file_lies(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("SUBULP_CACHE", "")
    below = Path("subulp", choices.FILE_NAME)
    assert choices.path() == tmp_path / ".cache" / below
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert choices.path() == tmp_path / ".cache" / below
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert choices.path() == Path("/elsewhere") / below
    monkeypatch.setenv("SUBULP_CACHE", "~/mine")
    assert choices.path() == tmp_path / "mine" / choices.FILE_NAME


def test_nothing_is_measured_while_a_graph_is_captured(clock, monkeypatch):
    used = clock(3.0, 1.0, 2.0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert used.choose() == TABLE[0]
    assert used.made == 0
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert used.choose() == TABLE[1]


def test_what_a_device_has_no_room_for(clock):
    small = OutOfResources(300_000, 100_000, "shared memory")
    assert clock(2.0, small, 1.0).choose() == TABLE[2]
    tuning.forget()
    assert clock(2.0, small, small).choose("another kernel") == TABLE[0]


@pytest.mark.parametrize("error", [tuning.TooLargeError, torch.OutOfMemoryError])
def test_without_memory_for_scratch_tensors_the_default_stays(clock, cache, error):
    used, calls = clock(3.0, 1.0, 2.0), []

    def fail():
        calls.append(1)
        raise error

    used.scratch = fail
    with pytest.warns(RuntimeWarning, match="a kernel is not measured: there is no memory"):
        assert used.choose() == TABLE[0]
    assert used.choose() == TABLE[0]
    assert len(calls) == 1
    assert not cache.exists()


def test_other_errors_are_raised_and_nothing_is_kept(clock, cache):
    used = clock(3.0, RuntimeError("an illegal memory access"), 2.0)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        used.choose()
    assert tuning.chosen() == []
    assert not cache.exists()


def test_only_the_gpus_of_nvidia_are_tuned(clock, monkeypatch):
    used = clock(3.0, 1.0, 2.0)
    assert used.choose(device=torch.device("cpu")) == TABLE[0]
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert used.choose() == TABLE[0]
    assert used.made == 0


def test_a_configuration_can_be_fixed(clock):
    used = clock(3.0, 1.0, 2.0)
    with tuning.fixed("a kernel", TABLE[2]):
        assert used.choose() == TABLE[2]
        assert used.choose(device=torch.device("cpu")) == TABLE[2]
        assert used.choose("another kernel") == TABLE[1]
    assert used.choose() == TABLE[1]


def test_threads_measure_once(clock):
    used, found = clock(3.0, 1.0, 2.0), []
    barrier = threading.Barrier(4)

    def run() -> None:
        barrier.wait()
        found.append(used.choose())

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [TABLE[1]] * 4
    assert used.made == 1


# Without torch, whose import takes seconds.
WRITER = """
import importlib.util, sys, warnings
from pathlib import Path
warnings.simplefilter("error")
source, file, rank = sys.argv[1:]
spec = importlib.util.spec_from_file_location("choices", source)
choices = importlib.util.module_from_spec(spec)
spec.loader.exec_module(choices)
for i in range(150):
    choices.add(Path(file), f"kernel {rank} {i % 10}", {"num_warps": 2**i if i < 10 else i})
    assert len(choices.read(Path(file))) >= 1
"""


def test_many_processes_write_at_once(cache):
    """Whoever reads finds a whole file, always; the last one's choices are among them."""
    command = [sys.executable, "-c", WRITER, choices.__file__, str(cache)]
    writers = [subprocess.Popen([*command, str(rank)]) for rank in range(3)]
    with warnings.catch_warnings(action="error"):
        while any(writer.poll() is None for writer in writers):
            for choice in choices.read(cache).values():
                assert choice.keys() == {"num_warps"}
        assert [writer.returncode for writer in writers] == [0, 0, 0]
        found = choices.read(cache)
    assert any(all(f"kernel {rank} {i}" in found for i in range(10)) for rank in range(3))
    assert list(cache.parent.iterdir()) == [cache]
