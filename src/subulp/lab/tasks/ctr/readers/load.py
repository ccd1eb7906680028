"""Data sets by the name that ``--data`` gives them."""

from __future__ import annotations

import glob
import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ....data.drawn import NAME as GENERATED
from ....data.lines import count_lines, find, shown, whole_lines
from .dataset import CTRData, ReadOptions, make_data
from .description import Description, make_layout, read_description
from .example_stream import Span, read_spans
from .flights import FLIGHTS, flights
from .generated import Generated, generate
from .layout import Layout, criteo_layout
from .parse_line import split_line

BUNDLED = Path(__file__).parent
ADULT = BUNDLED / "adult.toml"

DAY_OF_A_WEEK = 1 / 7
"""Share of a file's lines that test, if none is given: a day of Criteo's week."""

_KINDS = ("adult", "criteo", "csv")
_FORMS = "adult:DIR, criteo:FILE,FILE,..., csv:FILE, flights or generated:OPTION=NUMBER,..."


def load_data(
    data: str | None,
    options: ReadOptions,
    *,
    test: Path | None = None,
    test_share: float = DAY_OF_A_WEEK,
    columns: Path | None = None,
    rows: Sequence[int] = (100_000,),
) -> CTRData:
    """Read and check a data set.

    The test part of ``adult`` is its own file. For the others it is ``test``; without it the last
    one of several files; of a single file the last ``test_share`` of its lines, since clicks stand
    in the order of time.

    Args:
        data: ``adult:DIR``, ``criteo:FILE,FILE,...``, ``csv:FILE,FILE,...``, ``flights`` or
            ``generated``; a name may be a pattern such as ``day_*.gz``. ``None`` is the bundled
            Adult.
        options: How files are read.
        test: File of the test part (default: ``None``).
        test_share: Share of a single file's lines that test (default: 1/7, a day of Criteo's week).
        columns: Description of the columns of ``csv`` (default: ``None``).
        rows: Rows of the tables of ``criteo``, one number or 26 (default: 100,000).

    Raises:
        ValueError: The name has another form, or the data is wrong; the message begins with
            ``file:line`` where a line is.
        FileNotFoundError: A file is missing.
        RuntimeError: The package that has the data is missing.
    """
    kind, _, rest = (data or "adult").partition(":")
    if data in (None, FLIGHTS) or kind == GENERATED or (kind == "adult" and rest):
        if test is not None:
            raise ValueError(f"test={test} is given, and {kind} has a test part of its own")
        return _whole(kind, rest, options, test_share)
    if kind not in ("criteo", "csv") or not rest:
        raise ValueError(f"data={data} is unknown: give {_FORMS}")
    paths = _paths(rest)
    if test is not None:
        _check_file(test)
    if kind == "criteo":
        layout, first = criteo_layout(rows), 0
    else:
        if columns is None:
            raise ValueError("data=csv:... needs a description of its columns: --columns FILE.toml")
        description = read_description(columns)
        first = int(description.has_header)
        header = _header(paths[0], description) if first else None
        layout = make_layout(description, header, paths[0])
        for path in [*paths[1:], *([test] if test else [])]:
            if first and (other := _header(path, description)) != header:
                raise ValueError(f"{path}:1: the header is {other}, and {header} in {paths[0]}")
    if test is not None or len(paths) > 1:
        _check_no_share(test_share, f"test={test}" if test is not None else f"{len(paths)} files")
    train, tests = _split(paths, test, test_share, first)
    return _data(data or kind, layout, train, tests, options)


def _whole(kind: str, rest: str, options: ReadOptions, test_share: float) -> CTRData:
    """A data set that has both parts."""
    if kind == "adult":
        _check_no_share(test_share, f"data={kind}")
        return _adult(Path(rest) if rest else None, options)
    if kind == FLIGHTS:
        return flights(options, test_share=test_share)
    if options.min_count is not None:
        raise ValueError(
            f"min_count={options.min_count} and data={GENERATED} contradict each other: each "
            "of its categories has a row of its own"
        )
    return generate(Generated.parse(rest), buffer=options.buffer, test_share=test_share)


def _check_no_share(share: float, whole: str) -> None:
    if share != DAY_OF_A_WEEK:
        raise ValueError(
            f"test_share={share} has no effect on {whole}, whose test part is given: leave it out"
        )


def _data(
    name: str, layout: Layout, train: list[Span], test: list[Span], options: ReadOptions
) -> CTRData:
    parts = [partial(read_spans, layout, spans) for spans in (train, test)]
    return make_data(name, layout, parts[0], parts[1], options)


def _adult(folder: Path | None, options: ReadOptions) -> CTRData:
    where = folder or BUNDLED
    spans = [_adult_span(where, name) for name in ("adult.data", "adult.test")]
    if spans[0].path.samefile(spans[1].path):
        raise ValueError(
            f"{spans[1].path} and {spans[0].path} are the same file: give the test part of Adult"
        )
    layout = make_layout(read_description(ADULT), None)
    name = "Adult (bundled)" if folder is None else f"adult:{folder}"
    return _data(name, layout, spans[:1], spans[1:], options)


def evaluation_spans(data: str, layout: Layout) -> list[Span]:
    """All lines of the files that a name such as ``criteo:FILE`` means; the form may be left out.

    Of a folder of Adult they are those of the test part.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: Its header is not that of the layout.
    """
    kind, _, rest = data.partition(":")
    if kind in (GENERATED, FLIGHTS) and not Path(data).exists():
        raise ValueError(
            f"data={data} is made, and has no files of its own: give files with the columns of the "
            "training data, or leave data out for the run's own test part"
        )
    names = rest if kind in _KINDS and rest else data
    if kind == "adult" or Path(names).is_dir():
        return [_adult_span(Path(names), "adult.test")]
    paths = _paths(names)
    for path in paths if layout.header else ():
        if (found := fields_of_first_line(path, layout)) != list(layout.columns):
            raise ValueError(
                f"{path}:1: the header is {','.join(found)}: expected {','.join(layout.columns)}"
            )
    return [Span(path, int(layout.header)) for path in paths]


def fields_of_first_line(path: Path, layout: Layout) -> list[str]:
    """The fields of the first line of a file: of one without header, of the first not empty.

    Raises:
        ValueError: It cannot be read.
    """
    if not path.is_file():
        raise FileNotFoundError(f"file={path} is not a file: give a file with an example a line")
    return _fields(path, layout.separator, layout.quote, empty=layout.header)


def _adult_span(folder: Path, name: str) -> Span:
    path = find(folder, name)
    if path is None:
        raise FileNotFoundError(f"data=adult:{folder} has neither {name} nor {name}.gz")
    # The repository's test file begins with a remark.
    return Span(path, int(_first_line(path, empty=True).startswith(b"|")))


def _paths(names: str) -> list[Path]:
    paths = []
    for name in names.split(","):
        found = sorted(glob.glob(name)) if glob.has_magic(name) else [name]
        if not found:
            raise FileNotFoundError(f"no file matches {name}")
        paths += [Path(path) for path in found]
    for path in paths:
        _check_file(path)
    return paths


def _check_file(path: Path) -> None:
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise FileNotFoundError(f"{path} {what}: give the path of a file, plain or .gz")


def _first_line(path: Path, *, empty: bool) -> bytes:
    """The first line, or the first that is not empty."""
    for _, block in whole_lines(path):
        for line in block.split(b"\n"):
            if empty or line.strip():
                return line.removesuffix(b"\r")
    return b""


def _header(path: Path, description: Description) -> list[str]:
    values = description.values
    return _fields(path, values.separator, values.quote)


def _fields(path: Path, separator: str, quote: str, *, empty: bool = True) -> list[str]:
    raw = _first_line(path, empty=empty)
    try:
        return split_line(separator, quote, raw)
    except ValueError as error:
        raise ValueError(f"{path}:1: the line {shown(raw)} cannot be read: {error}") from None


def _split(
    paths: list[Path], test: Path | None, share: float, first: int
) -> tuple[list[Span], list[Span]]:
    """Lines that train and lines that test."""
    spans = [Span(path, first) for path in paths]
    for earlier, path in itertools.combinations([*paths, *([test] if test else [])], 2):
        if path.samefile(earlier):
            raise ValueError(
                f"{path} and {earlier} are the same file: a model would be tested on what it was "
                "trained on, or see it twice; give each file once"
            )
    if test is not None:
        return spans, [Span(test, first)]
    if len(paths) > 1:
        return spans[:-1], spans[-1:]
    lines = sum(count_lines(block) for _, block in whole_lines(paths[0])) - first
    cut = first + lines - max(1, round(share * lines))
    if cut <= first:
        found = "1 example is" if lines == 1 else f"{max(lines, 0)} examples are"
        raise ValueError(f"{paths[0]}: {found} too few for a training part and a test part")
    return [Span(paths[0], first, cut)], [Span(paths[0], cut)]
