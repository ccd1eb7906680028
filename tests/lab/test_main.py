"""``python -m subulp``: without the lab's packages it names them."""

import sys
from importlib import metadata

import pytest

from subulp import __main__ as entry
from subulp import lab
from subulp.lab import cli


def test_all_packages_of_the_lab_are_named(monkeypatch):
    lines = ["torch>=2.11", "cyclopts>=5; extra == 'lab'", 'rich>=13; extra == "lab"']
    monkeypatch.setattr(metadata, "requires", lambda name: [*lines, "pytest; extra == 'test'"])
    assert entry._packages("rich.console") == "'cyclopts>=5' 'rich>=13'"


@pytest.mark.parametrize("found", [None, []])
def test_without_a_record_of_them_the_missing_one_is(monkeypatch, found):
    monkeypatch.setattr(metadata, "requires", lambda name: found)
    assert entry._packages("rich.console") == "rich"


def test_a_package_that_was_never_installed(monkeypatch):
    def requires(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    assert entry._packages("cyclopts") == "cyclopts"


def test_ctrl_c_before_there_is_a_command_line(monkeypatch, capsys):
    class Loading:
        def find_spec(self, name, path, target=None):
            if name == cli.__name__:
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, cli.__name__)
    monkeypatch.delattr(lab, "cli")
    monkeypatch.setattr(sys, "meta_path", [Loading(), *sys.meta_path])
    assert entry.main() == 130
    assert capsys.readouterr().err == "interrupted\n"
