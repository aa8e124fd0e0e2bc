"""`specguard export`: from an untrained model of timm to a file that plain timm loads, and what is one sentence."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from helpers.commandline import contents
from specguard.cli import app
from specguard.models import from_run

STEPS = ("--epochs", "1", "--batch", "256", "--warmup", "0", "--device", "cpu")
GREY = ("--mean", "0.25", "--std", "0.5")


def trained(place: Path, *options: str) -> Path:
    result = CliRunner().invoke(app, ["train", "--run", str(place), *options])
    assert result.exit_code == 0, result.output
    return place


@pytest.fixture(scope="module")
def run(timm, tmp_path_factory) -> Path:
    """A model of timm without pretrained weights, trained for an epoch on digits, which it resizes."""
    place = tmp_path_factory.mktemp("trained") / "run"
    return trained(place, "timm:test_vit", "--image-size", "32", *GREY, *STEPS)


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("trained") / "own"
    return trained(place, "--set", "dim=8", "--set", "depth=1", *STEPS)


def test_a_fine_tuned_model_goes_back_to_plain_timm_with_the_call_that_is_printed(
    specguard, run, timm, tmp_path, generator
):
    before = contents(run)
    ended = specguard("export", run, "--to", "timm", tmp_path / "tuned.safetensors")
    ended.succeeds()
    assert "it gives the run's logits" in ended.out
    assert "bilinearly, to 32 x 32 pixels, before timm's model" in ended.out
    assert "pixels in [0, 1] with mean 0.25 and std 0.5, before timm's model" in ended.out
    call = re.search(r"timm\.create_model\('(\w+)', (.*), checkpoint_path='(.*)'\)", ended.out)
    assert call is not None
    options = {name: int(value) for name, value in (pair.split("=") for pair in call[2].split(", "))}
    assert options == {"num_classes": 10, "in_chans": 1, "img_size": 32}
    model = timm.create_model(call[1], **options, checkpoint_path=call[3]).eval()
    images = torch.rand(5, 1, 8, 8, generator=generator)
    with torch.no_grad():
        resized = torch.nn.functional.interpolate(images, (32, 32), mode="bilinear")
        theirs, ours = model((resized - 0.25) / 0.5), from_run(run)(images)
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)
    assert contents(run) == before
    with safe_open(tmp_path / "tuned.safetensors", "pt") as file:
        said = json.loads(file.metadata()["specguard"])
    assert [said[name] for name in ("layout", "mean", "std", "resize")] == ["timm", [0.25], [0.5], 32]
    assert said["classes"] == [str(digit) for digit in range(10)]
    assert said["fingerprint"] == json.loads(before["result.json"])["fingerprint"]


def test_an_exported_file_is_where_another_training_of_timms_model_begins(specguard, run, tmp_path):
    specguard("export", run, "--to", "timm", tmp_path / "tuned.safetensors").succeeds()
    words = ("timm:test_vit", "--image-size", "32", *GREY, "--weights", tmp_path / "tuned.safetensors")
    specguard("train", *words, "--run", tmp_path / "again", *STEPS).succeeds()
    known = json.loads((run / "model.json").read_text())["weights_fingerprint"]
    assert json.loads((tmp_path / "again" / "run.json").read_text())["initial_weights"] == known


def test_photos_of_a_folder_have_the_size_of_the_model_and_are_not_resized(specguard, timm, tmp_path, generator):
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            (tmp_path / "photos" / split / label).mkdir(parents=True)
            pixels = torch.randint(0, 256, (40, 33, 3), generator=generator, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(tmp_path / "photos" / split / label / "a.png")
    words = ("timm:test_vit2", "--image-size", "32", "--data", str(tmp_path / "photos"))
    place = trained(tmp_path / "run", *words, "--epochs", "1", "--batch", "4", "--device", "cpu")
    ended = specguard("export", place, "--to", "timm", tmp_path / "cats.safetensors")
    ended.succeeds()
    assert "resizing" not in ended.out
    assert "with mean 0.5,0.5,0.5 and std 0.5,0.5,0.5, before timm's model" in ended.out
    model = timm.create_model("test_vit2", num_classes=2, img_size=32).eval()
    model.load_state_dict(load_file(tmp_path / "cats.safetensors"), strict=True)
    images = torch.rand(3, 3, 32, 32, generator=generator)
    with torch.no_grad():
        torch.testing.assert_close(model(2 * images - 1), from_run(place)(images), rtol=1e-4, atol=1e-5)
    changed_metadata_is_refused(specguard, tmp_path)


def changed_metadata_is_refused(specguard, place):
    """An exported file names its function: what it says of itself may not make it another."""
    attack = ("--data", place / "photos", "--device", "cpu", "--norm", "linf", "--radius", "0.01")
    attack += ("--attack", "pgd", "--steps", "1", "--images", "1")
    specguard("attack", place / "cats.safetensors", *attack, "--mean", "0,0,0", "--std", "1,1,1").refuses("--mean")
    with safe_open(place / "cats.safetensors", "pt") as file:
        said = json.loads(file.metadata()["specguard"])
    for name, change in (("mean", [0.1, 0.1, 0.1]), ("timm", None)):
        other = said | {name: change}
        if change is None:
            other["timm"] = said["timm"] | {"options": said["timm"]["options"] | {"num_heads": 4}}
        path = place / f"{name}.safetensors"
        save_file(load_file(place / "cats.safetensors"), path, {"specguard": json.dumps(other)})
        specguard("attack", path, *attack).refuses("names the fingerprint of another model")


def test_a_model_of_this_package_is_written_under_its_own_names(specguard, own, tmp_path):
    ended = specguard("export", own, "--to", "state_dict", tmp_path / "w.safetensors")
    ended.succeeds()
    assert "it is the same function as the run's" in ended.out
    assert "takes pixels in [0, 1], and normalizes them with mean 0.3052 and std 0.3763" in ended.out
    tensors = load_file(tmp_path / "w.safetensors")
    assert tensors.keys() == load_file(own / "model.safetensors").keys()
    assert (tmp_path / "w.safetensors").stat().st_mode & 0o777 == (own / "model.safetensors").stat().st_mode & 0o777


def test_what_cannot_be_is_one_sentence_and_leaves_nothing(specguard, own, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words, named in (
        ((own, "--to", "timm", "w.safetensors"), (own, "no counterpart in timm", "state_dict")),
        ((own, "--to", "state_dict", "w.pt"), ("to a .safetensors file, not to 'w.pt'",)),
        ((own, "--to", "state_dict", "none/w.safetensors"), ("none/w.safetensors cannot be written",)),
        (("none", "--to", "state_dict", "w.safetensors"), ("none/model.json does not exist",)),
    ):
        specguard("export", *words).refuses(*named)
    assert list(tmp_path.iterdir()) == []
    assert specguard("export", own, "w.safetensors").code == 2  # the layout has no default
    assert specguard("export", own, "--to", "onnx", "w.safetensors").code == 2
    (tmp_path / "w.safetensors").write_text("mine")
    specguard("export", own, "--to", "state_dict", "w.safetensors").refuses("w.safetensors exists")
    assert (tmp_path / "w.safetensors").read_text() == "mine"


def test_an_interruption_leaves_nothing(specguard, own, tmp_path, monkeypatch):
    def stop(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr("specguard.records.files.os.fsync", stop)
    ended = specguard("export", own, "--to", "state_dict", tmp_path / "w.safetensors")
    assert ended.code == 130
    assert "nothing was written" in ended.err
    assert list(tmp_path.iterdir()) == []


def test_a_spoiled_run_is_refused(specguard, own, tmp_path):
    place = shutil.copytree(own, tmp_path / "run")
    whole = (place / "model.safetensors").read_bytes()
    for content in (whole[:-5], whole[:-5] + b"12345", b"", b"\x80\x02cos\nsystem\n."):
        (place / "model.safetensors").write_bytes(content)
        ended = specguard("export", place, "--to", "state_dict", tmp_path / "w.safetensors")
        ended.refuses(place / "model.safetensors")
    assert not (tmp_path / "w.safetensors").exists()
