"""Whole data sets: three forms, one content; and what is wrong with a set of files."""

import numpy as np
import pytest

from subulp.lab.tasks.xmc.readers.dataset import BagSplit, TextSplit
from subulp.lab.tasks.xmc.readers.load import load_bundled, read_xmc

from . import support
from .support import LABEL_TEXTS, TEST_LABELS, TEST_TEXTS, TRAIN_LABELS, TRAIN_TEXTS, put

FORMS = {"raw": support.write_raw, "json": support.write_json, "bags": support.write_bags}


def rows_of(matrix):
    return [matrix.row(i).tolist() for i in range(len(matrix))]


@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("form", FORMS)
def test_the_forms_hold_the_same(tmp_path, form, compressed):
    FORMS[form](tmp_path, compressed=compressed)
    data = read_xmc(tmp_path)
    assert rows_of(data.train.labels) == TRAIN_LABELS
    assert rows_of(data.test.labels) == TEST_LABELS
    assert (data.num_labels, data.label_counts.tolist()) == (3, [3, 1, 0])
    assert data.label_counts.dtype == np.int64
    rows, cols = data.train.pairs([3, 0, 1])
    assert (rows.tolist(), cols.tolist()) == ([0, 1, 1], [0, 0, 1])
    assert rows.dtype == cols.dtype == np.int64
    if form == "bags":
        assert isinstance(data.train, BagSplit)
        features = data.train.source.read([3, 1, 0])
        assert features.ids.tolist() == [3, 3, 3, 1]
        assert features.offsets.tolist() == [0, 2, 2, 4]
        assert features.values.tolist() == [1.0, 2.5, 0.5, 2.0]
        assert features.values.dtype == np.float32
        assert data.train.source.num_features == 4
        assert data.label_texts is None
    else:
        assert isinstance(data.train, TextSplit)
        assert data.train.source.read([2, 0, 1]) == ["the lazy dög", "a red fox", ""]
        assert list(data.train.source) == TRAIN_TEXTS
        assert list(data.test.source) == TEST_TEXTS
        assert list(data.label_texts) == LABEL_TEXTS


def test_label_texts_become_instances(tmp_path):
    support.write_raw(tmp_path)
    put(tmp_path, "trn_filter_labels.txt", "0 1\n")
    data = read_xmc(tmp_path)
    extended = data.with_label_texts()
    assert len(extended) == 7
    assert list(extended.source) == TRAIN_TEXTS + LABEL_TEXTS
    assert extended.source.read([6, 0, 4]) == ["never seen", "a red fox", "animal"]
    assert rows_of(extended.labels) == [*TRAIN_LABELS, [0], [1], [2]]
    # A pair of an instance and a label is filtered, not the label's own text.
    assert rows_of(extended.targets) == [[0], [], [0], [0], [0], [1], [2]]
    with pytest.raises(IndexError):
        extended.source.read([7])


@pytest.mark.parametrize("form", ["raw", "bags"])
def test_without_label_texts_there_is_nothing_to_extend(tmp_path, form):
    FORMS[form](tmp_path)
    (tmp_path / "Y.txt").unlink(missing_ok=True)
    with pytest.raises(ValueError, match=r"has no label texts to train on: it lacks Y\.txt"):
        read_xmc(tmp_path).with_label_texts()


@pytest.mark.parametrize("name", ["tst_filter_labels.txt", "filter_labels_test.txt"])
def test_filter_pairs_are_kept_and_left_out_of_the_targets(tmp_path, name):
    support.write_raw(tmp_path)
    put(tmp_path, name, "1 2\n0 0\n1 2\n")
    data = read_xmc(tmp_path)
    assert data.train.filter_pairs is None
    assert rows_of(data.test.filter_pairs) == [[0], [2]]
    assert rows_of(data.test.labels) == TEST_LABELS
    assert rows_of(data.test.targets) == [[1], [0]]
    assert [a.tolist() for a in data.test.pairs([1])] == [[0], [0]]


def test_training_counts_are_those_of_the_file(tmp_path):
    support.write_raw(tmp_path)
    put(tmp_path, "trn_filter_labels.txt", "0 1\n3 0\n")
    data = read_xmc(tmp_path)
    assert data.label_counts.tolist() == [3, 1, 0]
    assert data.train.targets.counts().tolist() == [2, 0, 0]


def test_a_plain_file_is_taken_before_a_compressed_one(tmp_path):
    support.write_raw(tmp_path)
    put(tmp_path, "Y.txt", b"damaged", compressed=True)
    assert list(read_xmc(tmp_path).label_texts) == LABEL_TEXTS


def test_the_bundled_data_set():
    data = load_bundled()
    assert (len(data.train), len(data.test), data.num_labels) == (26_746, 2_966, 10_222)
    assert data.label_counts.max() == 2_272
    assert data.label_counts.min() == 2
    assert len(data.train.labels.indices) / len(data.train) == pytest.approx(4.03, abs=0.005)
    capon = next(i for i, t in enumerate(data.train.source) if t == "castrated male chicken")
    assert [data.label_texts[label] for label in data.train.labels.row(capon)] == [
        *("Gallus gallus", "capon", "chicken", "domestic fowl", "fowl", "poultry")
    ]


def test_a_folder_that_is_none_or_holds_nothing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data=.*nowhere is not a folder: give the one"):
        read_xmc(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"holds none of trn_X_Y.txt, trn.json and train"):
        read_xmc(tmp_path)


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("raw", "trn_X.txt"),
        ("raw", "tst_X.txt"),
        ("raw", "tst_X_Y.txt"),
        ("json", "lbl.json"),
        ("json", "tst.json"),
        ("bags", "test.txt"),
    ],
)
def test_a_missing_file(tmp_path, form, name):
    FORMS[form](tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(FileNotFoundError, match=rf"{name} is missing \(also with \.gz\)"):
        read_xmc(tmp_path)


CONTRADICTIONS = [
    ("trn_X.txt", "one\ntwo\n", r"trn_X\.txt:3: 2 lines where trn_X_Y\.txt says 4"),
    ("trn_X.txt", "a\n" * 99, r"trn_X\.txt:5: more lines where trn_X_Y\.txt says 4"),
    ("tst_X.txt", "", r"tst_X\.txt:1: 0 lines where tst_X_Y\.txt says 2"),
    ("Y.txt", "animal\nred\n", r"Y\.txt:3: 2 lines where trn_X_Y\.txt says 3"),
    ("tst_X_Y.txt", "2 4\n3:1\n\n", r"tst_X_Y\.txt:1: 4 labels, where trn_X_Y\.txt has 3"),
    ("trn_X_Y.txt", "4 3\n\n\n\n\n", "no training instance with a label: there is nothing to"),
    ("tst_filter_labels.txt", "2 0\n", r"labels\.txt:1: instance '2' is out of range: expected 0"),
    ("tst_filter_labels.txt", "0 1\n1 3\n", r"labels\.txt:2: label '3' is out of range"),
    ("trn_filter_labels.txt", "0 1 1\n", r"labels\.txt:1: expected 'instance label', found '0 1"),
    ("trn_filter_labels.txt", "0 -1\n", r"labels\.txt:1: expected 'instance label', found '0 -1'"),
    ("trn_filter_labels.txt", "0 " + "9" * 5000, r"label '9+' \.\.\. is out of range: expected"),
]


@pytest.mark.parametrize(("name", "content", "message"), CONTRADICTIONS)
def test_files_that_contradict_each_other(tmp_path, name, content, message):
    support.write_raw(tmp_path)
    put(tmp_path, name, content)
    with pytest.raises(ValueError, match=message):
        read_xmc(tmp_path)


def test_an_empty_training_set(tmp_path):
    support.write_raw(tmp_path)
    put(tmp_path, "trn_X_Y.txt", "0 3\n")
    put(tmp_path, "trn_X.txt", "")
    with pytest.raises(ValueError, match="no training instance with a label"):
        read_xmc(tmp_path)


def test_an_empty_json_file(tmp_path):
    support.write_json(tmp_path)
    put(tmp_path, "trn.json", "")
    with pytest.raises(ValueError, match="no training instance with a label"):
        read_xmc(tmp_path)


def test_bags_of_other_features(tmp_path):
    support.write_bags(tmp_path)
    put(tmp_path, "test.txt", "1 5 3\n0 4:1\n")
    with pytest.raises(ValueError, match=r"test\.txt:1: 5 features, where train\.txt has 4"):
        read_xmc(tmp_path)


def test_an_empty_test_part(tmp_path):
    """Before it trains for hours, and then measures nothing."""
    support.write_raw(tmp_path)
    put(tmp_path, "tst_X_Y.txt", "0 3\n")
    put(tmp_path, "tst_X.txt", "")
    with pytest.raises(ValueError, match="has no test instance: there is nothing to measure on"):
        read_xmc(tmp_path)
