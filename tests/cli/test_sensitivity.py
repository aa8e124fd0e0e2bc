"""`specguard sensitivity`: a table and a figure of one layer, its stored result, one sentence for errors."""

import html
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from helpers.commandline import contents
from specguard.cli import app
from specguard.cli import figure as figure_module
from specguard.data import digits
from specguard.models import from_run
from specguard.nn import fingerprint
from specguard.records.io import read_json
from specguard.studies import sensitivity as sensitivity_module

TRAIN = ("--epochs", "1", "--batch", "256", "--set", "dim=8", "--set", "depth=2", "--set", "heads=2")
FEW = (
    "--images", "2", "--radius", "0.1", "--radius", "1/100", "--input-norm", "0.1", "--weight-change", "0.5",
    "--samples", "1", "--steps", "4", "--device", "cpu",
)  # fmt: skip
ROWS = [
    "found", "naive", "SpecFormer", "SpecFormer tight", "LoFAST (1)", "LoFAST (2)", "T1",
    "T2", "best",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "a run"
    result = CliRunner().invoke(app, ["train", "--run", str(run), "--device", "cpu", *TRAIN])
    assert result.exit_code == 0, result.output
    return run


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy, for a test to write into."""
    return shutil.copytree(trained, tmp_path / "a run")


@pytest.fixture
def undrawn(monkeypatch) -> None:
    monkeypatch.setattr(figure_module, "save_figure", lambda figure: {})


def studies(run: Path) -> list[Path]:
    return sorted((run / "sensitivity").iterdir()) if (run / "sensitivity").exists() else []


def drawn(path: Path) -> list[str]:
    """What is written in a figure, both of whose files are whole."""
    ElementTree.parse(f"{path}.svg")
    assert b"IEND" in Path(f"{path}.png").read_bytes()[-12:]
    texts = re.findall(r"<!-- (.*?) -->", Path(f"{path}.svg").read_text(encoding="utf-8"), re.DOTALL)
    return [html.unescape(text) for text in texts]


def test_a_run_becomes_two_tables_a_result_and_a_figure(specguard, run):
    before = contents(run)
    ended = specguard("sensitivity", run, "--layer", "1", *FEW)
    ended.succeeds()
    (folder,) = studies(run)
    assert folder.name.startswith("1-2-")
    assert ended.err.splitlines()[0] == f"{run} on 2 images, cpu, result in {folder}"
    assert ended.out.splitlines()[0].strip() == "a run: blocks.1.attention.branch.inner, n = 2"
    assert [row[0] for row in ended.rows()] == [*ROWS, *ROWS[1:]]
    result = read_json(folder / "summary.json")
    assert [row["radius"] for row in result["radii"]] == [0.01, 0.1]
    assert [float(cell) for cell in ended.rows()[0][1:]] == pytest.approx(
        [row["found"]["mean"] for row in result["radii"]], rel=0.01
    )
    ratios = {row[0]: [float(cell) for cell in row[1:]] for row in ended.rows()[len(ROWS) :]}
    assert ratios["T1"] == pytest.approx(
        [row["bounds"]["t1"]["mean"] / row["found"]["mean"] for row in result["radii"]], rel=0.01
    )
    assert min(value for name in ROWS[1:] for value in ratios[name]) >= 0.999
    settings = read_json(folder / "study.json")
    assert settings["about"]["model"] == fingerprint(from_run(run))
    assert settings["about"]["data"] == digits().fingerprint()
    assert result["environment"]["command"].startswith("specguard sensitivity ")
    names = (
        "environment.jsonl", "records.jsonl", "sensitivity.png", "sensitivity.svg", "study.json", "summary.json",
        "timing.jsonl",
    )  # fmt: skip
    inside = str(folder.relative_to(run))
    assert contents(run).keys() - before.keys() == {f"{inside}/{name}" for name in names}
    assert {"found by ascent", "LoFAST (1)", "T2", "W^Q"} <= set(drawn(folder / "sensitivity"))


@pytest.mark.usefixtures("undrawn")
def test_started_again_it_prints_the_stored_result_and_other_settings_are_refused(specguard, run, monkeypatch):
    first = specguard("sensitivity", run, *FEW, "--out", "here")
    first.succeeds()
    before = contents(run)
    monkeypatch.setattr(sensitivity_module, "largest_change", None)  # nothing is computed
    again = specguard("sensitivity", run, *FEW, "--out", "here")
    again.succeeds()
    assert again.out == first.out
    specguard("sensitivity", run, *FEW, "--out", "here", "--seed", "3").refuses("seed: 0 before, 3 now")
    assert contents(run) == before
    assert studies(run) == [run / "sensitivity" / "here"]


REFUSED: dict[str, tuple[str, tuple[str, ...]]] = {
    "layer too large": ("--layer 2", ("attention layers 0 to 1, not 2",)),
    "layer negative": ("--layer -1", ("not -1",)),
    "radius that is no number": ("--radius abc", ("--radius", "abc")),
    "radius zero": ("--radius 0", ("radii must be positive",)),
    "radius infinite": ("--radius 1e400", ("--radius", "1e400")),
    "norm negative": ("--input-norm -1", ("input_norms",)),
    "change zero": ("--weight-change 0", ("weight_changes",)),
    "weight radius": ("--weight-radius nan", ("--weight-radius",)),
    "too many images": ("--images 361", ("360", "361")),
    "data elsewhere": ("--data cifar10 --data-root nowhere", ("nowhere",)),
    "unknown device": ("--device tpu", ("tpu",)),
    "folder outside": ("--out ../x", ("--out", "../x")),
    "figure without a name": ("--figure ..", ("--figure",)),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_bad_option_is_one_sentence_and_leaves_nothing(specguard, run, monkeypatch, kind):
    options, named = REFUSED[kind]
    monkeypatch.chdir(run)
    before = contents(run)
    ended = specguard("sensitivity", run, *FEW, *options.split())
    ended.refuses(*named)
    assert ended.out == ""
    assert contents(run) == before
    assert studies(run) == []


def test_a_model_without_attention_and_a_run_that_is_not_there_are_one_sentence(specguard, tmp_path):
    convolutional = tmp_path / "covit"
    specguard(
        "train", "--run", convolutional, "--device", "cpu", *TRAIN, "--set", "kernels=[3]", "--set", "pool=mean"
    ).succeeds()
    specguard("sensitivity", convolutional, *FEW).refuses("no attention layers")
    assert studies(convolutional) == []
    specguard("sensitivity", tmp_path / "nowhere", *FEW).refuses(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["[bold] <b> & $y$"])
def test_a_run_of_any_name_is_printed_and_drawn_as_it_is_in_a_figure_of_any_name(specguard, run, tmp_path, name):
    place = run.rename(tmp_path / name)
    ended = specguard("sensitivity", place, *FEW, "--figure", tmp_path / "one.svg")
    ended.succeeds()
    assert ended.out.splitlines()[-1] == f"figure in {tmp_path / 'one'}.svg and {tmp_path / 'one'}.png"
    title = f"{name}: blocks.0.attention.branch.inner, n = 2"
    assert ended.out.splitlines()[0] == title
    assert title in drawn(tmp_path / "one")
