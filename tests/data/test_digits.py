"""The bundled digits: always the same, whole, and split once and for all."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from specguard.data import digits


@pytest.fixture(scope="module")
def data():
    return digits()


def test_there_are_1437_training_and_360_test_images_of_8_by_8_pixels(data):
    assert (len(data.train), len(data.test), data.shape) == (1437, 360, (1, 8, 8))
    assert data.classes == tuple("0123456789")


def test_every_fifth_image_of_the_source_from_the_first_on_is_a_test_image(data):
    pixels, labels = load_digits(return_X_y=True)
    rest = np.setdiff1d(np.arange(len(labels)), np.arange(0, len(labels), 5))
    for split, index in ((data.test, np.arange(0, len(labels), 5)), (data.train, rest)):
        np.testing.assert_array_equal(split.images.flatten(1).numpy() * 16, pixels[index])
        np.testing.assert_array_equal(split.labels.numpy(), labels[index])


def test_two_calls_give_the_same_data(data):
    assert digits().fingerprint() == data.fingerprint()


def test_pixels_fill_the_range_from_0_to_1_in_both_splits(data):
    for split in (data.train, data.test):
        assert split.images.dtype == torch.float32
        assert (split.images.min(), split.images.max()) == (0, 1)


def test_every_class_is_in_both_splits(data):
    for split in (data.train, data.test):
        assert split.labels.unique().tolist() == list(range(10))


def test_no_image_is_in_both_splits(data):
    train, test = ({image.tobytes() for image in split.images.numpy()} for split in (data.train, data.test))
    assert len(train) == len(data.train)
    assert len(test) == len(data.test)
    assert not train & test
