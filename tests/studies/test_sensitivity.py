"""No bound on an attention layer is below what ascent finds; a study is its files."""

import json
import math
import shutil
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
import torch

from specguard.certificates.attention import local as tightened
from specguard.data import Dataset
from specguard.errors import ConfigError, RunError, SoundnessError
from specguard.nn import ViT, ViTConfig, attention_weights
from specguard.records.base import About, Environment, encode, plain
from specguard.records.io import RecordFile, read_json, read_lines, read_record, write_json
from specguard.records.sensitivity import (
    BOUNDS,
    ELEMENTS,
    HEAD_BOUNDS,
    WEIGHT_BOUNDS,
    SensitivityRecord,
    SensitivitySettings,
    SensitivityStudy,
    SensitivitySummary,
    summarize,
)
from specguard.records.study import Progress, Watcher
from specguard.rng import Noise
from specguard.studies import run_sensitivity
from specguard.studies import sensitivity as module
from specguard.studies.attention_change import (
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
    "projected": replace(CONFIG, norm="layerproject"),
    "gated": replace(CONFIG, local_blocks=1, pool="mean"),
    "no biases, scaled": replace(CONFIG, qkv_bias=False, residual_scale=0.5, layer_scale=0.1),
}
SETTINGS = SensitivitySettings(
    layer=0, radii=(0.01, 0.5), input_norms=(0.01,), weight_changes=(0.5,), samples=1, steps=5, starts=1, batch=3
)
IMAGES = 3


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


def about(n: int = IMAGES) -> About:
    return About(model="abc", data="def", dataset="noise", n=n)


def start(
    folder: Path,
    settings: SensitivitySettings = SETTINGS,
    model: ViT | None = None,
    images: int = IMAGES,
    watch: Watcher = lambda progress: None,
) -> SensitivitySummary:
    split = Dataset(data().images[:images], data().labels[:images])
    found = run_sensitivity(model or made(), split, folder, settings, about=about(images), device=CPU, watch=watch)
    assert isinstance(found, SensitivitySummary)
    return found


@cache
def studied(
    config: ViTConfig = CONFIG, settings: SensitivitySettings = SETTINGS, scale: float = 0.5
) -> tuple[SensitivitySummary, tuple[SensitivityRecord, ...]]:
    """The summary, but for when and where it was made, and the records."""
    with TemporaryDirectory() as folder:
        summary = start(Path(folder), settings, made(config, scale))
        records = tuple(stored_records(Path(folder)))
    return msgspec.structs.replace(summary, seconds={}, environment=Environment()), records


def changed(**changes: Any) -> SensitivitySettings:
    return msgspec.structs.replace(SETTINGS, **changes)


def stored_records(folder: Path) -> list[SensitivityRecord]:
    return RecordFile(folder / "records.jsonl", SensitivityRecord).read()


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "study"
    start(folder)
    return folder


@pytest.fixture
def complete(finished, tmp_path) -> Path:
    """A complete study, without the work."""
    return shutil.copytree(finished, tmp_path / "complete")


# Bounds and what is found ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "layer"), list(zip(MODELS, (0, 1, 0, 1), strict=True)))
def test_no_bound_is_exceeded(name, layer):
    result, records = studied(MODELS[name], changed(layer=layer))
    assert len(result.radii) == len(result.input_norms) == 2
    for row in (*result.radii, *result.input_norms):
        for bound in BOUNDS:
            assert row.bounds[bound].min >= row.found.min * (1 - 1e-9) > 0
            assert row.bounds[bound].mean >= row.found.mean * (1 - 1e-9)
        assert row.bounds["best"].mean <= min(row.bounds[bound].mean for bound in set(BOUNDS) - {"best"})
    assert len(records) == IMAGES
    for record in records:  # at every image by itself
        for row in (*record.radii, *record.head, *record.input_norms):
            assert all(bound >= row.found * (1 - 1e-9) > 0 for bound in row.bounds.values())
        for row in (*record.radii, *record.input_norms):
            assert row.bounds["best"] == min(row.bounds.values())


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
    row = studied()[0].radii[0]
    assert row.bounds["t2"].mean <= 1.05 * row.found.mean


def test_inputs_are_those_behind_the_normalization_and_the_model_is_left_as_it_was():
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
    result, records = studied(settings=changed(weight_changes=(1e-9, 2.0), samples=2))
    rows = [(element, change) for element in ELEMENTS for change in (1e-9, 2.0)]
    assert [(row.element, row.change) for row in result.weights] == rows
    for row in result.weights:
        assert tuple(row.bounds) == WEIGHT_BOUNDS == ("lofast2", "t1")
        for name, bound in row.bounds.items():
            assert bound.min <= bound.mean <= bound.max
            if row.change == 1e-9:
                assert bound.mean == pytest.approx(result.unchanged[name].mean, rel=1e-5)
            else:
                assert bound.max > bound.min
    assert [(row.element, row.change) for row in records[0].weights] == rows
    assert all(len(row.bounds[name]) == 2 for row in records[0].weights for name in WEIGHT_BOUNDS)
    assert all(record.weights == () and record.unchanged == {} for record in records[1:])  # of the first only


def test_the_factors_of_one_head_lie_below_their_bounds_and_ours_is_the_tightest():
    rows = studied()[0].head
    assert [(row.radius, row.factor) for row in rows] == [
        (radius, factor) for radius in SETTINGS.radii for factor in ("maps", "values")
    ]
    for row in rows:
        found, bounds = row.found, row.bounds
        lofast = bounds["lofast1"]
        assert 0 < found.mean <= lofast.mean
        if row.factor == "maps":
            assert found.mean <= bounds["ours"].mean <= lofast.mean <= bounds["lofast2"].mean * (1 + 1e-3)
        else:
            assert lofast.mean <= bounds["naive"].mean * (1 + 1e-3)


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
    one, _ = studied()
    assert studied.__wrapped__() == studied()
    other, _ = studied(settings=changed(seed=1))
    assert other.weights != one.weights
    assert other.radii[0].bounds["t1"] == one.radii[0].bounds["t1"]


def test_batches_change_nothing_but_rounding():
    (one, records), (other, others) = studied(), studied(settings=changed(batch=2))
    for row, same in zip(one.radii, other.radii, strict=True):
        assert row.bounds["lofast1"].mean == pytest.approx(same.bounds["lofast1"].mean, rel=1e-9)
        assert row.found.mean == pytest.approx(same.found.mean, rel=1e-2)
    for record, alike in zip(records, others, strict=True):
        assert (record.sample, record.label, record.layer) == (alike.sample, alike.label, alike.layer)
        for row, same in zip(record.radii, alike.radii, strict=True):
            assert row.bounds["lofast1"] == pytest.approx(same.bounds["lofast1"], rel=1e-9)
            assert row.found == pytest.approx(same.found, rel=1e-2)


def test_found_never_shrinks_when_the_radius_grows():
    result, records = studied(settings=changed(steps=1, starts=0))
    found = [msgspec.structs.asdict(row.found) for row in result.radii]
    assert all(one[key] <= other[key] for one, other in pairwise(found) for key in ("mean", "min", "max"))
    assert all(one.found <= other.found for record in records for one, other in pairwise(record.radii))


def test_there_is_one_record_per_image_and_the_summary_is_theirs(finished):
    records, summary = stored_records(finished), read_json(finished / "summary.json")
    assert [record.sample for record in records] == list(range(IMAGES))
    assert [record.label for record in records] == data().labels[:IMAGES].tolist()
    exact = double_copy(made(), CPU)
    name = attention_name(exact, 0)
    X = layer_inputs(exact, exact.get_submodule(name), data().images[:IMAGES].double())
    norms = [float(torch.linalg.matrix_norm(x, 2)) for x in X]
    assert [record.input_norm for record in records] == pytest.approx(norms, rel=1e-12)
    for record in records:
        assert plain(record.layer) == {"name": name, "tokens": 5, "dim": 8, "heads": 2}
        assert [row.radius for row in record.radii] == list(SETTINGS.radii)
        assert [(row.input_norm, row.radius) for row in record.input_norms] == [(0.01, 0.01), (0.01, 0.5)]
        assert all(tuple(row.bounds) == HEAD_BOUNDS[row.factor] for row in record.head)
    again = plain(summarize(records, read_record(finished / "study.json", SensitivityStudy)))
    for key in again.keys() - {"seconds", "environment"}:
        assert summary[key] == again[key]
    for number, row in enumerate(summary["radii"]):
        found = [record.radii[number].found for record in records]
        assert row["found"] == pytest.approx({"mean": sum(found) / 3, "min": min(found), "max": max(found)})
    assert summary["input_norm"] == pytest.approx({"mean": sum(norms) / 3, "min": min(norms), "max": max(norms)})
    assert summary["n"] == IMAGES


@pytest.mark.parametrize("batch", [2, 3])
def test_a_watcher_is_told_every_piece(tmp_path, batch):
    told: list[Progress] = []
    start(tmp_path, changed(batch=batch), watch=told.append)
    pieces, batches = ["radii", "one head", "input norm 0.01", "weights"], math.ceil(IMAGES / batch)
    assert [piece.done for piece in told] == [
        *(4 * number + done for number in range(batches) for done in (0, 0, 1, 2, 3)), 4 * batches,
    ]  # fmt: skip
    assert [piece.doing for piece in told] == ["working", *pieces] * batches + ["done"]
    assert {piece.total for piece in told} == {4 * batches}


def test_a_result_is_stored_and_returned_without_work(tmp_path, monkeypatch):
    first = start(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lock", "environment.jsonl", "records.jsonl", "study.json", "summary.json", "timing.jsonl",
    ]  # fmt: skip
    assert read_record(tmp_path / "summary.json", SensitivitySummary) == first
    study = SensitivityStudy(about(), SETTINGS, attention_name(made(), 0))
    assert read_json(tmp_path / "study.json") == plain(study)
    assert first.study == study
    assert first.study.settings.seed == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(module._Work, "batch", None)
    assert start(tmp_path) == first
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_a_study_that_was_cut_short_ends_with_the_same_records(tmp_path, kept):
    settings, folder = changed(batch=2), tmp_path / "study"
    whole = start(folder, settings)
    content = (folder / "records.jsonl").read_bytes()
    lines = content.splitlines(keepends=True)
    (folder / "summary.json").unlink()
    (folder / "records.jsonl").write_bytes(b"".join(lines[:kept]) + (lines[kept][:30] if kept < 3 else b""))
    again = start(folder, settings)
    assert (folder / "records.jsonl").read_bytes() == content
    moment: dict[str, Any] = {"seconds": {}, "environment": Environment()}
    assert msgspec.structs.replace(again, **moment) == msgspec.structs.replace(whole, **moment)


def test_other_settings_and_other_records_in_the_folder_are_refused(complete, tmp_path):
    with pytest.raises(RunError, match="seed: 0 before, 1 now"):
        start(complete, changed(seed=1))
    with pytest.raises(RunError, match="n: 3 before, 4 now"):
        start(complete, images=4)
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "environment.jsonl").write_bytes(b"")
    with pytest.raises(RunError, match="other records"):
        start(tmp_path / "two")


def test_a_result_of_an_earlier_version_is_neither_read_nor_overwritten(tmp_path):
    files = {"sensitivity.json": b"{}\n", "environment.jsonl": b"{}\n", "result.json": b'{"layer": "x"}\n'}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(RunError, match=r"other records and no study\.json; name another folder"):
        start(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != ".lock"} == files


SPOILT: dict[str, Any] = {
    "no row": lambda r: r["radii"].pop(),
    "other radius": lambda r: r["radii"][0].update(radius=7.0),
    "no column": lambda r: r["input_norms"][0]["bounds"].pop("t1"),
    "text": lambda r: r["weights"][0]["bounds"].update(t1="much"),
    "negative": lambda r: r["unchanged"]["t1"].update(mean=-1.0),
    "half an extent": lambda r: r["radii"][1]["found"].pop("max"),
    "unknown column": lambda r: r["radii"][0].update(more=[[]]),
    "unknown bound": lambda r: r["radii"][0]["bounds"].update(specformer_printed=r["radii"][0]["bounds"]["naive"]),
    "a row that is none": lambda r: r["input_norms"].__setitem__(0, "much"),
    "other layer": lambda r: r["layer"].update(name="blocks.9"),
    "no size": lambda r: r["layer"].update(dim=None),
    "other size": lambda r: r["layer"].update(dim=9),
    "rows of another kind": lambda r: r.update(weights={}),
    "settings": lambda r: r["study"]["settings"].update(seed=3),
    "other n": lambda r: r.update(n=4),
    "other kind": lambda r: r.update(kind="spectrum"),
    "a bound that is smaller": lambda r: r["head"][0]["bounds"]["ours"].update(mean=0.0),
    "no found": lambda r: r["radii"][0].pop("found"),
    "other element": lambda r: r["weights"][0].update(element="k"),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_a_result_that_was_spoilt_is_refused(complete, kind):
    result = read_json(complete / "summary.json")
    SPOILT[kind](result)
    write_json(complete / "summary.json", result)
    with pytest.raises(RunError, match=r"summary\.json (does not hold the summary|is malformed)") as caught:
        start(complete)
    assert "\n" not in str(caught.value)


SPOILT_RECORDS: dict[str, Any] = {
    "no row": lambda r: r["radii"].pop(),
    "other radius": lambda r: r["radii"][0].update(radius=7.0),
    "other input norm": lambda r: r["input_norms"][0].update(input_norm=7.0),
    "other factor": lambda r: r["head"][0].update(factor="values"),
    "unknown factor": lambda r: r["head"][0].update(factor="queries"),
    "no bound": lambda r: r["input_norms"][0]["bounds"].pop("t1"),
    "unknown bound": lambda r: r["radii"][0]["bounds"].update(specformer_printed=1.0),
    "bounds in another order": lambda r: r["radii"][0].update(
        bounds=dict(reversed(r["radii"][0]["bounds"].items()))
    ),
    "a negative bound": lambda r: r["radii"][0]["bounds"].update(t1=-1.0),
    "a bound that is text": lambda r: r["radii"][0]["bounds"].update(t1="much"),
    "nothing found": lambda r: r["radii"][0].update(found=None),
    "no weights": lambda r: r.pop("weights"),
    "other element": lambda r: r["weights"][0].update(element="k"),
    "more directions": lambda r: r["weights"][0]["bounds"]["t1"].append(1.0),
    "nothing unchanged": lambda r: r.pop("unchanged"),
    "other layer": lambda r: r["layer"].update(name="blocks.9"),
    "other label": lambda r: r.update(label=r["label"] + 1),
    "other sample": lambda r: r.update(sample=7),
    "more": lambda r: r.update(more=1),
}


@pytest.mark.parametrize("ended", [True, False], ids=["finished", "unfinished"])
@pytest.mark.parametrize("kind", SPOILT_RECORDS)
def test_a_record_that_cannot_be_is_refused(complete, kind, ended):
    records = read_lines(complete / "records.jsonl")
    SPOILT_RECORDS[kind](records[0])
    content = "".join(json.dumps(record) + "\n" for record in records)
    (complete / "records.jsonl").write_text(content)
    if not ended:
        (complete / "summary.json").unlink()
    with pytest.raises(RunError, match=r"does not belong to this study|line 1 of .* is not a valid record"):
        start(complete)
    assert (complete / "records.jsonl").read_text() == content


def test_weights_are_changed_at_the_first_image_only(complete):
    records = read_lines(complete / "records.jsonl")
    records[1] |= {name: records[0][name] for name in ("weights", "unchanged")}
    (complete / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(RunError, match="does not belong to this study: image 1"):
        start(complete)


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
        changed(**WRONG[message])


def test_a_layer_that_is_not_there_is_refused_before_anything_is_written(tmp_path):
    for layer in (-1, 2):
        with pytest.raises(ConfigError, match=f"attention layers 0 to 1, not {layer}"):
            start(tmp_path / "x", changed(layer=layer))
    with pytest.raises(ConfigError, match="no attention layers"):
        start(tmp_path / "x", model=made(replace(CONFIG, kernels=(3,), pool="mean")))
    assert not (tmp_path / "x").exists()


def test_an_input_that_is_zero_or_not_finite_is_one_sentence(tmp_path):
    model = made(MODELS["projected"])
    with torch.no_grad():
        for parameter in (model.patches, model.class_token, model.positions):
            for weight in parameter.parameters():
                weight.zero_()
    with pytest.raises(ConfigError, match="is zero"):
        start(tmp_path / "x", model=model)
    with torch.no_grad():
        model.positions.table.fill_(math.nan)
    with pytest.raises(ConfigError, match="not finite"):
        start(tmp_path / "x", model=model)


def test_weights_that_are_not_finite_are_one_sentence(tmp_path):
    model = made()
    with torch.no_grad():
        model.blocks[0].attention.branch.inner.out.weight[0, 0] = math.inf
    with pytest.raises(ConfigError, match="cannot be computed"):
        start(tmp_path / "x", model=model)


def test_bounds_beyond_all_numbers_are_none_and_no_failure(tmp_path):
    model = made(MODELS["no biases, scaled"])
    with torch.no_grad():
        model.blocks[0].attention.branch.inner.qkv.weight.mul_(1e30)
    result = start(tmp_path, model=model)
    assert result.radii[0].found is not None
    assert None in result.radii[0].bounds.values()
    assert start(tmp_path, model=model) == result
    encode(result)  # which refuses what is not finite


@pytest.mark.parametrize("scale", [1e100, 1e150, 1e152])
def test_bounds_too_large_for_a_record_are_none_and_the_study_reads_what_it_has_written(tmp_path, scale):
    """Some of these bounds lie between the largest number of a record, 1e300, and infinity."""
    model = made(MODELS["no biases, scaled"]).double()
    with torch.no_grad():
        model.blocks[0].attention.branch.inner.qkv.weight.mul_(scale)
    result = start(tmp_path, model=model)
    assert result.radii[0].found is not None
    assert result.radii[0].bounds["specformer"] is None
    assert start(tmp_path, model=model) == result


def test_a_change_beyond_all_numbers_is_one_sentence_and_no_wrong_bound(tmp_path):
    model = made(MODELS["no biases, scaled"]).double()
    with torch.no_grad():
        model.blocks[0].attention.branch.inner.out.weight.mul_(1e154)  # squares overflow
    with pytest.raises(ConfigError, match="cannot be computed"):
        start(tmp_path, model=model)
