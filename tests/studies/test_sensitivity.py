"""No bound on an attention layer is below what ascent finds; a study is its files."""

import json
import math
import sys
from dataclasses import asdict, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from specguard.certificates.attention import local as tightened
from specguard.data import Dataset
from specguard.errors import ConfigError, RunError, SoundnessError
from specguard.nn import ViT, ViTConfig, attention_weights
from specguard.records import store as runs
from specguard.rng import Noise
from specguard.studies import Progress, Sensitivity, sensitivity
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
from specguard.studies.sensitivity import ELEMENTS, layer_sensitivity

module = sys.modules[sensitivity.__module__]  # the package's own name for it is the function's
CPU = torch.device("cpu")
# 4 patches and a class token: 5 tokens; head_dim 4, 2 heads.
CONFIG = ViTConfig(
    image=4, patch=2, channels=1, classes=3, dim=8, depth=2, heads=2, mlp_ratio=1.5, mean=(0.4,), std=(0.3,)
)
MODELS = {
    "layer norm": CONFIG,
    "projected": replace(CONFIG, norm="layerproject"),
    "gated": replace(CONFIG, local_blocks=1, pool="mean"),
    "no biases, scaled": replace(CONFIG, qkv_bias=False, residual_scale=0.5, layer_scale=0.1),
}
SETTINGS = Sensitivity(
    layer=0, radii=(0.01, 0.5), input_norms=(0.01,), weight_changes=(0.5,), images=3, samples=1, steps=5, starts=1,
    batch=3,
)  # fmt: skip
IDENTITY = {"model": "abc", "data": "def", "dataset": "noise"}


def made(config: ViTConfig = CONFIG, scale: float = 0.5) -> ViT:
    model, g = ViT(config), torch.Generator().manual_seed(17)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=g))
    return model.eval()


@cache
def data() -> Dataset:
    g = torch.Generator().manual_seed(3)
    return Dataset(torch.rand(4, 1, 4, 4, generator=g), torch.randint(0, 3, (4,), generator=g))


@cache
def studied(config: ViTConfig = CONFIG, settings: Sensitivity = SETTINGS, scale: float = 0.5) -> dict[str, Any]:
    return layer_sensitivity(made(config, scale), data().images[: settings.images], settings, CPU)


def start(folder: Path, settings: Sensitivity = SETTINGS, model: ViT | None = None) -> dict[str, Any]:
    return sensitivity(model or made(), data(), folder, settings, identity=IDENTITY, device=CPU)


def stored(folder: Path) -> dict[str, Any]:
    """A complete study in `folder`, without the work."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "layer_sensitivity", lambda *_: json.loads(json.dumps(studied())))
        return start(folder)


# Bounds and what is found ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "layer"), list(zip(MODELS, (0, 1, 0, 1), strict=True)))
def test_no_bound_is_exceeded(name, layer):
    result = studied(MODELS[name], replace(SETTINGS, layer=layer))
    for row in (*result["radii"], *result["input_norms"]):
        for bound in BOUNDS:
            assert row[bound]["min"] >= row["found"]["min"] * (1 - 1e-9) > 0
            assert row[bound]["mean"] >= row["found"]["mean"] * (1 - 1e-9)
        assert row["best"]["mean"] <= min(row[bound]["mean"] for bound in set(BOUNDS) - {"best"})


@pytest.mark.parametrize("name", ["upper_t1", "upper_t2"])
def test_a_bound_that_is_too_small_stops_the_study_and_leaves_no_result(tmp_path, monkeypatch, name):
    true = getattr(tightened, name)
    monkeypatch.setattr(tightened, name, lambda node, radius: 0.5 * true(node, radius))
    with pytest.raises(SoundnessError, match=name.removeprefix("upper_")):
        start(tmp_path)
    assert not (tmp_path / "result.json").exists()


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
    row = studied()["radii"][0]
    assert row["t2"]["mean"] <= 1.05 * row["found"]["mean"]


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
    wide = replace(CONFIG, dim=206, heads=2, mlp_ratio=0.1)  # 5 x 206 > 1024
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
    assert [(row["which"], row["change"]) for row in result["weights"]] == [
        (which, change) for which in ELEMENTS for change in (1e-9, 2.0)
    ]
    for row in result["weights"]:
        for name in ("lofast2", "t1"):
            assert row[name]["min"] <= row[name]["mean"] <= row[name]["max"]
            if row["change"] == 1e-9:
                assert row[name]["mean"] == pytest.approx(result["unchanged"][name]["mean"], rel=1e-5)
            else:
                assert row[name]["max"] > row[name]["min"]


def test_the_factors_of_one_head_lie_below_their_bounds_and_ours_is_the_tightest():
    rows = studied()["head"]
    assert [(row["radius"], row["factor"]) for row in rows] == [
        (radius, factor) for radius in SETTINGS.radii for factor in ("maps", "values")
    ]
    for row in rows:
        found, lofast = row["found"], row["lofast1"]
        assert 0 < found["mean"] <= lofast["mean"]
        if row["factor"] == "maps":
            assert found["mean"] <= row["ours"]["mean"] <= lofast["mean"] <= row["lofast2"]["mean"] * (1 + 1e-3)
        else:
            assert lofast["mean"] <= row["naive"]["mean"] * (1 + 1e-3)


def test_a_bound_on_the_factors_of_a_head_that_is_too_small_is_noticed(monkeypatch):
    module = sys.modules[sensitivity.__module__]
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
    assert studied.__wrapped__() == one
    other = studied(settings=replace(SETTINGS, seed=1))
    assert other["weights"] != one["weights"]
    assert other["radii"][0]["t1"] == one["radii"][0]["t1"]


def test_batches_change_nothing_but_rounding():
    one, other = studied(), studied(settings=replace(SETTINGS, batch=2))
    for row, same in zip(one["radii"], other["radii"], strict=True):
        assert row["lofast1"]["mean"] == pytest.approx(same["lofast1"]["mean"], rel=1e-9)
        assert row["found"]["mean"] == pytest.approx(same["found"]["mean"], rel=1e-2)


def test_found_never_shrinks_when_the_radius_grows():
    found = [row["found"] for row in studied(settings=replace(SETTINGS, steps=1, starts=0))["radii"]]
    assert all(one[key] <= other[key] for one, other in pairwise(found) for key in one)


def test_a_watcher_is_told_every_piece():
    told: list[Progress] = []
    layer_sensitivity(made(), data().images[:3], SETTINGS, CPU, told.append)
    assert [piece.done for piece in told] == list(range(told[0].total + 1))
    assert told[-1].doing == "done"


def test_a_result_is_stored_and_returned_without_work(tmp_path, monkeypatch):
    first = start(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lock", "environment.jsonl", "result.json", "sensitivity.json",
    ]  # fmt: skip
    assert runs.read_json(tmp_path / "result.json") == first
    assert runs.read_json(tmp_path / "sensitivity.json") == json.loads(json.dumps({**IDENTITY, **asdict(SETTINGS)}))
    assert first["settings"]["seed"] == 0
    monkeypatch.setattr(module, "layer_sensitivity", None)
    assert start(tmp_path) == first


def test_other_settings_and_other_records_in_the_folder_are_refused(tmp_path):
    stored(tmp_path / "one")
    with pytest.raises(RunError, match="seed: 0 before, 1 now"):
        start(tmp_path / "one", replace(SETTINGS, seed=1))
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "environment.jsonl").write_bytes(b"")
    with pytest.raises(RunError, match="other records"):
        start(tmp_path / "two")


SPOILT: dict[str, Any] = {
    "no row": lambda r: r["radii"].pop(),
    "other radius": lambda r: r["radii"][0].update(radius=7.0),
    "no column": lambda r: r["input_norms"][0].pop("t1"),
    "text": lambda r: r["weights"][0].update(t1="much"),
    "negative": lambda r: r["unchanged"]["t1"].update(mean=-1.0),
    "half an extent": lambda r: r["radii"][1]["found"].pop("max"),
    "unknown column": lambda r: r["radii"][0].update(more=[[]]),
    "a row that is none": lambda r: r["input_norms"].__setitem__(0, "much"),
    "other layer": lambda r: r.update(layer="blocks.9"),
    "no size": lambda r: r.update(dim=None),
    "rows of another kind": lambda r: r.update(weights={}),
    "settings": lambda r: r["settings"].update(seed=3),
}


def test_a_result_that_was_spoilt_is_refused(tmp_path):
    whole = stored(tmp_path)
    for spoil in SPOILT.values():
        result = json.loads(json.dumps(whole))
        spoil(result)
        runs.write_json(tmp_path / "result.json", result)
        with pytest.raises(RunError, match="does not hold the result"):
            start(tmp_path)


def test_the_printed_bound_in_an_older_result_is_left_out(tmp_path):
    whole = stored(tmp_path)
    older = json.loads(json.dumps(whole))
    for row in (*older["radii"], *older["input_norms"]):
        row |= {"specformer_printed": row["naive"], "exceeded": ["specformer_printed"]}
    runs.write_json(tmp_path / "result.json", older)
    assert start(tmp_path) == whole


WRONG: dict[str, dict[str, Any]] = {
    "at least one radius": {"radii": ()},
    "radii must be positive": {"radii": (0.0, 1.0)},
    "radii must increase": {"radii": (1.0, 0.5)},
    "input_norms must be positive": {"input_norms": (math.nan,)},
    "weight_changes must be positive": {"weight_changes": (math.inf,)},
    "weight_radius": {"weight_radius": 0.0},
    "images": {"images": 0},
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
        start(tmp_path / "x", model=made(replace(CONFIG, kernels=(3,), pool="mean")))
    with pytest.raises(ConfigError, match="4 images, not 5"):
        start(tmp_path / "x", replace(SETTINGS, images=5))
    assert not (tmp_path / "x").exists()


def test_an_input_that_is_zero_or_not_finite_is_one_sentence():
    model = made(MODELS["projected"])
    with torch.no_grad():
        for parameter in (model.patches, model.class_token, model.positions):
            for weight in parameter.parameters():
                weight.zero_()
    with pytest.raises(ConfigError, match="is zero"):
        layer_sensitivity(model, data().images, SETTINGS, CPU)
    with torch.no_grad():
        model.positions.table.fill_(math.nan)
    with pytest.raises(ConfigError, match="not finite"):
        layer_sensitivity(model, data().images, SETTINGS, CPU)


def test_weights_that_are_not_finite_are_one_sentence():
    model = made()
    with torch.no_grad():
        model.blocks[0].attention.branch.inner.out.weight[0, 0] = math.inf
    with pytest.raises(ConfigError, match="cannot be computed"):
        layer_sensitivity(model, data().images, SETTINGS, CPU)


def test_bounds_beyond_all_numbers_are_none_and_no_failure(tmp_path):
    model = made(MODELS["no biases, scaled"])
    with torch.no_grad():
        model.blocks[0].attention.branch.inner.qkv.weight.mul_(1e30)
    result = start(tmp_path, model=model)
    assert result["radii"][0]["found"] is not None
    json.dumps(result, allow_nan=False)
