"""Drawn examples: what the options decide, and what a model can learn from them."""

from pathlib import Path

import numpy as np
import pytest

from subulp.lab.tasks.ctr.readers.dataset import ReadOptions
from subulp.lab.tasks.ctr.readers.generated import Generated
from subulp.lab.tasks.ctr.readers.load import load_data


def shares(keys, rows):
    counts = np.bincount(keys, minlength=rows)
    return np.sort(counts)[::-1].cumsum() / len(keys)


def test_the_seed_alone_decides():
    one, same, other = (Generated(examples=500, rows=64, seed=seed).draw() for seed in (3, 3, 4))
    for name in ("labels", "numbers", "keys"):
        assert np.array_equal(getattr(one, name), getattr(same, name))
        assert not np.array_equal(getattr(one, name), getattr(other, name))


def test_tables_have_their_rows():
    options = Generated(examples=5000, tables=3, rows=40)
    assert options.sizes == [40, 10, 40]
    keys = options.draw().keys
    assert keys.dtype == np.uint32
    assert [int(keys[:, i].max()) < rows for i, rows in enumerate(options.sizes)] == [True] * 3
    assert len(np.unique(keys[:, 1])) == 10


def test_popularity_follows_the_exponent():
    flat, steep = (
        shares(Generated(examples=20_000, rows=1000, zipf=zipf).draw().keys[:, 0], 1000)
        for zipf in (0.0, 1.2)
    )
    assert flat[199] < 0.3
    assert steep[199] > 0.8
    # The most popular one of so many has 1 / H of all accesses.
    harmonic = (np.arange(1, 1001) ** -1.2).sum()
    assert steep[0] == pytest.approx(1 / harmonic, rel=0.05)


def test_popularity_moves_on_in_time():
    def often(drift):
        keys = Generated(examples=20_000, rows=1000, zipf=1.2, drift=drift).draw().keys[:, 0]
        return [int(np.bincount(part).argmax()) for part in (keys[:1000], keys[-1000:])]

    stays, moves = often(0.0), often(0.5)
    assert stays[0] == stays[1]
    assert moves[0] != moves[1]


def test_clicks_depend_on_pairs_and_on_no_category_alone():
    drawn = Generated(examples=60_000, tables=2, rows=8, zipf=0.0, signal=4.0).draw()
    keys, labels = drawn.keys, drawn.labels

    def spread(groups):
        means = np.bincount(groups, labels) / np.bincount(groups)
        return float(means.std())

    single = max(spread(keys[:, 0]), spread(keys[:, 1]))
    pair = spread(keys[:, 0] * 2 + keys[:, 1])
    assert pair > 0.1
    assert pair > 1.2 * single


def test_main_effects_are_what_categories_decide_alone():
    given = {"examples": 60_000, "tables": 2, "rows": 64, "zipf": 0.0, "signal": 4.0}

    def explained(drawn):
        """Of the clicks' variance, by the categories' means."""
        means = [np.bincount(k, drawn.labels) / np.bincount(k) for k in drawn.keys.T]
        parts = [of[drawn.keys[:, i]] - drawn.labels.mean() for i, of in enumerate(means)]
        return np.var(sum(parts)) / np.var(drawn.labels)

    without, half, most = (
        Generated(**given, main_effects=share).draw() for share in (0.0, 1.0, 8.0)
    )
    assert explained(without) < 0.05
    assert 0.2 < explained(half) < explained(most)
    # All else is as it is without.
    assert np.array_equal(without.keys, most.keys)
    assert np.array_equal(without.numbers, most.numbers)
    assert np.array_equal(without.labels, Generated(**given).draw().labels)


def test_examples_of_the_shape_of_criteos():
    data = load_data("generated:examples=700,rows=64,tables=26,numbers=13", ReadOptions())
    batch = next(data.train.in_order(50))
    assert (batch.numbers.shape, batch.keys.shape) == ((50, 13), (50, 26))
    layout = Generated(tables=26, numbers=13).layout
    assert layout.columns[:14] == ("label", *(f"I{i}" for i in range(1, 14)))


def test_numbers_have_the_same_part_in_clicks_however_many_they_are():
    def part(count):
        drawn = Generated(examples=60_000, rows=64, numbers=count, zipf=0.0).draw()
        return np.corrcoef(drawn.numbers.sum(1), drawn.labels)[0, 1]

    few, four, many = map(part, (1, 4, 13))
    # Four times the standard error of a correlation of so many examples.
    assert few == pytest.approx(four, abs=0.017)
    assert many == pytest.approx(four, abs=0.017)
    assert four > 0.1


def test_a_data_set_has_its_last_examples_as_test_part():
    data = load_data("generated:examples=700,rows=64", ReadOptions(buffer=128), test_share=0.1)
    assert (len(data.train), len(data.test)) == (630, 70)
    drawn = Generated(examples=700, rows=64).draw()
    last = next(data.test.in_order(70))
    assert np.array_equal(last.keys, drawn.keys[630:])
    assert [t.rows for t in data.tables] == [64, 16] * 4
    assert data.name == Generated.parse("examples=700,rows=64").name
    assert load_data("generated:examples=700,rows=64,seed=1", ReadOptions()).digest != data.digest


def test_a_small_buffer_keeps_what_is_near_in_time_together():
    data = load_data("generated:examples=1000,rows=64", ReadOptions(buffer=100), test_share=0.1)
    drawn = Generated(examples=1000, rows=64).draw()
    first = next(data.train.batches(100, seed=0))
    assert np.array_equal(np.sort(first.numbers[:, 0]), np.sort(drawn.numbers[:100, 0]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows=4", r"data=generated: rows=4 is out of range: give from 8 to"),
        ("drift=2", r"data=generated: drift=2 is out of range: give from 0 to 1"),
        ("row=4", r"data=generated: 'row=4' is unknown: give examples=, tables=, rows="),
        ("rows=many", r"data=generated: 'rows=many' is not an integer"),
        ("zipf=much", r"data=generated: 'zipf=much' is not a number"),
        ("seed=1,seed=2", r"data=generated repeats seed: give it once"),
    ],
)
def test_wrong_options_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        load_data(f"generated:{text}", ReadOptions())


def test_what_only_files_have_is_refused():
    with pytest.raises(ValueError, match=r"min_count=2 and data=generated contradict each other"):
        load_data("generated", ReadOptions(min_count=2))
    with pytest.raises(ValueError, match=r"test=t.tsv is given, and generated has a test part"):
        load_data("generated", ReadOptions(), test=Path("t.tsv"))
    with pytest.raises(ValueError, match="all labels of the training part are"):
        load_data("generated:examples=100,rows=8", ReadOptions(), test_share=0.99)
