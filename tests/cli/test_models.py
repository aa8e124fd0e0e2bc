"""Every command on models from elsewhere: what works, and what is one sentence and exit code 2."""

import importlib
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
from specguard.models import ModelSource, from_run, untrained
from specguard.models.load import Fitted
from specguard.nn import Network, fingerprint, weights_fingerprint
from specguard.records.io import read_json, read_lines

NAME, SIZE = "timm:test_vit", ("--image-size", "32")
GREY = ("--mean", "0.3", "--std", "0.4")
DIGITS = (*SIZE, "--data", "digits", *GREY, "--device", "cpu")
FEW = ("--images", "3", "--device", "cpu")
PGD = ("--attack", "pgd", "--steps", "3", "--no-diagnose")
SOURCE = ModelSource("timm", "test_vit", 10, 1, 32, (0.3,), (0.4,), pixels=8)


def model(timm, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return timm.create_model("test_vit", **{"img_size": 32, "in_chans": 1, "num_classes": 10} | options)


@pytest.fixture(scope="module")
def files(timm, tmp_path_factory) -> Path:
    """Weights of one model in two formats, and of others that do not fit."""
    folder = tmp_path_factory.mktemp("weights")
    plain = model(timm).state_dict()
    save_file(plain, folder / "w.safetensors")
    torch.save({"model": plain, "epoch": 3}, folder / "w.pt")
    save_file(model(timm, num_classes=7).state_dict(), folder / "seven.safetensors")
    save_file(model(timm, num_classes=7, img_size=48).state_dict(), folder / "large.safetensors")
    save_file({k: v for k, v in plain.items() if not k.startswith("head")}, folder / "headless.safetensors")
    save_file(model(timm, img_size=48).state_dict(), folder / "other_size.safetensors")
    save_file(model(timm, in_chans=3).state_dict(), folder / "color.safetensors")
    save_file(plain | {"norm.bias": torch.full((64,), torch.nan)}, folder / "nan.safetensors")
    (folder / "cut.safetensors").write_bytes((folder / "w.safetensors").read_bytes()[:-9])
    return folder


@pytest.fixture(scope="module")
def trained(files, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    options = ("--weights", str(files / "seven.safetensors"), "--penalty", "msvp", "--epochs", "1")
    few = ("--batch", "256", "--warmup", "0", "--data", "digits", "--device", "cpu")
    result = CliRunner().invoke(app, ["train", NAME, "--run", str(run), *SIZE, *options, *few])
    assert result.exit_code == 0, result.output
    assert "the head is new, for 10 classes" in result.output
    return run


@pytest.fixture
def work(monkeypatch, tmp_path) -> Path:
    """Where results go by default."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# What works --------------------------------------------------------------------------------------------------


def test_a_model_of_timm_is_attacked_and_its_records_know_it(specguard, files, work):
    ended = specguard("attack", NAME, "--weights", files / "w.pt", *DIGITS, *FEW, *PGD)
    ended.succeeds()
    assert [row[0] for row in ended.rows()] == ["clean", "pgd", "worst case"]
    (folder,) = work.glob("runs/timm-test_vit-*/attacks/*")
    network, fitted = SOURCE.loaded(files / "w.safetensors")
    assert fitted == Fitted()
    assert read_json(folder / "study.json")["about"]["model"] == fingerprint(network)
    before = contents(work)
    again = specguard("attack", NAME, "--weights", files / "w.safetensors", *DIGITS, *FEW, *PGD)
    again.succeeds()  # the same weights, in another file: what is there is what it was
    assert again.out == ended.out
    assert contents(work) == before


def test_a_model_of_timm_is_looked_into_certified_and_measured_in_folders_that_are_named(specguard, files, work):
    given = ("--weights", files / "w.safetensors", *DIGITS)
    specguard("spectrum", NAME, *given, *FEW, "--blocks", "blocks.1,head", "--out", "a/spectrum").succeeds()
    assert read_json(work / "a/spectrum/summary.json")["n"] == 3
    assert (work / "a/spectrum/violin.svg").exists()
    few = ("--images", "2", "--methods", "local", "--radius", "1e-6")
    ended = specguard("certify", NAME, *given, *few, "--out", work / "proofs")
    ended.succeeds()
    assert "unknown, of 2" in ended.out
    assert all(record["norms"] for record in read_lines(work / "proofs/records.jsonl"))
    one = ("--images", "1", "--samples", "1", "--steps", "2", "--starts", "0", "--radius", "0.1")
    specguard("sensitivity", NAME, *given, *one, "--input-norm", "1", "--weight-change", "0.1").succeeds()
    (result,) = work.glob("runs/timm-test_vit-*/sensitivity/*/summary.json")
    assert read_json(result)["layer"]["name"] == "blocks.0.attention.branch.inner"


def test_a_fine_tuned_model_of_timm_is_a_run_like_any_other(specguard, trained, files, work):
    run = shutil.copytree(trained, work / "run")
    network = from_run(run)
    assert isinstance(network, Network)
    assert network.shape == (1, 8, 8)
    assert fingerprint(network) == read_json(run / "model.json")["fingerprint"]
    assert untrained(run) is None  # it began with weights from a file
    specguard("attack", run, *FEW, *PGD).succeeds()
    specguard("certify", run, "--images", "2", "--device", "cpu", "--methods", "local").succeeds()
    both = ("--weights", files / "w.safetensors", *DIGITS, *FEW, "--blocks", "blocks.0")
    ended = specguard("spectrum", run, NAME, *both, "--figure", "both", "--out", "spectrum/x")
    ended.succeeds()
    assert "run: largest singular values" in ended.out
    assert f"{NAME}: largest singular values" in ended.out
    assert (run / "spectrum/x/summary.json").exists()
    assert (work / "spectrum/x/summary.json").exists()
    before = contents(run)
    specguard("train", "--run", run, "--resume").succeeds()
    assert contents(run) == before
    for lost in ("model.json", "model.safetensors", "result.json"):  # as if killed before the end
        (run / lost).unlink()
    specguard("train", "--run", run, "--resume").succeeds()
    assert (run / "model.json").read_bytes() == before["model.json"]


def test_weights_for_another_image_size_are_resized_where_a_size_is_given_and_that_is_said(specguard, files, work):
    ended = specguard("attack", NAME, "--weights", files / "other_size.safetensors", *DIGITS, *FEW, *PGD)
    ended.succeeds()
    assert "positions are resized, from images of size 48 to 32" in ended.err
    (folder,) = work.glob("runs/timm-test_vit-*/attacks/*")
    network, fitted = SOURCE.loaded(files / "other_size.safetensors", resize=True)
    assert fitted == Fitted(sizes=(48, 32))
    assert read_json(folder / "study.json")["about"]["model"] == fingerprint(network)


def test_training_begins_with_weights_that_have_no_head_and_are_for_another_size(specguard, files, folder, work):
    few = ("--epochs", "1", "--batch", "1437", "--device", "cpu", "--penalty", "msvp")
    ended = specguard(
        "train", NAME, "--weights", files / "headless.safetensors", "--run", "a", "--image-size", "48", *few
    )
    ended.succeeds()
    assert "the head is new, for 10 classes" in ended.err
    assert "positions are resized, from images of size 32 to 48" in ended.err
    assert from_run(work / "a").positions.table.shape == (1, 10, 64)
    ended = specguard("train", f"hf:{folder}", "--run", "b", "--image-size", "16", *few)
    ended.succeeds()
    assert "positions are resized, from images of size 8 to 16" in ended.err
    assert from_run(work / "b").positions.table.shape == (1, 17, 24)
    specguard("train", NAME, "--model", "tiny", "--run", "c").refuses("the model is named twice")


def test_certificates_of_a_model_from_elsewhere_are_proved_again(specguard, folder, work):
    given = (f"hf:{folder}", "--data", "digits", "--device", "cpu")
    few = ("--images", "3", "--radius", "1e-6", "--methods", "adjoint", "--out", "proofs")
    specguard("certify", *given, *few).succeeds()
    ended = specguard("check", "proofs", "--model", *given)
    ended.succeeds()
    assert "3 records right" in ended.out


def test_without_weights_training_begins_with_a_fresh_model_from_the_seed(specguard, timm, tmp_path):
    run = tmp_path / "run"
    few = ("--epochs", "1", "--batch", "1437", "--device", "cpu")
    specguard("train", "--run", run, "--model", "timm:test_vit2", *SIZE, *few).succeeds()
    assert weights_fingerprint(untrained(run)) == read_json(run / "run.json")["initial_weights"]


def test_images_of_a_folder_are_brought_to_the_size_of_the_model(specguard, files, work, generator):
    for split in ("train", "val"):
        for label in range(10):
            (work / "images" / split / str(label)).mkdir(parents=True)
            pixels = torch.randint(0, 256, (9, 12, 3), generator=generator, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(work / "images" / split / str(label) / "a.png")
    given = (NAME, "--weights", files / "color.safetensors", *SIZE, "--classes", "10", *FEW, *PGD, "--out", "x")
    ended = specguard("attack", *given, "--data", work / "images")
    ended.succeeds()
    before = contents(work)
    specguard("attack", *given, "--data", "folder", "--data-root", work / "images").succeeds()
    assert contents(work) == before  # the same said in other words
    specguard("attack", *given, "--data", work / "images", "--data-root", work).refuses("--data-root has no effect")
    specguard("attack", *given, "--data", work / "none").refuses("no data set", "none of digits, cifar10,")
    half = (0.5, 0.5, 0.5)
    network, _ = ModelSource("timm", "test_vit", 10, 3, 32, half, half).loaded(files / "color.safetensors")
    assert network.shape == (3, 32, 32)
    assert read_json(work / "x" / "study.json")["about"]["model"] == fingerprint(network)


@pytest.fixture(scope="module")
def folder(timm, tmp_path_factory) -> Path:
    transformers = importlib.import_module("transformers")
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 31}
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=10, **sizes)
    place = tmp_path_factory.mktemp("hf") / "vit"
    transformers.ViTForImageClassification(config).save_pretrained(place)
    text = transformers.BertConfig(vocab_size=9, **sizes)
    transformers.BertForSequenceClassification(text).save_pretrained(place.parent / "bert")
    return place


def test_a_folder_of_transformers_is_attacked_certified_and_fine_tuned(specguard, folder, work):
    place = shutil.copytree(folder, work / "mine")
    (place / "preprocessor_config.json").write_text('{"image_mean": [0.25], "image_std": [0.75]}')
    name, data = f"hf:{place}", ("--data", "digits", "--device", "cpu")
    specguard("attack", name, *data, "--images", "2", *PGD).succeeds()
    assert len(list(work.glob("runs/hf-vit-*/attacks/*/summary.json"))) == 1
    specguard("certify", name, *data, "--images", "2", "--methods", "local,adjoint").succeeds()
    few = ("--epochs", "1", "--batch", "1437", *data, "--penalty", "msvp")
    specguard("train", "--run", work / "run", "--model", name, *few).succeeds()
    shutil.rmtree(place)
    network = from_run(work / "run")
    assert network.normalise.mean.item() == 0.25
    specguard("attack", work / "run", "--images", "2", "--device", "cpu", *PGD).succeeds()


# What is refused ---------------------------------------------------------------------------------------------


class Runs:
    """A pickle of it writes a file when it is unpickled."""

    def __reduce__(self):
        return open, ("trap", "w")


WEIGHTS = {
    "none": (None, ("needs --weights",)),
    "a file that is not there": ("nowhere.pt", ("nowhere.pt", "does not exist")),
    "other classes": ("seven.safetensors", ("seven.safetensors", "7 classes, not 10")),
    "other channels": ("color.safetensors", ("images of 3 channels, not 1",)),
    "other shapes": ("large.safetensors", ("classes",)),
    "no head": ("headless.safetensors", ("headless.safetensors", "no head")),
    "no numbers": ("nan.safetensors", ("not finite", "norm.bias")),
    "a file cut short": ("cut.safetensors", ("truncated",)),
}
VERBS = {
    "attack": (*PGD,),
    "spectrum": ("--blocks", "head"),
    "certify": ("--methods", "local"),
    "sensitivity": ("--steps", "1"),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_that_do_not_fit_are_one_sentence_and_leave_nothing(specguard, files, work, case):
    file, named = WEIGHTS[case]
    given = () if file is None else ("--weights", files / file)
    for verb in VERBS if case in ("none", "other classes") else ("attack",):
        specguard(verb, NAME, *given, *DIGITS, *VERBS[verb]).refuses(*named)
    assert contents(work) == {}


def test_a_pickle_that_would_run_code_does_not(specguard, timm, work):
    torch.save({"model": model(timm).state_dict(), "extra": Runs()}, "hostile.pt")
    specguard("attack", NAME, "--weights", "hostile.pt", *DIGITS, *PGD).refuses("hostile.pt", "could run code")
    run = ("train", "--run", "run", "--model", NAME, "--weights", "hostile.pt", *SIZE)
    specguard(*run).refuses("hostile.pt", "could run code")
    assert [path.name for path in work.iterdir()] == ["hostile.pt"]


OPTIONS = {
    "unknown architecture": ("timm:no_such_vit", DIGITS, ("no architecture 'no_such_vit'",)),
    "an architecture from the net": ("timm:hf-hub:a/b", DIGITS, ("no architecture 'hf-hub:a/b'",)),
    "a model without blocks": ("timm:resnet10t", DIGITS[2:], ("resnet.ResNet, which cannot be converted",)),
    "a module without a counterpart": ("timm:test_vit3", DIGITS, ("of another architecture",)),
    "classes unlike the data": (NAME, (*DIGITS, "--classes", "11"), ("digits has 10 classes, but the model 11",)),
    "no data": (NAME, SIZE, ("--data",)),
    "channels that are not normalized": (NAME, (*SIZE, "--data", "digits"), ("--mean and --std",)),
    "mean alone": (NAME, (*SIZE, "--data", "digits", "--mean", "0.5"), ("belong together",)),
    "mean that is no number": (NAME, (*DIGITS, "--mean", "half"), ("--mean", "half")),
    "mean of too many channels": (NAME, (*DIGITS, "--mean", "0.1,0.2"), ("each of the 1 channels",)),
    "std of zero": (NAME, (*DIGITS, "--std", "0"), ("std be positive",)),
    "torchvision's unknown": ("torchvision:vit_x", DIGITS, ("images of 3 channels",)),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_what_cannot_be_is_one_sentence_and_leaves_nothing(specguard, files, work, case):
    name, options, named = OPTIONS[case]
    specguard("attack", name, "--weights", files / "w.safetensors", *options, *PGD).refuses(*named)
    assert contents(work) == {}


def test_a_module_without_a_counterpart_is_named(specguard, timm, work):
    pooled = timm.create_model("test_vit3", img_size=32, in_chans=1, num_classes=10)
    save_file(pooled.state_dict(), "pooled.safetensors")
    ended = specguard("certify", "timm:test_vit3", "--weights", "pooled.safetensors", *DIGITS)
    ended.refuses("attn_pool is a timm.layers.attention_pool.AttentionPoolLatent")


def test_options_that_would_do_nothing_are_one_sentence(specguard, trained, files, work):
    for option in (("--weights", files / "w.pt"), ("--classes", "10"), SIZE, ("--mean", "0.5")):
        specguard("attack", trained, *option).refuses(option[0], "has no effect on a run directory")
    start = ("train", "--run", "run", "--epochs", "1")
    specguard(*start, "--weights", files / "w.pt").refuses("--weights has no effect without --model timm:NAME")
    specguard(*start, "--model", NAME, "--set", "depth=1").refuses("--set has no effect without")
    specguard("spectrum", NAME, "timm:test_vit2", *DIGITS, "--figure", "x").refuses("one model from elsewhere")
    given = (NAME, "--weights", files / "w.pt", *DIGITS)
    specguard("certify", *given, "--out", "").refuses("--out")
    assert contents(work) == {}


def test_only_the_head_may_have_other_classes_when_training_begins(specguard, files, work):
    start = ("train", "--run", "run", "--model", NAME, *SIZE, "--weights")
    specguard(*start[:-3], "--weights", files / "large.safetensors").refuses("images of size 48, not 160")
    specguard(*start, files / "seven.safetensors", "--classes", "7").refuses("digits has 10 classes")
    specguard(*start[:-3], "--image-size", "3").refuses("original cannot be run")
    assert contents(work) == {}


def test_a_folder_of_transformers_that_does_not_fit_is_one_sentence(specguard, folder, work):
    options = ("--data", "digits", "--device", "cpu", *PGD)
    specguard("attack", f"hf:{work}", *options).refuses("config.json", "does not exist")
    specguard("attack", f"hf:{folder.parent / 'bert'}", *options).refuses("bert", "no classifier of images")
    specguard("attack", f"hf:{folder}", *options, "--weights", "w.pt").refuses("--weights")
    specguard("attack", f"hf:{folder}", *options, "--image-size", "3").refuses("holds no patch")
    for changes, named in (
        ({"num_hidden_layers": 2}, "it lacks 'vit.layers.1."),
        ({"hidden_size": 30}, "has another shape"),
        ({"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}, "2 classes, not 10"),
        ({"model_type": "no such"}, "'no such'"),
        ({"auto_map": {"AutoModelForImageClassification": "trap.Model"}, "model_type": "trap"}, "'trap'"),
    ):
        spoilt = shutil.copytree(folder, work / "spoilt", dirs_exist_ok=True)
        record = json.loads((folder / "config.json").read_text())
        (spoilt / "config.json").write_text(json.dumps(record | changes))
        specguard("attack", f"hf:{spoilt}", *options).refuses(named)
    (work / "spoilt" / "config.json").write_text(json.dumps(record))
    (work / "spoilt" / "model.safetensors").unlink()
    specguard("attack", f"hf:{work / 'spoilt'}", *options).refuses("model.safetensors", "does not exist")
    assert not (work / "runs").exists()
