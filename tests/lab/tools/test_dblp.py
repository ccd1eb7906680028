"""LF-Paper2Keywords from a file in the schema of the citation network."""

import gzip
import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from subulp.lab.tasks.xmc.readers.load import read_xmc
from subulp.lab.tools import dblp, json_stream
from subulp.lab.tools.dblp import build_dblp
from subulp.lab.tools.json_stream import JsonObjects


def paper(number, keywords, **changes):
    """A paper with the fields that the network's papers have."""
    fields = {
        "id": f"53e9{number:020x}",
        "title": f"On  Subject {number}",
        "doi": "10.1000/182",
        "issue": "4",
        "keywords": keywords,
        "lang": "en",
        "venue": {"raw": "J. Subj."},
        "year": 1998,
        "n_citation": 3,
        "page_start": "1",
        "page_end": "9",
        "volume": "2",
        "issn": "",
        "isbn": "",
        "url": ["http://example.org/1"],
        "abstract": f'We study "{number}",\nas {{others}}]}} did, \u00e0 la carte.',
        "authors": [{"id": "1", "name": "A. Author", "org": "A University"}],
        "references": ["53e90", "53e91"],
    }
    return {**fields, **changes}


PAPERS = [
    paper(0, ["Data Mining", "data  mining ", "Graphs"]),
    paper(1, ["data mining", "Größe"]),
    paper(2, []),
    paper(3, ["graphs"], abstract=""),
    paper(4, ["graphs"], title=None),
    paper(5, ["graphs", "", None, "only \ud83d here"]),
    paper(6, ["Graphs", "data mining"], id=""),
    paper(7, ["seen once"]),
    {"id": "x"},
    paper(9, ["data mining", "graphs"]),
]


def write(path, papers, form="array"):
    bodies = [json.dumps(p, ensure_ascii=True) for p in papers]
    text = {
        "array": "[\n" + ",\n".join(bodies) + "\n]\n",
        "commas first": "[" + "\n,".join(bodies) + "]",
        "one line": "[" + ", ".join(bodies) + "]",
        "trailing comma": "[\n" + "".join(f"{b},\n" for b in bodies) + "]",
        "lines": "\n".join(bodies) + "\n",
        "indented": json.dumps(papers, indent=2),
    }[form]
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def split_by(monkeypatch, tested):
    """Let the papers with these ids test, in place of what their hash says."""
    ids = {paper(number, [])["id"] for number in tested}
    monkeypatch.setattr(dblp, "_part", lambda key, share: int(key in ids))


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
@pytest.mark.parametrize(
    "form", ["array", "commas first", "one line", "trailing comma", "lines", "indented"]
)
def test_the_data_set(tmp_path, monkeypatch, form, suffix):
    split_by(monkeypatch, [1, 5, 9])
    monkeypatch.setattr(json_stream, "BLOCK", 100)
    source = write(tmp_path / f"dblp{suffix}", PAPERS, form)
    statistics = build_dblp(source, tmp_path / "a" / "out")
    data = read_xmc(tmp_path / "a" / "out")
    # "größe" and "only \ufffd here" have no training paper.
    assert list(data.label_texts) == ["data mining", "graphs", "seen once"]
    assert list(data.train.source) == [
        f'On Subject {n} We study "{n}", as {{others}}]}} did, à la carte.' for n in (0, 6, 7)
    ]
    assert [data.train.labels.row(i).tolist() for i in range(3)] == [[0, 1], [0, 1], [2]]
    assert [text.split()[2] for text in data.test.source] == ["1", "5", "9"]
    assert [data.test.labels.row(i).tolist() for i in range(3)] == [[0], [1], [0, 1]]
    assert statistics == dblp.DblpStatistics(10, 3, 3, 3, 5, 4)
    assert str(statistics) == (
        "10 papers read: 3 to train, 3 to test, 3 labels, 1.50 labels a paper, "
        "1.67 training papers a label"
    )
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["out"]


def test_a_label_needs_its_training_papers_and_a_paper_a_label(tmp_path, monkeypatch):
    split_by(monkeypatch, [1, 5, 9])
    source = write(tmp_path / "dblp.json", PAPERS)
    statistics = build_dblp(source, tmp_path / "out", min_count=2)
    data = read_xmc(tmp_path / "out")
    assert list(data.label_texts) == ["data mining", "graphs"]
    assert [text.split()[2] for text in data.train.source] == ["0", "6"]
    assert (statistics.train, statistics.test, statistics.labels) == (2, 3, 2)


def test_case_can_be_kept(tmp_path, monkeypatch):
    split_by(monkeypatch, [1, 9])
    build_dblp(write(tmp_path / "d.json", PAPERS), tmp_path / "out", keep_case=True)
    labels = ["Data Mining", "Graphs", "data mining", "graphs", "only \ufffd here", "seen once"]
    assert list(read_xmc(tmp_path / "out").label_texts) == labels


def test_the_split_is_a_hash_of_the_id(tmp_path):
    papers = [paper(number, [f"k{number % 3}"]) for number in range(400)]
    texts = []
    for name, chosen in (("all", papers), ("odd", papers[1::2])):
        build_dblp(write(tmp_path / "d.json", chosen), tmp_path / name, test_share=0.25)
        texts.append(set(read_xmc(tmp_path / name).test.source))
    assert texts[1] < texts[0]
    assert len(texts[0]) == pytest.approx(100, abs=30)
    # A data set built twice, years apart, is the same.
    assert dblp._part("53e99784b7602d9701f3e3f5", 0.5) == 0


def test_the_same_file_gives_the_same_bytes(tmp_path):
    papers = [paper(n, [f"k{n % 7}", f"k{n % 5}", f"w{n % 11}"]) for n in range(300)]
    for name in ("a", "b"):
        build_dblp(write(tmp_path / "d.json", papers), tmp_path / name)
    for file in ("trn_X.txt", "trn_X_Y.txt", "tst_X.txt", "tst_X_Y.txt", "Y.txt"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def peak_of_a_build(source, out):
    """Bytes of Python's memory, the least of three builds: what else the process does meets one."""
    peaks = []
    for turn in range(3):
        tracemalloc.start()
        try:
            build_dblp(source, out / str(turn))
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    return min(peaks)


def test_memory_does_not_grow_with_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(json_stream, "BLOCK", 1 << 14)
    peaks = []
    for count in (300, 1200):
        source = write(
            tmp_path / "d.json", [paper(n, [f"k{n % 50}", f"only {n}"] * 10) for n in range(count)]
        )
        peaks.append(peak_of_a_build(source, tmp_path / str(count)))
    assert source.stat().st_size > 4 * json_stream.BLOCK
    assert peaks[1] < 1.5 * peaks[0]


WRONG = [
    (
        '[\n{"id": "1"},\n{"id" "2"}\n]',
        r"d\.json:3: expected a complete JSON object \(Expecting ':'",
    ),
    (
        '[\n{"id": "1"},\n{"id": "2',
        r"d\.json:3: expected a complete JSON object \(Untermin.* byte 15",
    ),
    ('[\n{"id": "1"},\n', r"d\.json:3: the file ends inside its array: it is incomplete"),
    ('[{"id": "1"}] x', r"d\.json:1: expected nothing after the end of the array, at byte 14: 'x"),
    ('[{"id": "1"}, 3]', r"d\.json:1: expected a JSON object, at byte 14: '3\]'"),
    ("<xml>", r"d\.json:1: expected a JSON object, at byte 0: '<xml>'"),
    ('{"id": "1"}\n[', r"d\.json:2: expected a JSON object, at byte 12: '\['"),
    ('[{"a": ' + "[" * 100_000, r"d\.json:1: expected a JSON object \(maximum recursion"),
    ('[{"year": ' + "9" * 5000 + "}]", r"d\.json:1: expected a complete JSON object \(Exceeds the"),
    ('{}\n{"title": 3}', r"d\.json:2: expected text as 'title', found 3, at byte 3"),
    ('{"title": "a", "keywords": "b"}', r"expected a list of texts as 'keywords', found 'b'"),
    ('{"title": "a", "keywords": [1]}', r"expected a list of texts as 'keywords', found \[1\]"),
    ('{"year": NumberInt(2009)}', r"d\.json:1: expected a complete JSON object \(Expecting value"),
    (b'{"title": "caf\xe9"}', r"d\.json:1: from here on not UTF-8 \(invalid continuation byte"),
    (b'{"id": "1"}\n\xc3', r"d\.json:2: from here on not UTF-8 \(unexpected end of data"),
    ("", "of 0 papers none is left for the training part: a paper needs a title"),
    ("[]", "of 0 papers none is left for the training part"),
]


@pytest.mark.parametrize(("content", "message"), WRONG)
def test_wrong_files_leave_nothing(tmp_path, content, message):
    raw = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "d.json").write_bytes(raw)
    with pytest.raises(ValueError, match=message):
        build_dblp(tmp_path / "d.json", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["d.json"]


def test_an_object_that_never_ends_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(json_stream, "BLOCK", 1 << 10)
    monkeypatch.setattr(json_stream, "LONGEST", 1 << 12)
    (tmp_path / "d.json").write_text('[{"a": "' + "x" * (1 << 20))
    read = []
    with pytest.raises(ValueError, match=r"d\.json:1: expected a complete JSON object"):
        list(JsonObjects(tmp_path / "d.json", read.append))
    assert read[-1] < 1 << 14


@pytest.mark.parametrize(
    "content", [b"plain", gzip.compress(b"[" + b" " * 99 + b"{}]", mtime=0)[:20]]
)
def test_damaged_gzip(tmp_path, content):
    (tmp_path / "d.json.gz").write_bytes(content)
    with pytest.raises(ValueError, match=r"d\.json\.gz:1: from here on not a complete gzip file"):
        build_dblp(tmp_path / "d.json.gz", tmp_path / "out")


def test_a_folder_that_exists_a_file_that_does_not(tmp_path):
    source = write(tmp_path / "d.json", PAPERS)
    with pytest.raises(FileExistsError, match="exists: give another folder, or remove it"):
        build_dblp(source, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"none\.json is not a file: give the JSON file"):
        build_dblp(tmp_path / "none.json", tmp_path / "out")


@pytest.mark.parametrize("share", [0, 1, -0.1, float("nan")])
def test_arguments_out_of_range(tmp_path, share):
    source = write(tmp_path / "d.json", PAPERS)
    with pytest.raises(ValueError, match=r"test_share=.* is out of range: give more than 0"):
        build_dblp(source, tmp_path / "out", test_share=share)
    with pytest.raises(ValueError, match="min_count=0 is out of range: give at least 1"):
        build_dblp(source, tmp_path / "out", min_count=0)


def test_nothing_left_to_test_on(tmp_path, monkeypatch):
    split_by(monkeypatch, [])
    with pytest.raises(ValueError, match="of 10 papers none is left for the test part"):
        build_dblp(write(tmp_path / "d.json", PAPERS), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("where", ["texts", "database"])
def test_a_full_disk_keeps_nothing(tmp_path, monkeypatch, where):
    if where == "texts":

        def full(path):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(dblp, "_open", full)
    else:
        monkeypatch.setattr(dblp, "_SCHEMA", "PRAGMA max_page_count = 3;" + dblp._SCHEMA)
    papers = [paper(n, [f"keyword {n} {k}" for k in range(50)]) for n in range(50)]
    source = write(tmp_path / "d.json", papers)
    with pytest.raises(OSError, match=r"no room left in .* nothing was kept; give an --out on"):
        build_dblp(source, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["d.json"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.one_of(
        st.binary(),
        st.tuples(st.integers(0, 400), st.binary(max_size=4)).map(
            lambda cut: json.dumps(PAPERS[:2]).encode()[: cut[0]] + cut[1]
        ),
    ),
    st.sampled_from([1, 7, 1 << 20]),
)
def test_any_bytes_give_objects_or_an_error_with_its_place(tmp_path, content, block):
    path = tmp_path / "d.json"
    path.write_bytes(content)
    message = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_stream, "BLOCK", block)
        try:
            found = list(JsonObjects(path))
        except ValueError as error:
            message = str(error)
    assert message is None or message.startswith(f"{path}:")
    if message is None:
        assert all(isinstance(value, dict) for value in found)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=6,
)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=30,
)
@given(
    st.lists(st.dictionaries(st.text(), values)),
    st.integers(1, 40),
    st.booleans(),
    st.sampled_from([None, 1]),
)
def test_what_json_wrote_is_read_whatever_the_blocks(tmp_path, written, block, ascii_only, indent):
    path = tmp_path / "d.json"
    text = json.dumps(written, ensure_ascii=ascii_only, indent=indent)
    path.write_bytes(text.encode("utf-8", "replace"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_stream, "BLOCK", block)
        assert list(JsonObjects(path)) == json.loads(path.read_bytes())


def test_progress_counts_the_bytes_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(json_stream, "BLOCK", 500)
    source = write(tmp_path / "d.json", PAPERS)
    read = []
    build_dblp(source, tmp_path / "out", on_read=read.append)
    assert read[-1] == source.stat().st_size
    assert np.all(np.diff(read) >= 0)
