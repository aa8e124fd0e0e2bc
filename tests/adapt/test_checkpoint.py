"""Weights are read from anyone's files: wrapped, prefixed, broken or hostile."""

import argparse
import pickle
import zipfile
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import save_file

from specguard.adapt import load_weights
from specguard.errors import CheckpointError


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
    with pytest.raises(CheckpointError, match="does not end like a file of weights"):
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
