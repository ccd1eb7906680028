"""What would not fit into memory is refused before it is allocated, with both numbers of bytes."""

import gzip
import os
import re

import pytest
import torch

from subulp.lab.cli import main
from subulp.lab.data import room
from subulp.lab.engine.task import task_of
from subulp.lab.tasks.ctr.config import CTRConfig
from subulp.lab.tasks.image.config import ImageConfig
from subulp.lab.tasks.lm.config import LMConfig
from subulp.lab.tasks.xmc.config import XMCConfig

_REFUSED = re.compile(
    r"error: .* needs at least [\d,]+ bytes of memory \(.*\), and [\d,]+ \(.*\) are available: "
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def told(arguments, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("error: ")
    assert not os.path.exists("runs")
    return captured.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["lm", "--batch-size", "1000000000"],
        ["lm", "--width", "1000000"],
        ["lm", "--width", str(4 * 10**30)],
        ["lm", "--layers", "1000000000000"],
        ["image", "--width", "1000000"],
        ["image", "--width", str(10**40)],
        ["xmc", "--width", "100000000"],
        ["xmc", "--layers", "1000000000"],
        ["ctr", "--dim", "100000000"],
        ["ctr", "--bottom", "100000000000"],
        ["ctr", "--top", "1000000,1000000"],
    ],
    ids=" ".join,
)
def test_options_of_absurd_size(arguments, capsys):
    assert _REFUSED.search(told(["train", *arguments], capsys))


def test_several_at_a_time_that_do_not_fit_together(monkeypatch, capsys, text_file):
    monkeypatch.setattr("subulp.lab.compare.available_memory", lambda: 7_000_000)
    command = ["train", "lm", "--data", str(text_file), "--precision", "master,fp32"]
    message = told([*command, "--jobs", "2"], capsys)
    assert "jobs=2 needs at least" in message
    assert "give fewer jobs" in message


def test_fewer_jobs_where_memory_is_short(monkeypatch, small):
    from subulp.lab.compare import _fitting_jobs  # noqa: PLC0415
    from subulp.lab.engine.parallel import PlannedRun  # noqa: PLC0415

    config = small()
    data = task_of(config).load(config)
    runs = [PlannedRun(variant, seed) for variant in config.variants for seed in range(9)]
    one = max(task_of(config).least_memory(config, data, variant) for variant in config.variants)
    monkeypatch.setattr("subulp.lab.compare.default_jobs", lambda count: 8)
    for factor, jobs in ((1.5, 1), (3.5, 3), (100, 8)):
        monkeypatch.setattr("subulp.lab.compare.available_memory", lambda f=factor: int(f * one))
        assert _fitting_jobs(config, data, runs, None, torch.device("cpu")) == jobs


# The least that is said to be needed is what is measured, and not a guess ------------------------


@pytest.mark.parametrize(
    ("config", "variants"),
    [
        (LMConfig(device="cpu"), ("master", "nearest", "collage-plus")),
        (LMConfig(device="cpu", tie_head=True, precision=("fp32",)), ("fp32",)),
        (ImageConfig(device="cpu", width=8), ("fp32", "amp", "extra-bits-8", "nearest")),
        (XMCConfig(device="cpu", precision=("fp32", "fp8", "renee", "int4")), None),
        (CTRConfig(device="cpu", precision=("fp32", "int8")), None),
    ],
    ids=["lm", "lm-tied", "image", "xmc", "ctr"],
)
def test_the_least_memory_is_no_more_than_what_is_there(config, variants):
    task = task_of(config)
    data = task.load(config)
    for variant in variants or config.variants:
        work = task.build(config, data, variant, 0, torch.device("cpu"))
        rows = {
            id(p)
            for group in (work.rows.param_groups if work.rows else ())
            for p in group["params"]
        }
        own = sum(b.nbytes for b in work.model.buffers())
        own += sum(p.nbytes for p in work.model.parameters() if id(p) in rows)
        dense = sum(p.numel() for p in work.model.parameters() if id(p) not in rows)
        kept = int(dense * work.optimizer.bytes_per_parameter()["total"])
        least = task.least_memory(config, data, variant)
        # Beside batches, which are an addend of some MiB.
        assert 0.4 * (own + kept) < least < 1.1 * (own + kept) + 40e6, variant


# Files --------------------------------------------------------------------------------------------


def test_a_text_that_decompresses_to_more_than_there_is(monkeypatch, tmp_path, capsys):
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b"ab" * 40_000_000))
    assert path.stat().st_size < 200_000
    monkeypatch.setattr("subulp.lab.tasks.lm.text.available_memory", lambda: 100_000_000)
    message = told(["train", "lm", "--data", str(path)], capsys)
    assert _REFUSED.search(message)
    assert "bytes decompressed so far" in message


def test_a_large_file_is_refused_before_it_is_read(tmp_path, capsys):
    path = tmp_path / "sparse.txt"
    with path.open("wb") as file:
        file.truncate(1 << 43)
    message = told(["train", "lm", "--data", str(path)], capsys)
    assert _REFUSED.search(message)
    assert f"of {1 << 43:,} bytes," in message


@pytest.mark.parametrize("kind", ["pipe", "zero", "link"])
def test_pipes_and_devices(kind, tmp_path, capsys):
    path = tmp_path / "data"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/dev/zero")
    else:
        path = "/dev/zero"
    what = "a pipe" if kind == "pipe" else "a device"
    assert f"data={path} is {what}: give a text file" in told(
        ["train", "lm", "--data", str(path)], capsys
    )
    for command in (["xmc", "--data", str(path)], ["ctr", "--data", f"criteo:{path}"]):
        assert "is not a f" in told(["train", *command], capsys)
    folder = tmp_path / "cifar"
    folder.mkdir()
    (folder / "data_batch_1.bin").symlink_to(path)
    assert f"is {what}" in told(["train", "image", "--data", f"cifar10:{folder}"], capsys)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").symlink_to(path)
    for command in (
        ["report", str(run)],
        ["train", "--resume", str(run)],
        ["predict", str(run), "x"],
    ):
        assert told(command, capsys)


@pytest.mark.parametrize("labels", [2_000_000_000, 2**31 - 1])
def test_a_header_with_very_many_labels(labels, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(room, "available_memory", lambda: 4_000_000_000)
    for part in ("trn", "tst"):
        (tmp_path / f"{part}_X.txt").write_text(f"a {part}\n")
        (tmp_path / f"{part}_X_Y.txt").write_text(f"1 {labels}\n0:1\n")
    message = told(["train", "xmc", "--data", str(tmp_path)], capsys)
    assert _REFUSED.search(message)
    assert "trn_X_Y.txt:1" in message


def test_what_the_system_says_of_memory():
    there = room.available_memory()
    assert there is None or 1 << 20 < there < 1 << 50
    room.check_room("nothing", 0, "")
    with pytest.raises(ValueError, match=r"it needs at least 9,000 bytes of memory \(8\.8 KiB\)"):
        room.check_room("it", 9000, "give less", 4096)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1023, "1,023 bytes"), (1536, "1.5 KiB"), (2**40, "1.0 TiB")],
)
def test_sizes_as_text(count, text):
    assert room.size_text(count) == text
