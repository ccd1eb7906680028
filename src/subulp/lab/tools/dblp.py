"""LF-Paper2Keywords: papers of the DBLP-Citation-network V14 and their keywords.

The ELMO paper (section 5) describes the data set in three sentences: title and abstract are the
text, keywords the labels and the label texts; its Table 1 has as many test as training instances.
What it leaves open is decided here:

- A paper without title, abstract or keyword is dropped.
- White space is collapsed everywhere, and keywords are lowercased: ``Data Mining`` and ``data
  mining`` are one label. A paper has a keyword once.
- A hash of the paper's id decides its part, so a paper stays where it is when others come or go.
- A label needs ``min_count`` training papers; papers left without labels are dropped.
- Labels are numbered in the order of their code points; papers stay in the order of the file.
"""

from __future__ import annotations

import errno
import hashlib
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from .json_stream import JsonObjects

_PARTS = ("trn", "tst")
_TRAIN, _TEST = range(2)

# Half a character, which JSON can escape and UTF-8 cannot hold; and the end of a C string.
_UNWRITABLE = re.compile("[\0\ud800-\udfff]")

# Sorting and grouping go through SQLite, because keywords in their millions need not fit into
# memory: it holds this much of its file, and sorts in temporary files.
_CACHE_KIB = 256 << 10

_SCHEMA = f"""
PRAGMA journal_mode = OFF;
PRAGMA synchronous = OFF;
PRAGMA cache_size = -{_CACHE_KIB};
CREATE TABLE pair (keyword TEXT, part INTEGER, paper INTEGER);
CREATE TABLE label (number INTEGER PRIMARY KEY, keyword TEXT UNIQUE);
"""
_LABELS = f"""
INSERT INTO label
SELECT row_number() OVER (ORDER BY keyword) - 1, keyword
FROM (SELECT keyword FROM pair GROUP BY keyword HAVING sum(part = {_TRAIN}) >= ?)
"""
_ROWS = """
SELECT paper, number FROM pair JOIN label USING (keyword) WHERE part = ? ORDER BY paper, number
"""


@dataclass(frozen=True)
class DblpStatistics:
    """What was built.

    Attributes:
        read: Papers in the file.
        train: Training instances.
        test: Test instances.
        labels: Number of labels.
        train_pairs: Labels of all training instances together.
        test_pairs: Labels of all test instances together.
    """

    read: int
    train: int
    test: int
    labels: int
    train_pairs: int
    test_pairs: int

    def __str__(self) -> str:
        pairs, instances = self.train_pairs + self.test_pairs, self.train + self.test
        return (
            f"{self.read:,} papers read: {self.train:,} to train, {self.test:,} to test, "
            f"{self.labels:,} labels, {pairs / instances:.2f} labels a paper, "
            f"{self.train_pairs / self.labels:.2f} training papers a label"
        )


class _Paper(NamedTuple):
    key: str
    text: str
    keywords: list[str]


def build_dblp(
    source: Path,
    out: Path,
    *,
    test_share: float = 0.5,
    min_count: int = 1,
    keep_case: bool = False,
    on_read: Callable[[int], None] = lambda _: None,
) -> DblpStatistics:
    """Write ``trn_X.txt``, ``trn_X_Y.txt``, ``tst_X.txt``, ``tst_X_Y.txt`` and ``Y.txt``.

    The file is read once. Memory does not grow with it; the disk needs about twice the size of the
    result besides, next to ``out`` and in SQLite's temporary folder (``SQLITE_TMPDIR``, else
    ``/var/tmp``). ``out`` appears when all is written, and not before.

    Args:
        source: One JSON array of papers, or JSON lines, plain or ``.gz``. The fields ``id``,
            ``title``, ``abstract`` and ``keywords`` of each paper are read.
        out: Folder to make.
        test_share: Share of the papers that test (default: 0.5).
        min_count: Training papers that a label needs (default: 1).
        keep_case: Keep keywords as they are written (default: ``False``).
        on_read: Called now and then with the bytes read so far (default: nothing).

    Raises:
        ValueError: The file is not JSON or not of papers (the message begins with ``file:line``),
            an argument is out of range, or nothing is left to train or to test on.
        FileExistsError: ``out`` exists.
        OSError: The file cannot be read, or the disk is full.
    """
    if not 0 < test_share < 1:
        raise ValueError(f"test_share={test_share} is out of range: give more than 0, less than 1")
    if min_count < 1:
        raise ValueError(f"min_count={min_count} is out of range: give at least 1")
    if out.exists():
        raise FileExistsError(f"out={out} exists: give another folder, or remove it")
    if not source.is_file():
        raise FileNotFoundError(f"{source} is not a file: give the JSON file of DBLP-Citation V14")
    out.parent.mkdir(parents=True, exist_ok=True)
    with (
        _full_disk_explained(out.parent),
        tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch,
        closing(sqlite3.connect(Path(scratch) / "pairs.sqlite", isolation_level=None)) as database,
    ):
        database.executescript(_SCHEMA)
        papers = _papers(JsonObjects(source, on_read), keep_case)
        read = _collect(papers, Path(scratch), database, test_share)
        database.execute(_LABELS, (min_count,))
        result = Path(scratch) / "result"
        result.mkdir()
        statistics = _write(Path(scratch), result, database, read)
        for part, instances in (("training", statistics.train), ("test", statistics.test)):
            if not instances:
                raise ValueError(
                    f"{source}: of {read:,} papers none is left for the {part} part: a paper needs "
                    "a title, an abstract and a keyword with min_count training papers"
                )
        result.rename(out)
    return statistics


def _collect(
    papers: Iterable[_Paper | None], scratch: Path, database: sqlite3.Connection, share: float
) -> int:
    """Write texts to one file a part, and pairs to the database; how many papers there were."""
    read = 0
    numbers = [0, 0]
    with _open(scratch / "trn") as train, _open(scratch / "tst") as test:
        files = (train, test)

        def pairs() -> Iterator[tuple[str, int, int]]:
            nonlocal read
            for paper in papers:
                read += 1
                if paper is None:
                    continue
                part = _part(paper.key, share)
                files[part].write(paper.text + "\n")
                for keyword in paper.keywords:
                    yield keyword, part, numbers[part]
                numbers[part] += 1

        database.execute("BEGIN")
        database.executemany("INSERT INTO pair VALUES (?, ?, ?)", pairs())
        database.execute("COMMIT")
    return read


def _write(scratch: Path, result: Path, database: sqlite3.Connection, read: int) -> DblpStatistics:
    labels = 0
    with _open(result / "Y.txt") as file:
        for (keyword,) in database.execute("SELECT keyword FROM label ORDER BY number"):
            file.write(keyword + "\n")
            labels += 1
    (train, train_pairs), (test, test_pairs) = (
        _write_part(scratch, result, database.execute(_ROWS, (part,)), part, labels)
        for part in (_TRAIN, _TEST)
    )
    return DblpStatistics(read, train, test, labels, train_pairs, test_pairs)


def _write_part(
    scratch: Path, result: Path, rows: Iterable[tuple[int, int]], part: int, labels: int
) -> tuple[int, int]:
    """Write the texts that have labels, and their labels; how many of both."""
    name = _PARTS[part]
    instances = pairs = 0
    body = scratch / "body"
    with (
        (scratch / name).open(encoding="utf-8", newline="\n") as texts,
        _open(result / f"{name}_X.txt") as kept,
        _open(body) as file,
    ):
        numbered = enumerate(texts)
        for paper, group in groupby(rows, key=itemgetter(0)):
            numbers = [number for _, number in group]
            kept.write(next(text for index, text in numbered if index == paper))
            file.write(" ".join(f"{number}:1" for number in numbers) + "\n")
            instances += 1
            pairs += len(numbers)
    with body.open("rb") as lines, (result / f"{name}_X_Y.txt").open("wb") as out:
        # The header comes first and is known last.
        out.write(f"{instances} {labels}\n".encode())
        shutil.copyfileobj(lines, out)
    return instances, pairs


def _papers(records: JsonObjects, keep_case: bool) -> Iterator[_Paper | None]:
    for record in records:
        try:
            yield _paper(record, keep_case)
        except ValueError as error:
            records.fail(str(error))


def _paper(record: dict[str, Any], keep_case: bool) -> _Paper | None:
    """The fields of a paper that are used, or None if one is missing."""
    title, abstract = _text(record, "title"), _text(record, "abstract")
    keywords = dict.fromkeys(
        _clean(keyword if keep_case else keyword.lower()) for keyword in _list(record, "keywords")
    )
    keywords.pop("", None)
    if not (title and abstract and keywords):
        return None
    return _Paper(_text(record, "id") or title, f"{title} {abstract}", list(keywords))


def _text(record: dict[str, Any], name: str) -> str:
    value = record.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"expected text as {name!r}, found {value!r:.60}")
    return _clean(value)


def _list(record: dict[str, Any], name: str) -> list[str]:
    value = record.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(v, str | None) for v in value):
        raise ValueError(f"expected a list of texts as {name!r}, found {value!r:.60}")
    return [v for v in value if v is not None]


def _clean(text: str) -> str:
    return " ".join(_UNWRITABLE.sub("\ufffd", text).split())


def _part(key: str, test_share: float) -> int:
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return _TEST if int.from_bytes(digest, "big") < test_share * 2**64 else _TRAIN


def _open(path: Path) -> TextIO:
    return path.open("w", encoding="utf-8", newline="\n")


@contextmanager
def _full_disk_explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        full = getattr(error, "errno", None) == errno.ENOSPC or (
            getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
        )
        if not full:
            raise
        raise OSError(
            errno.ENOSPC,
            f"no room left in {folder}, or where SQLite sorts (SQLITE_TMPDIR, else /var/tmp): "
            "nothing was kept; give an --out on a larger disk",
        ) from None
