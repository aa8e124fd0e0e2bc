"""No bound on an attention layer is below what ascent finds; a study is its files."""

import json
import math
import shutil
import tempfile
from dataclasses import replace as changed_config
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from specguard.certificates.attention import local as tightened
from specguard.data import Dataset
from specguard.errors import ConfigError, RunError, SoundnessError
from specguard.nn import ViT, ViTConfig, attention_weights
from specguard.records import io
from specguard.records import store as runs
from specguard.records.base import About, plain
from specguard.records.sensitivity import ELEMENTS, SensitivitySettings, SensitivityStudy, SensitivitySummary
from specguard.records.study import Progress
from specguard.rng import Noise
from specguard.studies import run_sensitivity
from specguard.studies import sensitivity as module
from specguard.studies.attention_change import (
    BOUNDS,
    attention_name,
    bounds_at,
    changed_layer,
    double_copy,
    exceeded,
    largest_change,
    layer_inputs,
    lengths,
    node_at,
    starting_directions,
    with_skip,
)

CPU = torch.device("cpu")
# 4 patches and a class token: 5 tokens; head_dim 4, 2 heads.
CONFIG = ViTConfig(
    image=4, patch=2, channels=1, classes=3, dim=8, depth=2, heads=2, mlp_ratio=1.5, mean=(0.4,), std=(0.3,)
)
MODELS = {
    "layer norm": CONFIG,
    "projected": changed_config(CONFIG, norm="layerproject"),
    "gated": changed_config(CONFIG, local_blocks=1, pool="mean"),
    "no biases, scaled": changed_config(CONFIG, qkv_bias=False, residual_scale=0.5, layer_scale=0.1),
}
SETTINGS = SensitivitySettings(
    layer=0, radii=(0.01, 0.5), input_norms=(0.01,), weight_changes=(0.5,), samples=1, steps=5, starts=1, batch=3
)
ABOUT = About(model="abc", data="def", dataset="noise", n=3)


def made(config: ViTConfig = CONFIG, scale: float = 0.5) -> ViT:
    model, g = ViT(config), torch.Generator().manual_seed(17)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=g))
    return model.eval()


@cache
def data() -> Dataset:
    g = torch.Generator().manual_seed(3)
    return Dataset(torch.rand(4, 1, 4, 4, generator=g)[:3], torch.randint(0, 3, (4,), generator=g)[:3])


def start(
    folder: Path, settings: SensitivitySettings = SETTINGS, model: ViT | None = None, **more: Any
) -> SensitivitySummary:
    found = run_sensitivity(model or made(), data(), folder, settings, **{"about": ABOUT, "device": CPU} | more)
    assert isinstance(found, SensitivitySummary)
    return found


@cache
def studied(
    config: ViTConfig = CONFIG, settings: SensitivitySettings = SETTINGS, scale: float = 0.5
) -> SensitivitySummary:
    with tempfile.TemporaryDirectory() as folder:
        return start(Path(folder), settings, made(config, scale))


def numbers(summary: SensitivitySummary) -> dict[str, Any]:
    """All but what depends on the moment."""
    return {name: value for name, value in plain(summary).items() if name not in ("seconds", "environment")}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "study"
    start(folder)
    return folder


@pytest.fixture
def study(finished, tmp_path) -> Path:
    return shutil.copytree(finished, tmp_path / "study")


# Bounds and what is found ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "layer"), list(zip(MODELS, (0, 1, 0, 1), strict=True)))
def test_no_bound_is_exceeded(name, layer):
    result = studied(MODELS[name], replace(SETTINGS, layer=layer))
    for row in (*result.radii, *result.input_norms):
        assert tuple(row.bounds) == BOUNDS
        for bound in row.bounds.values():
            assert bound.min >= row.found.min * (1 - 1e-9) > 0
            assert bound.mean >= row.found.mean * (1 - 1e-9)
        assert row.bounds["best"].mean <= min(row.bounds[bound].mean for bound in set(BOUNDS) - {"best"})


def test_no_bound_of_any_record_is_exceeded_and_the_summary_is_over_the_records(finished):
    records, summary = io.read_lines(finished / "records.jsonl"), numbers(start(finished))
    assert [record["sample"] for record in records] == [0, 1, 2]
    for record in records:
        for row in (*record["radii"], *record["input_norms"], *record["head"]):
            assert all(bound >= row["found"] * (1 - 1e-9) > 0 for bound in row["bounds"].values())
    for key in ("radii", "input_norms", "head"):
        for number, row in enumerate(summary[key]):
            for name, bound in row["bounds"].items():
                values = [record[key][number]["bounds"][name] for record in records]
                assert (bound["min"], bound["max"]) == (min(values), max(values))
                assert bound["mean"] == pytest.approx(sum(values) / 3)
    assert ["weights" in record for record in records] == [True, False, False]  # of the first image only


@pytest.mark.parametrize("name", ["upper_t1", "upper_t2"])
def test_a_bound_that_is_too_small_stops_the_study_and_leaves_no_result(tmp_path, monkeypatch, name):
    true = getattr(tightened, name)
    monkeypatch.setattr(tightened, name, lambda node, radius: 0.5 * true(node, radius))
    with pytest.raises(SoundnessError, match=name.removeprefix("upper_")):
        start(tmp_path)
    assert not (tmp_path / "summary.json").exists()
    assert not (tmp_path / "records.jsonl").exists()


def test_a_bound_exceeded_at_one_image_is_named_and_one_that_is_not_a_number_too():
    found, size = torch.tensor([1.0, 2.0]).double(), torch.ones(2).double()
    bounds = {
        "above": torch.tensor([1.0, 2.0]).double(),
        "below": torch.tensor([5.0, 1.9]).double(),
        "none": torch.tensor([5.0, math.nan]).double(),
        "absent": None,
    }
    assert exceeded(found, bounds, size) == ("below", "none")


def point() -> tuple[Any, torch.Tensor]:
    exact = double_copy(made(), CPU)
    layer = exact.get_submodule(attention_name(exact, 0))
    return layer, layer_inputs(exact, layer, data().images.double())


def test_what_is_found_nearly_meets_the_derivative_at_small_radii_and_stays_in_the_ball():
    layer, X = point()
    function, seen = with_skip(layer), []

    def watched(Z: torch.Tensor) -> torch.Tensor:
        if len(Z) == 3 * len(X):
            seen.append(lengths(Z - X.repeat(3, 1, 1)).max())
        return function(Z)

    directions = starting_directions(function, X, Noise.of(torch.arange(len(X)), 0), 1)
    found = largest_change(watched, X, 1e-4, directions, 20)
    for i in range(len(X)):
        J = torch.autograd.functional.jacobian(function, X[i : i + 1]).reshape(X[0].numel(), -1)
        assert float(found[i]) == pytest.approx(1e-4 * float(torch.linalg.matrix_norm(J, 2)), rel=1e-3)
    assert seen
    assert max(seen) <= 1e-4 * (1 + 1e-9)


def test_t2_meets_what_is_found():
    row = studied().radii[0]
    assert row.bounds["t2"].mean <= 1.05 * row.found.mean


def test_inputs_are_those_behind_the_normalisation_and_the_model_is_left_as_it_was():
    model = made()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    exact = double_copy(model, CPU)
    block = exact.blocks[1]
    images = data().images.double()
    X = layer_inputs(exact, block.attention.branch.inner, images)
    z = images
    for layer in (exact.normalise, exact.patches, exact.class_token, exact.positions, exact.blocks[0]):
        z = layer(z)
    torch.testing.assert_close(X, block.attention.branch.norm(z))
    assert not block.attention.branch.inner._forward_pre_hooks
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_t2_is_none_where_the_derivative_cannot_be_formed():
    wide = changed_config(CONFIG, dim=206, heads=2, mlp_ratio=0.1)  # 5 x 206 > 1024
    layer = double_copy(made(wide, 0.05), CPU).blocks[0].attention.branch.inner
    bounds = bounds_at(
        node_at(layer, torch.randn(2, 5, 206, generator=torch.Generator().manual_seed(0)).double()), 0.1
    )
    assert bounds["t2"] is None
    assert all(bounds[name] is not None for name in BOUNDS if name != "t2")


def test_one_matrix_is_changed_by_its_share_and_nothing_else():
    layer, _ = point()
    for which in ("q", "k", "v", "o"):
        moved = changed_layer(layer, which, 0.3, Noise.of(torch.tensor([0]), 5))
        for other in ("q", "k", "v", "o"):
            (old,), (new,) = attention_weights(layer), attention_weights(moved)
            share = float((new.matrix(other) - old.matrix(other)).norm() / old.matrix(other).norm())
            assert share == pytest.approx(0.3 if other == which else 0.0, rel=1e-9)


def test_bounds_of_changed_weights_spread_about_those_of_the_layer_as_it_is():
    result = studied(settings=replace(SETTINGS, weight_changes=(1e-9, 2.0), samples=2))
    assert [(row.element, row.change) for row in result.weights] == [
        (element, change) for element in ELEMENTS for change in (1e-9, 2.0)
    ]
    for row in result.weights:
        assert tuple(row.bounds) == ("lofast2", "t1")
        for name, bound in row.bounds.items():
            assert bound.min <= bound.mean <= bound.max
            if row.change == 1e-9:
                assert bound.mean == pytest.approx(result.unchanged[name].mean, rel=1e-5)
            else:
                assert bound.max > bound.min


def test_the_factors_of_one_head_lie_below_their_bounds_and_ours_is_the_tightest():
    rows = studied().head
    assert [(row.radius, row.factor) for row in rows] == [
        (radius, factor) for radius in SETTINGS.radii for factor in ("maps", "values")
    ]
    for row in rows:
        found, means = row.found.mean, {name: bound.mean for name, bound in row.bounds.items()}
        assert 0 < found <= means["lofast1"]
        if row.factor == "maps":
            assert found <= means["ours"] <= means["lofast1"] <= means["lofast2"] * (1 + 1e-3)
        else:
            assert means["lofast1"] <= means["naive"] * (1 + 1e-3)


def test_a_bound_on_the_factors_of_a_head_that_is_too_small_is_noticed(monkeypatch):
    right = module.first_head

    def planted(*arguments):
        found = right(*arguments)
        return found | {"maps": found["maps"] | {"ours": 0.1 * found["maps"]["found"]}}

    monkeypatch.setattr(module, "first_head", planted)
    with pytest.raises(SoundnessError, match="the maps of a head of"):
        studied.__wrapped__()


# The study ---------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_numbers_and_another_others():
    one = studied()
    assert numbers(studied.__wrapped__()) == numbers(one)
    other = studied(settings=replace(SETTINGS, seed=1))
    assert other.weights != one.weights
    assert other.radii[0].bounds["t1"] == one.radii[0].bounds["t1"]


def test_batches_change_nothing_but_rounding():
    one, other = studied(), studied(settings=replace(SETTINGS, batch=2))
    for row, same in zip(one.radii, other.radii, strict=True):
        assert row.bounds["lofast1"].mean == pytest.approx(same.bounds["lofast1"].mean, rel=1e-9)
        assert row.found.mean == pytest.approx(same.found.mean, rel=1e-2)
    assert one.weights == other.weights


def test_found_never_shrinks_when_the_radius_grows():
    found = [row.found for row in studied(settings=replace(SETTINGS, steps=1, starts=0)).radii]
    for one, other in pairwise(found):
        assert (one.mean <= other.mean, one.min <= other.min, one.max <= other.max) == (True, True, True)


def test_a_watcher_is_told_every_piece(tmp_path):
    told: list[Progress] = []
    start(tmp_path, replace(SETTINGS, batch=2), watch=told.append)
    assert {piece.total for piece in told} == {8}
    assert [piece.done for piece in told] == [0, 0, 1, 2, 3, 4, 4, 5, 6, 7, 8]
    assert [p.doing for p in told] == ["working", "radii", "one head", "input norm 0.01", "weights"] * 2 + ["done"]


def test_a_study_is_stored_and_returned_without_work(study, monkeypatch):
    assert sorted(path.name for path in study.iterdir()) == [
        ".lock", "environment.jsonl", "records.jsonl", "study.json", "summary.json", "timing.jsonl",
    ]  # fmt: skip
    stored = io.read_record(study / "study.json", SensitivityStudy)
    assert stored == SensitivityStudy(ABOUT, SETTINGS, attention_name(made(), 0))
    before = {path.name: path.read_bytes() for path in study.iterdir()}
    monkeypatch.setattr(module._Look, "batch", None)
    found = start(study)
    assert found == io.read_record(study / "summary.json", SensitivitySummary)
    assert found.study == stored
    assert {path.name: path.read_bytes() for path in study.iterdir()} == before


def test_a_study_that_was_cut_short_ends_with_the_same_records(tmp_path):
    """Batches of two and one; the second is cut short, and so is the first."""
    settings = replace(SETTINGS, batch=2)
    whole = start(tmp_path / "whole", settings)
    content = (tmp_path / "whole" / "records.jsonl").read_bytes()
    lines = content.splitlines(keepends=True)
    for number, kept in enumerate((lines[0], b"".join(lines[:2]) + lines[2][:30], content, b"")):
        folder = shutil.copytree(tmp_path / "whole", tmp_path / str(number))
        (folder / "summary.json").unlink()
        (folder / "records.jsonl").write_bytes(kept)
        assert numbers(start(folder, settings)) == numbers(whole)
        assert (folder / "records.jsonl").read_bytes() == content


def test_other_settings_another_model_and_other_records_in_the_folder_are_refused(study, tmp_path):
    with pytest.raises(RunError, match="seed: 0 before, 1 now"):
        start(study, replace(SETTINGS, seed=1))
    with pytest.raises(RunError, match='model: "abc" before, "xyz" now'):
        start(study, about=replace(ABOUT, model="xyz"))
    with pytest.raises(RunError, match="layer"):
        start(study, replace(SETTINGS, layer=1))
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "environment.jsonl").write_bytes(b"")
    with pytest.raises(RunError, match="other records"):
        start(tmp_path / "two")


SPOILT: dict[str, Any] = {
    "no row": lambda r: r["radii"].pop(),
    "other radius": lambda r: r["radii"][0].update(radius=7.0),
    "no column": lambda r: r["input_norms"][0]["bounds"].pop("t1"),
    "text": lambda r: r["weights"][0]["bounds"].update(t1="much"),
    "unknown column": lambda r: r["radii"][0].update(more=[[]]),
    "unknown bound": lambda r: r["radii"][0]["bounds"].update(more=r["radii"][0]["bounds"]["t1"]),
    "a row that is none": lambda r: r["input_norms"].__setitem__(0, "much"),
    "no size": lambda r: r["layer"].update(dim=None),
    "other layer": lambda r: r["layer"].update(name="blocks.9"),
    "rows of another kind": lambda r: r.update(weights={}),
    "no weights": lambda r: r.update(weights=[]),
    "nothing unchanged": lambda r: r.update(unchanged={}),
    "another factor": lambda r: r["head"][0].update(factor="magic"),
    "factors turned round": lambda r: r["head"].reverse(),
}
SPOILT_SUMMARY = SPOILT | {
    "negative": lambda r: r["unchanged"]["t1"].update(mean=-1.0),
    "half an extent": lambda r: r["radii"][1]["found"].pop("max"),
    "another mean": lambda r: r["radii"][1]["bounds"]["t1"].update(
        mean=r["radii"][1]["bounds"]["t1"]["mean"] * 1.1
    ),
    "nothing found": lambda r: r["radii"][1].update(found=None),
    "settings": lambda r: r["study"]["settings"].update(seed=3),
    "another n": lambda r: r.update(n=4),
    "of another kind": lambda r: r.update(kind="spectrum"),
}
SPOILT_RECORD = SPOILT | {
    "negative": lambda r: r["unchanged"].update(t1=-1.0),
    "another image": lambda r: r.update(sample=1),
    "no image": lambda r: r.update(sample=9),
    "another label": lambda r: r.update(label=r["label"] + 1),
    "fewer samples": lambda r: r["weights"][0]["bounds"].update(t1=[]),
    "another element": lambda r: r["weights"][0].update(element="k"),
    "another norm": lambda r: r["input_norms"][0].update(input_norm=7.0),
    "nothing found": lambda r: r["radii"][0].update(found=None),
}


@pytest.mark.parametrize("kind", SPOILT_SUMMARY)
def test_a_summary_that_was_spoilt_is_refused(study, kind):
    summary = runs.read_json(study / "summary.json")
    SPOILT_SUMMARY[kind](summary)
    runs.write_json(study / "summary.json", summary)
    with pytest.raises(RunError, match=r"summary\.json (does not hold the summary|is not as it should be)"):
        start(study)


@pytest.mark.parametrize("ended", [True, False], ids=["finished", "unfinished"])
@pytest.mark.parametrize("kind", SPOILT_RECORD)
def test_a_record_that_was_spoilt_is_refused(study, kind, ended):
    if not ended:
        (study / "summary.json").unlink()
    records = io.read_lines(study / "records.jsonl")
    SPOILT_RECORD[kind](records[0])
    (study / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(RunError, match=r"does not belong to this study|line 1 of .* is not a record of its kind"):
        start(study)


def test_weights_are_looked_at_at_the_first_image_only(study):
    records = io.read_lines(study / "records.jsonl")
    records[1]["weights"], records[1]["unchanged"] = records[0]["weights"], records[0]["unchanged"]
    (study / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(RunError, match="does not belong to this study: image 1"):
        start(study)


WRONG: dict[str, dict[str, Any]] = {
    "at least one radius": {"radii": ()},
    "radii must be positive": {"radii": (0.0, 1.0)},
    "radii must increase": {"radii": (1.0, 0.5)},
    "input_norms must be positive": {"input_norms": (math.nan,)},
    "weight_changes must be positive": {"weight_changes": (math.inf,)},
    "weight_radius": {"weight_radius": 0.0},
    "samples": {"samples": 0},
    "steps": {"steps": 0},
    "starts": {"starts": -1},
    "batch": {"batch": 0},
}


@pytest.mark.parametrize("message", WRONG)
def test_settings_that_make_no_sense_are_refused(message):
    with pytest.raises(ConfigError, match=message):
        replace(SETTINGS, **WRONG[message])


def test_a_layer_that_is_not_there_is_refused_before_anything_is_written(tmp_path):
    for layer in (-1, 2):
        with pytest.raises(ConfigError, match=f"attention layers 0 to 1, not {layer}"):
            start(tmp_path / "x", replace(SETTINGS, layer=layer))
    with pytest.raises(ConfigError, match="no attention layers"):
        start(tmp_path / "x", model=made(changed_config(CONFIG, kernels=(3,), pool="mean")))
    assert not (tmp_path / "x").exists()


def test_an_input_that_is_zero_or_not_finite_is_one_sentence(tmp_path):
    model = made(MODELS["projected"])
    with torch.no_grad():
        for parameter in (model.patches, model.class_token, model.positions):
            for weight in parameter.parameters():
                weight.zero_()
    with pytest.raises(ConfigError, match="is zero"):
        start(tmp_path, model=model)
    with torch.no_grad():
        model.positions.table.fill_(math.nan)
    with pytest.raises(ConfigError, match="not finite"):
        start(tmp_path, model=model)


def test_weights_that_are_not_finite_are_one_sentence(tmp_path):
    model = made()
    with torch.no_grad():
        model.blocks[0].attention.branch.inner.out.weight[0, 0] = math.inf
    with pytest.raises(ConfigError, match="cannot be computed"):
        start(tmp_path, model=model)


def test_bounds_beyond_all_numbers_are_none_and_no_failure(tmp_path):
    model = made(MODELS["no biases, scaled"])
    with torch.no_grad():
        model.blocks[0].attention.branch.inner.qkv.weight.mul_(1e30)
    result = start(tmp_path, model=model)
    assert result.radii[0].found is not None
    assert None in result.radii[0].bounds.values()
    assert start(tmp_path, model=model) == result
