"""Reads a data set from its folder, in whichever of the repository's forms it lies there."""

from __future__ import annotations

from pathlib import Path

from ....data.lines import TextLines, fail, find
from .bags import read_bag_file
from .dataset import BagSplit, TextSplit, XMCData
from .json_lines import read_json_part, read_json_texts
from .label_files import read_filter_file, read_label_file
from .labels import MAX_LABELS, LabelMatrix

BUNDLED = "wordnet_small"

_TRAIN, _TEST = "trn", "tst"
_LONG = {_TRAIN: "train", _TEST: "test"}


def load_bundled() -> XMCData:
    """The data set that ships with the package: a reverse dictionary of 10,222 WordNet words."""
    data = read_xmc(Path(__file__).parent / BUNDLED)
    return XMCData("wordnet-small (bundled)", data.train, data.test, data.label_texts)


def read_xmc(folder: str | Path, cache: str | Path | None = None) -> XMCData:
    """Read and check a data set in a form of the Extreme Classification Repository.

    ==================  ====================================================================
    form                files, each plain or ``.gz``
    ==================  ====================================================================
    raw text            ``trn_X.txt``, ``trn_X_Y.txt``, ``tst_X.txt``, ``tst_X_Y.txt`` and,
                        where labels have texts, ``Y.txt``
    JSON lines          ``trn.json``, ``tst.json``, ``lbl.json``
    bag of words        ``train.txt``, ``test.txt``
    ==================  ====================================================================

    The two text forms may have ``trn_filter_labels.txt`` and ``tst_filter_labels.txt``, also under
    the names ``filter_labels_train.txt`` and ``filter_labels_test.txt``. A plain file is taken
    before a compressed one.

    All files are read once and checked. Memory then holds the label pairs (4 bytes each) and where
    lines begin (8 bytes a line); texts and features are read from the disk batch by batch.
    Compressed texts are decompressed into a temporary file first, which has no name and vanishes
    with the process.

    Args:
        folder: Holds the files.
        cache: Folder for decompressed files; ``None`` is the system's temporary folder
            (default: ``None``).

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is malformed (the message begins with ``file:line``), two files
            contradict each other, or there is nothing to train or to measure on.
        OSError: The disk has no room for a decompressed file.
    """
    folder, cache = Path(folder), None if cache is None else Path(cache)
    if not folder.is_dir():
        raise FileNotFoundError(f"data={folder} is not a folder: give the one that holds trn_X.txt")
    for first, read in (("trn_X_Y.txt", _raw), ("trn.json", _json), ("train.txt", _bags)):
        if find(folder, first):
            data = read(folder, cache)
            break
    else:
        raise FileNotFoundError(
            f"data={folder} holds none of trn_X_Y.txt, trn.json and train.txt (or these with .gz): "
            "give the folder of a data set of the Extreme Classification Repository"
        )
    if not len(data.train.targets.indices):
        raise ValueError(
            f"data={folder} has no training instance with a label: there is nothing to train on"
        )
    if not len(data.test.targets):
        raise ValueError(
            f"data={folder} has no test instance: there is nothing to measure on; give a test part"
        )
    return data


def _raw(folder: Path, cache: Path | None) -> XMCData:
    label_file = _need(folder, "trn_X_Y.txt")
    train = read_label_file(label_file)
    test = read_label_file(_need(folder, "tst_X_Y.txt"))
    _same_labels(_need(folder, "tst_X_Y.txt"), test, label_file, train)
    path = find(folder, "Y.txt")
    label_texts = None if path is None else _texts(path, cache, train.num_labels, label_file)
    parts = {
        part: TextSplit(
            labels,
            _filter(folder, part, labels),
            _texts(
                _need(folder, f"{part}_X.txt"), cache, len(labels), find(folder, f"{part}_X_Y.txt")
            ),
        )
        for part, labels in ((_TRAIN, train), (_TEST, test))
    }
    return XMCData(str(folder), parts[_TRAIN], parts[_TEST], label_texts)


def _json(folder: Path, cache: Path | None) -> XMCData:
    label_texts = read_json_texts(label_path := _need(folder, "lbl.json"), cache)
    if not 1 <= len(label_texts) <= MAX_LABELS:
        fail(label_path, 1, f"{len(label_texts)} labels: expected 1 to {MAX_LABELS}")
    parts = {}
    for part in (_TRAIN, _TEST):
        path = _need(folder, f"{part}.json")
        texts, labels = read_json_part(path, len(label_texts), cache)
        parts[part] = TextSplit(labels, _filter(folder, part, labels), texts)
    return XMCData(str(folder), parts[_TRAIN], parts[_TEST], label_texts)


def _bags(folder: Path, cache: Path | None) -> XMCData:
    paths = [_need(folder, f"{_LONG[part]}.txt") for part in (_TRAIN, _TEST)]
    (train_bags, train), (test_bags, test) = (read_bag_file(path, cache) for path in paths)
    _same_labels(paths[1], test, paths[0], train)
    if test_bags.num_features != train_bags.num_features:
        fail(
            paths[1],
            1,
            f"{test_bags.num_features} features, where {paths[0].name} has "
            f"{train_bags.num_features}",
        )
    return XMCData(
        str(folder), BagSplit(train, None, train_bags), BagSplit(test, None, test_bags), None
    )


def _need(folder: Path, name: str) -> Path:
    path = find(folder, name)
    if path is None:
        raise FileNotFoundError(f"{folder / name} is missing (also with .gz)")
    return path


def _texts(path: Path, cache: Path | None, expected: int, label_file: Path | None) -> TextLines:
    texts = TextLines(path, cache, limit=expected + 1)
    if len(texts) != expected:
        found = f"{len(texts):,} lines" if len(texts) < expected else "more lines"
        assert label_file is not None
        fail(
            path,
            min(len(texts), expected) + 1,
            f"{found} where {label_file.name} says {expected:,}: the two do not belong together, "
            "or one is not whole",
        )
    return texts


def _filter(folder: Path, part: str, labels: LabelMatrix) -> LabelMatrix | None:
    path = find(folder, f"{part}_filter_labels.txt", f"filter_labels_{_LONG[part]}.txt")
    return None if path is None else read_filter_file(path, labels.shape)


def _same_labels(path: Path, test: LabelMatrix, train_path: Path, train: LabelMatrix) -> None:
    if test.num_labels != train.num_labels:
        fail(
            path,
            1,
            f"{test.num_labels} labels, where {train_path.name} has {train.num_labels}",
        )
