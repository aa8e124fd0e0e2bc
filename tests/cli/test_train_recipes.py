"""`specguard train --recipe`: options for a purpose, which are printed, stored, and give way to those given."""

import re
from typing import Any

import numpy as np
import pytest
from PIL import Image

from specguard.cli.options import options_of
from specguard.cli.train import _GROUPS
from specguard.cli.train_recipes import RECIPES, recipe_settings
from specguard.records.io import read_json

SMALL = ("--set", "dim=8", "--set", "depth=1", "--device", "cpu")
QUICK = ("--epochs", "1", "--batch", "600", "--lr", "0.01")
OPTIONS = {name: option for group in _GROUPS for name, option in options_of(group).items()}


@pytest.fixture(autouse=True)
def named_commit(monkeypatch):
    monkeypatch.setenv("SPECGUARD_COMMIT", "test")


def printed(text: str) -> list[str]:
    """The options that a recipe has said it sets."""
    return re.findall(r"^  (--\S+(?: \S+)?)$", text, re.MULTILINE)


def words_of(name: str, value: Any) -> str:
    return (
        f"--{name.replace('_', '-')} {value:g}"
        if isinstance(value, float)
        else f"--{name.replace('_', '-')} {value}"
    )


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("data", ["digits", "cifar10"])
def test_a_recipe_names_options_that_exist_at_values_that_are_no_defaults(recipe, data):
    for name, value in recipe_settings(recipe, data).items():
        assert value == OPTIONS[name].value(value)
        assert value != OPTIONS[name].default
    assert recipe in OPTIONS["recipe"].help


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_prints_what_it_sets_and_gives_way_to_what_is_given(specguard, tmp_path, recipe):
    ended = specguard("train", "--run", tmp_path / "run", "--recipe", recipe, *SMALL, *QUICK)
    ended.succeeds()
    assert f"--recipe {recipe} sets" in ended.err
    given = {"epochs": 1, "batch": 600, "lr": 0.01}
    wanted = {name: value for name, value in recipe_settings(recipe, "digits").items() if name not in given}
    assert printed(ended.err) == [words_of(name, value) for name, value in wanted.items()]
    stored = read_json(tmp_path / "run" / "arguments.json")
    assert stored["recipe"] == recipe
    for name, value in (wanted | given).items():
        assert stored[name] == value
    untouched = stored.keys() - wanted.keys() - given.keys() - {"recipe", "set_", "device"}
    defaults = {name: option.default for name, option in OPTIONS.items()}
    assert [
        name for name in untouched if stored[name] != defaults[name] and stored[name] != [*defaults[name]]
    ] == []


def test_a_recipe_is_what_its_options_are_by_hand(specguard, tmp_path):
    by_hand = [word for name, value in RECIPES["robust-finetune"].items() for word in words_of(name, value).split()]
    for run, words in (("recipe", ["--recipe", "robust-finetune"]), ("hand", by_hand)):
        specguard("train", "--run", tmp_path / run, *words, *SMALL, *QUICK).succeeds()
    for file in ("run.json", "metrics.jsonl", "model.safetensors"):
        assert (tmp_path / "recipe" / file).read_bytes() == (tmp_path / "hand" / file).read_bytes()


def test_a_run_is_trained_further_by_a_recipe_and_keeps_its_model(specguard, tmp_path):
    specguard("train", "--run", tmp_path / "first", *SMALL, *QUICK).succeeds()
    quick = (*QUICK, "--device", "cpu")
    ended = specguard(
        "train", tmp_path / "first", "--run", tmp_path / "second", "--recipe", "robust-finetune", *quick
    )
    ended.succeeds()
    assert "--objective pgd" in printed(ended.err)
    settings = read_json(tmp_path / "second" / "run.json")
    assert settings["origin"]["run"] == "first"
    assert settings["training"]["awp"] == {"type": "AWP", "gamma": 0.005}
    made = ("train", "--run", tmp_path / "third", "--model", "certifiable_digits", *SMALL, *QUICK)
    specguard(*made).succeeds()
    words = ("--recipe", "certifiable", *quick)
    ended = specguard("train", tmp_path / "third", "--run", tmp_path / "fourth", *words)
    ended.succeeds()
    assert not any("--model" in line for line in printed(ended.err))
    assert read_json(tmp_path / "fourth" / "run.json")["training"]["objective"]["type"] == "EMMA"


def test_a_run_of_a_recipe_is_resumed_without_it_and_with_no_other(specguard, tmp_path, monkeypatch):
    run = tmp_path / "run"
    specguard("train", "--run", run, "--recipe", "smoothing", *SMALL, *QUICK).succeeds()
    monkeypatch.setitem(RECIPES, "smoothing", {"objective": "noise"})  # as a later version may say
    for words in ((), ("--recipe", "smoothing")):
        ended = specguard("train", "--run", run, "--resume", *words)
        ended.succeeds()
        assert "sets" not in ended.err
    specguard("train", "--run", run, "--resume", "--recipe", "certifiable").refuses(
        "was started with --recipe smoothing"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--recipe", "smothing"), "did you mean 'smoothing'?"),
        (("--recipe", "magic"), "choose robust-finetune, certifiable or smoothing"),
        (
            ("--recipe", "robust-finetune", "--objective", "standard"),
            "--ramp has no effect without --objective pgd, trades, mart, nfgsm, emma or certified; "
            "it is set by --recipe robust-finetune",
        ),
        (
            ("--recipe", "smoothing", "--radius", "0.1"),
            "--radius has no effect without an --objective that has a ball",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(specguard, tmp_path, words, said):
    specguard("train", "--run", tmp_path / "run", *words, *SMALL).refuses(said)
    assert not (tmp_path / "run").exists()


def test_a_config_file_goes_before_a_recipe(specguard, tmp_path):
    (tmp_path / "own.toml").write_text('recipe = "smoothing"\nobjective = "noise"\nepochs = 1\nbatch = 700\n')
    ended = specguard("train", "--run", tmp_path / "run", "--config", tmp_path / "own.toml", *SMALL)
    ended.succeeds()
    assert printed(ended.err) == []
    assert read_json(tmp_path / "run" / "run.json")["training"]["objective"]["type"] == "NoiseTraining"


def test_a_recipe_holds_out_fewer_images_where_there_are_few_and_says_so(specguard, tmp_path):
    """200 of 30 cannot be held out, and the next command of a verdict names the recipe alone."""
    for split, label in (("train", "a"), ("train", "b"), ("val", "a"), ("val", "b")):
        folder = tmp_path / "photos" / split / label
        folder.mkdir(parents=True)
        for number in range(15 if split == "train" else 1):
            pixels = np.full((8, 8, 3), 10 * number, dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
    words = ("train", "--run", tmp_path / "run", "--model", "tiny", "--data", tmp_path / "photos", *SMALL)
    ended = specguard(*words, "--recipe", "robust-finetune", *QUICK)
    ended.succeeds()
    assert "--validate 3" in printed(ended.err)
    assert read_json(tmp_path / "run" / "arguments.json")["validate"] == 3
    again = ("train", "--run", tmp_path / "given", *words[3:], "--recipe", "robust-finetune", *QUICK)
    specguard(*again, "--validate", "200").refuses("30 training images; 200 cannot be held out")
