"""`specguard train RUN`: a second stage begins with the weights of a run, says so, and resumes like any other."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

from helpers.commandline import contents
from specguard.cli import app
from specguard.models import from_run, warm_start
from specguard.nn import fingerprint, weights_fingerprint
from specguard.records.io import read_json, write_json
from specguard.train.loop import Loop

TINY = ("--set", "dim=8", "--set", "depth=1")
STEPS = ("--epochs", "2", "--batch", "512", "--warmup", "0", "--lr", "0.01", "--device", "cpu")
CERTIFIABLE = ("--model", "certifiable_digits", "--set", "dim=8", "--set", "depth=1")
SECOND = (*STEPS, "--objective", "pgd", "--inner-steps", "1", "--radius", "0.1", "--checkpoint-steps", "1")


def trained(place: Path, *options: str) -> Path:
    result = CliRunner().invoke(app, ["train", "--run", str(place), *options])
    assert result.exit_code == 0, result.output
    return place


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("runs") / "first", *TINY, *STEPS)


@pytest.fixture(autouse=True)
def named_commit(monkeypatch):
    monkeypatch.setenv("SPECGUARD_COMMIT", "test")


def test_a_second_stage_begins_with_the_weights_of_the_first_and_says_so(specguard, first, tmp_path, monkeypatch):
    before = contents(first)
    ended = specguard("train", first, "--run", tmp_path / "second", *SECOND)
    ended.succeeds()
    assert f"tiny, trained in {first}, on digits" in ended.err
    settings = read_json(tmp_path / "second" / "run.json")
    known = read_json(first / "model.json")
    assert settings["origin"] == {
        "run": "first",
        "fingerprint": known["fingerprint"],
        "weights_fingerprint": known["weights_fingerprint"],
    }
    assert settings["initial_weights"] == known["weights_fingerprint"]
    assert settings["model"] == known["config"]
    assert settings["training"]["objective"]["type"] == "PGDTraining"
    assert contents(first) == before
    arguments = read_json(tmp_path / "second" / "arguments.json")
    assert [arguments[name] for name in ("model", "set_", "weights", "data")] == [
        "tiny", ["dim=8", "depth=1"], str(first), "digits",
    ]  # fmt: skip
    for name, words in (("by option", ("--weights", first)), ("by model", ("--model", first))):
        specguard("train", "--run", tmp_path / name, *words, *SECOND).succeeds()
        for file in ("run.json", "arguments.json", "metrics.jsonl", "model.safetensors"):
            assert (tmp_path / name / file).read_bytes() == (tmp_path / "second" / file).read_bytes()
    monkeypatch.chdir(first.parent)  # in a folder, its name is enough
    specguard("train", "first", "--run", tmp_path / "by name", *SECOND).succeeds()
    assert (tmp_path / "by name" / "run.json").read_bytes() == (tmp_path / "second" / "run.json").read_bytes()


def test_a_second_stage_is_the_beginning_of_a_third_and_a_run_like_any_other(specguard, first, tmp_path):
    second, third = tmp_path / "second", tmp_path / "third"
    specguard("train", first, "--run", second, *STEPS).succeeds()
    specguard("train", second, "--run", third, *STEPS, "--model", "tiny", *TINY).refuses("the model is named twice")
    specguard("train", "--weights", second, "--run", third, *STEPS, "--model", "tiny", *TINY).succeeds()
    assert (
        read_json(third / "run.json")["origin"]["fingerprint"] == read_json(second / "result.json")["fingerprint"]
    )
    few = ("--images", "3", "--device", "cpu")
    specguard("attack", third, *few, "--attack", "pgd", "--steps", "2", "--no-diagnose").succeeds()
    specguard("report", third).succeeds()


@pytest.mark.parametrize("options", [TINY, CERTIFIABLE], ids=["vit", "certifiable"])
def test_a_killed_second_stage_resumes_without_the_first_to_the_same_bytes(
    specguard, options, tmp_path, monkeypatch
):
    first = trained(tmp_path / "first", *options, *STEPS)
    specguard("train", first, "--run", tmp_path / "whole", *STEPS, "--checkpoint-steps", "1").succeeds()
    true, steps = Loop.step, []

    def until_the_third(self, *given):
        steps.append(1)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return true(self, *given)

    monkeypatch.setattr(Loop, "step", until_the_third)
    run = tmp_path / "cut"
    ended = specguard("train", first, "--run", run, *STEPS, "--checkpoint-steps", "1")
    assert ended.code == 130
    monkeypatch.setattr(Loop, "step", true)
    shutil.rmtree(first)
    specguard("train", "--run", run, "--resume").succeeds()
    for file in ("run.json", "arguments.json", "metrics.jsonl", "model.safetensors", "model.json"):
        assert (run / file).read_bytes() == (tmp_path / "whole" / file).read_bytes(), file
    before = contents(run)
    specguard("train", "--run", run, "--resume").succeeds()
    assert contents(run) == before


def test_a_second_stage_that_was_killed_before_its_first_checkpoint_needs_the_first(
    specguard, first, tmp_path, monkeypatch
):
    source, run = shutil.copytree(first, tmp_path / "first"), tmp_path / "cut"

    def stop(self, *given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "step", stop)
        assert specguard("train", source, "--run", run, *STEPS).code == 130
    source.rename(tmp_path / "moved")
    specguard("train", "--run", run, "--resume").refuses(source, "does not exist")
    trained(source, *TINY, *STEPS, "--seed", "7")  # another run in its place
    specguard("train", "--run", run, "--resume").refuses("other settings (initial_weights")
    specguard("train", "--run", run, "--resume", "--weights", tmp_path / "moved").refuses("origin.run")
    shutil.rmtree(source)
    (tmp_path / "moved").rename(source)
    specguard("train", "--run", run, "--resume").succeeds()


def test_a_certifiable_model_keeps_its_constraints_in_a_second_stage(specguard, tmp_path):
    first = trained(tmp_path / "first", *CERTIFIABLE, *STEPS)
    specguard("train", first, "--run", tmp_path / "second", *STEPS).succeeds()
    settings = read_json(tmp_path / "second" / "run.json")
    assert settings["origin"]["fingerprint"] == fingerprint(from_run(first))
    assert settings["initial_weights"] == weights_fingerprint(warm_start(first).model)
    weight = from_run(tmp_path / "second").get_submodule("patches.map").weight.flatten(1)
    gram = weight @ weight.mT if weight.shape[0] <= weight.shape[1] else weight.mT @ weight
    torch.testing.assert_close(gram, torch.eye(len(gram)), rtol=0, atol=1e-5)


def test_a_model_of_timm_is_trained_in_two_stages(specguard, timm, tmp_path):
    words = ("timm:test_vit", "--image-size", "32", "--mean", "0.25", "--std", "0.5", *STEPS)
    first = trained(tmp_path / "first", *words)
    specguard("train", first, "--run", tmp_path / "second", *STEPS, "--penalty", "msvp").succeeds()
    settings, known = read_json(tmp_path / "second" / "run.json"), read_json(first / "model.json")
    assert settings["initial_weights"] == known["weights_fingerprint"]
    assert settings["model"] == known["config"]
    assert read_json(tmp_path / "second" / "arguments.json")["image_size"] == 32
    specguard("train", first, "--run", tmp_path / "x", "--image-size", "48").refuses("--image-size cannot change")


def test_a_model_that_was_trained_from_python_is_trained_further_on_data_that_are_named(specguard, first, tmp_path):
    run = shutil.copytree(first, tmp_path / "run")
    (run / "arguments.json").unlink()
    specguard("train", run, "--run", tmp_path / "second", *STEPS).refuses("does not say which data", "--data")
    specguard("train", run, "--run", tmp_path / "second", "--data", "digits", *STEPS).succeeds()
    specguard("train", "--run", tmp_path / "second", "--resume").succeeds()


# What is refused ---------------------------------------------------------------------------------------------


def spoiled(run: Path, case: str) -> None:
    if case == "cut short":
        (run / "model.safetensors").write_bytes((run / "model.safetensors").read_bytes()[:-9])
    elif case == "other weights":
        save_file({"head.weight": torch.zeros(10, 8)}, run / "model.safetensors")
    elif case == "a pickle":
        torch.save({"head.weight": torch.zeros(10, 8)}, run / "model.safetensors")
    elif case == "another architecture":
        record = read_json(run / "model.json")
        write_json(run / "model.json", record | {"config": record["config"] | {"dim": 16}})
    elif case == "a model of any size":
        record = read_json(run / "model.json")
        write_json(run / "model.json", record | {"config": record["config"] | {"dim": 2**16, "depth": 2}})
    elif case == "arguments of a wrong kind":
        write_json(run / "arguments.json", read_json(run / "arguments.json") | {"set_": 7})
    else:
        (run / "model.json").unlink()


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("cut short", "truncated or not a safetensors file"),
        ("other weights", "of another architecture: it lacks"),
        ("a pickle", "truncated or not a safetensors file"),
        ("another architecture", "of another architecture"),
        ("a model of any size", "of another architecture"),
        ("arguments of a wrong kind", "holds 'set_' of a wrong kind"),
        ("unfinished", "is not finished: it has no model.json"),
    ],
)
def test_a_spoiled_run_is_one_sentence_and_leaves_nothing(specguard, first, tmp_path, case, named):
    run = shutil.copytree(first, tmp_path / "run")
    spoiled(run, case)
    specguard("train", run, "--run", tmp_path / "second", *STEPS).refuses(tmp_path / "run", named)
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("runs/none",), ("runs/none is no training run",)),
        ((".",), (". is no training run",)),
        (("--weights", "none"), ("none is no training run",)),
        (("--weights", "FIRST", "--model", "deit_tiny_patch4_32"), ("--model cannot change the model of",)),
        (("FIRST", "--set", "depth=2"), ("--set cannot change the model of",)),
        (("FIRST", "--classes", "10"), ("--classes cannot change the model of",)),
        (("FIRST", "--weights", "FIRST"), ("the weights are named twice",)),
        (("FIRST", "--data", "IMAGES"), ("2 classes of inputs of shape (3, 8, 8)", "the model 10 of (1, 8, 8)")),
        (("FIRST", "--data-root", "x"), ("--data-root has no effect",)),
        (("timm:test_vit", "--weights", "FIRST"), ("--model cannot change the model of",)),
    ],
)
def test_what_cannot_be_is_one_sentence(specguard, first, tmp_path, monkeypatch, words, named):
    monkeypatch.chdir(tmp_path)
    for label in ("cat", "dog"):
        for split in ("train", "val"):
            (tmp_path / "images" / split / label).mkdir(parents=True)
            pixels = torch.zeros(8, 8, 3, dtype=torch.uint8).numpy()
            Image.fromarray(pixels).save(tmp_path / "images" / split / label / "a.png")
    given = [str({"FIRST": first, "IMAGES": tmp_path / "images"}.get(word, word)) for word in words]
    specguard("train", *given, "--run", "second", *STEPS).refuses(*named)
    assert not (tmp_path / "second").exists()


def test_a_run_is_not_continued_into_itself(specguard, first, tmp_path):
    run = shutil.copytree(first, tmp_path / "run")
    before = contents(run)
    specguard("train", run, "--run", run, *STEPS).refuses("already holds a run")
    assert contents(run) == before
    assert json.loads(before["run.json"]).get("origin") is None
