"""Every way to name a model: arguments of its constructor, a function, a file, a preset with weights."""

import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from helpers.commandline import contents
from specguard.cli import app
from specguard.cli.model_args import model_arguments
from specguard.cli.model_name import form_of
from specguard.errors import ConfigError
from specguard.models import ModelSource, from_run
from specguard.models.source import drawn_from
from specguard.nn import fingerprint
from specguard.records.io import read_json, write_json

CPU = ("--device", "cpu")
FEW = ("--data", "digits", "--images", "3", *CPU)
PGD = ("--attack", "pgd", "--steps", "2", "--no-diagnose")
SIZES = {"patch_size": 4, "embed_dim": 24, "depth": 1, "num_heads": 3}
ARGUMENTS = ("--model-arg", "patch_size=4,embed_dim=24", "--model-arg", "depth=1", "--model-arg", "num_heads=3")
TIMM = ("timm:vit_tiny_patch16_224", *ARGUMENTS, "--image-size", "8", "--mean", "0.3", "--std", "0.4")
SOURCE = ModelSource("timm", "vit_tiny_patch16_224", 10, 1, 8, (0.3,), (0.4,), arguments=SIZES)
NOISE = ("--samples", "20", "--select", "5")
STEPS = ("--epochs", "1", "--batch", "719", "--warmup", "0", *CPU)
MODULE = """
import sys
import torch
from torch import nn
from specguard.nn import ViT, ViTConfig
print("imported")
def build(depth=1, heads=3):
    import timm
    sizes = dict(img_size=8, patch_size=4, embed_dim=24, in_chans=1, num_classes=10)
    return timm.create_model("vit_tiny_patch16_224", depth=depth, num_heads=heads, **sizes)
def own():
    return ViT(ViTConfig(image=8, patch=4, channels=1, dim=8, depth=1, heads=2, mean=(0.3,), std=(0.4,)))
class Convolution(nn.Sequential):
    def __init__(self, width=2):
        super().__init__(nn.Conv2d(1, width, 3), nn.ReLU(), nn.Flatten(), nn.Linear(width * 36, 10))
made = Convolution()
number = 3
def seven(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 7))
def wide(): return nn.Sequential(nn.Flatten(), nn.Linear(65, 10))
def nothing(): pass
def raises(): raise KeyError("no such entry")
def leaves(): sys.exit(0)
"""


@pytest.fixture
def work(monkeypatch, tmp_path) -> Path:
    """The current folder, with a module of the user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine_of_test.py").write_text(MODULE)
    yield tmp_path
    for name in [name for name in sys.modules if name.endswith("_of_test")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def files(timm, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    with drawn_from(1):
        save_file(SOURCE.original().state_dict(), folder / "w.safetensors")
    return folder


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    """A run of a preset, and files with its weights."""
    place = tmp_path_factory.mktemp("own")
    for words in (
        ("train", "tiny_smooth", "--run", place / "run", *STEPS),
        ("export", place / "run", place / "w.safetensors", "--to", "state_dict"),
    ):
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exit_code == 0, result.output
    tensors = load_file(place / "w.safetensors")
    torch.save({"state_dict": tensors}, place / "w.pt")
    save_file(tensors, place / "plain.safetensors")
    return place


# Arguments of a constructor ------------------------------------------------------------------------------------


def test_arguments_are_literals_and_commas_within_lists_belong_to_them():
    words = ("patch_size=4,embed_dim=96", "a=[1, 2],b = true", "c=1e-5", 'd="x, y=3"', "e=gelu,tanh", "f=None,g=-2")
    assert model_arguments(words) == {
        "patch_size": 4, "embed_dim": 96, "a": [1, 2], "b": True, "c": 1e-5, "d": "x, y=3", "e": "gelu,tanh",
        "f": None, "g": -2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("depth",), "takes name=value"),
        (("=3",), "takes name=value"),
        (("de pth=3",), "takes name=value"),
        (("depth=3", "depth=4"), "names 'depth' twice"),
        (("depth=10**9",), "takes a number, true, false, a text or a list"),
        (("depth=",), "takes a number"),
        (("depth=NaN",), "takes a number"),
        (("depth=-Infinity",), "takes a number"),
        (("depth=[[1]]",), "a flat list"),
        (('depth={"a": 1}',), "a flat list"),
        (("depth=" + "[" * 3000,), "takes a number"),
        (("depth=" + "9" * 5000,), "at most 4096 characters"),
        (("depth=[1",), "takes a number"),
    ],
)
def test_what_is_no_literal_is_one_sentence(words, message):
    with pytest.raises(ConfigError, match=message):
        model_arguments(words)


def test_a_model_with_other_sizes_is_trained_reloaded_attacked_exported_and_loaded_from_the_export(
    specguard, timm, files, work
):
    train = ("train", *TIMM, "--weights", files / "w.safetensors", "--run", "run", *STEPS)
    ended = specguard(*train)
    ended.succeeds()
    assert "pixels are normalized with --mean 0.3 --std 0.4, as given" in ended.err
    assert read_json(work / "run" / "model.json")["config"]["source"]["arguments"] == SIZES
    network = from_run(work / "run")
    assert [len(network.blocks), network.patches.map.weight.shape] == [1, (24, 1, 4, 4)]
    before = contents(work / "run")
    specguard("train", "--run", "run", "--resume").succeeds()
    assert contents(work / "run") == before
    specguard("attack", "run", "--images", "3", *CPU, *PGD).succeeds()
    ended = specguard("export", "run", "out.safetensors", "--to", "timm")
    ended.succeeds()
    call = next(line for line in ended.out.splitlines() if line.startswith("timm.create_model("))
    exported = eval(call, {"timm": timm})  # noqa: S307 - as a user pastes it
    assert exported.blocks[0].attn.num_heads == 3
    ended = specguard("attack", "out.safetensors", *FEW, *PGD)
    ended.succeeds()
    assert "--mean 0.3 --std 0.4" in ended.err
    study = next(work.glob("runs/out-*/attacks/*/study.json"))
    assert read_json(study)["about"]["model"] == fingerprint(network)


def test_every_verb_takes_arguments_and_the_checker_proves_what_they_certify(specguard, files, work):
    given = (*TIMM, "--weights", files / "w.safetensors")
    for verb, *options in (
        ("certify", "--methods", "local", "--radius", "1e-4"),
        ("smooth", *NOISE),
        ("spectrum", "--blocks", "head"),
        ("sensitivity", "--steps", "1"),
    ):
        specguard(
            verb, *given, *FEW, *(options if verb != "smooth" else ())
        ).succeeds() if verb != "smooth" else None
    records = next(work.glob("runs/*/certificates/*/records.jsonl"))
    ended = specguard("check", records, "--model", *given, "--data", "digits", *CPU)
    ended.succeeds()
    assert "3 records right" in ended.out


REFUSED = {
    "a near miss": ("patchsize=4", "takes no argument 'patchsize'; did you mean 'patch_size'?"),
    "too deep": ("depth=1000000000", "'depth' of the model must be at most 1024"),
    "400 digits": ("depth=" + "9" * 400, "more than 64 bits"),
    "what an option says": ("img_size=32", "the size of the images is --image-size"),
    "weights": ("checkpoint_path=/etc/passwd", "weights are read from a local file"),
    "no text": ("act_layer=\x00", "must be a short text"),
    "a class": ("block_fn=os.system", "timm cannot make"),
    "no division": ("patch_size=0", "timm cannot make"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_that_cannot_be_are_one_sentence_and_leave_nothing(specguard, files, work, case):
    argument, message = REFUSED[case]
    before = contents(work)
    given = ("timm:vit_tiny_patch16_224", "--model-arg", argument, "--weights", files / "w.safetensors")
    specguard("attack", *given, "--image-size", "8", "--mean", "0", "--std", "1", *FEW).refuses(message)
    assert contents(work) == before


def test_arguments_have_no_effect_on_a_run_and_presets_are_changed_by_set(specguard, own, work):
    specguard("attack", own / "run", "--model-arg", "depth=1").refuses("--model-arg", "has no effect on a run")
    specguard("train", "tiny", "--run", "x", "--model-arg", "depth=1").refuses("--model-arg", "--set")
    assert not (work / "x").exists()


# Files and presets ---------------------------------------------------------------------------------------------


def test_a_preset_takes_weights_and_an_exported_file_needs_no_name(specguard, own, work):
    whole = fingerprint(from_run(own / "run"))
    for words in (
        ("tiny_smooth", "--weights", own / "w.safetensors"),
        ("tiny_smooth", "--weights", own / "w.pt"),
        ("tiny_smooth", "--weights", own / "plain.safetensors"),
        (own / "w.safetensors",),
    ):
        ended = specguard("attack", *words, *FEW, *PGD, "--out", "out")
        ended.succeeds()
        assert "pixels are normalized with" in ended.err
        assert read_json(work / "out" / "study.json")["about"]["model"] == whole


def test_a_file_alone_is_told_which_command_to_write(specguard, files, own, work):
    named = "timm:vit_tiny_patch16_224 --model-arg patch_size=4,embed_dim=24,depth=1,num_heads=3 --image-size 8"
    ended = specguard("attack", files / "w.safetensors", *FEW)
    ended.refuses(f"write {named} --weights {files / 'w.safetensors'}", "num_heads is a guess")
    plain = own / "plain.safetensors"
    specguard("certify", plain, *FEW).refuses(f"write tiny_smooth --weights {plain}")
    save_file({"a": torch.zeros(1)}, "other.safetensors")
    specguard("attack", "other.safetensors", *FEW).refuses("name it too, as in timm:NAME --weights")
    specguard("attack", "missing.safetensors", *FEW).refuses("missing.safetensors does not exist")
    specguard("train", plain, "--run", "x").refuses("name the architecture too")


def test_weights_that_do_not_fit_a_preset_are_one_sentence(specguard, files, own, work):
    kept = own / "w.safetensors"
    specguard("attack", "tiny", "--weights", kept, *FEW).refuses("of another architecture")
    specguard("attack", "tiny_smooth", "--weights", kept, *FEW, "--model-arg", "activation=gelu").refuses(
        "another function"
    )
    specguard("attack", "tiny_smooth", "--weights", kept, *FEW, "--model-arg", "dept=2").refuses(
        "did you mean 'depth'"
    )
    specguard("attack", "tiny_smooth", "--weights", kept, *FEW, "--mean", "0", "--std", "1").refuses("--mean")
    specguard("attack", "tiny", "--weights", files / "w.safetensors", *FEW).refuses("they look like those of timm:")
    specguard("attack", "tiny", *FEW).refuses("tiny needs --weights")
    specguard("attack", "tiney", *FEW).refuses("no training run", "did you mean 'tiny'?")
    specguard("attack", "timm:vit_tiny_patch16_244", "--weights", kept, *FEW).refuses(
        "did you mean 'vit_tiny_patch"
    )


# Functions -----------------------------------------------------------------------------------------------------


def test_a_function_of_the_user_is_attacked_certified_trained_and_named_again_for_its_run(specguard, timm, work):
    name = "mine_of_test:build"
    for verb, *options in (("attack", *PGD), ("certify", "--methods", "local", "--radius", "1e-4")):
        ended = specguard(verb, name, "--model-arg", "heads=4", *FEW, *options)
        ended.succeeds()
        assert "imported" not in ended.out
    assert "given pixels in [0, 1] as they are" in ended.err
    assert len(list(work.glob("runs/mine_of_test.build-*/*/*/summary.json"))) == 2
    specguard("train", name, "--run", "run", *STEPS, "--mean", "0.3", "--std", "0.4").succeeds()
    said = (f"run was trained from {name}, which runs the code of that module", "on the command line only")
    specguard("attack", "run", *PGD).refuses(*said, f"write {name} --weights run")
    specguard("train", "--run", "run", "--resume").refuses(*said, f"--model {name} again")
    specguard("train", "run", "--run", "second", *STEPS).refuses(*said)
    before = contents(work / "run")
    specguard("train", name, "--run", "run", "--resume").succeeds()
    assert contents(work / "run") == before
    specguard("attack", name, "--weights", "run", "--images", "3", *CPU, *PGD).succeeds()
    study = next((work / "run").glob("attacks/*/study.json"))
    assert read_json(study)["about"]["model"] == read_json(work / "run" / "result.json")["fingerprint"]
    specguard("attack", "mine_of_test:own", "--weights", "run", *PGD).refuses("of another architecture")


def test_a_model_without_rules_is_attacked_and_smoothed_and_proofs_refuse_it_by_name(specguard, work):
    name = "mine_of_test:Convolution"
    ended = specguard("attack", name, "--model-arg", "width=3", *FEW, *PGD, "--mean", "0.5", "--std", "0.5")
    ended.succeeds()
    assert "--mean 0.5 --std 0.5, as given" in ended.err
    specguard("smooth", name, *FEW, *NOISE).succeeds()
    specguard("attack", "mine_of_test:made", *FEW, *PGD).succeeds()
    for verb in ("certify", "spectrum", "sensitivity"):
        specguard(verb, name, *FEW).refuses(
            f"{name} cannot be converted", "mine_of_test.Convolution", "attack and smooth"
        )
    specguard("train", name, "--run", "x").refuses("cannot be converted")
    module = __import__("mine_of_test").Convolution()
    torch.save(module.state_dict(), "c.pt")
    specguard("attack", name, "--weights", "c.pt", *FEW, *PGD).succeeds()
    specguard("attack", name, "--weights", "c.pt", "--model-arg", "width=3", *FEW).refuses(
        "of another architecture"
    )
    assert not (work / "x").exists()


def test_a_model_of_this_package_that_a_function_makes_is_a_run_like_any_other(specguard, work):
    specguard("train", "mine_of_test:own", "--run", "run", *STEPS).succeeds()
    specguard("attack", "run", "--images", "3", *CPU, *PGD).succeeds()
    specguard("attack", "mine_of_test:own", *FEW, *PGD, "--mean", "0.5", "--std", "0.5").refuses(
        "its own normalization"
    )


FUNCTIONS = {
    "mine_of_test:buidl": "has no 'buidl'; did you mean 'build'?",
    "mine_of_test:number": "is a int, not a function",
    "mine_of_test:nothing": "must return a torch.nn.Module, not a NoneType",
    "mine_of_test:raises": "failed with KeyError: 'no such entry'",
    "mine_of_test:leaves": "failed with SystemExit: 0",
    "mine_of_test:seven": "gives outputs of shape (1, 7)",
    "mine_of_test:wide": "failed with RuntimeError: mat1 and mat2",
    "absent_of_test:x": "there is no module 'absent_of_test'",
    "exits_of_test:x": "failed with SystemExit: 1",
    "broken_of_test:x": "failed with SyntaxError",
    "needs_of_test:x": "failed with ModuleNotFoundError: No module named 'no_such_package'",
    "tim:vit_tiny": "did you mean 'timm:vit_tiny'?",
    "my models:x": "is no import path, which is written package.module:function",
    "a..b:c": "is no import path",
    ":x": "is no import path",
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_fails_is_one_sentence_with_its_place(specguard, timm, work, name):
    (work / "exits_of_test.py").write_text("import sys\nsys.exit(1)\n")
    (work / "broken_of_test.py").write_text("def x(:\n")
    (work / "needs_of_test.py").write_text("import no_such_package\n")
    ended = specguard("attack", name, *FEW)
    ended.refuses(FUNCTIONS[name])
    if "raises" in name:
        line = MODULE.splitlines().index('def raises(): raise KeyError("no such entry")') + 1
        ended.refuses(f"{work / 'mine_of_test.py'}:{line}")
    assert not (work / "runs").exists()


def test_no_file_names_a_function(specguard, own, work):
    trap = work / "trap_of_test.py"
    trap.write_text("import pathlib\npathlib.Path('ran').touch()\ndef x(): pass\n")
    (work / "c.toml").write_text('model = "trap_of_test:x"\n')
    said = "trap_of_test:x, which runs the code of that module, and is therefore named on the command line only"
    specguard("train", "--run", "x", "--config", "c.toml").refuses(said)
    specguard("check", own / "run", "--config", "c.toml").refuses(said)
    run = work / "run"
    for file in (own / "run").rglob("*"):
        if file.is_file():
            (run / file.relative_to(own / "run")).parent.mkdir(parents=True, exist_ok=True)
            (run / file.relative_to(own / "run")).write_bytes(file.read_bytes())
    write_json(run / "arguments.json", read_json(run / "arguments.json") | {"model": "trap_of_test:x"})
    specguard("train", "--run", "run", "--resume").refuses(said)
    specguard("train", "run", "--run", "x", *STEPS).refuses(said)
    record = read_json(run / "model.json")
    source = {"kind": "function", "name": "trap_of_test:x"}
    write_json(run / "model.json", record | {"config": {"name": "x", "source": source}})
    assert specguard("attack", "run").code == 2
    write_json(run / "model.json", record | {"config": {"name": "x", "source": None}})
    specguard("attack", "run").refuses(said)
    assert not (work / "ran").exists()


def test_a_name_is_of_one_form(work):
    (work / "a:b").mkdir()
    (work / "file.pt").touch()
    forms = {
        "timm:x": "library", "hf:a/b": "library", "tiny": "preset", "a:b": "run", "p.q:r.s": "function",
        "file.pt": "file", "gone.safetensors": "file", "runs/x": "run", "x y:z": "run", "": "run",
    }  # fmt: skip
    assert {name: form_of(name) for name in forms} == forms


# Folders and the rest ------------------------------------------------------------------------------------------


def pictures(folder: Path, *splits: str) -> Path:
    for split in splits:
        for number, name in enumerate(f"c{i}" for i in range(10)):
            (folder / split / name).mkdir(parents=True)
            Image.new("RGB", (8, 8), (20 * number, 0, 0)).save(folder / split / name / "1.png")
    return folder


def test_a_folder_with_only_val_is_attacked_and_certified_but_not_trained_on(specguard, timm, work):
    with drawn_from(1):
        source = ModelSource("timm", "vit_tiny_patch16_224", 10, 3, 8, (0.3,) * 3, (0.4,) * 3, arguments=SIZES)
        save_file(source.original().state_dict(), "rgb.safetensors")
    photos = pictures(work / "photos", "val")
    given = ("timm:vit_tiny_patch16_224", *ARGUMENTS, "--image-size", "8", "--data", photos)
    weights, few = ("--weights", "rgb.safetensors"), ("--images", "3", *CPU)
    ended = specguard("attack", *given, *weights, *few, *PGD)
    ended.succeeds()
    assert "--mean 0.5,0.5,0.5 --std 0.5,0.5,0.5, those of timm's vit_tiny_patch16_224" in ended.err
    specguard("certify", *given, *weights, *few, "--methods", "local").succeeds()
    before = contents(work)
    missing = f"there are no training images: the folder {photos / 'train'} does not exist"
    specguard("certify", *given, *weights, *few, "--baseline", "linear").refuses(missing)
    specguard("train", *given, *weights, "--run", "x", *STEPS).refuses(missing)
    assert contents(work) == before
    specguard("attack", *given[:-1], photos / "val", *weights, *PGD).refuses(
        "name the folder that it lies in", photos
    )


@pytest.mark.filterwarnings("default")
def test_a_radius_in_other_units_is_told_what_to_write_and_h_is_help(specguard, own, work):
    ended = specguard("attack", own / "run", "--images", "3", *CPU, *PGD, "--norm", "linf", "--radius", "8")
    ended.succeeds()
    assert "it is written 8/255" in ended.err
    for words in (("-h",), ("attack", "-h")):
        ended = specguard(*words)
        assert ended.code == 0
        assert "Usage" in ended.out
