"""Text by the same verbs: train, resume, attack, certify, verify; and what is one sentence and exit code 2."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from helpers.commandline import contents
from helpers.sentences import write_sst2
from specguard.cli import app
from specguard.data import sst2
from specguard.errors import ConfigError
from specguard.models import from_run, untrained, warm_start
from specguard.nn import TextConfig, TextEncoder, ViT, materialized, preset, text_encoder
from specguard.train import Training, train
from specguard.train.loop import Loop
from specguard.train.objectives.margins import InputGradient

SMALL = ("--set", "dim=8", "--set", "depth=1", "--set", "heads=2", "--set", "tokens=5")
STEPS = ("--epochs", "2", "--batch", "20", "--lr", "0.02", "--warmup", "0.5", "--device", "cpu")
TRAIN = ("--model", "text_small", "--data", "sst2", *SMALL, *STEPS)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_sst2(tmp_path_factory.mktemp("sst2"))


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    result = CliRunner().invoke(app, ["train", "--run", str(run), "--data-root", str(data), *TRAIN])
    assert result.exit_code == 0, result.output
    return run


@pytest.fixture
def run(trained, tmp_path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


def test_a_trained_run_keeps_its_vocabulary_and_comes_back(run, data):
    model = from_run(run)
    assert isinstance(model, TextEncoder)
    words = json.loads((run / "vocabulary.json").read_text())["words"]
    assert model.config.words == len(words) + 2
    assert untrained(run) is not None
    assert json.loads((run / "result.json").read_text())["test_accuracy"]["n"] == 12


def test_an_interrupted_run_resumes_to_the_same_weights(specguard, trained, data, tmp_path, monkeypatch):
    run, true, steps = tmp_path / "cut", Loop.step, []

    def until_the_sixth(self, *given):
        steps.append(1)
        if len(steps) == 6:
            raise KeyboardInterrupt
        return true(self, *given)

    monkeypatch.setattr(Loop, "step", until_the_sixth)
    ended = specguard("train", "--run", run, "--data-root", data, *TRAIN, "--checkpoint-steps", "3")
    assert ended.code == 130
    assert not (run / "result.json").exists()
    monkeypatch.setattr(Loop, "step", true)
    specguard("train", "--run", run, "--resume").succeeds()
    for name in ("metrics.jsonl", "model.safetensors"):
        assert (run / name).read_bytes() == (trained / name).read_bytes()


def test_it_is_trained_further_with_its_own_vocabulary(specguard, trained, data, tmp_path):
    second = tmp_path / "second"
    specguard("train", trained, "--run", second, *STEPS, "--checkpoint-steps", "3").succeeds()
    settings = json.loads((second / "run.json").read_text())
    known = json.loads((trained / "model.json").read_text())
    assert settings["origin"]["fingerprint"] == known["fingerprint"]
    assert settings["model"] == known["config"]
    words = torch.tensor([[2, 3, 1, 0, 0], [4, 2, 3, 1, 5]])
    torch.testing.assert_close(warm_start(trained).model(words), from_run(trained)(words), rtol=0, atol=1e-6)
    assert (second / "vocabulary.json").read_bytes() == (trained / "vocabulary.json").read_bytes()
    before = contents(second)
    for lost in ("model.json", "model.safetensors", "result.json"):  # as if killed before the end
        (second / lost).unlink()
    specguard("train", "--run", second, "--resume").succeeds()
    assert (second / "model.safetensors").read_bytes() == before["model.safetensors"]
    exported = tmp_path / "w.safetensors"
    specguard("export", second, "--to", "state_dict", exported).succeeds()
    materialized(text_encoder(from_run(second).config)).load_state_dict(load_file(exported), strict=True)
    specguard("export", second, "--to", "timm", tmp_path / "x.safetensors").refuses("no counterpart in timm")


def test_it_is_attacked_certified_and_checked(specguard, run):
    attack = ("--attack", "pgd", "--steps", "3", "--norm", "l2", "--radius", "20", "--device", "cpu")
    ended = specguard("attack", run, *attack)
    ended.succeeds()
    assert "[0, 1]" not in ended.err  # a large radius of embeddings is no mistake of units
    certify = ("--curve", "0.01,0.1", "--methods", "lofast,local,adjoint,mixed", "--device", "cpu")
    ended = specguard("certify", run, *certify, "--out", "proofs", "--no-search")
    ended.succeeds()
    assert "unknown, of 12" in ended.out
    before = contents(run / "proofs")
    specguard("certify", run, *certify, "--out", "proofs", "--no-search").succeeds()
    assert contents(run / "proofs") == before
    ended = specguard("check", run / "proofs", "--model", run, "--device", "cpu")
    ended.succeeds()
    assert "12 records right" in ended.out


def test_other_data_is_read_with_the_runs_own_vocabulary(specguard, run, tmp_path):
    other = write_sst2(tmp_path / "other", train=4, test=6)
    specguard("attack", run, "--data-root", other).refuses("the data is not what", "trained on")
    chosen = ("--data", "sst2", "--data-root", other, "--attack", "fgsm", "--norm", "l2", "--radius", "0.1")
    ended = specguard("attack", run, *chosen, "--device", "cpu")
    ended.succeeds()
    assert "n = 6" in ended.out


def test_a_vocabulary_that_is_missing_or_another_is_refused(specguard, run):
    path = run / "vocabulary.json"
    words = json.loads(path.read_text())["words"]
    path.write_text(json.dumps({"words": words[::-1]}))
    specguard("certify", run).refuses("is not the vocabulary")
    path.write_text(json.dumps({"words": "film"}))
    specguard("certify", run).refuses("does not hold a vocabulary")
    path.unlink()
    specguard("certify", run).refuses("vocabulary.json does not exist")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--data", "sst2"), "is text, which only a model of text takes"),
        (("--model", "text_small"), "needs --data sst2"),
        (("--model", "text_small", "--data", "sst2", "--set", "words=9"), "comes from the data"),
        (("--model", "text_small", "--data", "sst2", "--set", "patch=9"), "unknown field 'patch'"),
        (("--model", "text_small", "--data", "sst2", "--set", "depth=x"), "depth"),
        (("--model", "text_small", "--data", "sst2", "--flip"), "not for sentences"),
        (("--model", "text_small", "--data", "sst2", "--objective", "pgd"), "perturb pixels"),
        (("--model", "text_small", "--data", "sst2", "--validate", "5"), "perturb pixels"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(specguard, data, tmp_path, options, said):
    root = () if "--data" not in options else ("--data-root", data)
    specguard("train", "--run", tmp_path / "run", *root, *options).refuses(said)
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_text_without_a_folder_and_in_other_verbs_is_one_sentence(specguard, run, tmp_path):
    specguard("train", "--run", tmp_path / "new", "--model", "text_small", "--data", "sst2").refuses("--data-root")
    specguard("spectrum", run).refuses("spectrum takes models of images")
    specguard("sensitivity", run, "--layer", "0").refuses("sensitivity takes models of images")
    specguard("certify", run, "--images", "13").refuses("12 test sentences")


def test_another_vocabulary_and_a_gradient_by_words_are_refused(data, tmp_path):
    loaded = sst2(data, tokens=5)
    known = loaded.vocabulary
    config = TextConfig(words=len(known), tokens=5, dim=8, depth=0, heads=2, vocabulary=known.fingerprint)
    for changed, training, said in (
        (replace(config, words=len(known) + 1), Training(), "another vocabulary"),
        (replace(config, vocabulary=""), Training(), "another vocabulary"),
        (config, Training(objective=InputGradient(0.1)), "penalty on the input gradient"),
    ):
        with pytest.raises(ConfigError, match=said):
            train(text_encoder(changed), loaded, tmp_path / "run", training, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match="takes images"):
        train(ViT(preset("tiny")), loaded, tmp_path / "run", Training(), device=torch.device("cpu"))
