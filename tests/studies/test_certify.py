"""A study of certificates: three verdicts, never two at once; killed at any moment, it ends the same."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from specguard.certificates import certify
from specguard.certificates.methods import local
from specguard.data import Dataset
from specguard.errors import ConfigError, RunError, SoundnessError
from specguard.geometry import Ball
from specguard.nn import ViT, ViTConfig
from specguard.records.base import About
from specguard.records.certificate import METHOD_NAMES, CertificateSummary, CertifySettings
from specguard.records.io import read_record
from specguard.records.study import Progress
from specguard.studies import certify as module
from specguard.studies import run_certify

CPU = torch.device("cpu")
CONFIG = ViTConfig(
    image=4, patch=2, channels=1, classes=5, dim=6, depth=1, heads=2, mlp_ratio=2.0, mean=(0.4,), std=(0.3,),
    norm="none", activation="squareplus", pool="mean",
)  # fmt: skip
SETTINGS = CertifySettings(radii=(0.0, 0.01, 0.5), batch=3)
QUICK = msgspec.structs.replace(SETTINGS, methods=("local",), search=False)


def model() -> ViT:
    made, g = ViT(CONFIG), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=g))
    return made.eval()


def data(count: int = 8) -> Dataset:
    """The model's own answers as labels, but one that is wrong."""
    images = torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        labels = model()(images).argmax(1)
    labels[1] = (labels[1] + 1) % 5
    return Dataset((images * 255).round().to(torch.uint8), labels)


def about(**changes) -> About:
    return About(**{"model": "abc", "data": "def", "dataset": "noise", "n": 8} | changes)


def start(folder: Path, settings: CertifySettings = SETTINGS, split: Dataset | None = None, **changes):
    split = split or data()
    options = {name: changes.pop(name) for name in ("memory", "watch") if name in changes}
    known = about(n=len(split), **changes)
    return run_certify(model(), split, folder, settings, about=known, device=CPU, **options)


def lines(folder: Path, name: str = "records") -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def rewritten(folder: Path, records: list[dict]) -> None:
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(scope="module")
def complete(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("certified") / "study"
    start(folder)
    return folder


def test_records_say_what_certify_says(complete):
    split = data()
    images, labels = split.batch(slice(0, len(split)))
    for number, radius in enumerate(SETTINGS.radii):
        found = certify(model(), images, labels, Ball("l2", radius))
        for i, record in enumerate(lines(complete)):
            row = record["radii"][number]
            assert (row["verdict"] == "certified") == bool(found.certified[i])
            for method in METHOD_NAMES:
                bound, wanted = row["lower"][method], float(found.lower[method][i].min())
                bound = float("-inf") if bound is None else bound
                assert bound == pytest.approx(wanted, rel=1e-6, abs=1e-9)
                assert record["largest"][method] == pytest.approx(float(found.largest[method][i]), rel=2e-3)


def test_every_verdict_occurs_and_the_wrong_image_is_broken_from_the_start(complete):
    records = lines(complete)
    assert {row["verdict"] for record in records for row in record["radii"]} >= {"certified", "broken"}
    wrong = records[1]
    assert wrong["predicted"] != wrong["label"]
    assert wrong["margin"] < 0
    assert [row["verdict"] for row in wrong["radii"]] == ["broken"] * 3
    assert set(wrong["largest"].values()) == {0.0}


def test_the_summary_counts_what_the_records_say(complete):
    summary = json.loads((complete / "summary.json").read_text())
    records = lines(complete)
    assert summary["kind"] == "certify"
    assert summary["clean"]["count"] == sum(r["label"] == r["predicted"] for r in records)
    for number, row in enumerate(summary["radii"]):
        verdicts = [record["radii"][number]["verdict"] for record in records]
        assert row["certified"]["count"] == verdicts.count("certified")
        assert row["robust"]["count"] == len(records) - verdicts.count("broken")
        assert row["broken"] + row["unknown"] + row["certified"]["count"] == len(records)
        for method in METHOD_NAMES:
            assert row["by"][method]["count"] <= row["certified"]["count"]
    assert set(summary["seconds"]) >= {"total", "attack", "forward", "backward", *METHOD_NAMES}
    assert summary["seconds"]["total"] >= sum(v for n, v in summary["seconds"].items() if n != "total") > 0


def test_a_study_is_these_files_and_returns_what_it_has_written(tmp_path):
    result = start(tmp_path / "study", QUICK)
    assert isinstance(result, CertificateSummary)
    assert sorted(path.name for path in (tmp_path / "study").iterdir()) == [
        ".lock", "environment.jsonl", "records.jsonl", "study.json", "summary.json", "timing.jsonl",
    ]  # fmt: skip
    assert read_record(tmp_path / "study" / "summary.json", CertificateSummary) == result
    assert [line["begin"] for line in lines(tmp_path / "study", "timing")] == [0, 3, 6]


def test_started_again_it_is_what_it_was(complete, tmp_path):
    folder = shutil.copytree(complete, tmp_path / "study")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert start(folder) == read_record(complete / "summary.json", CertificateSummary)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("kept", [0, 1, 3, 4, 7, 8])
def test_a_study_that_was_cut_short_ends_with_the_same_records(complete, tmp_path, kept):
    folder = shutil.copytree(complete, tmp_path / "study")
    (folder / "summary.json").unlink()
    whole = (complete / "records.jsonl").read_bytes().splitlines(keepends=True)
    rest = whole[kept][:20] if kept < len(whole) else b""
    (folder / "records.jsonl").write_bytes(b"".join(whole[:kept]) + rest)
    start(folder)
    assert (folder / "records.jsonl").read_bytes() == (complete / "records.jsonl").read_bytes()


@pytest.mark.parametrize(
    "change",
    [
        {"sample": 3}, {"label": 9}, {"margin": None}, {"margin": "1"}, {"method": "magic"}, {"largest": {}},
        {"largest": dict.fromkeys(METHOD_NAMES, -1.0)}, {"losses": {"head": "much"}}, {"radii": []}, {"extra": 1},
        {"sample": 8}, {"sample": True}, {"label": None}, {"method": None}, {"method": "naive"},
        {"failures": {"local": "none"}}, {"method": "local"}, {"predicted": -1}, {"input": 7},
        {"largest": dict.fromkeys(METHOD_NAMES[::-1], 1.0)}, {"norms": {"head": {"norm": -1.0}}},
        {"proofs": {"magic": {}}}, {"proofs": {"local": {}}},
    ],
    ids=str,
)  # fmt: skip
def test_a_record_that_cannot_be_is_refused(complete, tmp_path, change):
    folder = shutil.copytree(complete, tmp_path / "study")
    found = lines(folder)
    found[0] |= change
    rewritten(folder, found)
    with pytest.raises(RunError, match=r"does not belong to this study|line 1 of .* is not a valid record"):
        start(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": "certified"}, {"verdict": "perhaps"}, {"radius": 0.4}, {"lower": {}}, {"extra": 1},
        {"lower": dict.fromkeys(METHOD_NAMES, 1.0)},
        {"proved": [{"method": "local", "classes": [1], "lower": 1.0}]},
        {"stages": [{"method": "local", "classes": 4, "left": 4}]},
    ],
    ids=str,
)  # fmt: skip
def test_a_row_that_cannot_be_is_refused(complete, tmp_path, change):
    folder = shutil.copytree(complete, tmp_path / "study")
    found = lines(folder)
    assert found[1]["radii"][2]["verdict"] == "broken"
    found[1]["radii"][2] |= change
    rewritten(folder, found)
    with pytest.raises(RunError, match=r"does not belong to this study|line 2 of .* is not a valid record"):
        start(folder)


def test_a_summary_that_says_something_else_is_refused(complete, tmp_path):
    folder = shutil.copytree(complete, tmp_path / "study")
    summary = json.loads((folder / "summary.json").read_text())
    for change in (
        {"limits": []}, {"n": 7}, {"kind": "smooth"}, {"extra": 1}, {"study": summary["study"] | {"attack": {}}},
        {"clean": summary["clean"] | {"count": 8}}, {"vacuous_below": 1.0}, {"radii": summary["radii"][:2]},
    ):  # fmt: skip
        (folder / "summary.json").write_text(json.dumps(summary | change))
        with pytest.raises(RunError, match=r"summary\.json"):
            start(folder)


def test_a_verdict_that_its_bounds_deny_is_refused(complete, tmp_path):
    folder = shutil.copytree(complete, tmp_path / "study")
    found = lines(folder)
    found[1]["radii"][2]["verdict"] = "certified"
    rewritten(folder, found)
    with pytest.raises(RunError, match="does not belong"):
        start(folder)


def test_other_settings_another_model_and_fewer_images_are_refused(complete):
    with pytest.raises(RunError, match="another folder"):
        start(complete, msgspec.structs.replace(SETTINGS, radii=(0.1,)))
    with pytest.raises(RunError, match="another folder"):
        start(complete, model="xyz")
    with pytest.raises(RunError, match="n: 8 before, 4 now"):
        start(complete, split=data(4))


def test_an_image_that_is_certified_and_broken_ends_everything(tmp_path, monkeypatch):
    monkeypatch.setattr(
        module._Prover, "_broken", lambda self, batch, ball: torch.ones(len(batch.labels), dtype=torch.bool)
    )
    with pytest.raises(SoundnessError, match="image 0 is certified by local and broken at radius 0"):
        start(tmp_path / "study", QUICK)
    assert not (tmp_path / "study" / "summary.json").exists()


def test_an_unsound_bound_is_caught_by_the_attack(tmp_path, monkeypatch):
    """The test of the tester: margins that can lose nothing are refuted at once."""
    true = local.Local.upper_loss

    def nothing(self, problem, reach):
        loss = true(self, problem, reach)
        return replace(loss, total=0 * loss.total)

    monkeypatch.setattr(local.Local, "upper_loss", nothing)
    with pytest.raises(SoundnessError, match="broken at radius 2"):
        start(tmp_path / "study", msgspec.structs.replace(QUICK, radii=(2.0,)))


def test_linf_is_certified_through_the_l2_ball_around_it(tmp_path, complete):
    """Images of 16 numbers: an linf radius of r lies in an l2 radius of 4 r."""
    start(tmp_path / "study", msgspec.structs.replace(SETTINGS, norm="linf", radii=(0.0025,)))
    for linf, l2 in zip(lines(tmp_path / "study"), lines(complete), strict=True):
        for method in METHOD_NAMES:
            square, around = linf["radii"][0]["lower"][method], l2["radii"][1]["lower"][method]
            if around is None:  # zonotope leaves out what is misclassified
                assert square is None
            elif method in ("adjoint", "mixed", "zonotope"):  # which know more of the linf ball itself
                assert square >= around - 1e-9
            else:
                assert square == pytest.approx(around, abs=1e-9)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"radii": ()}, "at least one radius"), ({"radii": (0.1, 0.1)}, "twice"), ({"radii": (-0.1,)}, "negative"),
        ({"methods": ()}, "one method"), ({"methods": ("magic",)}, "magic"), ({"batch": 0}, "batch"),
        ({"norm": "l1"}, "l1"), ({"methods": ("local", "local")}, "twice"), ({"radii": (float("nan"),)}, "finite"),
        ({"radii": (float("inf"),)}, "finite"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(changes, named):
    with pytest.raises(ConfigError, match=named):
        CertifySettings(**changes)


def test_a_study_within_a_budget_of_memory_is_taken_in_parts_and_is_the_same_study(tmp_path, monkeypatch):
    start(tmp_path / "whole", QUICK)
    taken, proved = [], module._Prover._whole

    def noted(self, batch, broken_at):
        taken.append(len(batch.samples))
        return proved(self, batch, broken_at)

    monkeypatch.setattr(module._Prover, "_whole", noted)
    start(tmp_path / "parts", QUICK, memory=150_000)
    assert sum(taken) == len(data())
    assert max(taken) < QUICK.batch
    for whole, parts in zip(lines(tmp_path / "whole"), lines(tmp_path / "parts"), strict=True):
        assert whole["sample"] == parts["sample"]
        for one, other in zip(whole["radii"], parts["radii"], strict=True):
            assert one["verdict"] == other["verdict"]
            assert one["lower"]["local"] == pytest.approx(other["lower"]["local"], rel=1e-9, abs=1e-9)
    with pytest.raises(ConfigError, match="one image alone takes about"):
        start(tmp_path / "none", QUICK, memory=1000)


def test_another_memory_resumes_a_study_with_the_symbols_that_it_began_with(tmp_path):
    settings, folder = msgspec.structs.replace(QUICK, methods=("local", "zonotope"), symbols=30), tmp_path / "study"
    start(folder, settings)
    (folder / "summary.json").unlink()
    records = (folder / "records.jsonl").read_text().splitlines(keepends=True)
    (folder / "records.jsonl").write_text("".join(records[: len(records) // 2]))
    again = start(folder, msgspec.structs.replace(settings, symbols=None))  # as many as fit would be more
    assert again.study.settings.symbols == 30
    assert (folder / "records.jsonl").read_text() == "".join(records)
    with pytest.raises(RunError, match="symbols"):
        start(folder, msgspec.structs.replace(settings, symbols=31))
    less = msgspec.structs.replace(settings, symbols=None)
    assert start(folder, less, memory=50_000) == again  # nothing is left to compute
    (folder / "summary.json").unlink()
    with pytest.raises(ConfigError, match="GiB an image with 30 symbols, more than"):
        start(folder, less, memory=50_000)


def test_a_study_that_zonotopes_did_not_fit_goes_on_without_them_only(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "images_within", lambda memory, work: 1)
    settings = msgspec.structs.replace(QUICK, methods=("local", "zonotope"))
    first = start(tmp_path / "study", settings, memory=50_000)
    assert "zonotope" not in first.largest
    assert start(tmp_path / "study", settings) == first
    (tmp_path / "study" / "summary.json").unlink()
    with pytest.raises(ConfigError, match="began with a memory in which zonotope did not fit"):
        start(tmp_path / "study", settings)
    with pytest.raises(ConfigError, match="more than"):
        start(tmp_path / "alone", msgspec.structs.replace(QUICK, methods=("zonotope",)), memory=1000)
    assert not (tmp_path / "alone").exists()


def test_zonotopes_that_do_not_fit_the_memory_say_so_and_other_methods_go_on(tmp_path, monkeypatch):
    settings = msgspec.structs.replace(QUICK, methods=("local", "zonotope"))
    monkeypatch.setattr(module, "images_within", lambda memory, work: 1)  # which measures the other methods
    summary = start(tmp_path / "study", settings, memory=50_000)
    assert summary.study.settings.symbols is None
    assert [(each.method, each.images) for each in summary.failures] == [("zonotope", len(data()))]
    assert "more than" in summary.failures[0].reason
    for record in lines(tmp_path / "study"):
        assert record["radii"][0]["lower"]["zonotope"] is None
        assert record["radii"][0]["lower"]["local"] is not None


@pytest.mark.filterwarnings("ignore:radius")
def test_what_is_infinite_is_named_and_not_taken_for_rounding(tmp_path):
    """At an absurd radius remainders are infinite; the summary says whose."""
    huge = msgspec.structs.replace(QUICK, radii=(1e300,), methods=("adjoint",))
    summary = start(tmp_path / "study", huge)
    assert all(record["radii"][0]["lower"]["adjoint"] is None for record in lines(tmp_path / "study"))
    assert any(None in record["losses"].values() for record in lines(tmp_path / "study"))
    assert "rounding" not in [entry.term for entry in summary.limits]
    assert start(tmp_path / "study", huge) == summary


def test_radii_that_are_whole_numbers_are_the_same_study_again(tmp_path):
    settings = msgspec.structs.replace(QUICK, radii=(0, 1))
    assert start(tmp_path / "study", settings) == start(tmp_path / "study", settings)


def test_killed_it_keeps_whole_batches_and_ends_the_same(complete, tmp_path):
    def dying(progress: Progress) -> None:
        if progress.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "study", watch=dying)
    assert len(lines(tmp_path / "study")) == 6
    start(tmp_path / "study")
    assert (tmp_path / "study" / "records.jsonl").read_bytes() == (complete / "records.jsonl").read_bytes()


def test_verifiers_need_methods_that_stop_early(tmp_path):
    class Nobody:
        name, rests_on, deterministic = "nobody", "nothing", True

    with pytest.raises(ConfigError, match="need stop_early"):
        run_certify(model(), data(), tmp_path / "x", QUICK, about=about(), device=CPU, verifiers=(Nobody(),))
    assert not (tmp_path / "x").exists()
