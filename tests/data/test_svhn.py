"""SVHN from small .mat files in the official layout: height x width x channel x sample, and 10 for the digit 0."""

import numpy as np
import pytest
from scipy.io import savemat

from specguard.data import matfile, svhn
from specguard.errors import DataError

FILES = {"train_32x32.mat": 11, "test_32x32.mat": 5}
files = pytest.mark.parametrize("file", FILES)


def content(file):
    """Random pixels and labels, every digit among them in the training file, as the official files have them."""
    count, source = FILES[file], np.random.default_rng(FILES[file])
    labels = (np.arange(count, dtype=np.uint8) % 10 + 1).reshape(-1, 1)
    return {"X": source.integers(256, size=(32, 32, 3, count), dtype=np.uint8), "y": labels}


@pytest.fixture
def root(tmp_path):
    for file in FILES:
        savemat(tmp_path / file, content(file), do_compression=True)
    return tmp_path


def test_pixels_are_sample_channel_row_column_and_nothing_is_mirrored(root):
    data = svhn(root, verify=False)
    assert data.shape == (3, 32, 32)
    for split, file in zip((data.train, data.test), FILES, strict=True):
        pixels = content(file)["X"]
        assert len(split) == FILES[file]
        for sample in range(len(split)):
            for channel in range(3):
                np.testing.assert_array_equal(split.images[sample, channel].numpy(), pixels[:, :, channel, sample])


def test_the_label_10_is_the_digit_0_and_all_other_labels_are_kept(root):
    data = svhn(root, verify=False)
    assert data.train.labels.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert data.test.labels.tolist() == [1, 2, 3, 4, 5]
    assert data.classes == tuple("0123456789")


def test_labels_may_lie_in_a_row(root):
    expected = svhn(root, verify=False).fingerprint()
    for file in FILES:
        savemat(root / file, {"X": content(file)["X"], "y": content(file)["y"].T.astype(np.int32)})
    assert svhn(root, verify=False).fingerprint() == expected


def missing(path, record):
    path.unlink()


def truncated(path, record):
    path.write_bytes(path.read_bytes()[:2000])


def bit_flipped(path, record):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0xFF  # inside the compressed pixels: zlib notices
    path.write_bytes(raw)


def emptied(path, record):
    path.write_bytes(b"")


def a_web_page(path, record):
    path.write_bytes(b"<html>404 not found</html>" * 20)


def a_newer_format(path, record):
    path.write_bytes(b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM" + b"\x89HDF\r\n\x1a\n" * 50)


def with_entry(key, value):
    return lambda path, record: savemat(path, {**record, key: value(record[key])})


def without(key):
    return lambda path, record: savemat(path, {k: v for k, v in record.items() if k != key} | {"z": 7})


FAULTS = {
    **{fault.__name__: fault for fault in (missing, truncated, bit_flipped, emptied, a_web_page, a_newer_format)},
    "no pixels": without("X"),
    "no labels": without("y"),
    "real pixels": with_entry("X", lambda x: x / 255),
    "wide pixels": with_entry("X", lambda x: x.astype(np.int16)),
    "text for pixels": with_entry("X", lambda x: "pixels"),
    "three axes": with_entry("X", lambda x: x[..., 0]),
    "a cell array of pixels": with_entry("X", lambda x: np.array([["pixels", 7]], dtype=object)),
    "a label too few": with_entry("y", lambda y: y[1:]),
    "real labels": with_entry("y", lambda y: y + 0.5),
    "text for labels": with_entry("y", lambda y: "labels"),
    "sample axis first": with_entry("X", lambda x: x.transpose(3, 0, 1, 2)),
}


@files
@pytest.mark.parametrize("fault", FAULTS)
def test_a_missing_corrupted_or_mistyped_file_is_refused_by_name(root, file, fault):
    FAULTS[fault](root / file, content(file))
    with pytest.raises(DataError) as caught:
        svhn(root, verify=False)
    assert str(root / file) in str(caught.value)


@files
@pytest.mark.parametrize("label", [11, 255])
def test_a_label_that_is_no_digit_is_refused(root, file, label):
    savemat(root / file, {"X": content(file)["X"], "y": np.full(FILES[file], label, dtype=np.uint8)})
    with pytest.raises(DataError):
        svhn(root, verify=False)


def test_a_file_that_is_not_the_official_one_fails_its_checksum(root):
    with pytest.raises(DataError, match="checksum") as caught:
        svhn(root)
    assert str(root / "train_32x32.mat") in str(caught.value)


# Files that would grow -----------------------------------------------------------------------------------------


def test_what_a_file_inflates_to_is_bounded_all_together(root, monkeypatch):
    savemat(
        root / "train_32x32.mat", {f"a{i}": np.zeros((1, 400), np.uint8) for i in range(9)}, do_compression=True
    )
    monkeypatch.setattr(matfile, "_LARGEST", 1000)
    with pytest.raises(DataError, match="larger than any valid file"):
        svhn(root, verify=False)


def test_an_array_is_not_widened_beyond_the_bound(root, monkeypatch):
    savemat(root / "train_32x32.mat", {"a": np.zeros((1, 400), np.int64)})
    content = (root / "train_32x32.mat").read_bytes()
    assert len(content) > 3200  # eight bytes each
    narrow = bytearray(content)
    at = narrow.rindex((12).to_bytes(4, "little") + (3200).to_bytes(4, "little"))
    narrow[at : at + 8 + 3200] = (2).to_bytes(4, "little") + (400).to_bytes(4, "little") + bytes(400)
    narrow[132:136] = (int.from_bytes(narrow[132:136], "little") - 2800).to_bytes(4, "little")
    (root / "train_32x32.mat").write_bytes(narrow)
    assert list(matfile.integer_arrays(bytes(narrow))) == ["a"]
    monkeypatch.setattr(matfile, "_LARGEST", 3000)
    with pytest.raises(DataError, match="larger than any valid one"):
        svhn(root, verify=False)
