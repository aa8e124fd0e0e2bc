"""Weights are read from anyone's files: wrapped, prefixed, broken or hostile."""

import argparse
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specguard.errors import CheckpointError
from specguard.models import load_weights


@pytest.fixture
def tensors(generator):
    return {"head.weight": torch.randn(3, 5, generator=generator), "head.bias": torch.randn(3, generator=generator)}


def same(found, wanted):
    return found.keys() == wanted.keys() and all(torch.equal(found[k], wanted[k]) for k in wanted)


def test_safetensors_and_torchs_files_hold_the_same(tmp_path, tensors):
    save_file(tensors, tmp_path / "w.safetensors")
    torch.save(tensors, tmp_path / "w.pt")
    torch.save(OrderedDict(tensors), tmp_path / "w.pth")
    torch.save(tensors, tmp_path / "w.bin", _use_new_zipfile_serialization=False)
    for path in tmp_path.iterdir():
        assert same(load_weights(path), tensors)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda t: {"state_dict": t, "epoch": 3, "optimizer": {"lr": 0.1}},
        lambda t: {"model": t, "args": None},
        lambda t: {"model_state_dict": t, "loss": 0.5},
        lambda t: {"model_ema": t},
        lambda t: {"checkpoint": 1, "state_dict": {"model": t}},
        lambda t: {f"module.{name}": v for name, v in t.items()},
        lambda t: {"model": {f"_orig_mod.module.model.{name}": v for name, v in t.items()}},
        lambda t: {name: torch.nn.Parameter(v) for name, v in t.items()},
        lambda t: {"state_dict": t, "args": argparse.Namespace(lr=0.1, model="deit", nested=[1, {"a": None}])},
        lambda t: {"n_averaged": torch.tensor(3)} | {f"module.{name}": v for name, v in t.items()},
    ],
)
def test_wrappers_and_prefixes_are_removed(wrap, tmp_path, tensors):
    torch.save(wrap(tensors), tmp_path / "w.pt")
    found = load_weights(tmp_path / "w.pt")
    assert same(found, tensors)
    assert all(type(t) is torch.Tensor and not t.requires_grad for t in found.values())


def test_a_prefix_that_some_names_lack_stays(tmp_path, tensors):
    torch.save(tensors | {"model.scale": torch.ones(2)}, tmp_path / "w.pt")
    assert "model.scale" in load_weights(tmp_path / "w.pt")


class Runs:
    """A pickle of it writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


class Whole(torch.nn.Linear):
    """A module saved whole, not its state_dict."""


def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(tmp_path, tensors):
    trap = tmp_path / "trap"
    torch.save(tensors | {"extra": Runs(trap)}, tmp_path / "zip.pt")
    torch.save({"state_dict": Runs(trap)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Runs(trap), protocol=2))
    (tmp_path / "system.pt").write_bytes(b"cposix\nsystem\n(S'touch " + str(trap).encode() + b"'\ntR.")
    torch.save(Whole(2, 2), tmp_path / "module.pt")
    torch.save({"model": tensors, "args": argparse.Namespace(lr=Runs(trap))}, tmp_path / "inside.pt")
    for name in ("zip", "old", "plain", "system", "module", "inside"):
        with pytest.raises(CheckpointError, match=r"could run code|not a file of weights") as caught:
            load_weights(tmp_path / f"{name}.pt")
        assert "\n" not in str(caught.value)
        assert not trap.exists()
    with pytest.raises(CheckpointError, match=r"asks for \S*open, which could run code"):
        load_weights(tmp_path / "zip.pt")
    with pytest.raises(CheckpointError, match=r"asks for \S*Whole, which could run code"):
        load_weights(tmp_path / "module.pt")


def test_broken_files_are_refused_in_one_sentence(tmp_path, tensors):
    torch.save(tensors, tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    save_file(tensors, tmp_path / "whole.safetensors")
    with zipfile.ZipFile(tmp_path / "other.pt", "w") as archive:
        archive.writestr("notes.txt", "nothing here")
    for name, content in (
        ("cut.pt", whole[: len(whole) // 2]),
        ("cut.pth", whole[:-30]),
        ("empty.pt", b""),
        ("text.pt", b"weights, honestly"),
        ("cut.safetensors", (tmp_path / "whole.safetensors").read_bytes()[:-10]),
        ("other.pt", None),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=r"is truncated or not a") as caught:
            load_weights(tmp_path / name)
        assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_weights(tmp_path / "none.pt")
    (tmp_path / "folder.pt").mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_weights(tmp_path / "folder.pt")
    with pytest.raises(CheckpointError, match="does not have the suffix of a weight file"):
        load_weights(tmp_path / "w.npz")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (torch.ones(3), "no weights by name but a value of type Tensor"),
        ([1, 2], "no weights by name but a value of type list"),
        ({}, "no weights by name but a value of type dict"),
        ({"epoch": 3}, "no tensor under 'epoch' but a value of type int"),
        ({"a": torch.ones(2), "b": {"c": torch.ones(2)}}, "no tensor under 'b' but a value of type dict"),
        ({7: torch.ones(2)}, "no tensor under 7"),
        ({"a": torch.eye(3).to_sparse()}, "under 'a' that is sparse"),
        ({"a": torch.ones(2), "b": torch.tensor([1.0, torch.nan])}, "not finite, in 'b'"),
        ({"a": torch.tensor([torch.inf], dtype=torch.bfloat16)}, "not finite, in 'a'"),
    ],
)
def test_what_is_not_a_dictionary_of_finite_tensors_is_refused(content, message, tmp_path):
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=message):
        load_weights(tmp_path / "w.pt")


# Files that would grow -----------------------------------------------------------------------------------------


def rewritten(source: Path, target: Path, pickled: bytes | None = None, packing: int = zipfile.ZIP_STORED) -> Path:
    """The same archive with another pickle inside, or compressed."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", packing) as new:
        for member in old.infolist():
            own = member.filename.endswith("data.pkl") and pickled is not None
            new.writestr(member.filename, pickled if own else old.read(member))
    return target


def refused(path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        load_weights(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(1).expand(10**6, 10**6),
        torch.ones(3).as_strided((2**40,), (0,)),
        torch.ones(4).as_strided((3, 3), (1, 0)),
        torch.ones(1, dtype=torch.bool).expand(2**45),
    ],
    ids=["expanded", "stride 0", "overlapping", "bool"],
)
def test_a_tensor_of_more_entries_than_the_file_holds_is_refused(tmp_path, zipped, tensor):
    torch.save({"w": tensor}, tmp_path / "w.pt", _use_new_zipfile_serialization=zipped)
    refused(tmp_path / "w.pt", "'w' has .* entries, which it does not hold")


def test_a_storage_that_is_never_filled_is_refused(tmp_path):
    """A file of torch before 1.6 says how large its storages are, and which of them follow."""
    torch.save({"w": torch.ones(4)}, tmp_path / "w.pt", _use_new_zipfile_serialization=False)
    content = (tmp_path / "w.pt").read_bytes()
    size = b"J" + (2**20).to_bytes(4, "little")
    forged = content.replace(b"K\x04N", size + b"N").replace(b"K\x04\x85", size + b"\x85")
    keys = forged.rindex(b"\x80\x02]")
    (tmp_path / "w.pt").write_bytes(forged[:keys] + b"\x80\x02]q\x00.")
    refused(tmp_path / "w.pt", "'w' has 1,048,576 entries, which it does not hold")


def test_a_compressed_archive_is_refused(tmp_path, tensors):
    torch.save({"w": torch.zeros(10**6)}, tmp_path / "plain.pt")
    packed = rewritten(tmp_path / "plain.pt", tmp_path / "w.pt", packing=zipfile.ZIP_DEFLATED)
    assert packed.stat().st_size < 10**5
    refused(packed, "is compressed")


GROWING = {
    "bytearray": b"\x80\x02}q\x00X\x01\x00\x00\x00wcbuiltins\nbytearray\nJ\x00\x00\x00\x10\x85Rs.",
    "bytearray of Python 2": b"\x80\x02}q\x00X\x01\x00\x00\x00wc__builtin__\nbytearray\nJ\x00\x00\x00\x10\x85Rs.",
    "encode": b"\x80\x02}X\x01\x00\x00\x00wc_codecs\nencode\nX\x01\x00\x00\x00aX\x06\x00\x00\x00latin1\x86Rs.",
}


@pytest.mark.parametrize("name", GROWING)
def test_a_pickle_that_asks_for_bytes_that_it_does_not_hold_is_refused(tmp_path, tensors, name, monkeypatch):
    torch.save(tensors, tmp_path / "plain.pt")
    rewritten(tmp_path / "plain.pt", tmp_path / "zip.pt", GROWING[name])
    (tmp_path / "plain.bin").write_bytes(GROWING[name])
    monkeypatch.setattr(torch, "load", None)  # it is not even asked
    for path in (tmp_path / "zip.pt", tmp_path / "plain.bin"):
        refused(path, "with which a few bytes can fill all memory")


UNUSED = [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.uint16, torch.uint32, torch.uint64]


@pytest.mark.parametrize("dtype", UNUSED, ids=str)
def test_numbers_in_which_nothing_is_computed_are_refused(tmp_path, dtype):
    tensors = {"w": torch.ones(3), "x": torch.zeros(4).to(dtype)}
    save_file(tensors, tmp_path / "w.safetensors")
    torch.save(tensors, tmp_path / "w.pt")
    for path in (tmp_path / "w.safetensors", tmp_path / "w.pt"):
        refused(path, f"'x' of type {str(dtype).removeprefix('torch.')}, which is not supported")


def test_shared_sliced_and_transposed_weights_are_read(tmp_path, generator):
    whole = torch.randn(6, 4, generator=generator)
    tensors = {"a": whole, "tied": whole, "part": whole[2:4], "turned": whole.T, "none": torch.empty(0, 5)}
    torch.save(tensors, tmp_path / "w.pt")
    torch.save(tensors, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert same(load_weights(tmp_path / "w.pt"), tensors)
    assert same(load_weights(tmp_path / "old.pt"), tensors)
