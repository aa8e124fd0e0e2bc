"""CIFAR-10 and CIFAR-100, from small files in the official layout, and from the official files themselves."""

import os
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from specguard.data import Data, cifar10, cifar100
from specguard.errors import DataError


@dataclass(frozen=True)
class Layout:
    """What the official archive of one data set looks like."""

    load: Callable[..., Data]
    folder: str
    sizes: dict[str, int]  # images in each small file; the last one is the test file
    meta: str
    labels: str
    names: str
    classes: tuple[str, ...]

    @property
    def test_file(self) -> str:
        return list(self.sizes)[-1]


_BATCHES = {f"data_batch_{i}": i + 1 for i in range(1, 6)}
LAYOUTS = {
    "cifar10": Layout(
        cifar10,
        "cifar-10-batches-py",
        {**_BATCHES, "test_batch": 7},
        "batches.meta",
        "labels",
        "label_names",
        tuple(f"thing {i}" for i in range(10)),
    ),
    "cifar100": Layout(
        cifar100,
        "cifar-100-python",
        {"train": 9, "test": 4},
        "meta",
        "fine_labels",
        "fine_label_names",
        tuple(f"thing {i}" for i in range(100)),
    ),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))


def record(layout: Layout, file: str) -> dict[str, object]:
    """The content of one small file: random pixels and labels, which differ from file to file."""
    if file == layout.meta:
        return {"num_vis": 3072, layout.names: list(layout.classes)}
    source = np.random.default_rng(list(layout.sizes).index(file))
    count = layout.sizes[file]
    return {
        "batch_label": "a small batch",
        layout.labels: source.integers(len(layout.classes), size=count).tolist(),
        "data": source.integers(256, size=(count, 3072), dtype=np.uint8),
        "filenames": [f"picture_{i}.png" for i in range(count)],
    }


def text_keys(content: dict[str, object]) -> bytes:
    return pickle.dumps(content, protocol=2)


def byte_keys(content: dict[str, object]) -> bytes:
    return pickle.dumps({key.encode(): value for key, value in content.items()}, protocol=2)


def python_2(content: dict[str, object]) -> bytes:
    """As cPickle of Python 2 wrote the official files: byte strings without an encoding, no _codecs."""

    def write(value: object) -> bytes:
        match value:
            case str():
                return b"U" + bytes([len(value)]) + value.encode()
            case int():
                return b"M" + struct.pack("<H", value)
            case list():
                return b"](" + b"".join(map(write, value)) + b"e"
            case np.ndarray():
                rows, columns = map(write, value.shape)
                kind = (
                    b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
                )
                raw = b"T" + struct.pack("<I", value.size) + value.tobytes()
                array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
                return array + b"(K\x01" + rows + columns + b"\x86" + kind + b"\x89" + raw + b"tb"
        raise TypeError(type(value))

    items = (write(key) + write(value) for key, value in content.items())
    return b"\x80\x02}(" + b"".join(items) + b"u."


DIALECTS = (text_keys, byte_keys, python_2)


def write_all(root: Path, layout: Layout, dialect: Callable[[dict[str, object]], bytes] = text_keys) -> Path:
    folder = root / layout.folder
    folder.mkdir()
    for file in (*layout.sizes, layout.meta):
        (folder / file).write_bytes(dialect(record(layout, file)))
    return folder


@layouts
@pytest.mark.parametrize("dialect", DIALECTS)
def test_pixels_are_channel_row_column_and_labels_and_names_are_kept(tmp_path, layout, dialect):
    write_all(tmp_path, layout, dialect)
    data = layout.load(tmp_path, verify=False)
    assert data.classes == layout.classes
    assert data.shape == (3, 32, 32)
    for split, files in ((data.train, list(layout.sizes)[:-1]), (data.test, [layout.test_file])):
        rows = [row for file in files for row in record(layout, file)["data"]]
        labels = [label for file in files for label in record(layout, file)[layout.labels]]
        assert split.labels.tolist() == labels
        assert len(split) == len(rows)
        for image, row in zip(split.images.numpy(), rows, strict=True):
            # The official description: 1024 red, 1024 green, 1024 blue values, each row by row.
            for channel in range(3):
                for line in (0, 1, 17, 31):
                    start = 1024 * channel + 32 * line
                    np.testing.assert_array_equal(image[channel, line], row[start : start + 32])


@layouts
def test_the_folder_of_the_archive_may_be_named_itself(tmp_path, layout):
    folder = write_all(tmp_path, layout)
    assert layout.load(folder, verify=False).fingerprint() == layout.load(tmp_path, verify=False).fingerprint()


def test_an_array_in_column_order_is_read_as_the_same_images(tmp_path):
    layout = LAYOUTS["cifar100"]
    folder = write_all(tmp_path, layout)
    expected = layout.load(folder, verify=False).fingerprint()
    content = record(layout, "train")
    content["data"] = np.asfortranarray(content["data"])
    (folder / "train").write_bytes(text_keys(content))
    assert layout.load(folder, verify=False).fingerprint() == expected


def put(key: str, value: Callable[[object], object]) -> Callable[[Path, dict[str, object], Layout], None]:
    """A fault: one entry of the record is replaced. `labels` and `names` stand for the layout's own keys."""

    def fault(path: Path, content: dict[str, object], layout: Layout) -> None:
        name = {"labels": layout.labels, "names": layout.names}.get(key, key)
        path.write_bytes(text_keys({**content, name: value(content[name])}))

    return fault


def drop(key: str) -> Callable[[Path, dict[str, object], Layout], None]:
    def fault(path: Path, content: dict[str, object], layout: Layout) -> None:
        name = {"labels": layout.labels, "names": layout.names}.get(key, key)
        path.write_bytes(text_keys({k: v for k, v in content.items() if k != name}))

    return fault


def missing(path: Path, *_: object) -> None:
    path.unlink()


def truncated(path: Path, *_: object) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def emptied(path: Path, *_: object) -> None:
    path.write_bytes(b"")


def a_folder(path: Path, *_: object) -> None:
    path.unlink()
    path.mkdir()


def not_a_pickle(path: Path, *_: object) -> None:
    path.write_bytes(b"<html>404</html>")


def not_a_dictionary(path: Path, content: dict[str, object], *_: object) -> None:
    path.write_bytes(pickle.dumps(list(content), protocol=2))


ANY_FILE = {f.__name__: f for f in (missing, truncated, emptied, a_folder, not_a_pickle, not_a_dictionary)}
BATCH_FILE = {
    "a column too few": put("data", lambda pixels: pixels[:, :-1]),
    "a column too many": put("data", lambda pixels: np.pad(pixels, ((0, 0), (0, 1)))),
    "transposed pixels": put("data", lambda pixels: pixels.T),
    "flat pixels": put("data", lambda pixels: pixels.reshape(-1)),
    "four axes": put("data", lambda pixels: pixels.reshape(-1, 3, 32, 32)),
    "wide pixels": put("data", lambda pixels: pixels.astype(np.int16)),
    "real pixels": put("data", lambda pixels: pixels / 255),
    "pixels in a list": put("data", lambda pixels: pixels.tolist()),
    "no pixels": drop("data"),
    "a label too few": put("labels", lambda labels: labels[:-1]),
    "a label too many": put("labels", lambda labels: [*labels, 0]),
    "labels as text": put("labels", lambda labels: [str(label) for label in labels]),
    "labels as real numbers": put("labels", lambda labels: [float(label) for label in labels]),
    "labels as truth values": put("labels", lambda labels: [bool(label) for label in labels]),
    "labels as lists": put("labels", lambda labels: [[label] for label in labels]),
    "labels in a tuple": put("labels", tuple),
    "labels in an array": put("labels", lambda labels: np.array([labels], dtype=np.uint8)),
    "one label of 70 bits": put("labels", lambda labels: [2**70, *labels[1:]]),
    "no labels": drop("labels"),
}
META_FILE = {
    "no names": drop("names"),
    "one text": put("names", lambda names: " ".join(names)),
    "numbers as names": put("names", lambda names: list(range(len(names)))),
    "names in a tuple": put("names", tuple),
}
FAULTS = [
    *((which, name, fault) for which in ("train", "test", "meta") for name, fault in ANY_FILE.items()),
    *((which, name, fault) for which in ("train", "test") for name, fault in BATCH_FILE.items()),
    *(("meta", name, fault) for name, fault in META_FILE.items()),
]


@layouts
@pytest.mark.parametrize(("which", "name", "fault"), FAULTS, ids=[f"{which}: {name}" for which, name, _ in FAULTS])
def test_a_faulty_file_is_refused_by_name(tmp_path, layout, which, name, fault):
    folder = write_all(tmp_path, layout)
    file = {"train": list(layout.sizes)[-2], "test": layout.test_file, "meta": layout.meta}[which]
    fault(folder / file, record(layout, file), layout)
    with pytest.raises(DataError) as caught:
        layout.load(tmp_path, verify=False)
    assert str(folder / file) in str(caught.value)


@layouts
@pytest.mark.parametrize(
    "fault",
    [
        put("labels", lambda labels: [-1, *labels[1:]]),
        put("labels", lambda labels: [100, *labels[1:]]),
        lambda path, content, layout: path.write_bytes(
            text_keys({"data": np.empty((0, 3072), dtype=np.uint8), layout.labels: []})
        ),
    ],
    ids=["a negative label", "a label beyond the classes", "no image"],
)
def test_labels_without_a_class_and_a_file_without_images_are_refused(tmp_path, layout, fault):
    folder = write_all(tmp_path, layout)
    fault(folder / layout.test_file, record(layout, layout.test_file), layout)
    with pytest.raises(DataError):
        layout.load(tmp_path, verify=False)


@layouts
def test_more_labels_than_names_are_refused(tmp_path, layout):
    folder = write_all(tmp_path, layout)
    (folder / layout.meta).write_bytes(text_keys({layout.names: ["only one"]}))
    with pytest.raises(DataError, match=r"labels must lie in 0\.\.0"):
        layout.load(tmp_path, verify=False)


@layouts
def test_a_file_that_is_not_the_official_one_fails_its_checksum_before_it_is_unpickled(tmp_path, layout):
    folder = write_all(tmp_path, layout)
    first = next(iter(layout.sizes))
    (folder / first).write_bytes(b"not even a pickle")
    with pytest.raises(DataError, match="checksum") as caught:
        layout.load(tmp_path)
    assert str(folder / first) in str(caught.value)


@layouts
def test_a_folder_that_does_not_exist_is_refused_by_name(tmp_path, layout):
    with pytest.raises(DataError, match="does not exist") as caught:
        layout.load(tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in str(caught.value)


@pytest.mark.data
def test_the_official_cifar10_files_pass_their_checksums_and_hold_what_everyone_knows():
    data = cifar10(Path(os.environ["SPECGUARD_DATA"]))
    assert (len(data.train), len(data.test), data.shape) == (50_000, 10_000, (3, 32, 32))
    assert data.test.labels[:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]
    assert " ".join(data.classes) == "airplane automobile bird cat deer dog frog horse ship truck"
    for split, count in ((data.train, 5000), (data.test, 1000)):
        assert split.labels.bincount().tolist() == [count] * 10
    # The statistics that every recipe quotes.
    mean, std = data.pixel_statistics()
    assert mean == (0.4914, 0.4822, 0.4465)
    assert std == (0.2470, 0.2435, 0.2616)
