"""`specguard attack`, and adversarial training: what works, and what is one sentence and exit code 2."""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from helpers.commandline import contents
from specguard.attacks import FGSM, PGD
from specguard.cli import app
from specguard.data import digits
from specguard.geometry import Ball
from specguard.models import from_run
from specguard.nn import fingerprint
from specguard.records import io as io_module
from specguard.records.files import append_file, locked, writing
from specguard.records.io import read_json, read_lines, write_json
from specguard.records.store import checkpoint_steps, read_tensors, write_checkpoint, write_tensors
from specguard.train import state as state_module

MODEL = ("--device", "cpu", "--set", "depth=1", "--set", "heads=2")
TRAIN = ("--epochs", "2", "--batch", "8", "--lr", "5e-3", "--warmup", "0.5", "--set", "dim=32", *MODEL)
SMALL = ("--epochs", "1", "--batch", "256", "--set", "dim=8", *MODEL)
# Twelve images in batches of five, three, and nothing that takes longer than the attack.
FEW = ("--images", "12", "--batch", "5", "--device", "cpu", "--no-diagnose")
PGD3 = ("--attack", "pgd", "--steps", "3")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "a run"
    result = CliRunner().invoke(app, ["train", "--run", str(run), *TRAIN])
    assert result.exit_code == 0, result.output
    assert read_json(run / "result.json")["test_accuracy"]["value"] > 0.4
    return run


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy, for a test to write into."""
    return shutil.copytree(trained, tmp_path / "a run")


def attacks(run: Path) -> list[Path]:
    """The evaluations below a run."""
    return sorted((run / "attacks").iterdir()) if (run / "attacks").exists() else []


def only(run: Path) -> Path:
    (folder,) = attacks(run)
    return folder


# What works --------------------------------------------------------------------------------------------------


def test_every_command_explains_itself():
    result = CliRunner().invoke(app, ["attack", "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_an_attack_prints_its_accuracy_and_leaves_records_in_the_run(specguard, run):
    ended = specguard("attack", run, "--attack", "pgd", "--radius", "8/255", "--norm", "linf", *FEW)
    ended.succeeds()
    folder = only(run)
    images, labels = digits().test.batch(slice(0, 12))
    model = from_run(run)
    stood = ~PGD()(model, images, labels, Ball("linf", 8 / 255)).success
    found = read_json(folder / "summary.json")
    assert found["n"] == 12
    assert found["attacks"][0]["accuracy"]["count"] == int(stood.sum())
    assert found["clean"]["count"] == int((model(images).argmax(1) == labels).sum())
    assert len(read_lines(folder / "records.jsonl")) == 12
    names = [row[:3] for row in ended.rows()]
    assert names == [
        ("clean", "", ""), ("pgd", "linf", "0.03137"), ("worst case", "linf", "0.03137")
    ]  # fmt: skip
    assert ended.rows()[1][3].startswith(f"{100 * int(stood.sum()) / 12:.1f} % [")
    assert all(row[3].endswith("n = 12") for row in ended.rows())
    assert ended.out.splitlines()[-1] == f"summary in {folder / 'summary.json'}"
    assert ended.err.splitlines()[0] == f"{run} on 12 images, cpu, records in {folder}"
    settings = read_json(folder / "study.json")
    assert settings["kind"] == "attack"
    assert settings["about"]["model"] == fingerprint(model)
    assert settings["about"]["data"] == digits().fingerprint()
    assert found["environment"]["command"].startswith("specguard attack ")


@pytest.mark.parametrize("options", [(), ("--suite", "quick")])
def test_the_quick_suite_is_the_default(specguard, run, options):
    ended = specguard("attack", run, *options, *FEW)
    ended.succeeds()
    assert [row[0] for row in ended.rows()] == ["clean", "fgsm", "pgd", "cw", "worst case"]
    assert only(run).name.startswith("fgsm+pgd+cw-linf-0.03137-")


def test_the_full_suite_is_a_cascade_and_says_so(specguard, run):
    """At this radius every image falls to the first attack."""
    ended = specguard("attack", run, "--suite", "full", "--radius", "0.5", *FEW)
    ended.succeeds()
    assert [row[0] for row in ended.rows()] == ["clean", "apgd-ce", "apgd-t", "fab", "square", "worst case"]
    assert "accuracy after each attack" in ended.out
    assert [row[3].split()[0] for row in ended.rows()[1:]] == ["0.0"] * 5
    assert {o["attack"] for r in read_lines(only(run) / "records.jsonl") for o in r["outcomes"]} == {"apgd-ce"}


def test_several_radii_have_a_row_each_and_the_worst_case_falls(specguard, run):
    options = ("--radius", "0", "--radius", "8/255", "--radius", "0.1", *PGD3, *FEW)
    ended = specguard("attack", run, *options)
    ended.succeeds()
    assert [row[:3] for row in ended.rows()[1:]] == [
        (name, "linf", radius) for name in ("pgd", "worst case") for radius in ("0", "0.03137", "0.1")
    ]
    found = read_json(only(run) / "summary.json")
    counts = [row["accuracy"]["count"] for row in found["worst_case"]]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == found["clean"]["count"] > counts[-1]


def test_several_attacks_are_named_and_one_that_is_named_twice_runs_once(specguard, run):
    ended = specguard("attack", run, *(f"--attack={a}" for a in ("fgsm", "apgd-dlr", "fgsm")), *FEW)
    ended.succeeds()
    assert [row[0] for row in ended.rows()] == ["clean", "fgsm", "apgd-dlr", "worst case"]


SETTINGS = {
    "--steps 3": ("attacks.0.settings.steps", 3),
    "--step-size 2/255": ("attacks.0.settings.step_size", 2 / 255),
    "--step-size 0.01 --steps 2": ("attacks.0.settings.step_size", 0.01),
    "--restarts 2 --steps 2": ("attacks.0.settings.restarts", 2),
    "--steps 1 --attack cw": ("attacks.1.settings.steps", 1),
    "--norm l2 --radius 0.5": ("balls.0", {"norm": "l2", "radius": 0.5, "box": True}),
    "--radius 1e-2": ("balls.0.radius", 0.01),
    "--images 7": ("about.n", 7),
    "--batch 3": ("settings.batch", 3),
    "--precision bfloat16": ("settings.precision", "bfloat16"),
    "--seed 5": ("settings.seed", 5),
    "--save-images": ("settings.save_images", True),
    "--data digits": ("about.dataset", "digits"),
}


@pytest.mark.parametrize("options", SETTINGS)
def test_every_option_reaches_the_settings_of_the_evaluation(specguard, run, options):
    specguard("attack", run, "--attack", "pgd", *FEW, *options.split()).succeeds()
    path, expected = SETTINGS[options]
    value: Any = read_json(only(run) / "study.json")
    for part in path.split("."):
        value = value[int(part)] if part.isdigit() else value[part]
    assert value == expected


def test_other_settings_go_to_another_folder(specguard, run):
    for options in ((), ("--seed", "1"), ("--radius", "0.03"), ("--images", "11"), ("--norm", "l2")):
        specguard("attack", run, *PGD3, *FEW, *options).succeeds()
    assert len(attacks(run)) == 5


def test_running_again_prints_the_same_and_changes_nothing(specguard, run):
    first = specguard("attack", run, *PGD3, *FEW)
    before = contents(run)
    again = specguard("attack", run, *PGD3, *FEW)
    again.succeeds()
    assert again.out == first.out
    assert contents(run) == before


def test_a_folder_may_be_named_and_other_settings_in_it_are_refused_by_their_difference(specguard, run, tmp_path):
    out = tmp_path / "a [bold]folder[/bold]"
    ended = specguard("attack", run, *PGD3, *FEW, "--out", out)
    ended.succeeds()
    assert ended.out.splitlines()[-1] == f"summary in {out / 'summary.json'}"
    assert attacks(run) == []
    before = contents(out)
    specguard("attack", run, *PGD3, *FEW, "--out", out, "--seed", "3").refuses(out, "seed: 0 before, 3 now")
    specguard("attack", run, *PGD3, *FEW, "--out", out, "--images", "9").refuses(out, "n: 12 before, 9 now")
    assert contents(out) == before


def test_saved_images_are_adversarial(specguard, run):
    specguard("attack", run, "--attack", "fgsm", "--radius", "0.1", *FEW, "--save-images").succeeds()
    files = sorted((only(run) / "images").iterdir())
    assert [file.name for file in files] == [f"fgsm-linf-0.1-{i:08d}.safetensors" for i in (0, 5, 10)]
    stored = [read_tensors(file) for file in files]
    images, samples = (torch.cat([s[key] for s in stored]) for key in ("images", "samples"))
    clean, labels = digits().test.batch(samples)
    direct = FGSM(from_run(run), clean, labels, Ball("linf", 0.1), ids=samples)
    assert torch.equal(samples, torch.arange(12))
    assert Ball("linf", 0.1).contains(images, clean).all()
    assert torch.equal(from_run(run)(images).argmax(1) != labels, direct.success)


def test_a_leaderboard_entry_is_written_on_request(specguard, run, tmp_path):
    file = tmp_path / "entry.json"
    specguard("attack", run, *PGD3, *FEW, "--robustbench", file).succeeds()
    found, entry = read_json(only(run) / "summary.json"), read_json(file)
    assert entry["name"] == "a run"
    assert entry["architecture"] == "tiny"
    assert entry["dataset"] == "digits"
    assert entry["threat_model"] == "Linf"
    assert entry["eps"] == "8/255"
    assert entry["clean_acc"] == f"{100 * found['clean']['value']:.2f}"
    assert entry["autoattack_acc"] is None
    # Also of an evaluation that is there already.
    file.unlink()
    specguard("attack", run, *PGD3, *FEW, "--robustbench", file).succeeds()
    assert read_json(file) == entry


def test_signs_of_obfuscated_gradients_are_printed(specguard, run):
    """The trained model, with logits a million times as large."""
    tensors, record = read_tensors(run / "model.safetensors"), read_json(run / "model.json")
    model = from_run(run)
    with torch.no_grad():
        for name in ("head.weight", "head.bias"):
            tensors[name] = tensors[name] * 1e6
    model.load_state_dict(tensors)
    write_tensors(run / "model.safetensors", tensors)
    write_json(run / "model.json", record | {"fingerprint": fingerprint(model)})
    options = [option for option in FEW if option != "--no-diagnose"]
    ended = specguard("attack", run, "--attack", "fgsm", *options)
    ended.succeeds()
    said = [line for line in ended.err.splitlines() if line.startswith("warning, saturation: ")]
    assert len(said) == 1
    assert "cross-entropy has no slope" in said[0]
    again = specguard("attack", run, "--attack", "fgsm", *options)
    assert said[0] in again.err.splitlines()


def test_a_run_without_its_command_line_is_attacked_once_the_data_is_named(specguard, run):
    (run / "arguments.json").unlink()
    specguard("attack", run, *PGD3, *FEW).refuses(run, "--data")
    specguard("attack", run, *PGD3, *FEW, "--data", "digits").succeeds()


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize(("norm", "radius"), [("linf", "8"), ("linf", "2"), ("l2", "128")])
def test_a_radius_in_units_of_bytes_is_warned_of_in_one_line(specguard, run, norm, radius):
    ended = specguard("attack", run, *PGD3, *FEW, "--norm", norm, "--radius", radius)
    ended.succeeds()
    said = [line for line in ended.err.splitlines() if "warning" in line.lower()]
    assert len(said) == 1
    assert f"{radius}/255" in said[0]
    assert ".py" not in ended.err  # no place in the source


@pytest.mark.filterwarnings("always")
def test_a_radius_in_pixels_is_not_warned_of(specguard, run):
    ended = specguard("attack", run, *PGD3, *FEW, "--radius", "8/255")
    assert "warning" not in ended.err.lower()


# What is refused ---------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[str, tuple[str, ...]]] = {
    "attack and suite": ("--attack pgd --suite quick", ("--attack", "--suite")),
    "unknown attack": ("--attack deepfool", ("deepfool", "pgd", "autoattack")),
    "no attack": ("--attack=", ("choose among",)),
    "steps without attack": ("--steps 3", ("--steps", "without --attack")),
    "step size without attack": ("--step-size 0.1", ("--step-size", "without --attack")),
    "restarts without attack": ("--restarts 2", ("--restarts", "without --attack")),
    "steps of a suite": ("--suite full --steps 3", ("--steps", "without --attack")),
    "steps of square": ("--attack square --steps 3", ("square", "steps")),
    "step size of apgd": ("--attack pgd --attack apgd-ce --step-size 0.1", ("apgd-ce", "step size")),
    "restarts of cw-l2": ("--attack cw-l2 --norm l2 --restarts 2", ("cw-l2", "restarts")),
    "no steps": ("--attack pgd --steps 0", ("steps", "0")),
    "negative steps": ("--attack pgd --steps -3", ("steps", "-3")),
    "no restarts": ("--attack pgd --restarts 0", ("restarts", "0")),
    "no step": ("--attack pgd --step-size 0", ("step size", "0")),
    "negative step": ("--attack pgd --step-size -1/255", ("step size",)),
    "step that is no number": ("--attack pgd --step-size large", ("--step-size", "large")),
    "radius that is no number": ("--radius abc", ("--radius", "8/255", "abc")),
    "radius divided by zero": ("--radius 8/0", ("--radius", "8/0")),
    "radius divided twice": ("--radius 8/255/2", ("--radius", "8/255/2")),
    "negative radius": ("--radius -0.1", ("radius", "-0.1")),
    "radius nan": ("--radius nan", ("--radius", "nan")),
    "radius infinite": ("--radius inf", ("--radius", "inf")),
    "second radius": ("--radius 0.1 --radius x", ("--radius", "x")),
    "too many images": ("--images 361", ("360", "361")),
    "data without root": ("--data cifar10", ("cifar10", "--data-root")),
    "missing data": ("--data cifar10 --data-root nowhere", ("nowhere", "does not exist")),
    "root of bundled data": ("--data-root nowhere", ("--data-root", "no effect")),
    "root of bundled data, named": ("--data digits --data-root nowhere", ("--data-root", "no effect")),
    "unknown device": ("--device tpu", ("tpu", "auto, cpu or cuda")),
    "device that is not there": ("--device cuda:99", ("cuda:99", "not available")),
    "l2 attack in linf": ("--attack cw-l2 --norm linf --images 3", ("l2", "linf")),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_bad_option_is_one_sentence(specguard, run, monkeypatch, kind):
    options, named = REFUSED[kind]
    monkeypatch.chdir(run)
    specguard("attack", run, "--no-diagnose", "--device", "cpu", *options.split()).refuses(*named)
    assert [folder for folder in attacks(run) if (folder / "summary.json").exists()] == []


def test_restarts_of_an_attack_that_draws_nothing_are_refused(specguard, run):
    """FGSM starts at the image itself: a second round is the first one again, and the option is without effect."""
    specguard("attack", run, "--attack", "fgsm", "--restarts", "3", *FEW).refuses("restarts")


PARSER = ["--images 0", "--images many", "--images -3", "--batch 0", "--norm l3", "--suite deepfool", "--steps x"]


@pytest.mark.parametrize("options", [*PARSER, "--precision float8", "--data imagenet", "--seed x", "--nonsense"])
def test_what_the_parser_refuses_has_exit_code_2_and_no_traceback(specguard, run, options):
    ended = specguard("attack", run, *options.split())
    assert ended.code == 2
    assert "Traceback" not in ended.err
    assert options.split()[0] in ended.err
    assert attacks(run) == []


def test_a_run_that_is_not_there_is_one_sentence(specguard, tmp_path):
    for run in (tmp_path / "nowhere", tmp_path, tmp_path / ("x" * 300)):
        specguard("attack", run, *FEW).refuses(run)
    (tmp_path / "file").write_bytes(b"precious")
    specguard("attack", tmp_path / "file", *FEW).refuses(tmp_path / "file")
    assert contents(tmp_path) == {"file": b"precious"}


@pytest.mark.parametrize("missing", ["model.json", "model.safetensors", "run.json"])
def test_a_run_that_lacks_a_file_is_refused_by_name(specguard, run, missing):
    (run / missing).unlink()
    specguard("attack", run, *FEW).refuses(run / missing)
    assert attacks(run) == []


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_truncated_weights_are_refused_by_name(specguard, run, share):
    content = (run / "model.safetensors").read_bytes()
    (run / "model.safetensors").write_bytes(content[: int(share * len(content))])
    specguard("attack", run, *FEW).refuses(run / "model.safetensors")
    assert attacks(run) == []


def test_weights_with_one_other_bit_are_refused(specguard, run):
    content = bytearray((run / "model.safetensors").read_bytes())
    content[-2] ^= 1
    (run / "model.safetensors").write_bytes(content)
    specguard("attack", run, *FEW).refuses(run / "model.safetensors", "fingerprint")


@pytest.mark.parametrize("file", ["model.json", "arguments.json", "run.json"])
@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b"{}"])
def test_a_file_of_the_run_that_was_spoilt_is_one_sentence(specguard, run, file, content):
    (run / file).write_bytes(content)
    specguard("attack", run, *FEW).refuses()
    assert attacks(run) == []


@pytest.mark.parametrize("data", [[], None, "digits", 3])
def test_settings_of_the_run_whose_data_is_of_a_wrong_kind_are_one_sentence(specguard, run, data):
    write_json(run / "run.json", read_json(run / "run.json") | {"data": data})
    specguard("attack", run, *FEW).refuses()


@pytest.mark.parametrize("data", ["imagenet", None, 5, ["digits"]])
def test_arguments_that_name_no_known_data_ask_for_it(specguard, run, data):
    write_json(run / "arguments.json", read_json(run / "arguments.json") | {"data": data})
    specguard("attack", run, *FEW).refuses(run, "--data")


def test_other_data_than_in_training_is_refused_unless_it_is_meant(specguard, run):
    settings = read_json(run / "run.json")
    settings["data"]["fingerprint"] = "0" * 64
    write_json(run / "run.json", settings)
    specguard("attack", run, *PGD3, *FEW).refuses("not what", run, "--data")
    specguard("attack", run, *PGD3, *FEW, "--data", "digits").succeeds()


@pytest.mark.parametrize("below", ["file", "file/below", "x" * 300])
def test_a_folder_that_cannot_be_written_is_one_sentence(specguard, run, tmp_path, below):
    (tmp_path / "file").write_bytes(b"precious")
    specguard("attack", run, *PGD3, *FEW, "--out", tmp_path / below).refuses(tmp_path / below)
    assert (tmp_path / "file").read_bytes() == b"precious"


@pytest.mark.parametrize("place", ["file/below.json", "nowhere/entry.json", "folder", ".", "x" * 300])
def test_a_leaderboard_file_that_cannot_be_written_is_one_sentence(specguard, run, tmp_path, monkeypatch, place):
    (tmp_path / "file").write_bytes(b"precious")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    specguard("attack", run, *PGD3, *FEW, "--robustbench", place).refuses(place)
    assert (tmp_path / "file").read_bytes() == b"precious"


def test_a_folder_in_use_is_one_sentence(specguard, run, tmp_path):
    with locked(tmp_path / "out"):
        specguard("attack", run, *PGD3, *FEW, "--out", tmp_path / "out").refuses(tmp_path / "out", "in use")


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"clean": 1}', b"\xff\xfe"])
def test_a_summary_that_was_tampered_with_is_one_sentence(specguard, run, content):
    specguard("attack", run, *PGD3, *FEW).succeeds()
    (only(run) / "summary.json").write_bytes(content)
    specguard("attack", run, *PGD3, *FEW).refuses(only(run) / "summary.json")


@pytest.mark.parametrize("line", [b"{", b"{}", b'{"attack": "pgd"}', b"7"])
def test_records_that_were_tampered_with_are_one_sentence(specguard, run, line):
    specguard("attack", run, *PGD3, *FEW).succeeds()
    (only(run) / "summary.json").unlink()
    with open(only(run) / "records.jsonl", "ab") as handle:
        handle.write(line + b"\n")
    specguard("attack", run, *PGD3, *FEW).refuses(only(run) / "records.jsonl")


def test_autoattack_without_its_package_is_one_sentence(specguard, run, monkeypatch):
    for name in ("pyautoattack", "autoattack"):
        monkeypatch.setitem(sys.modules, name, None)
    specguard("attack", run, "--suite", "autoattack", *FEW).refuses("pip install")


def test_a_full_disk_is_one_sentence_and_the_same_command_continues(specguard, run, tmp_path, monkeypatch):
    calls = 0

    def full(path: Path, content: bytes) -> None:
        nonlocal calls
        calls += path.name == "records.jsonl"
        if calls == 2:
            with writing(path):
                raise OSError(28, "No space left on device")
        append_file(path, content)

    whole = specguard("attack", run, *PGD3, *FEW, "--out", tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(io_module, "append_file", full)
        ended = specguard("attack", run, *PGD3, *FEW, "--out", tmp_path / "out")
    ended.refuses(tmp_path / "out", "No space left on device")
    again = specguard("attack", run, *PGD3, *FEW, "--out", tmp_path / "out")
    assert again.rows() == whole.rows()
    assert contents(tmp_path / "out")["records.jsonl"] == contents(tmp_path / "whole")["records.jsonl"]


# Control-C ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [(*PGD3,), ("--suite", "quick"), (*PGD3, "--save-images")], ids=" ".join)
@pytest.mark.parametrize("batches", [1, 3])
def test_control_c_is_one_line_with_a_command_that_continues_like_an_uninterrupted_one(
    specguard, run, tmp_path, monkeypatch, options, batches
):
    whole = specguard("attack", run, *options, *FEW, "--out", tmp_path / "whole")
    calls = 0

    def interrupted(path: Path, content: bytes) -> None:
        nonlocal calls
        calls += path.name == "records.jsonl"
        if calls == batches:
            raise KeyboardInterrupt
        append_file(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(io_module, "append_file", interrupted)
        ended = specguard("attack", run, *options, *FEW)
    assert ended.code == 130
    assert "Traceback" not in ended.err
    assert ended.out == ""
    assert not (only(run) / "summary.json").exists()
    said = ended.err.splitlines()[-1]
    assert said.startswith("interrupted; continue with: specguard attack ")
    continued = specguard(*shlex.split(said.partition("continue with: specguard ")[2]))
    continued.succeeds()
    assert continued.rows() == whole.rows()
    found, expected = contents(only(run)), contents(tmp_path / "whole")
    assert found.keys() == expected.keys()
    for name in found.keys() - {"summary.json", "environment.jsonl", "timing.jsonl"}:
        assert found[name] == expected[name]
    one, other = (json.loads(files["summary.json"]) for files in (found, expected))
    for moment in ("environment", "seconds"):
        del one[moment], other[moment]
    assert one == other


# Adversarial training ----------------------------------------------------------------------------------------

OBJECTIVES = {
    "pgd": ("PGDTraining", "--inner-steps 2 --clean-fraction 0.25 --inner-step-size 2/255 --ramp 1"),
    "trades": ("TRADES", "--inner-steps 2 --beta 3 --norm l2 --radius 0.25 --ramp 0"),
    "nfgsm": ("NFGSM", "--radius 0.05"),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_adversarial_objective_trains_validates_and_can_be_attacked(specguard, tmp_path, name):
    kind, options = OBJECTIVES[name]
    ended = specguard("train", "--run", tmp_path, *SMALL, "--objective", name, *options.split(), "--validate", "40")
    ended.succeeds()
    assert re.search(r"epoch 1: loss .*, validation robust \d+\.\d %", ended.err)
    settings = read_json(tmp_path / "run.json")["training"]
    assert settings["objective"]["type"] == kind
    assert settings["validation"]["images"] == 40
    assert settings["validation"]["ball"] == settings["objective"]["ball"]
    assert read_json(tmp_path / "result.json")["best"]["epoch"] == 1
    specguard("attack", tmp_path, *PGD3, *FEW).succeeds()


OPTIONS = {
    "--objective pgd": ("objective.ball", {"type": "Ball", "norm": "linf", "radius": 8 / 255, "box": True}),
    "--objective pgd --norm l2 --radius 0.5": ("objective.ball.norm", "l2"),
    "--objective pgd --inner-steps 1": ("objective.steps", 1),
    "--objective pgd --inner-step-size 2/255": ("objective.step_size", 2 / 255),
    "--objective pgd --ramp 0": ("objective.ramp", 0.0),
    "--objective pgd --clean-fraction 0.5": ("objective.clean", 0.5),
    "--objective pgd --label-smoothing 0.1": ("objective.label_smoothing", 0.1),
    "--objective trades --beta 2": ("objective.beta", 2.0),
    "--objective trades --label-smoothing 0.1": ("objective.label_smoothing", 0.1),
    "--objective nfgsm --radius 4/255": ("objective.ball.radius", 4 / 255),
    "--objective nfgsm --ramp 3": ("objective.ramp", 3.0),
    "--validate 30 --radius 1/255": ("validation.ball.radius", 1 / 255),
    "--validate 30 --norm l2": ("validation.ball.norm", "l2"),
}


@pytest.mark.parametrize("options", OPTIONS)
def test_every_option_of_adversarial_training_reaches_the_settings_of_the_run(specguard, tmp_path, options):
    quick = () if "--inner-steps" in options or "nfgsm" in options or "--objective" not in options else (
        "--inner-steps", "1"
    )  # fmt: skip
    specguard("train", "--run", tmp_path, *SMALL, *options.split(), *quick).succeeds()
    path, expected = OPTIONS[options]
    value: Any = read_json(tmp_path / "run.json")["training"]
    for part in path.split("."):
        value = value[part]
    assert value == expected


BAD: dict[str, tuple[str, tuple[str, ...]]] = {
    "radius that is no number": ("--objective pgd --radius big", ("--radius", "big")),
    "radius divided by zero": ("--objective nfgsm --radius 8/0", ("--radius", "8/0")),
    "radius nan": ("--objective trades --radius nan", ("--radius", "nan")),
    "negative radius": ("--objective pgd --radius -1/255", ("radius", "-0.0039")),
    "negative radius of validation": ("--validate 10 --radius -1/255", ("radius", "-0.0039")),
    "no step": ("--objective pgd --inner-step-size 0", ("step size", "0")),
    "negative step": ("--objective trades --inner-step-size -0.1", ("step size", "-0.1")),
    "step that is no number": ("--objective pgd --inner-step-size x", ("--inner-step-size", "x")),
    "negative ramp": ("--objective pgd --ramp -1", ("ramp", "-1")),
    "all clean": ("--objective pgd --clean-fraction 1", ("clean", "1")),
    "negative share": ("--objective pgd --clean-fraction -0.5", ("clean", "-0.5")),
    "negative beta": ("--objective trades --beta -1", ("beta", "-1")),
    "beta nan": ("--objective trades --beta nan", ("--beta", "nan")),
    "ramp infinite": ("--objective nfgsm --ramp inf", ("--ramp", "inf")),
    "smoothing": ("--objective nfgsm --label-smoothing 1", ("smoothing", "1")),
    "negative validation": ("--validate -5", ("-5",)),
    "all images held out": ("--validate 1437", ("1437",)),
    "more than all images held out": ("--objective pgd --validate 5000", ("5000",)),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_value_of_adversarial_training_is_one_sentence_and_leaves_no_run(specguard, tmp_path, kind):
    options, named = BAD[kind]
    specguard("train", "--run", tmp_path / "new", *SMALL, *options.split()).refuses(*named)
    assert not (tmp_path / "new" / "run.json").exists()


NO_EFFECT = {
    "--beta 3": "--objective trades",
    "--objective pgd --beta 3": "--objective trades",
    "--objective nfgsm --beta 3": "--objective trades",
    "--objective trades --clean-fraction 0.5": "--objective pgd",
    "--clean-fraction 0.5": "--objective pgd",
    "--inner-steps 3": "--objective pgd, trades or mart",
    "--objective nfgsm --inner-steps 3": "--objective pgd, trades or mart",
    "--objective nfgsm --inner-step-size 0.1": "--objective pgd, trades or mart",
    "--norm l2": "an --objective that has a ball, or --validate",
    "--radius 0.1": "an --objective that has a ball, or --validate",
    "--ramp 3": "--objective pgd, trades, mart, nfgsm, emma or certified",
    "--validate 30 --ramp 3": "--objective pgd, trades, mart, nfgsm, emma or certified",
    "--validate 30 --inner-steps 3": "--objective pgd, trades or mart",
}


@pytest.mark.parametrize("options", NO_EFFECT)
def test_an_option_of_adversarial_training_without_effect_is_refused(specguard, tmp_path, options):
    specguard("train", "--run", tmp_path / "new", *SMALL, *options.split()).refuses(
        options.split()[-2], "no effect", NO_EFFECT[options]
    )
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("options", ["--objective adv", "--norm l3", "--inner-steps 0", "--validate some"])
def test_what_the_parser_refuses_of_adversarial_training_has_exit_code_2(specguard, tmp_path, options):
    ended = specguard("train", "--run", tmp_path / "new", *SMALL, *options.split())
    assert ended.code == 2
    assert "Traceback" not in ended.err
    assert options.split()[0] in ended.err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_interrupted_adversarial_training_is_resumed_with_its_stored_options(
    specguard, tmp_path, monkeypatch, name
):
    options = ("--objective", name, *OBJECTIVES[name][1].split(), "--validate", "30", "--checkpoint-steps", "2")
    specguard("train", "--run", tmp_path / "whole", *SMALL, *options).succeeds()
    calls = 0

    def interrupted(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        write_checkpoint(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(state_module, "write_checkpoint", interrupted)
        ended = specguard("train", "--run", tmp_path / "run", *SMALL, *options)
    assert ended.code == 130
    assert ended.err.splitlines()[-1].endswith("--resume")
    assert checkpoint_steps(tmp_path / "run") == [2]
    specguard("train", "--run", tmp_path / "run", "--resume").succeeds()
    for file in ("metrics.jsonl", "model.safetensors", "run.json", "arguments.json"):
        assert (tmp_path / "run" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_resuming_adversarial_training_with_another_option_names_it_with_both_values(specguard, tmp_path):
    options = ("--objective", "trades", "--inner-steps", "1", "--beta", "3", "--validate", "30")
    specguard("train", "--run", tmp_path, *SMALL, *options).succeeds()
    before = contents(tmp_path)
    for changed, named in {
        "--beta 4": "training.objective.beta: 3.0 before, 4.0 now",
        "--radius 0.25": f"training.objective.ball.radius: {8 / 255} before, 0.25 now",
        "--inner-steps 2": "training.objective.steps: 1 before, 2 now",
        "--validate 31": "training.validation.images: 30 before, 31 now",
        "--objective nfgsm": "training.objective",
    }.items():
        specguard("train", "--run", tmp_path, "--resume", *changed.split()).refuses(named)
    specguard("train", "--run", tmp_path, "--resume", "--clean-fraction", "0.5").refuses(
        "--clean-fraction", "effect"
    )
    assert contents(tmp_path) == before
    specguard("train", "--run", tmp_path, "--resume", *options).succeeds()
