"""Runs whose data have relative paths are resumed in any working directory."""

import os
from pathlib import Path

import pytest

from subulp.lab.compare import compare, resume
from subulp.lab.engine.stopping import Interrupted
from subulp.lab.tasks.ctr.config import CTRConfig
from subulp.lab.tasks.ctr.task import load as load_ctr
from subulp.lab.tasks.image.config import ImageConfig
from subulp.lab.tasks.lm.config import LMConfig
from subulp.lab.tasks.xmc.config import XMCConfig
from tests.lab.engine.resuming import numbers, stopped_after
from tests.lab.tasks.ctr.support import SMALL as SMALL_CTR
from tests.lab.tasks.ctr.support import write_clicks

PATHS = [
    (LMConfig(data=Path("a/text.gz")), "data", "{}/a/text.gz"),
    (LMConfig(), "data", "None"),
    (ImageConfig(data="cifar10:a b"), "data", "cifar10:{}/a b"),
    (ImageConfig(data="cifar10:/a"), "data", "cifar10:/a"),
    (ImageConfig(), "data", "digits"),
    (XMCConfig(data=Path("../x")), "data", "{}/../x"),
    (XMCConfig(encoder="bert"), "encoder", "{}/bert"),
    (XMCConfig(), "encoder", "bag"),
    (CTRConfig(data="adult:x"), "data", "adult:{}/x"),
    (CTRConfig(data="criteo:day_*.gz,/last"), "data", "criteo:{}/day_*.gz,/last"),
    (CTRConfig(data="csv:x", columns=Path("y.toml")), "columns", "{}/y.toml"),
    (CTRConfig(data="csv:x", test=Path("z")), "test", "{}/z"),
    (CTRConfig(data="unknown:x"), "data", "unknown:x"),
]


@pytest.mark.parametrize(
    ("config", "name", "expected"), PATHS, ids=[f"{c.task}-{i}" for i, (c, *_) in enumerate(PATHS)]
)
def test_paths_are_absolute_and_nothing_else_changes(config, name, expected):
    found = config.located()
    assert str(getattr(found, name)) == expected.format(Path.cwd())
    changed = [n for n in vars(config) if getattr(found, n) != getattr(config, n)]
    assert set(changed) <= {"data", "encoder", "columns", "test"}
    assert found.located() == found
    assert found.variants == config.variants


def test_a_run_is_resumed_in_another_working_directory(small, text_file, tmp_path, monkeypatch):
    relative = Path(os.path.relpath(text_file, tmp_path))
    monkeypatch.chdir(tmp_path)
    whole = compare(small(data=relative), out=Path("whole"), jobs=1)
    with monkeypatch.context() as patch:
        stopped_after(2, patch)
        with pytest.raises(Interrupted):
            compare(small(data=relative), out=Path("stopped"), jobs=1)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert numbers(resume(Path("../stopped"), jobs=1)) == numbers(whole)


@pytest.mark.parametrize("folder", ["with [1] *", "a,b"])
def test_files_of_clicks_in_a_folder_whose_name_says_something_in_patterns(
    tmp_path, monkeypatch, folder
):
    (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / folder)
    data = Path(write_clicks(tmp_path / folder).removeprefix("criteo:"))
    found = CTRConfig(**SMALL_CTR, data=f"criteo:{data.name[:-1]}?").located()
    assert len(load_ctr(found).train) > 0
