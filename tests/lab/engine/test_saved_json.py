"""A file of another format, or a damaged one, is one error that names file, format and remedy."""

import pytest

from subulp.lab.engine.typed_files import saved_json


def read(path):
    with saved_json(path, "subulp thing 2", "a thing", "train again") as fields:
        size = int(fields["size"])
    return size


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"format": "subulp thing 1", "size": 3}', "its format is 'subulp thing 1'"),
        ('{"size": 3}', "'format'"),
        ('{"format": "subulp thing 2"}', "'size'"),
        ('{"format": "subulp thing 2", "size": [3]}', "int"),
        ("[3]", r"expected a JSON object, got \[3\]"),
        ("{", "expected a JSON object: EOF"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_a_damaged_file_is_named(text, reason, tmp_path):
    path = tmp_path / "thing.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"thing.json is not a thing as .*{reason}.*train again"):
        read(path)


def test_a_good_file_is_read(tmp_path):
    path = tmp_path / "thing.json"
    path.write_text('{"format": "subulp thing 2", "size": "3"}')
    assert read(path) == 3
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "other.json")
