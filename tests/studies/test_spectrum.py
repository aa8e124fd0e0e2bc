"""A study of spectra says what a dense computation says, and one killed at any moment ends with the same bytes."""

import itertools
import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import jacrev

from specguard.attacks import PGD
from specguard.data import Dataset
from specguard.errors import ConfigError, RunError, SpecGuardError
from specguard.geometry import Ball
from specguard.nn import ViT, ViTConfig, unfuse_attention
from specguard.records.base import About, BallRecord, encode, plain
from specguard.records.files import locked
from specguard.records.io import RecordFile, read_json, read_lines, read_record, write_json
from specguard.records.ledger import Ledger
from specguard.records.spectrum import (
    Distribution,
    SpectrumRecord,
    SpectrumSettings,
    SpectrumStudy,
    SpectrumSummary,
    path_of,
    summarize,
)
from specguard.records.store import read_tensors
from specguard.records.study import Progress
from specguard.spectrum import part_names
from specguard.studies import run_spectrum
from specguard.studies import spectrum as module

CPU = torch.device("cpu")
CONFIG = ViTConfig(
    image=4, patch=2, channels=1, classes=5, dim=6, depth=2, heads=2, mlp_ratio=2.0, mean=(0.4,), std=(0.3,)
)
COUNT = 5  # in batches of 2, 2 and 1
ABOUT = About(model="abc", data="def", dataset="noise", n=COUNT)
# The image has 16 entries and the tokens 30: row_column is there for the embedding and the network only.
SETTINGS = SpectrumSettings(top=2, dense=20, ball=BallRecord(norm="l2", radius=0.1), directions=3, batch=2, seed=1)


def changed(settings: SpectrumSettings, **changes: Any) -> SpectrumSettings:
    return msgspec.structs.replace(settings, **changes)


EXACT = changed(SETTINGS, tolerance=1e-9, precision="float64", dense=30, directions=5)
QUICK = changed(SETTINGS, parts="blocks.0,head", top=1, most=2)  # to be killed often; its attack is short, too


class Death(BaseException):
    """Stands for SIGKILL: nothing but what is on the disk survives."""


def made(config: ViTConfig = CONFIG, scale: float = 0.5) -> ViT:
    """Weights far from the start of training, where a block is nearly the identity."""
    model, g = ViT(config), torch.Generator().manual_seed(17)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=g))
    return model.eval()


@cache
def data() -> Dataset:
    g = torch.Generator().manual_seed(3)
    return Dataset(torch.rand(COUNT, 1, 4, 4, generator=g), torch.randint(0, 5, (COUNT,), generator=g))


def start(
    folder: Path,
    settings: SpectrumSettings,
    *,
    model: ViT | None = None,
    about: About = ABOUT,
    split: Dataset | None = None,
    untrained: ViT | None = None,
    watch: Callable[[Progress], None] = lambda progress: None,
) -> SpectrumSummary:
    """What a new process does."""
    with pytest.MonkeyPatch.context() as patch:
        if settings.most == QUICK.most:
            patch.setattr(module, "PGD", lambda steps, leave: PGD(steps=1, leave=leave))
        found = run_spectrum(
            model or made(), split or data(), folder, settings,
            about=about, device=CPU, untrained=untrained, watch=watch,
        )  # fmt: skip
    assert isinstance(found, SpectrumSummary)
    return found


def records(folder: Path) -> list[dict[str, Any]]:
    """As they are on the disk."""
    return read_lines(folder / "records.jsonl")


def stored_records(folder: Path) -> list[SpectrumRecord]:
    return RecordFile(folder / "records.jsonl", SpectrumRecord).read()


def stored_summary(folder: Path) -> SpectrumSummary:
    found: SpectrumSummary = read_record(folder / "summary.json", SpectrumSummary)
    return found


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def outcome(folder: Path) -> dict[str, bytes]:
    """All that may not depend on how often the study was killed."""
    moment = ("environment.jsonl", "timing.jsonl")
    found = {n: c for n, c in contents(folder).items() if n not in moment and not n.endswith(".draft")}
    summary = json.loads(found["summary.json"])
    del summary["environment"], summary["seconds"]
    return found | {"summary.json": json.dumps(summary).encode()}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setenv("SPECGUARD_COMMIT", "test")  # spares three processes per start
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # no machine loses its power here


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Callable[[SpectrumSettings], Path]:
    """The folder of a study that was never killed."""

    @cache
    def of(settings: SpectrumSettings) -> Path:
        folder = tmp_path_factory.mktemp("finished") / "study"
        start(folder, settings)
        return folder

    return of


def difference(folder: Path, expected: dict[str, bytes], settings: SpectrumSettings = QUICK) -> str | None:
    """Continue in `folder`; what then differs from an uninterrupted study, or the error that it ends with."""
    try:
        start(folder, settings)
        found = outcome(folder)
    except (Exception, Death) as error:  # noqa: BLE001 - any error at all is a failure to continue
        return f"{type(error).__name__}: {error}"
    if found.keys() != expected.keys():
        return f"files {sorted(found.keys() ^ expected.keys())}"
    return next((name for name in expected if found[name] != expected[name]), None)


def one_sentence(error: BaseException, *named: object) -> None:
    assert isinstance(error, SpecGuardError)
    assert "\n" not in str(error)
    for name in named:
        assert str(name) in str(error)


# Against dense matrices --------------------------------------------------------------------------------------


class Dense:
    """Everything a study says of the exact settings, by whole matrices in float64 and the model's own layers."""

    def __init__(self, settings: SpectrumSettings) -> None:
        self.model = unfuse_attention(made().double())
        self.images = data().images.double()
        ids = torch.arange(COUNT)
        attack, ball = PGD(steps=20, leave=False), Ball(settings.ball.norm, settings.ball.radius)
        found = [
            attack(made().double(), self.images[some], data().labels[some], ball, ids=some, seed=settings.seed)
            for some in ids.split(settings.batch)
        ]
        self.attacked = torch.cat([f.images for f in found])

    def before(self, name: str) -> Callable[[Tensor], Tensor]:
        """Images to the input of a part, as the model's own layers are named."""
        m = self.model
        stem = [m.normalise, m.patches, m.class_token, m.positions]
        first, second = m.blocks
        layers = {
            "embedding": [], "network": [], "head": [*stem, first, second],
            "blocks.0": stem, "blocks.0.attention": stem, "blocks.0.mlp": [*stem, first.attention],
            "blocks.1": [*stem, first], "blocks.1.attention": [*stem, first],
            "blocks.1.mlp": [*stem, first, second.attention],
        }[name]  # fmt: skip
        return torch.nn.Sequential(*layers)

    def step(self, name: str) -> Callable[[Tensor], Tensor]:
        m = self.model
        if name == "embedding":
            return torch.nn.Sequential(m.normalise, m.patches, m.class_token, m.positions)
        if name == "head":
            return torch.nn.Sequential(m.norm, m.pool, m.head)
        return m if name == "network" else m.get_submodule(name)

    def matrices(self, name: str) -> tuple[Tensor, Tensor]:
        """J_F (or J) and I + J_F (or J) of every image."""
        at, step = self.before(name)(self.images), self.step(name)
        whole = dense(step, at)
        return (whole - torch.eye(whole.shape[1]).double() if "." in name else whole), whole

    def lengths(self, name: str) -> tuple[list[float], list[float]]:
        clean, moved = self.before(name)(self.images), self.before(name)(self.attacked)
        step = self.step(name)
        with torch.no_grad():
            return tuple(x.flatten(1).norm(dim=1).tolist() for x in (moved - clean, step(moved) - step(clean)))


def dense(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    alone = [jacrev(lambda z: function(z.unsqueeze(0)).squeeze(0))(sample) for sample in x.detach()]
    return torch.stack([J.detach().reshape(-1, x[0].numel()) for J in alone])


@pytest.fixture(scope="module")
def exact() -> Dense:
    return Dense(EXACT)


NAMES = part_names(made())


@pytest.mark.parametrize("name", NAMES)
def test_every_record_is_what_whole_matrices_say(finished, exact, name):
    rows = [record["parts"][name] for record in records(finished(EXACT))]
    J, whole = exact.matrices(name)
    values = torch.linalg.svdvals(J)
    entering, leaving = exact.lengths(name)
    sums = (J.abs().sum(1).amax(1) * J.abs().sum(2).amax(1)).sqrt().tolist()
    kind = "residual" if "." in name else "map"
    last = name.rpartition(".")[2]
    for i, row in enumerate(rows):
        assert (row["kind"], row["group"]) == (kind, "block" if last.isdigit() else last)
        assert row["sigma"] == pytest.approx(values[i, :2].tolist(), rel=1e-7)
        assert row["step"] == pytest.approx(torch.linalg.svdvals(whole[i])[0].item(), rel=1e-7)
        assert row["entering"] == pytest.approx(entering[i], rel=1e-7)
        assert row["leaving"] == pytest.approx(leaving[i], rel=1e-7)
        assert row["row_column"] == pytest.approx(sums[i], rel=1e-9)
        assert row["row_column"] >= row["sigma"][0]
        assert row["converged"]
        assert len(row["residual"]) == 2
        assert all(0 <= r <= 1e-9 * row["sigma"][0] for r in row["residual"])
    if kind == "residual":  # the two are told apart
        assert all(abs(row["step"] - row["sigma"][0]) > 1e-3 for row in rows)


def test_there_is_one_record_per_image_in_order_with_its_label_and_all_parts(finished):
    found = records(finished(SETTINGS))
    assert [r["sample"] for r in found] == list(range(COUNT))
    assert [r["label"] for r in found] == data().labels.tolist()
    assert all(tuple(r["parts"]) == NAMES for r in found)


def distribution_by_hand(values: list[float]) -> dict[str, Any]:
    quantiles = {str(q): float(np.quantile(values, q / 100)) for q in (5, 25, 50, 75, 95)}
    return {"n": len(values), "mean": np.mean(values), "std": np.std(values), "quantiles": quantiles}


def same_distribution(found: Distribution | None, values: list[float], rel: float = 1e-7) -> None:
    expected = distribution_by_hand(values)
    assert found is not None
    assert found.n == expected["n"]
    assert found.mean == pytest.approx(expected["mean"], rel=rel)
    assert found.std == pytest.approx(expected["std"], rel=1e-5)
    assert found.quantiles == pytest.approx(expected["quantiles"], rel=rel)


def test_the_summary_is_what_whole_matrices_say(finished, exact):
    found = stored_summary(finished(EXACT))
    assert found.n == COUNT
    assert [part.name for part in found.parts] == list(NAMES)
    paths: dict[str, list[Tensor]] = {"exponent": [], "log_product": []}
    for part in found.parts:
        J, whole = exact.matrices(part.name)
        values, steps = torch.linalg.svdvals(J), torch.linalg.svdvals(whole)[:, 0]
        sums = (J.abs().sum(1).amax(1) * J.abs().sum(2).amax(1)).sqrt()
        assert len(part.sigma) == 2
        for i in range(2):
            same_distribution(part.sigma[i], values[:, i].tolist())
        same_distribution(part.step, steps.tolist())
        same_distribution(part.row_column_over_sigma, (sums / values[:, 0]).tolist())
        assert part.unconverged == 0
        if part.group == "block":
            paths["exponent"].append(values[:, 0])
            paths["log_product"].append(steps.log())
    for key, rows in paths.items():
        assert len(rows) == CONFIG.depth
        same_distribution(getattr(found, key), sum(rows).tolist())
    entering, leaving = exact.lengths("blocks.0")[0], exact.lengths("blocks.1")[1]
    same_distribution(found.growth, [math.log(b / a) for a, b in zip(entering, leaving, strict=True)])


def test_the_weights_of_the_summary_are_the_svd_of_both_models(tmp_path):
    found = start(tmp_path, QUICK, untrained=made(scale=0.1)).weights
    assert stored_summary(tmp_path).weights == found
    for weights, model in ((found.after, made()), (found.before, made(scale=0.1))):
        rows = {(row.layer, row.kind): row.sigma for row in weights}
        assert len(rows) == len(weights) == 2 * 6 + 2
        head = torch.linalg.svdvals(model.head.weight.double())[0].item()
        assert rows["head", "head"] == pytest.approx((head,), rel=1e-9)
        q = model.blocks[1].attention.branch.inner.qkv.weight[:6].double().unflatten(0, (2, 3))
        expected = tuple(torch.linalg.svdvals(q)[:, 0].tolist())
        assert rows["blocks.1.attention.branch.inner", "q"] == pytest.approx(expected, rel=1e-9)


def test_without_the_untrained_model_there_is_nothing_to_compare_with(finished):
    assert stored_summary(finished(QUICK)).weights.before is None


def test_the_summary_is_a_function_of_the_records_on_disk(finished):
    folder = finished(SETTINGS)
    found, study = read_json(folder / "summary.json"), read_record(folder / "study.json", SpectrumStudy)
    again = plain(summarize(stored_records(folder), study))
    said = again.keys() - {"environment", "seconds", "weights"}
    assert said == {"kind", "study", "n", "parts", "exponent", "log_product", "growth"}
    assert {key: found[key] for key in said} == {key: again[key] for key in said}
    assert found["study"] == read_json(folder / "study.json") == plain(study)
    assert study == SpectrumStudy(ABOUT, SETTINGS, NAMES)
    assert len(read_lines(folder / "environment.jsonl")) == 1


def test_a_study_is_these_files_and_returns_what_it_has_written(tmp_path):
    found = start(tmp_path / "study", QUICK)
    assert sorted(path.name for path in (tmp_path / "study").iterdir()) == [
        ".lock", "directions", "environment.jsonl", "records.jsonl", "study.json", "summary.json", "timing.jsonl",
    ]  # fmt: skip
    assert stored_summary(tmp_path / "study") == found
    timing = read_lines(tmp_path / "study" / "timing.jsonl")
    assert [line["begin"] for line in timing] == [0, 2, 4]
    assert found.seconds == {"total": pytest.approx(sum(line["seconds"]["total"] for line in timing))}
    assert found.seconds["total"] > 0


def test_single_precision_is_within_the_tolerance_of_double(finished):
    for one, other in zip(records(finished(SETTINGS)), records(finished(EXACT)), strict=True):
        for name in NAMES:
            a, b = one["parts"][name], other["parts"][name]
            assert a["sigma"][0] == pytest.approx(b["sigma"][0], rel=1e-3)
            assert a["step"] == pytest.approx(b["step"], rel=1e-3)
            assert a["sigma"][0] <= b["sigma"][0] * (1 + 1e-5)  # from below, but for rounding


def test_what_is_said_of_a_part_does_not_depend_on_which_others_are_looked_at(tmp_path, finished):
    start(tmp_path, changed(SETTINGS, parts="blocks.1.mlp,network"))
    for some, whole in zip(records(tmp_path), records(finished(SETTINGS)), strict=True):
        assert some["parts"] == {name: whole["parts"][name] for name in ("blocks.1.mlp", "network")}
    assert "exponent" not in read_json(tmp_path / "summary.json")


def test_pixels_stored_as_bytes_are_looked_at_in_0_to_1(tmp_path):
    images = (255 * data().images).round().to(torch.uint8)
    start(tmp_path / "bytes", QUICK, split=Dataset(images, data().labels))
    start(tmp_path / "floats", QUICK, split=Dataset(images / 255, data().labels))
    assert records(tmp_path / "bytes") == records(tmp_path / "floats")


@pytest.mark.parametrize("batch", [2, 50])
def test_how_images_are_put_together_changes_nothing_beyond_the_tolerance(tmp_path, finished, batch):
    start(tmp_path, changed(EXACT, batch=batch, parts="blocks.1,network", directions=0))
    for one, other in zip(records(tmp_path), records(finished(EXACT)), strict=True):
        for name in ("blocks.1", "network"):
            assert one["parts"][name]["sigma"] == pytest.approx(other["parts"][name]["sigma"], rel=1e-6)
            assert one["parts"][name]["leaving"] == pytest.approx(other["parts"][name]["leaving"], rel=1e-6)


def test_a_row_column_bound_is_there_only_for_parts_that_are_small_enough(finished):
    for record in records(finished(SETTINGS)):
        for name, part in record["parts"].items():
            if name in ("embedding", "network"):
                assert part["row_column"] >= part["sigma"][0] * (1 - 1e-5)
            else:
                assert part["row_column"] is None


def test_more_values_than_there_are_are_as_many_as_there_are(tmp_path):
    start(tmp_path, changed(EXACT, parts="head,network,embedding", top=20, batch=4, directions=0))
    for record in records(tmp_path):
        assert {n: len(p["sigma"]) for n, p in record["parts"].items()} == {
            "embedding": 16,
            "head": 5,
            "network": 5,
        }
    assert [len(part.sigma) for part in stored_summary(tmp_path).parts] == [16, 5, 5]


def test_values_that_did_not_converge_are_counted(tmp_path):
    found = start(tmp_path, changed(SETTINGS, most=1, tolerance=1e-6, directions=0))
    for part in found.parts:
        rows = [record["parts"][part.name] for record in records(tmp_path)]
        assert part.unconverged == sum(not row["converged"] for row in rows)
        for row in rows:
            assert row["converged"] == all(r <= 1e-6 * row["sigma"][0] for r in row["residual"])
    assert sum(part.unconverged for part in found.parts) > COUNT


def test_a_step_that_did_not_converge_is_counted_too(tmp_path, monkeypatch):
    """What bounds the growth is the product of steps: it must not be too small in silence."""
    real, calls = module.lower_singular_values, []

    def watched(A, *arguments, **options):
        found = real(A, *arguments, **options)
        calls.append(found.converged)
        return found

    monkeypatch.setattr(module, "lower_singular_values", watched)
    for most in (3, 5, 8):
        calls.clear()
        folder = tmp_path / str(most)
        summary = start(folder, changed(EXACT, parts="block", top=1, most=most, tolerance=1e-2, directions=0))
        pairs = list(zip(calls[::2], calls[1::2], strict=True))
        either = sum(int((~(values & steps)).sum()) for values, steps in pairs)
        assert sum(part.unconverged for part in summary.parts) == either, f"most={most}"


# The laws of the path ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [0, 1])
@pytest.mark.parametrize("parts", ["block", "blocks.0,blocks.2", "blocks.1"])
def test_a_tiny_perturbation_grows_no_more_than_the_steps_and_these_no_more_than_the_exponent(
    tmp_path, parts, local
):
    """The first-order law, of whichever blocks were looked at."""
    model = made(replace(CONFIG, depth=3 + local, local_blocks=local))
    with torch.no_grad():
        for parameter in model.blocks[1].parameters():
            parameter.mul_(3)
        for name in (0, 2):
            for parameter in model.blocks[name].parameters():
                parameter.mul_(0.2)
    settings = changed(
        EXACT, parts=parts, ball=BallRecord(norm="l2", radius=1e-6), batch=5, dense=0, directions=0, top=1
    )
    start(tmp_path, settings, model=model)
    looked_at = stored_records(tmp_path)
    blocks = [n for n, p in looked_at[0].parts.items() if p.group == "block"]
    assert len(looked_at) == COUNT
    assert blocks
    for record in looked_at:
        found = path_of(record, blocks)
        assert found["growth"] <= found["log_product"] + 1e-4
        assert found["log_product"] <= found["exponent"] + 1e-9


def test_each_part_leaves_what_the_next_one_is_entered_by(finished):
    for record in records(finished(EXACT)):
        parts = record["parts"]
        chain = ["embedding", "blocks.0", "blocks.1", "head"]
        for one, other in itertools.pairwise(chain):
            assert parts[one]["leaving"] == pytest.approx(parts[other]["entering"], rel=1e-9)
        assert parts["embedding"]["entering"] == pytest.approx(parts["network"]["entering"], rel=1e-9)
        assert 0 < parts["network"]["entering"] <= 0.1 * (1 + 1e-9)
        assert parts["head"]["leaving"] == pytest.approx(parts["network"]["leaving"], rel=1e-9)


def test_without_a_perturbation_there_is_no_growth(tmp_path):
    found = start(
        tmp_path, changed(SETTINGS, parts="block", ball=BallRecord(norm="linf", radius=0.0), directions=0)
    )
    assert found.growth is not None
    assert found.growth.n == 0
    assert found.exponent is not None
    assert found.exponent.n == COUNT


# Directions --------------------------------------------------------------------------------------------------


def stored_directions(folder: Path) -> dict[str, Tensor]:
    files = sorted((folder / "directions").iterdir())
    tensors = [read_tensors(path) for path in files]
    return {name: torch.cat([t[name] for t in tensors]) for name in tensors[0]}


def test_directions_are_kept_for_the_first_images_beside_these_in_files_by_batch(finished):
    folder = finished(SETTINGS)
    assert sorted(p.name for p in (folder / "directions").iterdir()) == [
        "00000000.safetensors",
        "00000002.safetensors",
    ]
    found = stored_directions(folder)
    assert set(found) == {"images", "samples", *NAMES}
    assert found["samples"].tolist() == [0, 1, 2]
    assert torch.equal(found["images"], data().images[:3])
    for name in NAMES:
        assert found[name].shape == (3, 1, 4, 4)
        torch.testing.assert_close(found[name].flatten(1).norm(dim=1), torch.ones(3), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_direction_is_the_pull_back_of_the_first_right_singular_vector(finished, exact, name):
    found = stored_directions(finished(EXACT))
    assert found[name].dtype == torch.float64
    J, _ = exact.matrices(name)
    for i in range(COUNT):
        vector = torch.linalg.svd(J[i])[2][0]
        if name == "embedding":  # a value for every patch: no vector is the first, but it is amplified as much
            amplified = (J[i] @ found[name][i].flatten()).norm().item()
            assert amplified == pytest.approx(torch.linalg.svdvals(J[i])[0].item(), rel=1e-7)
            continue
        if name != "network":
            vector = dense(exact.before(name), exact.images[i : i + 1])[0].T @ vector
        assert (found[name][i].flatten() @ vector / vector.norm()).abs().item() == pytest.approx(1, abs=1e-6)


def test_directions_are_kept_only_on_request(tmp_path):
    start(tmp_path, changed(QUICK, directions=0))
    assert not (tmp_path / "directions").exists()


def test_a_direction_has_length_one_however_small_the_derivative_is(tmp_path):
    model = made()
    with torch.no_grad():
        model.patches.map.weight.mul_(1e-25)
    start(tmp_path, changed(QUICK, parts="blocks.0"), model=model)
    found = stored_directions(tmp_path)["blocks.0"]
    torch.testing.assert_close(found.flatten(1).norm(dim=1), torch.ones(3), rtol=0, atol=1e-4)


# What a study may not do -------------------------------------------------------------------------------------


def test_the_callers_model_stays_as_it_was(tmp_path):
    model = made().train()
    model.blocks[0].eval()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    modes = [layer.training for layer in model.modules()]
    start(tmp_path, changed(QUICK, precision="float64"), model=model)
    assert all(t.dtype == before[n].dtype and torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert [layer.training for layer in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())


def test_a_study_leaves_the_libraries_of_the_device_as_fast_and_deterministic_as_they_were(tmp_path):
    seen = set()
    flags = torch.backends.cudnn
    before = (flags.enabled, flags.deterministic, flags.benchmark, flags.allow_tf32)
    start(tmp_path, QUICK, watch=lambda progress: seen.add((flags.enabled, flags.deterministic, flags.allow_tf32)))
    assert seen == {(before[0], before[1], False)}
    assert (flags.enabled, flags.deterministic, flags.benchmark, flags.allow_tf32) == before


def test_a_watcher_is_told_of_every_part_of_every_batch(tmp_path):
    told: list[Progress] = []
    start(tmp_path, QUICK, watch=told.append)
    assert [p.done for p in told] == [0, 0, 1, 2, 2, 3, 4, 4, 5, 6]
    assert {p.total for p in told} == {6}
    assert [p.doing for p in told] == ["working", "blocks.0", "head"] * 3 + ["done"]


@pytest.mark.parametrize(
    "change",
    [
        {"top": 0}, {"most": 0}, {"batch": 0}, {"batch": -3}, {"dense": -1}, {"directions": -1}, {"tolerance": 0.0},
        {"tolerance": 1.0}, {"tolerance": -1e-3}, {"tolerance": math.nan}, {"precision": "float16"},
        {"precision": ""},
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(change):
    with pytest.raises(ConfigError) as caught:
        changed(SETTINGS, **change)
    one_sentence(caught.value)


def test_a_part_that_the_model_lacks_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError) as caught:
        start(tmp_path / "study", changed(QUICK, parts="blocks.7"))
    one_sentence(caught.value, "blocks.7")
    assert not (tmp_path / "study").exists()


SICK: dict[str, Callable[[ViT], None]] = {
    "NaN in the head": lambda m: m.head.weight.fill_(math.nan),
    "NaN in a block": lambda m: m.blocks[1].mlp.branch.inner.expand.weight.fill_(math.nan),
    "infinite logits": lambda m: m.head.bias.fill_(math.inf),
    "one infinite logit": lambda m: m.head.bias[0].fill_(math.inf),
    "squares overflow in the head": lambda m: m.head.weight.mul_(1e25),
    "logits overflow": lambda m: m.head.weight.mul_(1e38),
    "squares overflow in a block": lambda m: m.blocks[0].mlp.branch.inner.contract.weight.mul_(1e25),
    "products overflow": lambda m: [b.mlp.branch.inner.contract.weight.mul_(1e30) for b in m.blocks],
    "squares overflow in the embedding": lambda m: m.patches.map.weight.mul_(1e22),
}


@pytest.mark.parametrize("kind", SICK)
def test_a_model_whose_numbers_are_not_finite_is_refused_with_one_sentence_or_looked_at(tmp_path, kind):
    model = made()
    with torch.no_grad():
        SICK[kind](model)
    try:
        found = start(tmp_path, changed(SETTINGS, directions=0, top=1, most=20), model=model)
    except SpecGuardError as error:
        one_sentence(error)
    else:
        encode(found)  # which refuses what is not finite
        assert len(records(tmp_path)) == COUNT


# Death -------------------------------------------------------------------------------------------------------


def test_a_study_killed_before_any_part_ends_like_an_uninterrupted_one(tmp_path, finished):
    expected, found = outcome(finished(QUICK)), {}
    for call in itertools.count(1):
        folder, calls = tmp_path / str(call), itertools.count(1)

        def watch(progress: Progress, calls=calls, call=call) -> None:
            if next(calls) == call:
                raise Death

        try:
            start(folder, QUICK, watch=watch)
        except Death:
            assert not (folder / "summary.json").exists()
            found[call] = difference(folder, expected)
        else:
            break
    assert found == dict.fromkeys(range(1, 11))  # before each batch and each of its parts, and at the end


def test_a_study_killed_again_and_again_ends_like_an_uninterrupted_one(tmp_path, finished):
    seen: set[int] = set()

    def watch(progress: Progress) -> None:
        if progress.done not in seen:
            seen.add(progress.done)
            raise Death

    for _ in range(7):  # before each of two parts in three batches, and at the end
        with pytest.raises(Death):
            start(tmp_path / "study", QUICK, watch=watch)
    start(tmp_path / "study", QUICK, watch=watch)
    assert len(read_lines(tmp_path / "study" / "environment.jsonl")) == 8
    assert outcome(tmp_path / "study") == outcome(finished(QUICK))


def test_a_resumed_study_does_not_look_again_at_what_is_recorded(tmp_path):
    def stop(progress: Progress) -> None:
        if progress.done == 4:
            raise Death

    told: list[Progress] = []
    with pytest.raises(Death):
        start(tmp_path, QUICK, watch=stop)
    start(tmp_path, QUICK, watch=told.append)
    assert [p.done for p in told] == [4, 4, 5, 6]


def unfinished(folder: Path, source: Path, content: bytes) -> Path:
    """A study without its summary, with these bytes of records."""
    shutil.copytree(source, folder)
    (folder / "summary.json").unlink()
    (folder / "records.jsonl").write_bytes(content)
    return folder


def test_records_cut_at_any_byte_are_completed_and_a_batch_cut_short_is_done_again(tmp_path, finished):
    content, expected = (finished(QUICK) / "records.jsonl").read_bytes(), outcome(finished(QUICK))
    ends = [i + 1 for i, byte in enumerate(content) if byte == 10]
    lengths = {0, 1, *ends, *(end - 1 for end in ends[::2]), *(end + 40 for end in ends[1:-1:2])}
    found = {}
    for length in sorted(lengths):
        folder = unfinished(tmp_path / str(length), finished(QUICK), content[:length])
        found[length] = difference(folder, expected)
    assert len(found) > 10
    assert found == dict.fromkeys(found)


def test_records_with_a_line_begun_behind_the_last_one_lose_it(tmp_path, finished):
    content = (finished(QUICK) / "records.jsonl").read_bytes()
    folder = unfinished(tmp_path / "study", finished(QUICK), content + b'{"sample": 7, "la')
    assert difference(folder, outcome(finished(QUICK))) is None


def test_a_planted_study_that_keeps_half_a_batch_is_noticed(tmp_path, finished, monkeypatch):
    """The start of the iteration belongs to the batch: its rest alone would end with other digits."""
    lines = (finished(QUICK) / "records.jsonl").read_bytes().splitlines(keepends=True)
    folder = unfinished(tmp_path / "study", finished(QUICK), b"".join(lines[:3]))
    monkeypatch.setattr(Ledger, "is_complete", lambda ledger, begin: begin in ledger.records)
    assert difference(folder, outcome(finished(QUICK))) is not None


class Disk:
    """The file system as `records.files` sees it: the `last` request half done or not at all, then `error`."""

    def __init__(self, patch: pytest.MonkeyPatch, last: int, error: BaseException) -> None:
        self.last, self.error, self.requests = last, error, 0
        for name in ("replace", "fsync"):
            patch.setattr(os, name, self.all_or_nothing(getattr(os, name)))
        self.fdopen = os.fdopen
        patch.setattr(os, "fdopen", self.opened)

    def due(self) -> bool:
        self.requests += 1
        return self.requests == self.last

    def all_or_nothing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if self.due():
                raise self.error
            return real(*arguments)

        return call

    def opened(self, descriptor: int, mode: str) -> Any:
        handle = self.fdopen(descriptor, mode)
        if mode == "rb":
            return handle
        real = handle.write

        class Handle:
            write = staticmethod(lambda content: self.written(real, content))
            flush, fileno = handle.flush, handle.fileno
            __enter__ = lambda self: self  # noqa: E731
            __exit__ = lambda self, *_: handle.close()  # noqa: E731

        return Handle()

    def written(self, real: Callable[[bytes], int], content: bytes) -> int:
        if self.due():
            real(content[: len(content) // 2])
            raise self.error
        return real(content)


FULL = OSError(28, "No space left on device")


@pytest.mark.slow
@pytest.mark.parametrize("error", [Death(), FULL], ids=["killed", "disk full"])
def test_a_study_that_fails_at_any_request_to_the_file_system_ends_like_an_uninterrupted_one(
    tmp_path, monkeypatch, finished, error
):
    expected, found = outcome(finished(QUICK)), {}
    with monkeypatch.context() as patch:
        disk = Disk(patch, 0, error)
        start(tmp_path / "whole", QUICK)
    assert disk.requests > 20
    for last in range(1, disk.requests + 1, 2 if error is FULL else 1):
        folder = tmp_path / str(last)
        with monkeypatch.context() as patch:
            Disk(patch, last, error)
            with pytest.raises(Death if isinstance(error, Death) else RunError) as caught:
                start(folder, QUICK)
        if error is FULL:
            one_sentence(caught.value, folder, "No space left on device")
        found[last] = difference(folder, expected)
    assert found == dict.fromkeys(found)


def test_a_folder_for_directions_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "directions").write_bytes(b"precious")
    with pytest.raises(RunError) as caught:
        start(tmp_path, QUICK)
    one_sentence(caught.value, tmp_path / "directions")
    assert (tmp_path / "directions").read_bytes() == b"precious"


# Folders that are there already ------------------------------------------------------------------------------


@pytest.fixture
def complete(finished, tmp_path) -> Path:
    return shutil.copytree(finished(QUICK), tmp_path / "complete")


def test_a_finished_study_is_returned_as_it_is(complete):
    before = contents(complete)

    def watch(progress: Progress) -> None:
        raise AssertionError("something was looked at")

    assert start(complete, QUICK, watch=watch) == stored_summary(complete)
    assert contents(complete) == before


OTHER = {
    "seed": ({"seed": 4}, "seed: 1 before, 4 now"),
    "batch": ({"batch": 5}, "batch: 2 before, 5 now"),
    "top": ({"top": 2}, "top: 1 before, 2 now"),
    "precision": ({"precision": "float64"}, 'precision: "float32" before, "float64" now'),
    "ball": ({"ball": BallRecord(norm="linf", radius=0.1)}, 'ball.norm: "l2" before, "linf" now'),
    "parts": ({"parts": "head,block"}, "parts: "),
    "directions": ({"directions": 5}, "directions: 3 before, 5 now"),
    "tolerance": ({"tolerance": 1e-2}, "tolerance: 0.001 before, 0.01 now"),
}


@pytest.mark.parametrize("ended", [True, False], ids=["finished", "unfinished"])
@pytest.mark.parametrize("kind", OTHER)
def test_a_folder_with_other_settings_is_refused_by_the_difference_and_left_alone(complete, kind, ended):
    changes, named = OTHER[kind]
    if not ended:
        (complete / "summary.json").unlink()
    before = contents(complete)
    with pytest.raises(RunError) as caught:
        start(complete, changed(QUICK, **changes))
    one_sentence(caught.value, complete, named, "another folder")
    assert contents(complete) == before


@pytest.mark.parametrize("change", [{"model": "abd"}, {"data": "deg"}, {"dataset": "signal"}], ids=str)
def test_a_folder_of_another_model_or_other_data_is_refused(complete, change):
    (key,) = change
    with pytest.raises(RunError) as caught:
        start(complete, QUICK, about=msgspec.structs.replace(ABOUT, **change))
    one_sentence(caught.value, f'{key}: "{getattr(ABOUT, key)}" before, "{change[key]}" now')


def test_a_folder_of_more_or_fewer_images_is_refused(complete):
    fewer = Dataset(data().images[:4], data().labels[:4])
    with pytest.raises(RunError) as caught:
        start(complete, QUICK, split=fewer, about=msgspec.structs.replace(ABOUT, n=4))
    one_sentence(caught.value, "n: 5 before, 4 now")


def test_a_folder_in_use_is_refused(complete):
    with locked(complete), pytest.raises(RunError) as caught:
        start(complete, QUICK)
    one_sentence(caught.value, complete, "in use by another process")


# Records that are not what they should be ---------------------------------------------------------------------

GONE, NAN = "<gone>", math.nan


def altered(part: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in (part | changes).items() if value is not GONE}


WRONG_RECORDS: list[dict[str, Any]] = [
    {"sample": 0}, {"sample": 5}, {"sample": "1"}, {"sample": None}, {"sample": 1.0}, {"sample": GONE},
    {"label": 4}, {"label": "0"}, {"label": None}, {"label": GONE}, {"parts": GONE}, {"parts": []}, {"parts": {}},
    {"parts": {"blocks.0": {}, "head": {}}}, {"parts": {"blocks.0": 5, "head": []}},
]  # fmt: skip
WRONG_PARTS: list[dict[str, Any]] = [
    *({key: wrong} for key in ("step", "entering", "leaving") for wrong in (None, "1", [1.0], GONE, NAN, math.inf)),
    *({"sigma": wrong} for wrong in ([], 1.0, None, "1", [None], ["1"], [math.nan], [math.inf], [1.0, 0.5], GONE)),
    *({"residual": wrong} for wrong in ([], 1.0, None, [None], [NAN], [math.inf], [0.1, 0.1], [0.1, "x"], GONE)),
    *({"converged": wrong} for wrong in (None, 1, "true", GONE)),
    *({"row_column": wrong} for wrong in ("1", [1.0], math.nan, math.inf, GONE)),
    *({"kind": wrong} for wrong in (None, "flow", "map", GONE)),
    *({"group": wrong} for wrong in (None, 5, "head", GONE)),
    {"sigma": [-1.0]}, {"step": -1.0}, {"entering": -1.0}, {"sigma": [1.7e308]}, {"more": math.nan},
]  # fmt: skip


def continued_with(folder: Path, source: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    """A study whose second record, of a whole batch, was changed."""
    found = records(source)
    found[1] = change(found[1])
    return unfinished(folder, source, "".join(json.dumps(r) + "\n" for r in found).encode())


@pytest.mark.parametrize("change", WRONG_RECORDS, ids=str)
def test_a_record_of_another_study_is_refused_with_one_sentence(tmp_path, finished, change):
    change = {"label": (int(data().labels[1]) + 1) % 5} if change == {"label": 4} else change
    folder = continued_with(tmp_path / "study", finished(QUICK), lambda record: altered(record, **change))
    before = (folder / "records.jsonl").read_bytes()
    with pytest.raises(RunError) as caught:
        start(folder, QUICK)
    one_sentence(caught.value, folder / "records.jsonl")
    assert (folder / "records.jsonl").read_bytes() == before


@pytest.mark.parametrize("change", WRONG_PARTS, ids=str)
def test_a_record_with_a_part_that_cannot_be_is_refused_with_one_sentence(tmp_path, finished, change):
    def spoilt(record: dict[str, Any]) -> dict[str, Any]:
        record["parts"]["blocks.0"] = altered(record["parts"]["blocks.0"], **change)
        return record

    folder = continued_with(tmp_path / "study", finished(QUICK), spoilt)
    with pytest.raises(RunError) as caught:
        start(folder, QUICK)
    one_sentence(caught.value, folder / "records.jsonl")


@pytest.mark.parametrize("change", ["missing", "more", "order"])
def test_a_record_with_other_parts_is_refused_with_one_sentence(tmp_path, finished, change):
    def spoilt(record: dict[str, Any]) -> dict[str, Any]:
        parts = record["parts"]
        if change == "missing":
            del parts["head"]
        elif change == "more":
            parts["network"] = parts["head"]
        else:
            record["parts"] = dict(reversed(parts.items()))
        return record

    folder = continued_with(tmp_path / "study", finished(QUICK), spoilt)
    with pytest.raises(RunError) as caught:
        start(folder, QUICK)
    one_sentence(caught.value, folder / "records.jsonl", "does not belong to this study")


@pytest.mark.parametrize("line", [b"", b"{", b"[1]", b"7", b"\xff\xfe", b"[" * 100_000])
@pytest.mark.parametrize("place", [0, 4])
def test_a_line_that_is_no_record_is_refused_by_its_number(tmp_path, finished, line, place):
    lines = (finished(QUICK) / "records.jsonl").read_bytes().splitlines()
    lines.insert(place, line)
    folder = unfinished(tmp_path / "study", finished(QUICK), b"".join(text + b"\n" for text in lines))
    with pytest.raises(RunError) as caught:
        start(folder, QUICK)
    one_sentence(caught.value, folder / "records.jsonl", f"line {place + 1}")


def test_more_records_than_images_are_refused(tmp_path, finished):
    content = (finished(QUICK) / "records.jsonl").read_bytes()
    folder = unfinished(tmp_path / "study", finished(QUICK), content + content.splitlines(keepends=True)[-1])
    with pytest.raises(RunError) as caught:
        start(folder, QUICK)
    one_sentence(caught.value, folder / "records.jsonl")


@pytest.mark.parametrize("file", ["study.json", "summary.json", "environment.jsonl", "timing.jsonl"])
@pytest.mark.parametrize("content", [b"[]\n", b"{\n", b"\xff\xfe\n", b"{}\n", b"null\n"])
def test_a_file_of_the_folder_that_is_no_record_is_refused_by_name(complete, file, content):
    if file != "summary.json":
        (complete / "summary.json").unlink()
    if file == "environment.jsonl" and content == b"{}\n":
        return  # as good a record of a start as any
    (complete / file).write_bytes(content)
    with pytest.raises(RunError) as caught:
        start(complete, QUICK)
    one_sentence(caught.value, complete)


SPOILT: dict[str, Callable[[dict[str, Any]], Any]] = {
    "other settings": lambda s: s["study"]["settings"].update(seed=9),
    "no settings": lambda s: s["study"].pop("settings"),
    "no study": lambda s: s.pop("study"),
    "another kind": lambda s: s.update(kind="attack"),
    "no parts": lambda s: s.update(parts=[]),
    "n is text": lambda s: s.update(n="5"),
    "another n": lambda s: s.update(n=8),
    "weights gone": lambda s: s.pop("weights"),
    "parts are numbers": lambda s: s.update(parts=[1, 2]),
    "parts are empty": lambda s: s.update(parts=[{}, {}]),
    "a part gone": lambda s: s["parts"].pop(),
    "sigma gone": lambda s: s["parts"][0].pop("sigma"),
    "growth gone": lambda s: s.pop("growth"),
    "nothing of the weights": lambda s: s.update(weights={}),
    "another mean": lambda s: s["parts"][1]["step"].update(mean=0.5),
    "converged after all": lambda s: s["parts"][0].update(unconverged=0),
    "more": lambda s: s.update(more=1),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_a_damaged_summary_is_refused_with_one_sentence(complete, kind):
    """Who asked for the study goes on to print it."""
    summary = read_json(complete / "summary.json")
    assert summary["parts"][0]["unconverged"] > 0
    SPOILT[kind](summary)
    write_json(complete / "summary.json", summary)
    with pytest.raises(RunError) as caught:
        start(complete, QUICK)
    one_sentence(caught.value, complete / "summary.json")
