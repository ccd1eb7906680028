"""``python -m subulp`` without the lab's packages names them."""

from importlib import metadata

import pytest

from subulp import __main__ as entry


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
