"""`specguard spectrum`: what works, what continues, and what is one sentence and exit code 2."""

import html
import json
import math
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

from helpers.commandline import contents
from specguard.cli import app
from specguard.cli import figure as figure_module
from specguard.cli import spectrum as command_module
from specguard.data import digits
from specguard.models import from_run
from specguard.models import run as adapt_module
from specguard.nn import fingerprint
from specguard.printable import printable
from specguard.records import io as io_module
from specguard.records.files import append_file, locked, writing
from specguard.records.io import read_json, read_lines, write_json
from specguard.records.store import read_tensors, write_tensors
from specguard.studies import spectrum as spectrum_module

TRAIN = ("--epochs", "1", "--batch", "256", "--set", "dim=8", "--set", "depth=2", "--set", "heads=2")
# Six images in batches of three: two of them.
FEW = ("--images", "6", "--batch", "3", "--device", "cpu")
HEAD = (*FEW, "--blocks", "head")
STUDY = (*HEAD, "--directions", "4")
PARTS = [
    "embedding", "blocks.0", "blocks.0.attention", "blocks.0.mlp", "blocks.1", "blocks.1.attention", "blocks.1.mlp",
    "head", "network",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "a run"
    result = CliRunner().invoke(app, ["train", "--run", str(run), "--device", "cpu", *TRAIN])
    assert result.exit_code == 0, result.output
    return run


@pytest.fixture(scope="module")
def studied(trained, tmp_path_factory) -> Path:
    """The run, and in it one study that is complete."""
    run = shutil.copytree(trained, tmp_path_factory.mktemp("studied") / "a run")
    result = CliRunner().invoke(app, ["spectrum", str(run), *STUDY])
    assert result.exit_code == 0, result.output
    return run


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy, for a test to write into."""
    return shutil.copytree(trained, tmp_path / "a run")


@pytest.fixture
def whole(studied, tmp_path) -> Path:
    """A copy with a complete study."""
    return shutil.copytree(studied, tmp_path / "a run")


@pytest.fixture
def partial(whole) -> Path:
    """A copy whose study lacks its summary, so that its records are read as those of one that was interrupted."""
    (only(whole) / "summary.json").unlink()
    return whole


@pytest.fixture
def undrawn(monkeypatch) -> None:
    """Figures take most of the time of so small a study."""
    monkeypatch.setattr(figure_module, "save_figure", lambda figure: {})


def studies(run: Path) -> list[Path]:
    return sorted((run / "spectrum").iterdir()) if (run / "spectrum").exists() else []


def only(run: Path) -> Path:
    (folder,) = studies(run)
    return folder


def records(folder: Path) -> list[Any]:
    return read_lines(folder / "records.jsonl")


def drawn(path: Path) -> list[str]:
    """What is written in a figure, both of whose files are whole."""
    ElementTree.parse(f"{path}.svg")
    png = Path(f"{path}.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert b"IEND" in png[-12:]
    texts = re.findall(r"<!-- (.*?) -->", Path(f"{path}.svg").read_text(encoding="utf-8"), re.DOTALL)
    return [html.unescape(text) for text in texts]


def without_starts(folder: Path) -> dict[str, bytes]:
    return {name: content for name, content in contents(folder).items() if not name.endswith("environment.jsonl")}


# What works --------------------------------------------------------------------------------------------------


def test_the_command_explains_itself():
    result = CliRunner().invoke(app, ["spectrum", "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_a_run_becomes_a_table_records_a_summary_and_a_figure(specguard, run):
    before = contents(run)
    ended = specguard("spectrum", run, *FEW)
    ended.succeeds()
    folder = only(run)
    assert folder.name.startswith("6-")
    assert ended.err.splitlines()[0] == f"{run} on 6 images, cpu, records in {folder}"
    assert ended.out.splitlines()[0].strip() == "a run: largest singular values, n = 6"
    assert ended.out.splitlines()[-1] == f"figure in {folder / 'violin'}.svg and {folder / 'violin'}.png"
    assert [row[0] for row in ended.rows()] == PARTS
    assert [row[0] for row in ended.rows() if row[3]] == PARTS[1:7]  # only residual parts have I + J_F
    assert "growth through the blocks" in ended.out
    found = read_json(folder / "summary.json")
    assert found["n"] == 6
    for row, part in zip(ended.rows(), found["parts"], strict=True):
        sigma = part["sigma"][0]
        assert row[1] == f"{sigma['mean']:.3g} ± {sigma['std']:.2g}"
        assert row[2] == f"{sigma['quantiles']['50']:.3g}"
    assert found["environment"]["command"].startswith("specguard spectrum ")
    assert found["weights"]["before"] is not None
    settings = read_json(folder / "study.json")
    assert settings["about"]["model"] == fingerprint(from_run(run))
    assert settings["about"]["data"] == digits().fingerprint()
    names = (
        "environment.jsonl", "records.jsonl", "study.json", "summary.json", "timing.jsonl", "violin.png",
        "violin.svg",
    )  # fmt: skip
    inside = str(folder.relative_to(run))
    assert contents(run).keys() - before.keys() == {f"{inside}/{name}" for name in names}
    assert {name: content for name, content in contents(run).items() if name in before} == before
    assert {"a run", "embedding", "blocks.0", "blocks.1", "head"} <= set(drawn(folder / "violin"))


@pytest.mark.usefixtures("undrawn")
def test_the_values_are_those_of_the_dense_jacobian_of_the_network(specguard, run):
    specguard("spectrum", run, *FEW, "--blocks", "network", "--top", "3", "--tolerance", "1e-4").succeeds()
    model, (images, labels) = from_run(run), digits().test.batch(slice(0, 6))
    for i, record in enumerate(records(only(run))):
        J = torch.autograd.functional.jacobian(model, images[i : i + 1]).reshape(10, -1)
        expected = torch.linalg.svdvals(J)[:3]
        torch.testing.assert_close(
            torch.tensor(record["parts"]["network"]["sigma"]), expected, rtol=1e-3, atol=1e-5
        )
        assert record["sample"] == i
        assert record["label"] == int(labels[i])


BLOCKS = {
    "all": PARTS,
    "network": ["network"],
    "head,embedding": ["embedding", "head"],
    "block": ["blocks.0", "blocks.1"],
    " attention , blocks.0.mlp,attention": ["blocks.0.attention", "blocks.0.mlp", "blocks.1.attention"],
}


@pytest.mark.parametrize("blocks", BLOCKS)
def test_parts_are_chosen_by_name_and_by_group_and_all_that_were_chosen_are_drawn_or_the_main_ones(
    specguard, run, blocks
):
    ended = specguard("spectrum", run, *FEW, "--images", "1", "--blocks", blocks)
    ended.succeeds()
    assert [row[0] for row in ended.rows()] == BLOCKS[blocks]
    assert all(list(record["parts"]) == BLOCKS[blocks] for record in records(only(run)))
    main = [name for name in BLOCKS[blocks] if name in ("embedding", "blocks.0", "blocks.1", "head")]
    assert [text for text in drawn(only(run) / "violin") if text in PARTS] == (main or BLOCKS[blocks])


SETTINGS = {
    "--top 3": ("top", 3),
    "--tolerance 0.01": ("tolerance", 0.01),
    "--most 7": ("most", 7),
    "--dense 9": ("dense", 9),
    "--norm linf --radius 8/255": ("ball", {"norm": "linf", "radius": 8 / 255, "box": True}),
    "--radius 1e-2": ("ball", {"norm": "l2", "radius": 0.01, "box": True}),
    "--images 2": ("n", 2),
    "--batch 4": ("batch", 4),
    "--precision float64": ("precision", "float64"),
    "--seed -5": ("seed", -5),
    "--directions 1": ("directions", 1),
    "--data digits": ("dataset", "digits"),
    "--blocks embedding": ("parts", ["embedding"]),
}


@pytest.mark.parametrize("options", SETTINGS)
def test_every_option_reaches_the_settings_of_the_study(specguard, run, undrawn, options):
    specguard("spectrum", run, *HEAD, *options.split()).succeeds()
    name, expected = SETTINGS[options]
    study = read_json(only(run) / "study.json")
    assert {**study["settings"], **study["about"], "parts": study["parts"]}[name] == expected


def test_other_settings_go_to_another_folder(specguard, run, undrawn):
    others = ((), ("--seed", "1"), ("--radius", "0.2"), ("--images", "5"), ("--top", "2"), ("--dense", "1"))
    for options in others:
        specguard("spectrum", run, *HEAD, *options).succeeds()
    assert len(studies(run)) == len(others)


@pytest.mark.usefixtures("undrawn")
def test_a_folder_may_be_named_and_other_settings_in_it_are_refused_by_their_difference(specguard, run):
    out = run / "a [bold]folder"
    ended = specguard("spectrum", run, *HEAD, "--out", out.name + "/below")
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[-1].startswith(f"figure in {out / 'below' / 'violin'}.svg")
    before = contents(run)
    specguard("spectrum", run, *HEAD, "--out", out.name + "/below", "--seed", "3").refuses("seed: 0 before, 3 now")
    specguard("spectrum", run, *HEAD, "--out", out.name + "/below", "--images", "5").refuses("n: 6 before, 5 now")
    assert contents(run) == before


def test_two_runs_make_one_figure_and_each_keeps_its_own_records(specguard, run, trained, tmp_path):
    other = shutil.copytree(trained, tmp_path / "another")
    ended = specguard("spectrum", run, other, *HEAD, "--figure", tmp_path / "both")
    ended.succeeds()
    assert {"a run", "another", "head"} <= set(drawn(tmp_path / "both"))
    assert ended.out.count("largest singular values, n = 6") == 2
    for place in (run, other):
        assert len(records(only(place))) == 6
        assert not (only(place) / "violin.svg").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a run", "another", "both.png", "both.svg"]
    assert records(only(run)) == records(only(other))


def test_runs_of_one_name_are_told_apart_by_the_shortest_ends_of_their_paths(specguard, trained, tmp_path):
    places = [shutil.copytree(trained, tmp_path / name / "run") for name in ("one", "two")]
    ended = specguard("spectrum", *places, *HEAD, "--figure", tmp_path / "both")
    ended.succeeds()
    assert {"one/run", "two/run"} <= set(drawn(tmp_path / "both"))


def test_runs_of_different_depth_and_parts_share_a_figure(specguard, run, tmp_path):
    other = tmp_path / "shallow"
    shallow = [option.replace("depth=2", "depth=1") for option in TRAIN]
    specguard("train", "--run", other, "--device", "cpu", *shallow).succeeds()
    specguard("spectrum", other, run, *FEW, "--blocks", "block", "--figure", tmp_path / "f").succeeds()
    assert [text for text in drawn(tmp_path / "f") if text in PARTS] == ["blocks.0", "blocks.1"]


def test_directions_of_the_first_images_are_kept_and_drawn(specguard, whole):
    folder = only(whole)
    stored = [read_tensors(path) for path in sorted((folder / "directions").iterdir())]
    samples, images, head = (torch.cat([part[name] for part in stored]) for name in ("samples", "images", "head"))
    assert torch.equal(samples, torch.arange(4))
    assert torch.equal(images, digits().test.batch(slice(0, 4))[0])
    torch.testing.assert_close(head.flatten(1).norm(dim=1), torch.ones(4))
    classes = digits().classes
    texts = drawn(folder / "directions")
    assert [text for text in texts if text in classes] == [classes[int(i)] for i in digits().test.labels[:4]]
    assert {"image", "head"} <= set(texts)


@pytest.mark.usefixtures("undrawn")
def test_the_direction_of_the_network_is_the_change_it_amplifies_most(specguard, run):
    specguard("spectrum", run, *FEW, "--blocks", "network", "--directions", "6", "--tolerance", "1e-4").succeeds()
    paths = sorted((only(run) / "directions").iterdir())
    found = torch.cat([read_tensors(path)["network"] for path in paths])
    model, images = from_run(run), digits().test.batch(slice(0, 6))[0]
    for image, direction, record in zip(images, found, records(only(run)), strict=True):
        J = torch.autograd.functional.jacobian(model, image[None]).reshape(10, -1)
        assert float((J @ direction.flatten()).norm()) == pytest.approx(
            record["parts"]["network"]["sigma"][0], rel=1e-3
        )


def test_more_directions_than_images_or_rows_are_no_failure(specguard, run):
    specguard("spectrum", run, *HEAD, "--images", "10", "--batch", "4", "--directions", "1000").succeeds()
    paths = sorted((only(run) / "directions").iterdir())
    assert [len(read_tensors(path)["samples"]) for path in paths] == [4, 4, 2]
    assert len([text for text in drawn(only(run) / "directions") if text in digits().classes]) == 8


@pytest.mark.parametrize("blocks", ["attention", "blocks.1.mlp"])
def test_directions_of_branches_are_drawn_where_only_these_were_asked_for(specguard, run, blocks):
    specguard("spectrum", run, *FEW, "--images", "2", "--blocks", blocks, "--directions", "2").succeeds()
    assert any(name.startswith("blocks.") for name in drawn(only(run) / "directions"))


@pytest.mark.usefixtures("undrawn")
def test_the_dense_norm_is_there_for_small_parts_only_and_never_below_the_largest_value(specguard, run):
    size = 8 * 8
    specguard("spectrum", run, *FEW, "--blocks", "all", "--dense", size, "--images", "3").succeeds()
    for record in records(only(run)):
        for name, part in record["parts"].items():
            if name in ("embedding", "network"):  # of 64 pixels; the tokens have more entries
                assert part["row_column"] >= part["sigma"][0] * (1 - 1e-5)
            else:
                assert part["row_column"] is None
    small = read_json(only(run) / "summary.json")["parts"]
    assert [part["row_column_over_sigma"]["n"] for part in small] == [3, *[0] * 7, 3]


@pytest.mark.usefixtures("undrawn")
def test_more_values_are_in_order_and_as_many_as_the_part_has(specguard, run):
    specguard("spectrum", run, *FEW, "--blocks", "head,blocks.1", "--top", "3").succeeds()
    for record in records(only(run)):
        for part in record["parts"].values():
            assert len(part["sigma"]) == len(part["residual"]) == 3
            assert part["sigma"] == sorted(part["sigma"], reverse=True)
    parts = read_json(only(run) / "summary.json")["parts"]
    assert [len(part["sigma"]) for part in parts] == [3, 3]
    specguard("spectrum", run, *HEAD, "--images", "2", "--top", "1000", "--out", "many").succeeds()
    assert {len(record["parts"]["head"]["sigma"]) for record in records(run / "many")} == {10}


@pytest.mark.usefixtures("undrawn")
def test_values_that_did_not_converge_are_counted(specguard, run):
    ended = specguard("spectrum", run, *HEAD, "--tolerance", "1e-12", "--most", "2")
    ended.succeeds()
    assert ended.err.splitlines()[-1] == "warning: 6 values did not converge; raise --most, the limit on products"


def test_without_a_perturbation_there_is_no_growth_and_no_failure(specguard, run):
    ended = specguard("spectrum", run, *FEW, "--blocks", "block", "--radius", "0")
    ended.succeeds()
    assert "PGD-20" not in ended.out
    found = read_json(only(run) / "summary.json")
    assert found["growth"] == {"n": 0, "mean": None, "std": None, "quantiles": None}
    assert found["exponent"]["n"] == 6
    assert {part["entering"] for record in records(only(run)) for part in record["parts"].values()} == {0.0}
    drawn(only(run) / "violin")


def test_one_image_is_enough(specguard, run):
    specguard("spectrum", run, *HEAD, "--images", "1").succeeds()
    drawn(only(run) / "violin")


@pytest.mark.usefixtures("undrawn")
@pytest.mark.filterwarnings("always")
def test_a_radius_in_units_of_bytes_is_warned_of_in_one_line(specguard, run):
    ended = specguard("spectrum", run, *HEAD, "--radius", "64")
    ended.succeeds()
    assert len([line for line in ended.err.splitlines() if "64/255" in line]) == 1
    assert ".py" not in ended.err


@pytest.mark.usefixtures("undrawn")
def test_without_a_number_of_images_all_of_a_small_data_set_are_taken(specguard, run):
    ended = specguard("spectrum", run, "--blocks", "head", "--batch", "360", "--device", "cpu")
    ended.succeeds()
    assert ended.err.splitlines()[0].startswith(f"{run} on 360 images")


def test_a_model_whose_part_vanishes_has_no_violin_there_and_no_failure(specguard, run):
    scaled(run, 0.0)
    specguard("spectrum", run, *FEW, "--blocks", "head,network", "--directions", "2").succeeds()
    assert {record["parts"]["network"]["sigma"][0] for record in records(only(run))} == {0.0}
    drawn(only(run) / "violin")


def scaled(run: Path, factor: float) -> None:
    """The trained model with other weights of its head, and their hash."""
    tensors, record, model = (
        read_tensors(run / "model.safetensors"),
        read_json(run / "model.json"),
        from_run(run),
    )
    tensors["head.weight"] = tensors["head.weight"] * factor
    model.load_state_dict(tensors)
    write_tensors(run / "model.safetensors", tensors)
    write_json(run / "model.json", record | {"fingerprint": fingerprint(model)})


# Names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["<b> & $y$", "[bold] run", "a:100:b", r"\$x$ a--b"])
def test_a_run_of_any_name_is_printed_and_drawn_as_it_is(specguard, run, tmp_path, name):
    place = run.rename(tmp_path / name)
    ended = specguard("spectrum", place, *HEAD)
    ended.succeeds()
    folder = only(place)
    assert ended.err.splitlines()[0] == f"{place} on 6 images, cpu, records in {folder}"
    assert f"{name}: largest singular values, n = 6" in " ".join(ended.out.split("┏")[0].split())
    assert ended.out.splitlines()[-1] == f"figure in {folder / 'violin'}.svg and {folder / 'violin'}.png"
    assert {name, name.replace("--", "- -")} & set(drawn(folder / "violin"))


def test_labels_that_look_like_markup_are_no_failure(specguard, trained, tmp_path):
    """Two runs of the same last name are told apart by the folder above, which makes a closing tag of it."""
    places = [shutil.copytree(trained, tmp_path / folder / "b]") for folder in ("x[", "y[")]
    ended = specguard("spectrum", *places, *HEAD, "--figure", tmp_path / "both")
    ended.succeeds()
    assert "x[/b]: largest" in ended.out


@pytest.mark.filterwarnings("always::UserWarning")
@pytest.mark.parametrize("name", ["_run", "中文", "x" * 200, "x\x01y"])
def test_the_name_of_a_run_leads_to_no_warning_from_within_and_is_in_the_legend(
    specguard, run, tmp_path, recwarn, name
):
    place = run.rename(tmp_path / name)
    specguard("spectrum", place, *HEAD).succeeds()
    assert printable(name) in drawn(only(place) / "violin")
    assert [str(warning.message) for warning in recwarn] == []


def test_a_name_that_is_no_text_is_written_out():
    assert printable(os.fsdecode(b"x\xffy [b] \xc3\xa4")) == "x\\xffy [b] ä"


# What is refused ---------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[str, tuple[str, ...]]] = {
    "unknown part": ("--blocks head,blocks.9", ("blocks.9", "embedding", "network")),
    "unknown group": ("--blocks BLOCK", ("BLOCK",)),
    "no part": ("--blocks=", ("''",)),
    "part with markup": ("--blocks [/bold]", ("[/bold]",)),
    "radius that is no number": ("--radius abc", ("--radius", "8/255", "abc")),
    "negative radius": ("--radius -0.1", ("radius", "-0.1")),
    "radius infinite": ("--radius 1e400", ("--radius", "1e400")),
    "tolerance of 1": ("--tolerance 1", ("tolerance", "1.0")),
    "tolerance nan": ("--tolerance nan", ("tolerance", "nan")),
    "too many images": ("--images 361", ("360", "361")),
    "missing data": ("--data cifar10 --data-root nowhere", ("nowhere", "does not exist")),
    "unknown device": ("--device tpu", ("tpu", "auto, cpu or cuda")),
    "device that is not there": ("--device cuda:99", ("cuda:99", "not available")),
}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("kind", REFUSED)
def test_a_bad_option_is_one_sentence_and_leaves_nothing(specguard, run, monkeypatch, kind):
    options, named = REFUSED[kind]
    monkeypatch.chdir(run)
    before = contents(run)
    ended = specguard("spectrum", run, *HEAD, "--batch", "360", *options.split())
    ended.refuses(*named)
    assert ended.out == ""
    assert contents(run) == before
    assert studies(run) == []


PARSER = ["--images 0", "--batch 0", "--top 0", "--most 0", "--dense -1", "--directions -1", "--precision float16"]


@pytest.mark.parametrize("options", PARSER)
def test_what_the_parser_refuses_has_exit_code_2_and_no_traceback(specguard, run, options):
    ended = specguard("spectrum", run, *options.split())
    assert ended.code == 2
    assert "Traceback" not in ended.err
    assert options.split()[0] in ended.err
    assert studies(run) == []


def test_several_runs_without_the_name_of_a_figure_are_refused(specguard, run, trained):
    ended = specguard("spectrum", run, trained, *HEAD)
    ended.refuses("--figure")
    assert studies(run) == studies(trained) == []


def test_the_same_run_twice_is_refused_however_it_is_written(specguard, run, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(run)
    monkeypatch.chdir(run)
    for again in (run, f"{run}/", run / ".." / run.name, tmp_path / "link", "."):
        specguard("spectrum", run, again, *HEAD, "--figure", tmp_path / "f").refuses("twice")
    assert studies(run) == []


def test_a_run_that_is_not_there_is_one_sentence(specguard, tmp_path):
    for run in (tmp_path / "nowhere", tmp_path, tmp_path / ("x" * 300), tmp_path / "[/bold]"):
        specguard("spectrum", run, *HEAD).refuses(run)
    (tmp_path / "file").write_bytes(b"precious")
    specguard("spectrum", tmp_path / "file", *HEAD).refuses(tmp_path / "file")
    assert contents(tmp_path) == {"file": b"precious"}


def test_a_link_that_leads_to_itself_is_one_sentence(specguard, tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    specguard("spectrum", tmp_path / "loop", *HEAD).refuses(tmp_path / "loop")


@pytest.mark.usefixtures("undrawn")
def test_a_second_run_that_is_not_there_is_found_before_the_first_is_looked_at(specguard, run, tmp_path):
    """The first may take hours."""
    ended = specguard("spectrum", run, tmp_path / "nowhere", *HEAD, "--figure", tmp_path / "f")
    ended.refuses(tmp_path / "nowhere")
    assert studies(run) == []


@pytest.mark.parametrize("missing", ["model.json", "model.safetensors", "run.json"])
def test_a_run_that_lacks_a_file_is_refused_by_name(specguard, run, missing):
    (run / missing).unlink()
    specguard("spectrum", run, *HEAD).refuses(run / missing)
    assert studies(run) == []


@pytest.mark.usefixtures("undrawn")
def test_a_run_without_its_command_line_is_looked_at_once_the_data_is_named(specguard, run):
    (run / "arguments.json").unlink()
    specguard("spectrum", run, *HEAD).refuses(run, "--data")
    assert studies(run) == []
    specguard("spectrum", run, *HEAD, "--data", "digits").succeeds()


def test_truncated_weights_are_refused_by_name(specguard, run):
    content = (run / "model.safetensors").read_bytes()
    (run / "model.safetensors").write_bytes(content[: len(content) // 2])
    specguard("spectrum", run, *HEAD).refuses(run / "model.safetensors")
    assert studies(run) == []


def test_weights_with_one_other_bit_are_refused(specguard, run):
    content = bytearray((run / "model.safetensors").read_bytes())
    content[-2] ^= 1
    (run / "model.safetensors").write_bytes(content)
    specguard("spectrum", run, *HEAD).refuses(run / "model.safetensors", "fingerprint")


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_weights_that_are_no_real_numbers_are_refused_by_name(specguard, run, dtype):
    tensors = read_tensors(run / "model.safetensors")
    write_tensors(run / "model.safetensors", {name: tensor.to(dtype) for name, tensor in tensors.items()})
    specguard("spectrum", run, *HEAD).refuses(run / "model.safetensors")


@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_weights_of_a_type_that_cannot_be_computed_with_are_refused_even_with_their_hash(specguard, run, dtype):
    model = from_run(run).to(dtype)
    write_tensors(run / "model.safetensors", model.state_dict())
    record = read_json(run / "model.json")
    write_json(run / "model.json", record | {"fingerprint": fingerprint(model)})
    specguard("spectrum", run, *HEAD).refuses(run / "model.safetensors")


@pytest.mark.parametrize("factor", [math.nan, math.inf, 1e38])
def test_weights_that_overflow_are_one_sentence(specguard, run, factor):
    scaled(run, factor)
    specguard("spectrum", run, *FEW, "--blocks", "head,embedding").refuses("finite")


@pytest.mark.parametrize("file", ["model.json", "arguments.json", "run.json"])
@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"config": 3, "model": 3}'])
def test_a_file_of_the_run_that_was_spoilt_is_one_sentence(specguard, run, file, content):
    (run / file).write_bytes(content)
    before = contents(run)
    specguard("spectrum", run, *HEAD).refuses()
    assert contents(run) == before


HOSTILE: dict[str, dict[str, Any]] = {
    "model": {"model": None},
    "fields": {"model": {"dim": "many"}},
    "sizes": {"model": {"dim": -8}},
    "seed": {"training": {"seed": "x"}},
    "weights": {"initial_weights": 7},
    "data": {"data": []},
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_settings_of_the_run_of_a_wrong_kind_are_one_sentence(specguard, run, kind):
    write_json(run / "run.json", read_json(run / "run.json") | HOSTILE[kind])
    specguard("spectrum", run, *HEAD).refuses()
    assert studies(run) == []


def test_settings_of_a_stranger_do_not_fill_the_memory(specguard, run, monkeypatch):
    """model.json is checked against the weights first; the model as it was before training comes from run.json."""
    settings = read_json(run / "run.json")
    write_json(run / "run.json", settings | {"model": settings["model"] | {"dim": 2**16, "heads": 1}})
    build = adapt_module.ViT

    def careful(config: Any, *more: Any) -> Any:
        assert config.dim < 2**16 or torch.get_default_device().type == "meta", "200 GB"
        return build(config, *more)

    monkeypatch.setattr(adapt_module, "ViT", careful)
    ended = specguard("spectrum", run, *HEAD)
    assert ended.code in (0, 2)


@pytest.mark.usefixtures("undrawn")
def test_other_data_than_in_training_is_refused_unless_it_is_meant(specguard, run):
    settings = read_json(run / "run.json")
    settings["data"]["fingerprint"] = "0" * 64
    write_json(run / "run.json", settings)
    specguard("spectrum", run, *HEAD).refuses("not what", run, "--data")
    specguard("spectrum", run, *HEAD, "--data", "digits").succeeds()


# Files of the study ------------------------------------------------------------------------------------------


SPOILT = {"gone": None, "empty": b"", "objects": b"{}\n" * 6, "no text": b"\xff\xfe\n"}


@pytest.mark.parametrize("kind", SPOILT)
def test_records_of_a_complete_study_that_were_spoilt_are_one_sentence(specguard, whole, kind):
    path, content = only(whole) / "records.jsonl", SPOILT[kind]
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    before = contents(whole)
    specguard("spectrum", whole, *STUDY).refuses(path)
    assert contents(whole) == before


@pytest.mark.usefixtures("undrawn")
def test_a_complete_study_that_lost_records_is_not_drawn_as_if_it_had_them(specguard, whole):
    path = only(whole) / "records.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    before = contents(whole)
    specguard("spectrum", whole, *STUDY).refuses(path)
    assert contents(whole) == before


def test_a_start_that_was_refused_is_not_recorded_as_one(specguard, partial):
    folder = only(partial)
    (folder / "records.jsonl").write_bytes(b"{}\n")
    before = contents(partial)
    specguard("spectrum", partial, *STUDY).refuses(folder)
    assert contents(partial) == before


@pytest.mark.parametrize("state", ["whole", "partial"])
@pytest.mark.parametrize("kind", ["cut", "empty", "other tensors", "other shape", "a number", "no folder"])
def test_directions_that_were_spoilt_are_one_sentence(specguard, request, state, kind):
    run = request.getfixturevalue(state)
    folder = only(run) / "directions"
    first = min(folder.iterdir())
    if kind == "cut":
        first.write_bytes(first.read_bytes()[:100])
    elif kind == "empty":
        first.write_bytes(b"")
    elif kind == "no folder":
        shutil.rmtree(folder)
    else:
        tensors = read_tensors(first)
        changes = {"other tensors": {"x": tensors["head"]}}
        changes["other shape"] = tensors | {"head": torch.zeros(2, 5)}
        changes["a number"] = tensors | {"head": torch.tensor(1.0)}
        write_tensors(first, changes[kind])
    figures = {name: content for name, content in contents(run).items() if name.endswith(("svg", "png"))}
    specguard("spectrum", run, *STUDY).refuses("directions")
    assert figures.items() <= contents(run).items()


def test_directions_that_lack_a_file_are_not_drawn_under_the_labels_of_other_images(specguard, whole):
    folder = only(whole)
    min((folder / "directions").iterdir()).unlink()
    (folder / "directions.svg").unlink()
    ended = specguard("spectrum", whole, *STUDY)
    if ended.code == 0:  # only image 3 is left
        classes = digits().classes
        shown = [text for text in drawn(folder / "directions") if text in classes]
        assert shown == [classes[int(digits().test.labels[3])]]
    else:
        ended.refuses("directions")


@pytest.mark.parametrize(
    "file", ["records.jsonl", "summary.json", "study.json", "environment.jsonl", "timing.jsonl", ".lock"]
)
def test_a_folder_in_place_of_a_file_is_one_sentence(specguard, partial, file):
    path = only(partial) / file
    path.unlink(missing_ok=True)
    path.mkdir()
    specguard("spectrum", partial, *STUDY).refuses(only(partial))


def test_a_folder_in_use_is_one_sentence(specguard, whole):
    with locked(only(whole)):
        specguard("spectrum", whole, *STUDY).refuses(only(whole), "in use")


# Places ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", ["model.json", "model.json/below", "x" * 300])
def test_a_folder_that_cannot_be_written_is_one_sentence(specguard, run, out):
    before = contents(run)
    specguard("spectrum", run, *HEAD, "--out", out).refuses(run / out.partition("/")[0])
    assert contents(run) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_run_that_must_not_be_written_is_one_sentence(specguard, run):
    run.chmod(0o500)
    try:
        specguard("spectrum", run, *HEAD).refuses(run)
    finally:
        run.chmod(0o700)
    assert studies(run) == []


def test_a_file_in_place_of_the_studies_is_one_sentence(specguard, run):
    (run / "spectrum").write_bytes(b"precious")
    before = contents(run)
    specguard("spectrum", run, *HEAD).refuses(run / "spectrum")
    assert contents(run) == before


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("out", [".", "", "../other", "/absolute", "a/../.."])
def test_records_stay_within_the_run_as_the_help_says(specguard, run, tmp_path, out):
    before = contents(tmp_path)
    out = str(tmp_path / "absolute") if out == "/absolute" else out
    specguard("spectrum", run, *HEAD, "--out", out).refuses("--out")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("complete", [True, False])
def test_a_folder_that_holds_an_attack_is_refused_and_left_as_it_is(specguard, run, complete):
    attack = ("--attack", "fgsm", "--images", "6", "--device", "cpu", "--no-diagnose")
    specguard("attack", run, *attack, "--out", run / "attacks" / "a").succeeds()
    if not complete:
        (run / "attacks" / "a" / "summary.json").unlink()
    before = contents(run)
    specguard("spectrum", run, *HEAD, "--out", "attacks/a").refuses(run / "attacks" / "a")
    assert contents(run) == before


@pytest.mark.parametrize("place", ["nowhere/figure", "file/figure", "x" * 300, ".", "", "folder/.."])
def test_a_figure_that_cannot_be_written_is_one_sentence_and_nothing_is_left(
    specguard, whole, tmp_path, monkeypatch, place
):
    work = tmp_path / "work"
    (work / "folder").mkdir(parents=True)
    (work / "file").write_bytes(b"precious")
    monkeypatch.chdir(work)
    monkeypatch.setattr(command_module, "_write_directions", lambda *_: None)  # to save time
    before = contents(tmp_path)
    specguard("spectrum", whole, *STUDY, "--figure", place).refuses()
    assert contents(tmp_path) == before
    assert contents(work) == {"file": b"precious"}


def without_figures(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: content for name, content in files.items() if not name.endswith((".svg", ".png"))}


def test_a_file_of_a_figure_that_cannot_be_replaced_leaves_no_draft(specguard, whole, tmp_path):
    (tmp_path / "figure.png").mkdir()
    specguard("spectrum", whole, *STUDY, "--figure", tmp_path / "figure").refuses("figure.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a run", "figure.png", "figure.svg"]


def test_a_figure_that_is_named_with_its_suffix_does_not_get_it_twice(specguard, whole, tmp_path):
    specguard("spectrum", whole, *STUDY, "--figure", tmp_path / "figure.svg").succeeds()
    assert (tmp_path / "figure.svg").exists()
    assert (tmp_path / "figure.png").exists()


# Again, and after an interruption ----------------------------------------------------------------------------


def test_started_again_a_complete_study_is_only_drawn_and_to_the_same_bytes(specguard, whole, monkeypatch):
    folder = only(whole)
    before = contents(whole)
    first = specguard("spectrum", whole, *STUDY)
    for figure in ("violin.svg", "violin.png", "directions.svg", "directions.png"):
        (folder / figure).unlink()
    monkeypatch.setattr(spectrum_module, "lower_singular_values", None)  # nothing is computed
    again = specguard("spectrum", whole, *STUDY)
    again.succeeds()
    assert again.out == first.out
    assert contents(whole) == before


@pytest.mark.usefixtures("undrawn")
def test_a_study_cut_in_the_middle_of_a_line_continues_to_the_same_records(specguard, partial):
    folder = only(partial)
    before = contents(partial)
    expected = (folder / "records.jsonl").read_bytes()
    for share in (0.3, 0.7):
        (folder / "records.jsonl").write_bytes(expected[: int(share * len(expected))])
        (folder / "summary.json").unlink(missing_ok=True)
        specguard("spectrum", partial, *STUDY).succeeds()
        assert (folder / "records.jsonl").read_bytes() == expected
    after = contents(partial)
    changed = {name.rpartition("/")[2] for name in after if after[name] != before.get(name)}
    assert changed == {"environment.jsonl", "summary.json", "timing.jsonl"}
    assert len(read_lines(folder / "environment.jsonl")) == 3


def same_study(folder: Path, other: Path) -> None:
    found, expected = (without_figures(contents(place)) for place in (folder, other))
    assert found.keys() == expected.keys()
    for name in found.keys() - {"summary.json", "environment.jsonl", "timing.jsonl"}:
        assert found[name] == expected[name]
    one, two = (json.loads(files["summary.json"]) for files in (found, expected))
    for moment in ("environment", "seconds"):
        del one[moment], two[moment]
    assert one == two


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("batches", [1, 2])
def test_control_c_is_one_line_with_a_command_that_continues_like_an_uninterrupted_one(
    specguard, run, studied, monkeypatch, batches
):
    calls = 0

    def interrupted(path: Path, content: bytes) -> None:
        nonlocal calls
        calls += path.name == "records.jsonl"
        if calls == batches:
            raise KeyboardInterrupt
        append_file(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(io_module, "append_file", interrupted)
        ended = specguard("spectrum", run, *STUDY)
    assert ended.code == 130
    assert "Traceback" not in ended.err
    assert ended.out == ""
    assert not (only(run) / "summary.json").exists()
    said = ended.err.splitlines()[-1]
    assert said.startswith("interrupted; continue with: specguard spectrum ")
    specguard(*shlex.split(said.partition("continue with: specguard ")[2])).succeeds()
    same_study(only(run), only(studied))


def test_the_command_that_continues_names_the_run_as_it_is(specguard, run, tmp_path, monkeypatch):
    """A name between colons may be that of a small picture."""
    place = run.rename(tmp_path / "lr:100:[bold] $x")

    def interrupted(path: Path, content: bytes) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(io_module, "append_file", interrupted)
    ended = specguard("spectrum", place, *HEAD)
    assert ended.code == 130
    said = ended.err.splitlines()[-1]
    assert shlex.split(said.partition("continue with: ")[2]) == ["specguard", "spectrum", str(place), *HEAD]


def test_control_c_while_drawing_has_its_exit_code_and_leaves_the_study_whole(specguard, run, studied, monkeypatch):
    def interrupted(figure: Any) -> dict[str, bytes]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(figure_module, "save_figure", interrupted)
        ended = specguard("spectrum", run, *STUDY)
    assert ended.code == 130
    assert "Traceback" not in ended.err
    specguard("spectrum", run, *STUDY).succeeds()
    same_study(only(run), only(studied))


# A full disk -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("file", ["records.jsonl", "directions"])
def test_a_full_disk_is_one_sentence_and_the_same_command_continues(
    specguard, run, studied, monkeypatch, file, batches
):
    calls = 0
    module, function = (io_module, "append_file") if file == "records.jsonl" else (spectrum_module, "write_tensors")
    write = getattr(module, function)

    def full(path: Path, content: Any) -> None:
        nonlocal calls
        calls += file in (path.name, path.parent.name)
        if calls == batches:
            with writing(path):
                raise OSError(28, "No space left on device")
        write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(module, function, full)
        specguard("spectrum", run, *STUDY).refuses(only(run) if studies(run) else run, "No space left on device")
    assert not (only(run) / "summary.json").exists()
    specguard("spectrum", run, *STUDY).succeeds()
    same_study(only(run), only(studied))


def test_a_disk_that_is_full_when_the_figure_is_written_is_one_sentence(specguard, run, studied, monkeypatch):
    def full(path: Path, content: bytes) -> None:
        with writing(path):
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(figure_module, "write_file", full)
        specguard("spectrum", run, *STUDY).refuses("No space left on device")
    specguard("spectrum", run, *STUDY).succeeds()
    same_study(only(run), only(studied))
