"""What a data set promises: pixels in [0, 1], one label for each image, a fingerprint that sees everything."""

import numpy as np
import pytest
import torch
from jaxtyping import config

from specguard.data import Data, Dataset
from specguard.errors import DataError

SAMPLES, CHANNELS, HEIGHT, WIDTH, CLASSES = 11, 2, 5, 7, 3
SHAPE = (SAMPLES, CHANNELS, HEIGHT, WIDTH)
KINDS = (torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64)


def split(dtype=torch.float32, samples=SAMPLES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(samples, *SHAPE[1:], generator=generator, dtype=torch.float64)
    images = (images * 255).to(dtype) if dtype == torch.uint8 else images.to(dtype)
    return Dataset(images, torch.randint(CLASSES, (samples,), generator=generator))


def data(dtype=torch.float32):
    return Data("tiny", split(dtype), split(dtype, samples=4, seed=1), ("ant", "bee", "cat"))


def with_pixel(value):
    images = torch.full(SHAPE, 0.5)
    images[3, 1, 4, 6] = value
    return images


LABELS = torch.arange(SAMPLES) % CLASSES

REFUSED = {
    "NaN": (with_pixel(float("nan")), LABELS),
    "just above one": (with_pixel(1.0001), LABELS),
    "just below zero": (with_pixel(-1e-6), LABELS),
    "infinite": (with_pixel(float("inf")), LABELS),
    "minus infinity": (with_pixel(-float("inf")), LABELS),
    "signed integers": (torch.ones(SHAPE, dtype=torch.int64), LABELS),
    "booleans": (torch.ones(SHAPE, dtype=torch.bool), LABELS),
    "no batch axis": (torch.full(SHAPE[1:], 0.5), LABELS),
    "one axis too many": (torch.full((*SHAPE, 1), 0.5), LABELS),
    "labels with two axes": (torch.full(SHAPE, 0.5), LABELS.view(-1, 1)),
    "labels as real numbers": (torch.full(SHAPE, 0.5), LABELS.double()),
    "a label missing": (torch.full(SHAPE, 0.5), LABELS[1:]),
    "a label too many": (torch.full(SHAPE, 0.5), torch.cat([LABELS, LABELS[:1]])),
    "no images": (torch.empty(0, *SHAPE[1:]), LABELS[:0]),
    "no bytes": (torch.empty(0, *SHAPE[1:], dtype=torch.uint8), LABELS[:0]),
    "images without pixels": (torch.empty(SAMPLES, CHANNELS, 0, WIDTH), LABELS),
    "byte images without pixels": (torch.empty(SAMPLES, CHANNELS, 0, WIDTH, dtype=torch.uint8), LABELS),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_set_of_labeled_images_in_the_unit_range_is_refused(name, monkeypatch):
    # As it is shipped: users run without the type checks of the tests, which would come first.
    monkeypatch.setattr(config, "jaxtyping_disable", True)
    with pytest.raises(DataError):
        Dataset(*REFUSED[name])


def test_the_ends_of_the_range_are_allowed():
    assert len(Dataset(with_pixel(0.0), LABELS)) == len(Dataset(with_pixel(1.0), LABELS)) == SAMPLES


def test_every_byte_becomes_its_value_over_255():
    images = torch.arange(256, dtype=torch.uint8).view(1, 2, 8, 16)
    pixels, _ = Dataset(images, torch.zeros(1, dtype=torch.int64)).batch(slice(None))
    assert pixels.dtype == torch.float32
    np.testing.assert_array_equal(pixels.flatten().numpy(), np.arange(256, dtype=np.float32) / np.float32(255))


@pytest.mark.parametrize("dtype", KINDS)
def test_a_batch_holds_the_asked_images_and_labels_in_the_asked_order(dtype):
    whole, index = split(dtype), torch.tensor([6, 0, 6, 10])
    images, labels = whole.batch(index)
    for row, i in enumerate(index.tolist()):
        expected, label = whole.batch(slice(i, i + 1))
        assert torch.equal(images[row], expected[0])
        assert labels[row] == label[0] == whole.labels[i]
    assert images.is_floating_point()
    assert images.dtype == (torch.float32 if dtype == torch.uint8 else dtype)


def test_moving_a_data_set_keeps_pixels_and_labels():
    whole = split()
    moved = whole.to(torch.device("cpu"))
    assert torch.equal(moved.images, whole.images)
    assert torch.equal(moved.labels, whole.labels)


@pytest.mark.parametrize("label", [-1, CLASSES])
@pytest.mark.parametrize("side", ["train", "test"])
def test_a_label_outside_the_classes_is_refused_in_either_split(side, label):
    splits = {"train": split(), "test": split(samples=4)}
    labels = splits[side].labels.clone()
    labels[2] = label
    splits[side] = Dataset(splits[side].images, labels)
    with pytest.raises(DataError, match=r"tiny.*0\.\.2"):
        Data("tiny", **splits, classes=("ant", "bee", "cat"))


def test_splits_of_different_image_shapes_are_refused():
    narrow = Dataset(torch.full((4, CHANNELS, HEIGHT, WIDTH - 1), 0.5), LABELS[:4])
    with pytest.raises(DataError, match="tiny"):
        Data("tiny", split(), narrow, ("ant", "bee", "cat"))


def test_the_shape_is_channels_height_width():
    assert data().shape == (CHANNELS, HEIGHT, WIDTH)


@pytest.mark.parametrize("dtype", KINDS)
def test_pixel_statistics_are_those_of_numpy_over_the_training_images_to_four_digits(dtype):
    whole = data(dtype)
    unit = 255 if dtype == torch.uint8 else 1
    pixels = whole.train.images.double().numpy() / unit
    mean, std = whole.pixel_statistics()
    np.testing.assert_allclose(mean, pixels.mean((0, 2, 3)), atol=0.51e-4)
    np.testing.assert_allclose(std, pixels.std((0, 2, 3)), atol=0.51e-4)
    assert [round(value, 4) for value in mean + std] == list(mean + std)


def test_the_deviation_of_a_constant_channel_is_not_zero_so_that_dividing_by_it_is_safe():
    images = torch.rand(SHAPE, generator=torch.Generator().manual_seed(5))
    images[:, 1] = 0.25
    constant = Dataset(images, LABELS)
    mean, std = Data("tiny", constant, split(), ("ant", "bee", "cat")).pixel_statistics()
    assert (mean[1], std[1]) == (0.25, 1e-4)


@pytest.mark.parametrize("dtype", KINDS)
def test_every_accepted_kind_of_pixel_has_a_fingerprint(dtype):
    assert data(dtype).fingerprint() == data(dtype).fingerprint()


def one_pixel(images, labels):
    images[2, 1, 4, 5] = 1 - images[2, 1, 4, 5]


def one_label(images, labels):
    labels[3] = (labels[3] + 1) % CLASSES


def two_labels_swapped(images, labels):
    first, second = 0, int((labels != labels[0]).nonzero()[0])
    labels[[first, second]] = labels[[second, first]]


@pytest.mark.parametrize("change", [one_pixel, one_label, two_labels_swapped])
@pytest.mark.parametrize("side", ["train", "test"])
def test_the_fingerprint_changes_with_one_pixel_and_with_one_label_of_either_split(side, change):
    whole = data()
    splits = {"train": whole.train, "test": whole.test}
    images, labels = splits[side].images.clone(), splits[side].labels.clone()
    change(images, labels)
    splits[side] = Dataset(images, labels)
    assert Data("tiny", **splits, classes=whole.classes).fingerprint() != whole.fingerprint()


def test_the_fingerprint_sees_the_shape_the_type_and_which_split_is_which():
    whole = data()
    reshaped = [
        Dataset(s.images.reshape(len(s), CHANNELS, WIDTH, HEIGHT), s.labels) for s in (whole.train, whole.test)
    ]
    doubled = [Dataset(s.images.double(), s.labels) for s in (whole.train, whole.test)]
    others = [Data("tiny", *pair, whole.classes) for pair in (reshaped, doubled, (whole.test, whole.train))]
    assert len({d.fingerprint() for d in [whole, *others]}) == 4


def test_the_fingerprint_does_not_depend_on_the_layout_in_memory():
    whole = data()
    strided = Dataset(whole.train.images.contiguous(memory_format=torch.channels_last), whole.train.labels)
    assert not strided.images.is_contiguous()
    assert Data("tiny", strided, whole.test, whole.classes).fingerprint() == whole.fingerprint()
