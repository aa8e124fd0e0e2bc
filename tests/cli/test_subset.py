"""`--images` on a folder of images: every command looks at the same subset; `--first` is what there was before."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from specguard.cli import app
from specguard.data import image_folder

SIZES = {"ant": 9, "bee": 15, "cow": 6}  # of the 30 test images
TRAIN = ("--model", "tiny_smooth", "--epochs", "1", "--batch", "8", "--device", "cpu")
FEW = ("--images", "7", "--device", "cpu")
VERBS = {
    "attack": ("attack", "RUN", *FEW, "--attack", "fgsm", "--radius", "0.01", "--no-diagnose"),
    "certify": ("certify", "RUN", *FEW, "--methods", "local", "--no-search", "--radius", "0.01"),
    "cascade": ("certify", "RUN", *FEW, "--methods", "local", "--stop-early", "--radius", "0.01"),
    "smooth": ("smooth", "RUN", *FEW, "--select", "5", "--samples", "20"),
    "spectrum": ("spectrum", "RUN", *FEW, "--blocks", "head", "--most", "3"),
    "sensitivity": ("sensitivity", "RUN", *FEW, "--samples", "1", "--steps", "2"),
}
FIRST = {  # the folders of studies of the first seven images: under other names, what is there would not be found
    "attack": "attacks/fgsm-linf-0.01-34354727",
    "certify": "certificates/7-34d2f35d",
    "smooth": "smoothing/7-a4641c09",
    "spectrum": "spectrum/7-1497ff5f",
    "sensitivity": "sensitivity/0-7-b737d5fe",
}
SAID = "the 7 images are a subset of 30, stratified by class"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run on a folder of three classes of unequal size."""
    place, noise = tmp_path_factory.mktemp("trained"), np.random.default_rng(0)
    for split in ("train", "val"):
        for name, size in SIZES.items():
            (place / "zoo" / split / name).mkdir(parents=True)
            for number in range(size):
                pixels = noise.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / "zoo" / split / name / f"{number:02d}.png")
    command = ["train", "--run-dir", str(place / "run"), "--data", str(place / "zoo"), *TRAIN]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    return place / "run"


@pytest.fixture
def run(trained, tmp_path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture(scope="module")
def chosen(trained) -> list[int]:
    """The images that every command is to look at."""
    return image_folder(trained.parent / "zoo", 8).take(7).samples.tolist()


def placed(verb: str, run: Path) -> list[object]:
    return [run if word == "RUN" else word for word in VERBS[verb]]


def folder(run: Path, ended) -> Path:
    """Where a command says that its records are."""
    (line,) = (line for line in ended.err.splitlines() if " images, cpu, re" in line)
    return Path(line.partition(" in ")[2])


def samples(place: Path) -> list[int]:
    lines = (place / "records.jsonl").read_text().splitlines()
    return list(dict.fromkeys(json.loads(line)["sample"] for line in lines))


@pytest.mark.parametrize("verb", VERBS)
def test_every_command_looks_at_the_same_images_and_says_how_they_were_chosen(specguard, run, chosen, verb):
    ended = specguard(*placed(verb, run))
    ended.succeeds()
    assert ended.out.splitlines().count(SAID) == 1
    place = folder(run, ended)
    assert samples(place) == chosen
    assert {s < 9 for s in chosen} == {True, False}
    stored = json.loads((place / "summary.json").read_text())
    assert stored["study"]["about"]["subset"] == {"rule": "stratified", "seed": 0, "of": 30}
    assert specguard(*placed(verb, run)).out == ended.out  # started again, it is what it was


@pytest.mark.parametrize("verb", FIRST)
def test_first_takes_the_first_files_and_a_folder_whose_name_stays(specguard, run, verb):
    ended = specguard(*placed(verb, run), "--first")
    ended.succeeds()
    assert "stratified" not in ended.out
    place = run / FIRST[verb]
    assert folder(run, ended) == place
    assert samples(place) == list(range(7))
    assert "subset" not in json.loads((place / "study.json").read_text())["about"]


@pytest.mark.parametrize("verb", FIRST)
def test_a_study_of_the_first_images_is_pointed_at_and_never_continued_with_others(specguard, run, verb):
    specguard(*placed(verb, run), "--first").succeeds()
    before = {p: p.read_bytes() for p in (run / FIRST[verb]).rglob("*") if p.is_file()}
    ended = specguard(*placed(verb, run))
    ended.succeeds()
    assert f"{run / FIRST[verb]} holds the same study of the first 7 images; --first continues it" in ended.err
    assert folder(run, ended) != run / FIRST[verb]
    named: object = run / FIRST[verb] if verb == "attack" else FIRST[verb].removeprefix("sensitivity/")
    refused = specguard(*placed(verb, run), "--out", named)
    refused.refuses("the first images before, a stratified subset now; --first takes the first")
    assert {p: p.read_bytes() for p in before} == before


@pytest.mark.parametrize("verb", ["attack", "certify"])
def test_a_study_of_the_first_images_that_was_left_unfinished_goes_on_with_first(specguard, run, verb):
    specguard(*placed(verb, run), "--batch", 2, "--first").succeeds()
    (path,) = run.rglob("records.jsonl")
    whole = path.read_bytes()
    (path.parent / "summary.json").unlink()
    path.write_bytes(whole[: len(whole) // 2])
    ended = specguard(*placed(verb, run), "--batch", 2, "--first")
    ended.succeeds()
    assert path.read_bytes() == whole


@pytest.mark.parametrize("verb", ["attack", "certify", "spectrum"])
def test_shards_look_at_the_images_of_one_process(specguard, run, chosen, verb):
    for index in range(2):
        ended = specguard(*placed(verb, run), "--batch", 2, "--shard", f"{index}/2")
        ended.succeeds()
    assert SAID in ended.out.splitlines()
    assert samples(folder(run, ended)) == chosen
    shares = [samples(folder(run, ended) / "shards" / f"{index}-of-2") for index in range(2)]
    assert shares == [[*chosen[0:2], *chosen[4:6]], [*chosen[2:4], *chosen[6:7]]]


@pytest.mark.parametrize("verb", ["certify", "cascade"])
@pytest.mark.parametrize("first", [(), ("--first",)])
def test_certificates_are_checked_at_the_images_that_they_are_about(specguard, run, chosen, verb, first):
    specguard(*placed(verb, run), *first, "--out", "proofs").succeeds()
    ended = specguard("check", run / "proofs", "--model", run, "--device", "cpu")
    ended.succeeds()
    assert (SAID in ended.out.splitlines()) == (not first)
    (lines,) = run.with_name(f"{run.name}.checks").rglob("records.jsonl")
    assert samples(lines.parent) == (list(range(7)) if first else chosen)


def test_all_images_are_the_folder_as_it_is(specguard, run):
    ended = specguard(*placed("attack", run)[:2], "--attack", "fgsm", "--no-diagnose", "--device", "cpu")
    ended.succeeds()
    assert "stratified" not in ended.out
    assert samples(folder(run, ended)) == list(range(30))
    named = specguard(
        *placed("attack", run)[:2], "--images", 30, "--attack", "fgsm", "--no-diagnose", "--device", "cpu"
    )
    assert named.out == ended.out
    specguard(*placed("attack", run)[:2], "--images", 31, "--device", "cpu").refuses(
        "zoo has 30 test images, not 31"
    )


def test_the_report_says_how_images_were_chosen(specguard, run):
    for more in ((), ("--first",)):
        for verb in ("attack", "certify", "spectrum"):
            specguard(*placed(verb, run), *more).succeeds()
    specguard("report", run, "--out", run / "report.html").succeeds()
    page = (run / "report.html").read_text()
    assert page.count(": 7 images, a subset of 30 stratified by class.") == 1
    assert "attacked by fgsm on 7 images, a subset of 30 stratified by class" in page
    assert page.count("certified and attacked on 7 images") == 2
    assert page.count("certified and attacked on 7 images, a subset of 30 stratified by class") == 1


def test_digits_are_in_an_order_of_their_own(specguard, tmp_path):
    result = CliRunner().invoke(app, ["train", "--run-dir", str(tmp_path / "run"), *TRAIN[:-4], "--batch", "64"])
    assert result.exit_code == 0, result.output
    ended = specguard(*placed("attack", tmp_path / "run"))
    ended.succeeds()
    assert "stratified" not in ended.out
    assert samples(folder(tmp_path / "run", ended)) == list(range(7))
    assert specguard(*placed("attack", tmp_path / "run"), "--first").out == ended.out
