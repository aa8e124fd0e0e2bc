"""A folder of images: small pictures that the test writes itself."""

import shutil
from contextlib import suppress

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image

from specguard.data import image_folder
from specguard.errors import ConfigError, DataError

COLOURS = {"bee": (250, 10, 20), "ant": (10, 240, 30), "cow": (40, 50, 230)}


def write(path, color=(9, 99, 199), width=11, height=7, mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), color).convert(mode).save(path)


@pytest.fixture
def root(tmp_path):
    """Three classes; two pictures of each to train on and one to test on."""
    for name, color in COLOURS.items():
        for file in ("train/{}/1.png", "train/{}/0.png", "val/{}/2.png"):
            write(tmp_path / "zoo" / file.format(name), color)
    return tmp_path / "zoo"


def test_classes_are_the_training_folders_in_alphabetical_order(root):
    data = image_folder(root, 5)
    assert data.name == "zoo"
    assert data.classes == ("ant", "bee", "cow")
    for split, per_class in ((data.train, 2), (data.test, 1)):
        assert split.labels.tolist() == [label for label in range(3) for _ in range(per_class)]
        for image, label in zip(split.images, split.labels, strict=True):
            color = np.array(COLOURS[data.classes[label]]).reshape(3, 1, 1)
            np.testing.assert_array_equal(image.numpy(), np.broadcast_to(color, (3, 5, 5)))


def test_files_of_a_class_come_in_alphabetical_order_so_that_two_machines_agree(root):
    for shade, file in enumerate(("b.png", "a.png", "c.png")):
        write(root / "train" / "ant" / file, (shade, shade, shade))
    first = image_folder(root, 5).train.images[:5, 0, 0, 0]
    assert first.tolist() == [10, 10, 1, 0, 2]  # 0.png, 1.png, a.png, b.png, c.png


def test_val_wins_over_test_and_test_serves_where_there_is_no_val(root):
    write(root / "test" / "cow" / "9.png", COLOURS["cow"])
    assert len(image_folder(root, 5).test) == 3
    (root / "val").rename(root / "elsewhere")
    assert image_folder(root, 5).test.labels.tolist() == [2]


@pytest.mark.parametrize(("width", "height"), [(24, 8), (8, 24), (8, 8), (25, 8), (9, 31), (3, 2), (200, 201)])
@pytest.mark.parametrize("size", [8, 5, 13])
def test_the_shorter_edge_is_resized_and_the_center_is_cut_out(root, width, height, size):
    """A picture with a gradient along each axis; the result must be the gradient around the center."""
    x, y = np.meshgrid((np.arange(width) + 0.5) / width, (np.arange(height) + 0.5) / height)
    picture = np.stack([255 * x, 255 * y, np.full_like(x, 77)], axis=2).round().astype(np.uint8)
    Image.fromarray(picture).save(root / "val" / "ant" / "2.png")
    image = image_folder(root, size).test.images[0].numpy().astype(float)
    assert image.shape == (3, size, size)
    np.testing.assert_array_equal(image[2], 77)
    edge = min(width, height)
    place = ((np.arange(size) + 0.5) / size - 0.5) * edge  # of the kept pixels, from the center, in old pixels
    # Bicubic filters reproduce a gradient away from the border; half a new pixel is lost to an odd margin.
    error_x, error_y = (255 * (0.51 * edge / size + 0.5) / length + 1 for length in (width, height))
    inner = slice(2, -2)
    np.testing.assert_allclose(
        image[0][inner, inner], np.tile(255 * (0.5 + place / width), (size, 1))[inner, inner], atol=error_x
    )
    np.testing.assert_allclose(
        image[1].T[inner, inner], np.tile(255 * (0.5 + place / height), (size, 1))[inner, inner], atol=error_y
    )


def test_a_picture_of_the_right_size_is_kept_bit_for_bit(root):
    pixels = np.random.default_rng(0).integers(256, size=(7, 7, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(root / "val" / "ant" / "2.png")
    image = image_folder(root, 7).test.images[0].numpy()
    for channel in range(3):
        np.testing.assert_array_equal(image[channel], pixels[:, :, channel])


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1", "LA"])
def test_pictures_of_every_mode_become_rgb(root, mode):
    suffix = "jpg" if mode == "CMYK" else "png"
    write(root / "train" / "cow" / f"x.{suffix}", (255, 255, 255), mode=mode)
    image = image_folder(root, 5).train.images[-1]
    assert image.shape == (3, 5, 5)
    assert image.min() >= 250


def test_a_picture_of_16_bits_keeps_its_grays_or_is_refused(root):
    """Cutting its values off at 255 would make nearly every picture white."""
    gray = np.full((7, 7), 0x8000, dtype=np.uint16)
    Image.fromarray(gray).save(root / "val" / "ant" / "2.png")
    with suppress(DataError):
        assert image_folder(root, 7).test.images[0].unique().tolist() == [0x80]


def test_other_files_are_passed_over_and_suffixes_may_be_capitals(root):
    (root / "train" / "ant" / "notes.txt").write_text("no picture")
    (root / "train" / "readme.md").write_text("no class")
    (root / "val" / "readme.md").write_text("no class")
    write(root / "train" / "ant" / "z.PNG", COLOURS["ant"])
    data = image_folder(root, 5)
    assert data.classes == ("ant", "bee", "cow")
    assert len(data.train) == 7


def test_a_class_without_test_pictures_is_allowed(root):
    (root / "val" / "bee" / "2.png").unlink()
    (root / "val" / "bee").rmdir()
    assert image_folder(root, 5).test.labels.tolist() == [0, 2]


def truncated(path):
    noise = np.random.default_rng(1).integers(256, size=(40, 30, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:-1500])


UNREADABLE = {
    "no picture": lambda path: path.write_text("this is no picture"),
    "empty": lambda path: path.write_bytes(b""),
    "truncated": truncated,
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a dead link": lambda path: (path.unlink(), path.symlink_to("nowhere.png")),
}


@pytest.mark.parametrize("fault", UNREADABLE)
@pytest.mark.parametrize("file", ["train/bee/1.png", "val/cow/2.png"])
def test_an_unreadable_picture_is_refused_by_name(root, file, fault):
    UNREADABLE[fault](root / file)
    with pytest.raises(DataError) as caught:
        image_folder(root, 5)
    assert str(root / file) in str(caught.value)


@pytest.mark.parametrize("limit", [76, 50, 10])
def test_a_decompression_bomb_is_refused_by_name_and_not_only_warned_about(root, monkeypatch, limit):
    """The pictures have 77 pixels. Pillow itself warns above its limit, and raises above twice that."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with pytest.raises(DataError, match="decompression bomb") as caught:
        image_folder(root, 5)
    assert str(root / "train" / "ant" / "0.png") in str(caught.value)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 77)
    assert len(image_folder(root, 5).train) == 6


def test_a_long_thin_picture_is_never_blown_up_beyond_the_limit_on_pixels(root, monkeypatch):
    """900 pixels in a row pass as small; with the shorter edge at 50 the whole would have 2,250,000."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)
    write(root / "val" / "ant" / "2.png", width=900, height=1)
    sizes, resize = [], Image.Image.resize

    def observed(picture, size, *arguments, **options):
        sizes.append(size)
        return resize(picture, size, *arguments, **options)

    monkeypatch.setattr(Image.Image, "resize", observed)
    with suppress(DataError):
        assert image_folder(root, 50).shape == (3, 50, 50)
    assert sizes
    assert all(width * height <= 10_000 for width, height in sizes)


def test_a_test_class_that_was_never_trained_on_is_refused_by_name(root):
    write(root / "val" / "dog" / "0.png")
    with pytest.raises(DataError, match="'dog'"):
        image_folder(root, 5)


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_split_without_pictures_is_refused_by_name(root, split):
    for path in (root / split).rglob("*.png"):
        path.unlink()
    with pytest.raises(DataError, match="no images") as caught:
        image_folder(root, 5)
    assert str(root / split) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("elsewhere", "test images are expected in {0}/val or {0}/test.*but {0} has elsewhere, train"),
        ("vall", "is it 'vall'?"),
    ],
)
def test_a_folder_without_test_images_says_what_is_expected_and_what_was_found(root, name, message):
    (root / "val").rename(root / name)
    with pytest.raises(DataError, match=message.format(root)):
        image_folder(root, 5)
    with pytest.raises(DataError, match="is one split of a data set: name the folder that it lies in"):
        image_folder(root / "train", 5)
    with pytest.raises(DataError, match="does not exist"):
        image_folder(root / "nowhere", 5)


@pytest.mark.parametrize("name", ["test", "valid", "validation", "testing"])
def test_test_images_have_several_names(root, name):
    whole = image_folder(root, 5)
    (root / "val").rename(root / name)
    found = image_folder(root, 5)
    assert torch.equal(found.test.images, whole.test.images)
    assert found.fingerprint() == whole.fingerprint()


def test_without_training_images_classes_are_those_of_val_and_training_is_refused(root):
    whole = image_folder(root, 5)
    (root / "train").rename(root / "training")
    with pytest.raises(DataError, match="rename the folder"):
        image_folder(root, 5)
    shutil.rmtree(root / "training")
    found = image_folder(root, 5)
    assert torch.equal(found.test.images, whole.test.images)
    assert found.classes == tuple(sorted(path.name for path in (root / "val").iterdir() if path.is_dir()))
    assert found.fingerprint() != whole.fingerprint()
    assert len(found.take(1)) == 1
    assert "train" in repr(found)
    for use in (lambda: len(found.train), found.pixel_statistics, lambda: found.train.batch(slice(0, 1))):
        with pytest.raises(DataError, match="there are no training images: the folder"):
            use()


@pytest.mark.parametrize("size", [0, -3])
def test_a_size_below_one_is_refused_as_such_and_not_blamed_on_a_picture(root, size):
    with pytest.raises(ConfigError):
        image_folder(root, size)


def test_a_few_pictures_are_of_all_classes_whether_or_not_they_stay_on_the_disk(root):
    for name, color in COLOURS.items():
        for number in range(10 if name == "ant" else 4):
            write(root / "val" / name / f"more-{number}.png", color)
    data, streamed = image_folder(root, 5), image_folder(root, 5, memory=0)
    assert data.test.labels[:7].tolist() == [0] * 7
    split = data.take(7)
    assert sorted(split.labels.tolist()) == [0, 0, 0, 0, 1, 2, 2]
    assert streamed.take(7).samples.tolist() == split.samples.tolist()
    everything = slice(0, 7)
    for one, other in zip(split.batch(everything), streamed.take(7).batch(everything), strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


# Names that say something else than the content ----------------------------------------------------------------

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\nshowpage\n%%EOF\n"


def test_a_suffix_starts_no_other_program(root, monkeypatch):
    started = []
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", "gs")
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *arguments, **_: started.append(arguments))
    for suffix in ("png", "jpg", "bmp"):
        path = root / "train" / "bee" / f"1.{suffix}"
        path.write_bytes(EPS)
        with pytest.raises(DataError, match="its content is not that of a PNG, JPEG, WEBP, BMP or PPM") as caught:
            image_folder(root, 5)
        assert str(path) in str(caught.value)
        path.unlink()
    assert not started


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "ICO", "TGA", "PCX", "SGI", "DDS", "PDF", "JPEG2000"])
def test_a_picture_of_another_format_is_refused_by_name(root, kind):
    path = root / "train" / "bee" / "1.png"
    try:
        Image.new("RGB", (16, 16)).save(path, kind)
    except (KeyError, OSError) as error:
        pytest.skip(f"this Pillow cannot write it: {error}")
    with pytest.raises(DataError, match="its content is not that of") as caught:
        image_folder(root, 5)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "PPM"])
def test_a_picture_of_a_known_format_is_read_whatever_its_suffix(root, kind):
    Image.new("RGB", (16, 16), (9, 99, 199)).save(root / "train" / "bee" / "9.png", kind)
    assert len(image_folder(root, 5).train) == 7
