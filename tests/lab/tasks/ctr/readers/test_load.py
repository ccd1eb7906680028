"""Whole data sets: files, splits, shuffling, vocabularies, bounded memory, bad input."""

import tracemalloc
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from subulp.lab.data import lines as xmc_lines
from subulp.lab.tasks.ctr.readers.dataset import ReadOptions
from subulp.lab.tasks.ctr.readers.description import make_layout, read_description
from subulp.lab.tasks.ctr.readers.example_stream import BadLines, Span, read_spans
from subulp.lab.tasks.ctr.readers.examples import ColumnStatistics, Encoder, Examples
from subulp.lab.tasks.ctr.readers.layout import criteo_layout
from subulp.lab.tasks.ctr.readers.load import evaluation_spans, load_data

from .support import criteo_lines, write_lines

PLAIN = ReadOptions()
SAMPLE = Path(__file__).parents[5] / "shared" / "data" / "criteo-sample" / "train.txt"

CLICKS = """\
clicked,price,shop,country
1,10.5,a,DE
0,,b,FR
0,3,a,FR
1,200,"c, d",DE
0,7,a,IT
1,8,b,IT
0,1,c,DE
"""
COLUMNS = """\
[label]
column = "clicked"

[numeric]
columns = ["price"]
standardise = true

[categorical]
columns = ["shop", "country"]
rows = 50

[[cross]]
columns = ["shop", "country"]
rows = 2000
storage = "int8"
"""


@pytest.fixture
def criteo(tmp_path):
    return write_lines(tmp_path / "train.txt", criteo_lines(70))


@pytest.fixture
def clicks(tmp_path):
    (tmp_path / "clicks.csv").write_text(CLICKS)
    (tmp_path / "columns.toml").write_text(COLUMNS)
    return f"csv:{tmp_path / 'clicks.csv'}", tmp_path / "columns.toml"


def everything(part):
    return Examples.join(list(part.in_order(1000)))


# ---------------------------------------------------------------------------------------- Criteo


def test_the_last_lines_of_one_file_test(criteo):
    data = load_data(f"criteo:{criteo}", PLAIN)
    assert (len(data.train), len(data.test)) == (60, 10)
    whole = load_data(f"criteo:{criteo}", PLAIN, test_share=0.5)
    assert (len(whole.train), len(whole.test)) == (35, 35)
    np.testing.assert_array_equal(everything(data.test).keys, everything(whole.test).keys[-10:])
    assert data.positive_share == everything(data.train).labels.mean()
    assert [t.rows for t in data.tables] == [100_000] * 26


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_the_last_file_tests_and_files_follow_each_other(tmp_path, name):
    parts = [criteo_lines(n, seed=n) for n in (30, 20, 10)]
    for index, lines in enumerate(parts):
        write_lines(tmp_path / f"{index}{name}", lines)
    data = load_data(f"criteo:{tmp_path}/*{name}", PLAIN)
    assert (len(data.train), len(data.test)) == (50, 10)
    joined = write_lines(tmp_path / "joined", parts[0] + parts[1])
    other = load_data(f"criteo:{joined}", PLAIN, test=tmp_path / f"2{name}")
    np.testing.assert_array_equal(everything(data.train).keys, everything(other.train).keys)
    np.testing.assert_array_equal(everything(data.test).keys, everything(other.test).keys)


def test_several_members_of_one_gzip_file_are_one_file(tmp_path):
    lines = criteo_lines(20)
    halves = [write_lines(tmp_path / f"{i}.gz", lines[10 * i : 10 * i + 10]) for i in (0, 1)]
    (tmp_path / "both.gz").write_bytes(b"".join(half.read_bytes() for half in halves))
    blocks = xmc_lines.whole_lines(tmp_path / "both.gz")
    assert sum(xmc_lines.count_lines(block) for _, block in blocks) == 20


def test_blocks_do_not_show(criteo, monkeypatch):
    whole = load_data(f"criteo:{criteo}", PLAIN)
    monkeypatch.setattr(xmc_lines, "BLOCK", 500)
    parts = load_data(f"criteo:{criteo}", ReadOptions(buffer=13))
    for part in ("train", "test"):
        a, b = (everything(getattr(data, part)) for data in (whole, parts))
        np.testing.assert_array_equal(a.keys, b.keys)
        np.testing.assert_array_equal(a.numbers, b.numbers)
    assert whole.positive_share == parts.positive_share


def test_a_seed_decides_the_order(criteo, monkeypatch):
    monkeypatch.setattr(xmc_lines, "BLOCK", 500)
    data = load_data(f"criteo:{criteo}", ReadOptions(buffer=20))
    keys = {
        seed: np.stack([b.keys for b in islice(data.train.batches(8, seed), 14)]) for seed in (0, 1)
    }
    again = np.stack([b.keys for b in islice(data.train.batches(8, 0), 14)])
    np.testing.assert_array_equal(keys[0], again)
    assert not np.array_equal(keys[0], keys[1])
    # An epoch of 60 has 7 batches; the 4 examples left over differ from epoch to epoch.
    for epoch in (keys[0][:7], keys[0][7:]):
        seen = {tuple(row) for row in epoch.reshape(56, 26)}
        assert len(seen) == 56
        assert seen <= {tuple(row) for row in everything(data.train).keys}
    assert not np.array_equal(keys[0][:7], keys[0][7:])


def test_a_file_that_shrinks_is_noticed(criteo):
    data = load_data(f"criteo:{criteo}", ReadOptions(buffer=20))
    write_lines(criteo, criteo_lines(30))
    with pytest.raises(ValueError, match="the file has changed while it was read"):
        list(islice(data.train.batches(8, 0), 8))


def test_memory_does_not_grow_with_the_file(tmp_path):
    """Blocks come one after the other: 20,000 lines peak like 5,000."""
    lines = criteo_lines(500)
    layout = criteo_layout([1000])
    peaks = []
    for repeats in (10, 40):
        path = write_lines(tmp_path / f"{repeats}.gz", lines * repeats)
        size = 0
        tracemalloc.start()
        before = pa.total_allocated_bytes()
        for block in read_spans(layout, [Span(path)], BadLines("raise")):
            size += len(block)
            assert pa.total_allocated_bytes() - before < 1 << 20
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert size == 500 * repeats
    assert peaks[1] < 1.3 * peaks[0] + (8 << 20)
    assert peaks[1] < 40 << 20


def test_a_part_larger_than_the_buffer_is_not_kept(criteo, monkeypatch):
    monkeypatch.setattr(xmc_lines, "BLOCK", 500)
    sizes = [len(c) for c in load_data(f"criteo:{criteo}", ReadOptions(buffer=20)).train.chunks()]
    assert sum(sizes) == 60
    assert max(sizes) < 30
    kept = load_data(f"criteo:{criteo}", PLAIN).train
    criteo.unlink()
    assert [len(c) for c in kept.chunks()] == [60]


def test_a_bad_line_has_its_place(criteo, monkeypatch):
    lines = criteo_lines(70)
    lines[30] = lines[30].rsplit("\t", 1)[0]
    lines[65] = lines[65].replace("\t", "\tabc", 1)
    write_lines(criteo, lines)
    monkeypatch.setattr(xmc_lines, "BLOCK", 1000)
    with pytest.raises(ValueError, match=r"train.txt:31: 39 fields: expected 40 .*--on-bad-line"):
        load_data(f"criteo:{criteo}", PLAIN)
    data = load_data(f"criteo:{criteo}", ReadOptions(on_bad_line="skip", buffer=10))
    assert (len(data.train), len(data.test), data.skipped) == (59, 9, 2)
    assert data.first_skipped.startswith(f"{criteo}:31: 39 fields")
    # The later passes leave out the same lines, and count none twice.
    assert len(next(data.train.batches(59, 0))) == 59


def test_a_vocabulary_has_the_frequent_categories(criteo):
    data = load_data(f"criteo:{criteo}", ReadOptions(min_count=3))
    keys = everything(data.train).keys[:, 0]
    values, counts = np.unique(keys, return_counts=True)
    assert data.tables[0].rows == 1 + (counts >= 3).sum()
    rows = data.encode(everything(data.train)).rows[:, 0]
    for value, count in zip(values, counts, strict=True):
        found = set(rows[keys == value].tolist())
        assert len(found) == 1
        assert (found == {0}) == (count < 3)
    small = load_data(f"criteo:{criteo}", ReadOptions(min_count=1), rows=[4])
    assert small.tables[0].rows == 4


def test_numbers_are_standardised_by_the_training_part():
    numbers = np.array([[1.0, 5.0], [3.0, 5.0], [np.nan, 5.0]], np.float32)
    statistics = ColumnStatistics(2)
    statistics.add(numbers)
    mean, deviation = statistics.result()
    assert mean.tolist() == [2.0, 5.0]
    assert deviation.tolist() == [1.0, 1.0]


@pytest.mark.skipif(not SAMPLE.exists(), reason="its licence forbids to ship it")
def test_the_sample_of_criteo_reads():
    data = load_data(f"criteo:{SAMPLE}", PLAIN)
    assert len(data.train) + len(data.test) == 1999


# ------------------------------------------------------------------------------------------ Adult


def test_the_bundled_data_is_adult():
    data = load_data(None, PLAIN)
    assert (len(data.train), len(data.test)) == (32_561, 16_281)
    assert data.positive_share == pytest.approx(7_841 / 32_561)
    assert data.numbers == 6
    batch = data.encode(everything(data.train))
    np.testing.assert_allclose(batch.numbers.mean(0), 0, atol=1e-3)
    np.testing.assert_allclose(batch.numbers.std(0), 1, atol=1e-3)
    assert (batch.rows.max(0) < [t.rows for t in data.tables]).all()
    # Hashes do not depend on the machine, nor on the process.
    assert batch.rows[0].tolist()[:4] == [854, 1370, 857, 1611]


def test_a_folder_with_the_repositorys_files(tmp_path):
    row = "39, Private, 77516, HS-grad, 9, Divorced, Sales, Husband, White, Male, 0, 0, 40, ?, "
    (tmp_path / "adult.data").write_text(f"{row}<=50K\n{row}>50K\n\n")
    (tmp_path / "adult.test").write_text(f"|1x3 Cross validator\n{row}>50K.\n{row}<=50K.\n\n")
    data = load_data(f"adult:{tmp_path}", PLAIN)
    assert (len(data.train), len(data.test), data.positive_share) == (2, 2, 0.5)
    (tmp_path / "adult.test").unlink()
    with pytest.raises(FileNotFoundError, match=r"has neither adult.test nor adult.test.gz"):
        load_data(f"adult:{tmp_path}", PLAIN)


# -------------------------------------------------------------------------------------------- CSV


def test_a_table_of_ones_own(clicks):
    data = load_data(clicks[0], PLAIN, columns=clicks[1], test_share=0.3)
    assert (len(data.train), len(data.test)) == (5, 2)
    assert [(t.name, t.rows, t.storage) for t in data.tables] == [
        ("shop", 50, None),
        ("country", 50, None),
        ("shop x country", 2000, "int8"),
    ]
    batch = data.encode(everything(data.train))
    assert batch.numbers[1, 0] == 0.0
    assert batch.rows[0, 0] == batch.rows[2, 0] != batch.rows[1, 0]
    assert batch.rows[0, 2] != batch.rows[2, 2]


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ('"price"', '"prize"', 5, "numeric names 'prize', which is unknown: did you mean 'price'?"),
        ('"clicked"', '"click"', 2, "label names 'click', .* did you mean 'clicked'?"),
        ('["shop", "country"]\nrows = 50', '["shops"]\nrows = 50', 9, "table names 'shops'"),
        (
            "standardise",
            "standardize",
            6,
            "numeric.0..standardize: did you mean standardise",
        ),
        ("[numeric]", "[numeri]", 4, "unknown key numeri: did you mean numeric"),
        ("rows = 50", 'rows = "50"', 10, "categorical.0..rows to be a valid integer, got .50"),
        ("rows = 50\n", "", 8, "categorical.0..rows is missing"),
        (
            "rows = 50",
            "rows = 0",
            10,
            "categorical.0..rows to be greater than or equal to 1",
        ),
        (
            "standardise = true",
            'transform = "root"',
            6,
            "numeric.0..transform to be 'log' or 'none', got .root",
        ),
        ('column = "clicked"', "", 1, "label.column is missing"),
        ("[label]", 'columns = ["clicked", "shop"]\n[label]', 1, "but the file's header is"),
        ("[label]", "header = false\n[label]", 1, "a file without a header needs the names"),
        (
            "[label]",
            'separator = "::"\n[label]',
            1,
            "separator to be one ASCII character, got",
        ),
        ("[label]", "[buckets]\nprice = [3, 1]\n[label]", 2, "buckets of price are .* ascending"),
        ("[label]", "label = 3\n[labels]", 1, "expected label to be an object, got 3"),
        ('columns = ["price"]', 'columns = ["clicked"]', 5, "label=clicked is a feature too"),
        ("[label]", "[label", 1, "expected TOML"),
        ("[[cross]]", "[[cross]]\nrows = 1\n[[cross]]", 12, "cross.0..columns is missing"),
        ('["shop", "country"]\nrows = 2', '["shop",\n"land"]\nrows = 2', 13, "table names 'land'"),
        ('"int8"', '"int9"', 15, "cross.0..storage to be 'fp32', .* 'int2', got .int9"),
        ("rows = 2000", "rows = 0", 14, "cross.0..rows to be greater than or equal to 1"),
        (
            "[label]",
            f"[buckets]\nprice = [1{'0' * 400}]\n[label]",
            2,
            "buckets.price to be an array of",
        ),
        ("[numeric]", "a = '''\n[numeric]\n'''\n[numeric]", 4, "unknown key label.a"),
        (
            "[numeric]",
            "[[numeric]]\ncolumns = []\n[[numeric]]\nrows = 3",
            7,
            "key numeric.1..rows",
        ),
        ('column = "clicked"', 'column = "clicked"\npositive = ["0"]', 1, "give each label to one"),
    ],
)
def test_a_wrong_description(clicks, old, new, line, message):
    data, columns = clicks
    assert old in COLUMNS
    columns.write_text(COLUMNS.replace(old, new))
    with pytest.raises(ValueError, match=f"^{columns}:{line}: .*{message}"):
        load_data(data, PLAIN, columns=columns)


def test_what_is_no_description(tmp_path, clicks):
    with pytest.raises(FileNotFoundError, match=r"columns=.* is not a file: give a TOML file"):
        load_data(clicks[0], PLAIN, columns=tmp_path)
    with pytest.raises(FileNotFoundError, match="columns=nowhere does not exist: give a TOML file"):
        load_data(clicks[0], PLAIN, columns=Path("nowhere"))
    deep, large = tmp_path / "deep.toml", tmp_path / "large.toml"
    deep.write_text(f"a = {'[' * 5000}")
    with pytest.raises(ValueError, match=r"deep\.toml:1: expected TOML, got values nested too"):
        load_data(clicks[0], PLAIN, columns=deep)
    large.write_bytes(b"#" * (1 << 21))
    with pytest.raises(ValueError, match=r"large\.toml: above 1,048,576 bytes: expected a desc"):
        load_data(clicks[0], PLAIN, columns=large)


def test_a_description_is_part_of_the_digest(clicks):
    data, columns = clicks
    digests = {load_data(data, PLAIN, columns=columns).digest for _ in range(2)}
    columns.write_text(COLUMNS.replace("standardise = true", "standardise = false"))
    assert load_data(data, PLAIN, columns=columns).digest not in digests
    assert len(digests) == 1


def test_a_bad_line_of_a_table_has_its_place(clicks, tmp_path):
    (tmp_path / "clicks.csv").write_text(CLICKS + '1,2,"a,DE\n')
    with pytest.raises(ValueError, match=r"clicks.csv:9: .*quoted field must end on its line"):
        load_data(clicks[0], PLAIN, columns=clicks[1])
    (tmp_path / "clicks.csv").write_text(CLICKS.replace("200", "many"))
    with pytest.raises(ValueError, match=r"clicks.csv:5: column price is 'many'"):
        load_data(clicks[0], PLAIN, columns=clicks[1])


def test_headers_must_agree(clicks, tmp_path):
    (tmp_path / "test.csv").write_text(CLICKS.replace("price", "cost"))
    with pytest.raises(ValueError, match=r"test.csv:1: the header is .*cost"):
        load_data(clicks[0], PLAIN, columns=clicks[1], test=tmp_path / "test.csv")


def test_files_that_are_evaluated_have_the_columns_of_the_model(clicks, tmp_path):
    layout = make_layout(read_description(clicks[1]), CLICKS.partition("\n")[0].split(","))
    same = tmp_path / "same.csv"
    same.write_text(CLICKS)
    assert evaluation_spans(str(same), layout) == [Span(same, 1)]
    lines = CLICKS.split("\n")
    for name, text in (
        ("ordered", CLICKS.replace("price,shop", "shop,price")),
        ("headless", "\n".join(lines[1:])),
        ("repeated", CLICKS.replace("price", "shop")),
    ):
        other = tmp_path / f"{name}.csv"
        other.write_text(text)
        with pytest.raises(ValueError, match=rf"{name}.csv:1: the header is .*: expected clicked"):
            evaluation_spans(str(other), layout)


def test_a_share_of_a_file_that_does_not_test_is_refused(clicks, tmp_path):
    (tmp_path / "test.csv").write_text(CLICKS.replace("10.5", "9"))
    for data, options, whole in (
        (None, {}, "data=adult"),
        (clicks[0], {"columns": clicks[1], "test": tmp_path / "test.csv"}, "test=.*test.csv"),
        (f"{clicks[0]},{tmp_path / 'test.csv'}", {"columns": clicks[1]}, "2 files"),
    ):
        with pytest.raises(ValueError, match=f"test_share=0.5 has no effect on {whole}"):
            load_data(data, PLAIN, test_share=0.5, **options)


# ---------------------------------------------------------------------------------------- nothing


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ("criteo:", ValueError, "data=criteo: is unknown: give adult:DIR, criteo:FILE"),
        ("kaggle:x", ValueError, "data=kaggle:x is unknown"),
        ("criteo:nothing.txt", FileNotFoundError, "nothing.txt does not exist"),
        ("criteo:no*thing", FileNotFoundError, r"no file matches no\*thing"),
        ("csv:nothing.csv", FileNotFoundError, "nothing.csv does not exist"),
    ],
)
def test_wrong_names(data, error, message):
    with pytest.raises(error, match=message):
        load_data(data, PLAIN)


def test_too_little(tmp_path, criteo):
    for lines in ([], criteo_lines(1)):
        path = write_lines(tmp_path / "short.txt", lines)
        with pytest.raises(ValueError, match="too few for a training part and a test part"):
            load_data(f"criteo:{path}", PLAIN)
    path = write_lines(tmp_path / "equal.txt", ["1" + text[1:] for text in criteo_lines(20)])
    with pytest.raises(ValueError, match="all labels of the training part are 1"):
        load_data(f"criteo:{path}", PLAIN)
    with pytest.raises(ValueError, match="rows has 2 numbers: give one for all tables, or 26"):
        load_data(f"criteo:{criteo}", PLAIN, rows=[1, 2])
    with pytest.raises(ValueError, match="are the same file: a model would be tested"):
        load_data(f"criteo:{criteo}", PLAIN, test=criteo)
    with pytest.raises(ValueError, match="needs a description"):
        load_data(f"csv:{criteo}", PLAIN)
    with pytest.raises(ValueError, match="adult has a test part of its own"):
        load_data(None, PLAIN, test=criteo)


def test_a_damaged_gzip_file_has_its_place(tmp_path):
    path = write_lines(tmp_path / "half.gz", criteo_lines(50))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"half.gz:\d+: from here on not a complete gzip file"):
        load_data(f"criteo:{path}", PLAIN)


def test_bad_lines_count_once():
    bad = BadLines("skip")
    for line in (3, 5):
        bad(Path("f"), line, "wrong")
    assert (bad.count, bad.first) == (2, "f:3: wrong")
    assert isinstance(Encoder(criteo_layout([5]), ColumnStatistics(13), None).rows, list)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (CLICKS.replace("price", "shop", 1), r"clicks.csv:1: the header has 'shop' twice"),
        ("", r"clicks.csv"),
        ("\n1,2\n", r"clicks.csv has no header: its first line names the columns"),
    ],
)
def test_a_header_that_is_wrong_is_the_files(clicks, tmp_path, text, message):
    """And not the description's."""
    (tmp_path / "clicks.csv").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load_data(clicks[0], PLAIN, columns=clicks[1])
    assert str(clicks[1]) not in str(caught.value)


@pytest.mark.parametrize("name", ["generated:examples=1000", "flights"])
def test_data_that_are_made_are_not_evaluated_on(clicks, name):
    layout = make_layout(read_description(clicks[1]), CLICKS.partition("\n")[0].split(","))
    with pytest.raises(ValueError, match=f"data={name} is made, and has no files of its own"):
        evaluation_spans(name, layout)
