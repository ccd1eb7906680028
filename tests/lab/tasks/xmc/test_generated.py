"""The generated data set: always the same, skewed, and learnable; and what it refuses."""

import dataclasses

import numpy as np
import pytest

from subulp.lab.engine.loop import run
from subulp.lab.tasks.xmc.config import XMCConfig
from subulp.lab.tasks.xmc.readers.generated import CLUSTER, POOL, SEEN, generate
from subulp.lab.tasks.xmc.task import digest, load

SMALL = {"width": 16, "epochs": 1, "batch_size": 32, "watch_every": 50, "device": "cpu"}


def test_it_is_always_the_same():
    config = XMCConfig(generated_labels=100, **SMALL)
    first, second = load(config), load(config)
    assert digest(first) == digest(second)
    assert digest(first) != digest(load(dataclasses.replace(config, generated_labels=101)))


def test_labels_are_as_frequent_as_zipfs_law_has_it():
    counts = np.sort(generate(2000).train.labels.counts())[::-1]
    assert counts[0] > 100 * max(1, counts[1000])
    assert len(generate(2000).train) == 8000


@pytest.mark.parametrize("count", [64, 65, 1000])
def test_labels_of_an_instance_are_of_one_cluster_and_show_their_features(count):
    data = generate(count)
    clusters = -(-count // CLUSTER)
    for part in (data.train, data.test):
        for i in range(0, len(part), 7):
            labels = part.labels.row(i)
            assert len(set(labels % clusters)) == 1
            shown = part.source.read([i]).ids
            of_cluster = shown[shown // POOL == labels[0] % clusters]
            assert len(of_cluster) >= SEEN - 3
            assert (shown < part.source.num_features).all()


def test_batches_are_instances_one_after_the_other():
    source = generate(64).train.source
    batch = source.read([5, 0, 9])
    for place, i in enumerate((5, 0, 9)):
        own = batch.ids[batch.offsets[place] : batch.offsets[place + 1]]
        assert own.tolist() == source.read([i]).ids.tolist()
    assert (batch.values == 1).all()


def test_it_can_be_learned():
    config = XMCConfig(generated_labels=64, **SMALL | {"epochs": 30}, precision=("fp8",))
    # The most frequent label is right in a fifth of the instances.
    assert run(config, load(config), "fp8", 0).metrics["P@1"] > 45


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"generated_labels": 63}, "generated_labels=63 is out of range"),
        ({"generated_labels": 2**20 + 1}, "generated_labels=1048577 is out of range"),
        ({"data": "x"}, "generated_labels=64 and data=x contradict each other"),
        ({"encoder": "bert"}, "generated_labels=64 makes features, and encoder=bert reads texts"),
    ],
)
def test_bad_input(changes, message):
    with pytest.raises(ValueError, match=message):
        XMCConfig(**{"generated_labels": 64} | changes)


def test_it_has_no_label_texts():
    with pytest.raises(ValueError, match="has no label texts to train on"):
        load(XMCConfig(generated_labels=64, label_texts=True, **SMALL))
