"""`specguard zoo`, and `zoo:NAME` as the model of every command."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from helpers.commandline import contents
from specguard.models import from_run, from_zoo
from specguard.nn import fingerprint
from specguard.records.io import read_json
from specguard.records.zoo import zoo_card, zoo_folder, zoo_names

DIGITS = "zoo:digits-certified"
FEW = ("--images", "3", "--device", "cpu")
STEPS = ("--epochs", "1", "--batch", "512", "--warmup", "0", "--device", "cpu")


@pytest.fixture
def work(monkeypatch, tmp_path) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_list_has_every_model_with_its_numbers_in_eighty_columns(specguard):
    ended = specguard("zoo")
    ended.succeeds()
    for card in map(zoo_card, zoo_names()):
        (line,) = [line for line in ended.out.splitlines() if line.split()[:1] == [card.name]]
        row = card.headline
        clean, robust, certified = (f"{100 * each.value:.1f}" for each in (card.clean, row.robust, row.certified))
        counts = [f"{accuracy.n:,}" for accuracy in (card.clean, row.certified)]
        assert row.robust.n == row.certified.n
        assert line.split()[1:] == [
            card.data, clean, counts[0], robust, certified, counts[1], row.norm, f"{row.radius:.3g}"
        ]  # fmt: skip


def test_a_card_says_the_data_the_training_the_numbers_and_how_they_were_checked(specguard):
    for name in ("cifar10-certified", "zoo:cifar10-certified"):
        ended = specguard("zoo", name)
        ended.succeeds()
        for text in (
            "45.8 % [42.7, 48.9]", "48.7 % [45.6, 51.8]", "1,000", "PGD, 40 steps", "Krizhevsky", "license",
            "proved 55,275 claims of 1,000 images again", "recipes/cifar10_certified/attention/checked.json",
        ):  # fmt: skip
            assert text in ended.out
    specguard("zoo", "digit-certified").refuses("the zoo has no 'digit-certified'", "did you mean")


def test_a_model_of_the_zoo_is_attacked_certified_checked_and_reported(specguard, work):
    before = contents(zoo_folder("digits-certified"))
    specguard("attack", DIGITS, *FEW, "--attack", "pgd", "--steps", "2", "--no-diagnose").succeeds()
    (folder,) = work.glob("runs/zoo-digits-certified-*/attacks/*")
    assert read_json(folder / "study.json")["about"]["model"] == zoo_card("digits-certified").fingerprint
    specguard("certify", DIGITS, *FEW, "--methods", "local", "--out", "proofs").succeeds()
    ended = specguard("check", "proofs", "--model", DIGITS, "--device", "cpu")
    ended.succeeds()
    assert "3 records right" in ended.out
    specguard("smooth", DIGITS, *FEW, "--samples", "20").succeeds()
    specguard("spectrum", DIGITS, *FEW, "--blocks", "head").succeeds()
    (place,) = (path for path in (work / "runs").iterdir() if path.suffix != ".checks")
    specguard("report", place, "--out", "report.html").succeeds()
    assert "zoo-digits-certified" in (work / "report.html").read_text()
    assert contents(zoo_folder("digits-certified")) == before


def test_a_model_of_the_zoo_is_trained_further_and_resumed(specguard, work):
    ended = specguard("train", DIGITS, "--run", "further", *STEPS)
    ended.succeeds()
    assert f"digits_shift, trained in {DIGITS}, on digits" in ended.err
    settings = json.loads((work / "further/run.json").read_text())
    assert settings["origin"]["fingerprint"] == zoo_card("digits-certified").fingerprint
    arguments = read_json(work / "further/arguments.json")
    assert [arguments[name] for name in ("model", "weights", "data")] == [
        "digits_shift",
        DIGITS,
        "digits",
    ]
    before = contents(work / "further")
    specguard("train", "--run", "further", "--resume").succeeds()
    assert contents(work / "further") == before
    for name, words in (("a", ("--weights", DIGITS)), ("b", ("--model", DIGITS))):
        specguard("train", "--run", name, *words, *STEPS).succeeds()
        assert (work / name / "model.safetensors").read_bytes() == before["model.safetensors"]


def test_an_ordinary_vit_of_the_zoo_is_trained_further_and_goes_back_to_timm(specguard, timm, work, generator):
    for split in ("train", "val"):
        for label in range(10):
            (work / "images" / split / str(label)).mkdir(parents=True)
            pixels = torch.randint(0, 256, (32, 32, 3), generator=generator, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(work / "images" / split / str(label) / "a.png")
    data = ("--data", str(work / "images"), "--device", "cpu")
    one = ("--images", "1", "--samples", "1", "--steps", "2", "--starts", "0", "--radius", "0.1")
    specguard(
        "sensitivity", "zoo:cifar10-timm", *data, *one, "--input-norm", "1", "--weight-change", "0.1"
    ).succeeds()
    few = (*data, "--epochs", "1", "--batch", "10", "--warmup", "0")
    specguard("train", "zoo:cifar10-timm", "--run", "tuned", *few).succeeds()
    specguard("train", "--run", "tuned", "--resume").succeeds()
    for source in ("zoo:cifar10-timm", "tuned"):
        file = f"{source.removeprefix('zoo:')}.safetensors"
        ended = specguard("export", source, "--to", "timm", file)
        ended.succeeds()
        assert "it gives the run's logits" in ended.out
        assert "embed_dim=64" in ended.out


def test_a_model_of_the_zoo_is_exported(specguard, work):
    specguard("export", DIGITS, "--to", "state_dict", "w.safetensors").succeeds()
    assert (work / "w.safetensors").exists()
    specguard("export", "zoo:none", "--to", "state_dict", "x.safetensors").refuses("the zoo has no 'none'")


def test_the_weights_of_cifar10_are_those_of_its_recipe():
    recipe = Path(__file__).parents[2] / "recipes" / "cifar10_certified" / "attention"
    folder = zoo_folder("cifar10-certified")
    for file in ("model.safetensors", "model.json"):
        assert (folder / file).read_bytes() == (recipe / file).read_bytes()
    assert fingerprint(from_zoo("cifar10-certified")) == fingerprint(from_run(recipe))


def test_what_cannot_be_is_one_sentence(specguard, work):
    specguard("attack", "zoo:none").refuses("the zoo has no 'none'")
    specguard("train", "zoo:none", "--run", "x", *STEPS).refuses("the zoo has no 'none'")
    specguard("attack", DIGITS, "--classes", "3").refuses("--classes", "a model of the zoo")
    specguard("attack", "zoo:cifar10-certified").refuses("needs --data-root")
    specguard("attack", "zoo:cifar10-certified", "--data", "digits").refuses("inputs of shape (1, 8, 8)")
    specguard("train", DIGITS, "--run", "x", *STEPS, "--set", "depth=2").refuses("--set cannot change the model of")
    assert list(work.iterdir()) == []
