"""One checkpoint: whole or not there, and nothing in it is believed unseen."""

import errno
import json
import random
import shutil
import subprocess
import sys

import pytest
import torch

from subulp.lab.engine import checkpoint
from subulp.lab.engine.checkpoint import MANIFEST, STATE, TENSORS, Header
from subulp.lab.engine.files import UnwritableError
from subulp.lab.engine.sealed import DamagedError, fingerprint, sum_of

HEADER = Header("lm", "master", 0, 7, {"lr": 0.1}, 2.5)
STATE_ = {"weights": torch.arange(12.0).view(3, 4), "step": 7, "rates": (0.1, float("inf"))}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "run" / "step-00000007"
    checkpoint.write(path, HEADER, STATE_)
    return path


def test_what_was_written_is_read(path):
    header, state = checkpoint.read(path)
    assert header == checkpoint.read_header(path) == checkpoint.check(path) == HEADER
    assert torch.equal(state.pop("weights"), STATE_["weights"])
    assert state == {"step": 7, "rates": (0.1, float("inf"))}
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    modes = {file.stat().st_mode for file in path.iterdir()}
    assert len(modes) == 1


def test_another_checkpoint_takes_its_place(path):
    checkpoint.write(path, HEADER, {"new": 1})
    assert checkpoint.read(path)[1] == {"new": 1}
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("name", [TENSORS, STATE, MANIFEST])
def test_a_missing_file_is_damage(path, name):
    (path / name).unlink()
    with pytest.raises(DamagedError, match=f"{name} is missing"):
        checkpoint.read(path)


@pytest.mark.parametrize("name", [TENSORS, STATE, MANIFEST])
def test_a_file_that_is_cut_off_is_damage(path, name):
    raw = (path / name).read_bytes()
    for size in {0, 1, len(raw) // 2, len(raw) - 2}:
        (path / name).write_bytes(raw[:size])
        with pytest.raises(DamagedError, match=f"{name} is damaged"):
            checkpoint.read(path)


@pytest.mark.parametrize("name", [TENSORS, STATE, MANIFEST])
def test_every_flipped_bit_is_damage(path, name):
    raw = bytearray((path / name).read_bytes())
    generator = random.Random(0)
    for _ in range(200):
        byte, bit = generator.randrange(len(raw)), 1 << generator.randrange(8)
        raw[byte] ^= bit
        (path / name).write_bytes(raw)
        with pytest.raises(DamagedError, match=r"is damaged"):
            checkpoint.read(path)
        raw[byte] ^= bit


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "other"}', "[" * 100_000, "\0"])
def test_a_foreign_manifest_is_damage(path, text):
    (path / MANIFEST).write_text(text)
    with pytest.raises(DamagedError, match=r"manifest\.json is damaged"):
        checkpoint.read(path)


def resigned(path, **changes):
    """Change a manifest, with the right sum: as a version of subulp, or a foe, would write it."""
    manifest = {**json.loads((path / MANIFEST).read_text()), **changes}
    del manifest["sha256"]
    manifest["sha256"] = sum_of(manifest)
    (path / MANIFEST).write_text(json.dumps(manifest))


def test_a_newer_version_is_named_and_is_no_damage(path):
    resigned(path, version=2)
    with pytest.raises(ValueError, match=r"version 2 of the format, and this subulp reads up to 1"):
        checkpoint.read(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "7"},
        {"seed": None},
        {"files": {}},
        {"files": {TENSORS: {}, STATE: {}}},
        {"files": {"../../x": {"size": 1, "sha256": ""}}},
        {"config": []},
        {"version": 0.5, "task": 1},
    ],
    ids=str,
)
def test_a_manifest_of_wrong_types_is_no_manifest(path, changes):
    resigned(path, **changes)
    with pytest.raises(DamagedError, match="no manifest of version 1"):
        checkpoint.read(path)


def test_a_state_that_is_pickled_is_not_run(path, tmp_path):
    """A foe can give any bytes the right sums: they are read as data."""
    marker = tmp_path / "ran"
    torch.save({"x": _Marks(str(marker))}, path / TENSORS)
    resigned(path, files={n: fingerprint(path / n) for n in (TENSORS, STATE)})
    with pytest.raises(DamagedError, match="is damaged"):
        checkpoint.read(path)
    assert not marker.exists()


class _Marks:
    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return open, (self._path, "w")


# ------------------------------------------------------------------------- writing goes wrong


@pytest.mark.parametrize("place", ["save_file", "sync", "_write_json"])
def test_a_write_that_fails_leaves_the_old_checkpoint(path, monkeypatch, place):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, place, full)
    for name in (path.name, "step-00000009"):
        with pytest.raises(UnwritableError, match="No space left on device") as caught:
            checkpoint.write(path.with_name(name), HEADER, {"new": 1})
        assert caught.value.errno == errno.ENOSPC
    assert checkpoint.read(path)[1]["step"] == 7
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(UnwritableError, match=r"run/step-1 cannot be written: .*irector"):
        checkpoint.write(tmp_path / "run" / "step-1", HEADER, STATE_)


FULL_DISK = """
import sys
from pathlib import Path
import torch
from subulp.lab.engine import checkpoint
folder = Path(sys.argv[1])
header = checkpoint.Header("lm", "master", 0, 1, {})
checkpoint.write(folder / "small", header, {"x": torch.arange(20_000.0)})
for size in (200_000, 100_000, 40_000, 20_000):
    try:
        for i in range(20):
            checkpoint.write(folder / f"large-{size}-{i}", header, {"x": torch.arange(float(size))})
    except checkpoint.UnwritableError as error:
        assert "No space left on device" in str(error), error
    else:
        raise AssertionError("the disk is not full")
    assert not list(folder.glob(".*")), list(folder.iterdir())
for path in folder.iterdir():
    checkpoint.read(path)
print("whole", len(list(folder.iterdir())))
"""


def test_a_full_disk_costs_only_the_checkpoint_that_it_has_no_room_for(tmp_path):
    """On a real file system of half a megabyte, in a mount namespace that ends with the test."""
    namespace = ["unshare", "--user", "--map-root-user", "--mount"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*namespace, "true"], check=False).returncode
    ):
        pytest.skip("no namespace to mount in; the simulated failures above stand for it")
    script = f'mount -t tmpfs -o size=512k tmpfs {tmp_path} && exec "$0" -c "$1" {tmp_path}'
    result = subprocess.run(
        [*namespace, "sh", "-c", script, sys.executable, FULL_DISK],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("whole")
