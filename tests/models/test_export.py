"""A run's weights in a file of their own are the same function, or there is no file."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from specguard.data import Data, Dataset, digits
from specguard.errors import CheckpointError, ConfigError, RunError
from specguard.models import ModelSource, export, from_run
from specguard.nn import CertifiableConfig, Resize, ViT, certifiable, fingerprint, materialized, preset
from specguard.records import files, io, store
from specguard.records.export import ExportRecord, TimmModel
from specguard.train import AdamW, Training, train

CPU = torch.device("cpu")
GREY = ((0.3,), (0.4,))
CONFIG = {
    "model_type": "vit",
    "image_size": 8,
    "patch_size": 4,
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "intermediate_size": 31,
    "num_channels": 1,
}
SMALL = {"image": 8, "patch": 4, "channels": 1, "dim": 8, "depth": 1, "heads": 2, "mean": (0.3,), "std": (1.0,)}
MODELS = {
    "vit": lambda: ViT(preset("tiny", dim=8, depth=1, heads=2, mean=GREY[0], std=GREY[1])),
    "certifiable": lambda: certifiable(CertifiableConfig(**SMALL)),
    "timm": lambda: ModelSource("timm", "test_vit", 10, 1, 32, *GREY).fresh(1),
    "timm, resized": lambda: ModelSource("timm", "test_vit2", 10, 1, 32, *GREY, pixels=8).fresh(1),
    "timm, distilled": lambda: ModelSource("timm", "deit_tiny_distilled_patch16_224", 10, 1, 32, *GREY).fresh(1),
    "hf": lambda: ModelSource("hf", "vit", 10, 1, 8, *GREY, config=CONFIG).fresh(1),
}
OF_TIMM = ("timm", "timm, resized", "timm, distilled")


@pytest.fixture(autouse=True)
def named_commit(monkeypatch):
    monkeypatch.setenv("SPECGUARD_COMMIT", "test")


def some_digits(pixels):
    """Some digits, enlarged to so many pixels along a side."""
    full, factor = digits(), pixels // 8
    small = (
        Dataset(s.images[:80].repeat_interleave(factor, 2).repeat_interleave(factor, 3), s.labels[:80])
        for s in (full.train, full.test)
    )
    return Data("some digits", *small, full.classes)


@pytest.fixture(scope="module")
def runs(timm, tmp_path_factory):
    made = {}

    def of(kind):
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("runs") / "run"
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1)
                model = MODELS[kind]()
            training = Training(epochs=1, batch=40, optimizer=AdamW(lr=1e-2))
            train(model, some_digits(model.shape[-1]), made[kind], training, device=CPU)
        return made[kind]

    return of


def metadata(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as opened:
        return opened.metadata()


@pytest.mark.parametrize("kind", MODELS)
def test_a_state_dict_has_the_names_of_the_model_and_loads_into_a_new_one(kind, runs, tmp_path):
    exported = export(runs(kind), tmp_path / "w.safetensors")
    trained = from_run(runs(kind))
    fresh = materialized(MODELS[kind]()).eval()
    fresh.load_state_dict(load_file(exported.path), strict=True)
    assert fingerprint(fresh) == fingerprint(trained) == exported.record.fingerprint
    assert exported.record.classes == tuple(digits().classes)
    assert exported.record.mean == (0.3,)
    assert exported.record.std == ((1.0,) if kind == "certifiable" else (0.4,))
    assert exported.record.config == io.read_json(runs(kind) / "model.json")["config"]


@pytest.mark.parametrize("kind", OF_TIMM)
def test_plain_timm_gives_the_runs_logits_from_the_file_and_what_it_says(kind, runs, timm, tmp_path, generator):
    exported = export(runs(kind), tmp_path / "w.safetensors", to="timm")
    about, made = exported.record, exported.record.timm
    assert made is not None
    model = timm.create_model(made.name, **made.options, checkpoint_path=str(exported.path)).eval()
    images = torch.rand(7, *from_run(runs(kind)).shape, generator=generator)
    mean, std = (torch.tensor(numbers).view(-1, 1, 1) for numbers in (about.mean, about.std))
    resized = images if about.resize is None else Resize(about.resize)(images)
    assert (about.resize is None) == (kind != "timm, resized")
    with torch.no_grad():
        theirs, ours = model((resized - mean) / std), from_run(runs(kind))(images)
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)
    assert ours.std() > 0.1


def test_options_of_timm_are_those_that_its_architecture_does_not_have_by_itself(runs, tmp_path):
    record = export(runs("timm, resized"), tmp_path / "w.safetensors", to="timm").record
    assert record.timm == TimmModel(name="test_vit2", options={"num_classes": 10, "in_chans": 1, "img_size": 32})
    assert record.config is None


def test_the_metadata_is_one_entry_that_is_read_back_and_the_file_is_always_the_same(runs, tmp_path):
    exported = export(runs("timm"), tmp_path / "one.safetensors", to="timm")
    export(runs("timm"), tmp_path / "two.safetensors", to="timm")
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "two.safetensors").read_bytes()
    said = metadata(exported.path)
    assert list(said) == ["specguard"]
    found = json.loads(said["specguard"])
    assert found["mean"] == [0.3]
    io.write_json(tmp_path / "record.json", found)
    assert io.read_record(tmp_path / "record.json", ExportRecord) == exported.record


@pytest.mark.parametrize(
    ("kind", "what"), [("vit", "a model of this package"), ("certifiable", "this package"), ("hf", "transformers")]
)
def test_a_model_without_a_counterpart_is_refused_in_one_sentence(kind, what, runs, tmp_path):
    with pytest.raises(ConfigError, match=f"of {what}.* no counterpart in timm") as caught:
        export(runs(kind), tmp_path / "w.safetensors", to="timm")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


# Files -------------------------------------------------------------------------------------------------------


def test_no_file_is_replaced_and_no_link_followed(runs, tmp_path):
    (tmp_path / "file.safetensors").write_text("mine")
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "target")
    for name in ("file", "link"):
        with pytest.raises(RunError, match=rf"{name}\.safetensors exists"):
            export(runs("vit"), tmp_path / f"{name}.safetensors")
    assert (tmp_path / "file.safetensors").read_text() == "mine"
    assert not (tmp_path / "target").exists()


def test_a_file_that_appears_in_between_is_kept(runs, tmp_path, monkeypatch):
    place, load = tmp_path / "w.safetensors", from_run

    def slow(run):
        place.write_text("somebody else's")
        return load(run)

    monkeypatch.setitem(export.__globals__, "from_run", slow)
    with pytest.raises(RunError, match=r"cannot be written: File exists"):
        export(runs("vit"), place)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["somebody else's"]


def test_names_of_files_and_layouts_are_checked(runs, tmp_path):
    with pytest.raises(ConfigError, match=r"to a \.safetensors file, not to"):
        export(runs("vit"), tmp_path / "w.pt")
    with pytest.raises(ConfigError, match="to timm or state_dict, not to 'onnx'"):
        export(runs("vit"), tmp_path / "w.safetensors", to="onnx")
    with pytest.raises(RunError, match="cannot be written: No such file"):
        export(runs("vit"), tmp_path / "none" / "w.safetensors")


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_full_disk_or_an_interruption_leaves_nothing(runs, tmp_path, monkeypatch, failure):
    def fail(descriptor):
        raise failure

    run = runs("timm")
    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(RunError if isinstance(failure, OSError) else KeyboardInterrupt):
        export(run, tmp_path / "w.safetensors", to="timm")
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_translation_is_noticed_before_anything_is_written(runs, tmp_path, monkeypatch):
    right = export.__globals__["timm_weights"]

    def wrong(network, model):
        state = right(network, model)
        return state | {"blocks.0.mlp.fc1.bias": state["blocks.0.mlp.fc1.bias"] + 1e-4}

    monkeypatch.setitem(export.__globals__, "timm_weights", wrong)
    with pytest.raises(ConfigError, match=r"differs from its original at 'blocks\.0\.mlp"):
        export(runs("timm"), tmp_path / "w.safetensors", to="timm")
    assert list(tmp_path.iterdir()) == []


def test_an_unfinished_or_spoiled_run_is_refused(runs, tmp_path):
    run = shutil.copytree(runs("vit"), tmp_path / "run")
    tensors = store.read_tensors(run / "model.safetensors")
    store.write_tensors(run / "model.safetensors", tensors | {"head.bias": tensors["head.bias"] + 1})
    with pytest.raises(CheckpointError, match="does not match the fingerprint"):
        export(run, tmp_path / "w.safetensors")
    tensors["head.bias"][0] = torch.nan
    model = MODELS["vit"]()
    model.load_state_dict(tensors)
    store.write_tensors(run / "model.safetensors", tensors)
    io.write_json(run / "model.json", io.read_json(run / "model.json") | {"fingerprint": fingerprint(model)})
    with pytest.raises(CheckpointError, match=r"not finite, in 'head\.bias'"):
        export(run, tmp_path / "w.safetensors")
    os.unlink(run / "model.json")
    with pytest.raises(RunError, match=r"model\.json does not exist"):
        export(run, tmp_path / "w.safetensors")
    assert not (tmp_path / "w.safetensors").exists()
