"""A small data set for all tests of the image classifier."""

import dataclasses

import pytest

from subulp.lab.tasks.image.images import load_images


@pytest.fixture(scope="session")
def digits():
    """A corner of the digits: three batches of training pictures."""
    images = load_images("digits")
    return dataclasses.replace(
        images,
        train=images.train[:48],
        train_labels=images.train_labels[:48],
        validation=images.validation[:40],
        validation_labels=images.validation_labels[:40],
    )
