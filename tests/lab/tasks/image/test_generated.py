"""Drawn pictures: their shape, what the options decide, and that a class is its figure."""

import numpy as np
import pytest
import torch

from subulp.lab.tasks.image.generated import Generated, _figures
from subulp.lab.tasks.image.images import load_images


def test_they_have_the_shape_of_cifar10():
    (pictures, labels), (test, test_labels) = Generated(pictures=1200).draw()
    assert pictures.shape == (1000, 3, 32, 32)
    assert test.shape == (200, 3, 32, 32)
    assert {t.dtype for t in (pictures, labels, test, test_labels)} == {torch.uint8}
    assert labels.unique().tolist() == test_labels.unique().tolist() == list(range(10))


def test_options_alone_decide():
    def drawn(**options):
        (pictures, labels), _ = Generated(pictures=60, **options).draw()
        return pictures, labels

    pictures, labels = drawn(seed=1)
    assert all(map(torch.equal, drawn(seed=1), (pictures, labels)))
    assert not torch.equal(drawn(seed=2)[1], labels)
    clear, same = drawn(seed=1, noise=0.0)
    assert torch.equal(same, labels)
    off = (pictures.float() - clear.float()).std() / 255
    # A standard deviation of 0.3, but for what is cut off at black and at white.
    assert 0.2 < off < 0.3


def test_more_pictures_than_are_drawn_at_a_time():
    (pictures, labels), (test, _) = Generated(pictures=2500, noise=0.0).draw()
    assert len(pictures) == len(labels) == 2084
    assert len(test) == 416
    assert len(torch.unique(pictures.flatten(1), dim=0)) == len(pictures)


def test_a_class_is_its_number_of_lobes_and_whether_it_is_a_ring():
    labels = np.repeat(np.arange(10, dtype=np.uint8), 50)
    covered = _figures(np.random.default_rng(0), labels)
    assert covered.min() >= 0
    assert covered.max() == 1
    down, across = np.mgrid[:32, :32]
    right = 0
    for label, mask in zip(labels, covered, strict=True):
        weight = mask / mask.sum()
        y, x = (weight * down).sum(), (weight * across).sum()
        # A ring is empty in the middle.
        assert (mask[round(y), round(x)] < 0.5) == (label >= 5)
        offset = (across - x) + 1j * (down - y)
        waves = [abs((weight * offset**k / abs(offset) ** (k - 1)).sum()) for k in range(2, 7)]
        right += int(np.argmax(waves)) + 2 == 2 + label % 5
    assert right >= 0.95 * len(labels)


def test_load_images_takes_options():
    images = load_images("generated:pictures=120,noise=0,seed=5")
    assert images.train.shape == (100, 3, 32, 32)
    assert images.train.mean((0, 2, 3)).numpy() == pytest.approx(np.zeros(3), abs=1e-5)
    assert images.mirror
    assert images.width == 64
    assert len(load_images("generated").train) == 5000


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("generated:images=60", "'images=60' is unknown: give pictures=, noise=, seed="),
        ("generated:pictures=59", "pictures=59 is out of range: give from 60 to 1000000"),
        ("generated:pictures=1e3", "'pictures=1e3' is not an integer"),
        ("generated:noise=-1", "noise=-1 is out of range"),
        ("generated:noise=nan", "noise=nan is out of range"),
        ("generated:seed=1,seed=2", "repeats seed: give it once"),
        ("generate", "data=generate is unknown: use digits, generated, or cifar10:DIR"),
    ],
)
def test_options_that_cannot_be_are_refused(source, message):
    with pytest.raises(ValueError, match=message):
        load_images(source)
