"""Directories that another version has left: read as they are, or refused with a sentence that says so."""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from helpers import companions, old_runs
from helpers.studies import CPU, STUDIES, model
from specguard.data import Dataset
from specguard.errors import RunError, SpecGuardError
from specguard.models import from_run
from specguard.records import attack, certificate, legacy, spectrum
from specguard.records.attack import AttackRecord, AttackStudy, AttackSummary
from specguard.records.certificate import CertificateRecord, CertificateSummary, CertifyStudy
from specguard.records.check import CheckSettings, CheckSummary
from specguard.records.io import read_lines, rewrite_records
from specguard.records.smoothing import SmoothRecord, SmoothSummary
from specguard.records.spectrum import SpectrumRecord, SpectrumStudy, SpectrumSummary
from specguard.records.study import check_summary
from specguard.records.training import TrainingSummary
from specguard.studies import checked_study, run_check
from specguard.version import __version__

RECIPES = Path(__file__).parents[2] / "recipes"


# Studies in the formats before 0.2 -------------------------------------------------------------------------------

READ: dict[str, tuple[Any, Any, Any, Any]] = {  # what a study, its records and its summary are read as
    "attack": (AttackStudy, AttackRecord, AttackSummary, lambda r, s: attack.summarize(r, s, tuple("abcde"))),
    "cascade of attacks": (
        AttackStudy,
        AttackRecord,
        AttackSummary,
        lambda r, s: attack.summarize(r, s, tuple("abcde")),
    ),
    "certify": (CertifyStudy, CertificateRecord, CertificateSummary, certificate.summarize),
    "cascade": (CertifyStudy, CertificateRecord, CertificateSummary, certificate.summarize),
    "spectrum": (SpectrumStudy, SpectrumRecord, SpectrumSummary, spectrum.summarize),
}


@pytest.mark.parametrize("name", READ)
def test_an_old_study_is_read_as_one_of_today_and_its_records_give_its_summary(tmp_path, name):
    folder, (study_kind, kind, summary_kind, summarize) = old_runs.write(name, tmp_path / "study"), READ[name]
    study, summary = legacy.read_study(folder), legacy.read_summary(folder / "summary.json")
    assert type(study) is study_kind
    assert type(summary) is summary_kind
    assert summary.study == study
    assert (study.about.dataset, study.about.data, study.about.n) == ("noise", "def", 3)
    assert summary.environment.commit == "0a264b9"
    digest = hashlib.sha256()
    records = list(legacy.study_records(folder, kind, digest=digest))
    assert digest.hexdigest() == hashlib.sha256((folder / "records.jsonl").read_bytes()).hexdigest()
    assert [record.sample for record in records] == [0, 1, 2]
    assert [record.label for record in records] == [0, 1, 4]
    check_summary(summary, summarize(records, study), folder / "summary.json", ("flags", "weights"))
    if kind is AttackRecord:
        assert all(attack.fits(record, study) for record in records)
    if kind is CertificateRecord:
        assert all(certificate.fits(record, study) for record in records)


@pytest.mark.parametrize("name", ["attack", "cascade of attacks"])
def test_the_lines_of_an_old_attack_are_the_outcomes_of_its_images(tmp_path, name):
    folder = old_runs.write(name, tmp_path / "study")
    lines, settings = (old_runs.STUDIES[name][file] for file in ("records.jsonl", "evaluation.json"))
    records = legacy.old_records(folder / "records.jsonl", AttackRecord)
    found = [(r.sample, r.label, r.clean, *msgspec.structs.astuple(o)) for r in records for o in r.outcomes]
    keys = ("sample", "label", "before", "attack", "norm", "radius", "predicted", "broken", "distance", "closest")
    assert sorted(found, key=str) == sorted((tuple(line[key] for key in keys) for line in lines), key=str)
    study = legacy.read_study(folder)
    assert isinstance(study, AttackStudy)
    assert study.stop_early == settings["cascade"] == (name != "attack")
    assert [(ball.norm, ball.radius) for ball in study.balls] == [("l2", 0.1), ("l2", 2.0)]
    assert [each.settings for each in study.attacks] == [each["settings"] for each in settings["attacks"]]
    assert (study.settings.batch, study.settings.diagnose) == (2, name == "attack")


@pytest.mark.parametrize("name", ["certify", "cascade"])
def test_what_were_families_are_methods(tmp_path, name):
    study = legacy.read_study(old_runs.write(name, tmp_path / "study"))
    assert isinstance(study, CertifyStudy)
    assert study.settings.methods == ("naive", "local")
    assert study.settings.stop_early == (name == "cascade")
    assert study.settings.radii == (0.01, 0.3)
    assert study.attack["type"] == "PGD"
    assert study.verifiers == {}


@pytest.mark.parametrize(("name", "kind"), [("smooth", SmoothSummary), ("check", CheckSummary)])
def test_of_others_the_summary_is_read_and_the_rest_refused_with_one_sentence(tmp_path, name, kind):
    folder = old_runs.write(name, tmp_path / "study")
    summary, old = legacy.read_summary(folder / "summary.json"), old_runs.STUDIES[name]["summary.json"]
    assert type(summary) is kind
    assert summary.n == summary.study.about.n == old["n"] == 3
    if isinstance(summary, SmoothSummary):
        assert summary.clean.count == old["right"]["count"] == 1
        assert [row.certified.count for row in summary.radii] == [1]
        assert summary.study.settings.smoothing.sigma == old["sigma"] == 0.2
        assert summary.failure_probability.any_of_all == 0.03
    if isinstance(summary, CheckSummary):
        assert (summary.claims, summary.attacked) == (old["claims"], old["attacked"])
    with pytest.raises(RunError, match="is of an earlier version, and only its summary is read"):
        legacy.read_study(folder)


def test_probabilistic_certificates_are_never_taken_for_proofs(tmp_path):
    folder = old_runs.write("smooth", tmp_path / "study")
    with pytest.raises(RunError, match="holds probabilistic certificates of smoothing"):
        legacy.read_certificates(folder / "records.jsonl")
    with pytest.raises(RunError, match=r"records\.jsonl"):
        list(legacy.old_records(folder / "records.jsonl", SmoothRecord))


@pytest.mark.parametrize("name", ["certify", "cascade"])
def test_old_certificates_are_proved_again(tmp_path, name):
    folder = old_runs.write(name, tmp_path / "study")
    images = torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(4))  # as the old study had
    three = Dataset(images, torch.tensor([0, 1, 4]))
    claimed = checked_study(folder / "records.jsonl")
    found, believed = run_check(
        claimed, model(), three, tmp_path / "checked", data="def", device=CPU, settings=CheckSettings()
    )
    assert (found.n, believed) == (3, 0)
    if name == "certify":
        assert found.claims == old_runs.STUDIES["check"]["summary.json"]["claims"]


@pytest.mark.parametrize("name", ["attack", "certify", "cascade", "spectrum"])
@pytest.mark.parametrize("file", ["settings", "summary.json", "records.jsonl"])
def test_an_old_file_that_lacks_something_is_one_sentence_that_names_it(tmp_path, name, file):
    folder = old_runs.write(name, tmp_path / "study")
    settings = next(each for each in legacy.OLD_STUDIES if (folder / each).exists())
    path = folder / (settings if file == "settings" else file)
    lines = [json.loads(line) for line in path.read_text().splitlines()] if file == "records.jsonl" else None
    record = lines[0] if lines else json.loads(path.read_text())
    needed = {"settings": ("model", "data", "n"), "summary.json": ("n", "settings"), "records.jsonl": ("label",)}
    for key in needed[file]:
        bad = {other: value for other, value in record.items() if other != key}
        path.write_text("".join(json.dumps(line) + "\n" for line in [bad, *(lines or [])[1:]]))
        try:
            if file == "settings":
                found: Any = legacy.read_study(folder)
            elif file == "summary.json":
                found = legacy.read_summary(path)
            else:
                found = list(legacy.old_records(path, READ[name][1]))
        except RunError as error:
            assert "\n" not in str(error)  # noqa: PT017
            assert path.name in str(error) or "earlier version" in str(error)  # noqa: PT017
        else:
            assert found is None  # it is not known as a summary at all
            assert key == "settings"


def test_links_are_not_followed_in_an_old_study_either(tmp_path):
    folder = old_runs.write("attack", tmp_path / "study")
    (folder / "records.jsonl").rename(tmp_path / "elsewhere")
    (folder / "records.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match=r"records\.jsonl .*it is a link, which is not followed"):
        list(legacy.study_records(folder, AttackRecord))


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("left", old_runs.STUDIES)
def test_an_old_study_is_not_continued_but_refused_and_left_alone(tmp_path, name, left):
    folder = old_runs.write(left, tmp_path / "study")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(RunError, match=r"holds other records and no study\.json; name another folder"):
        STUDIES[name](folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"} == before


def test_all_committed_recipes_are_read():
    counts: Counter[type] = Counter()
    apart = ("run.json", "model.json", "arguments.json")
    for path in sorted(RECIPES.rglob("*.json")):
        if path.name not in apart and (found := legacy.read_summary(path)) is not None:
            counts[type(found)] += 1
    kinds = (TrainingSummary, AttackSummary, CertificateSummary, SpectrumSummary, CheckSummary)
    assert all(counts[kind] >= 4 for kind in kinds)


@pytest.mark.parametrize(
    "record", [{}, {"kind": "attack"}, {"kind": "later"}, {"kind": ["attack"]}, {"n": 3}, {"settings": {}}], ids=str
)
def test_another_object_is_no_summary(tmp_path, record):
    (tmp_path / "x.json").write_text(json.dumps(record))
    if record == {"kind": "attack"}:
        with pytest.raises(RunError, match=r"x\.json is malformed"):
            legacy.read_summary(tmp_path / "x.json")
    else:
        assert legacy.read_summary(tmp_path / "x.json") is None


# Work that another version has begun in the format of today ------------------------------------------------------


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("originals")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECGUARD_COMMIT", "test")
        companions.trained(folder, "sgd")
        for name, study in STUDIES.items():
            study(folder / name)
    return folder


@pytest.fixture
def old(originals, tmp_path, monkeypatch) -> Path:
    """The same directories, as if version 0.0.9 had begun them."""
    monkeypatch.setenv("SPECGUARD_COMMIT", "test")
    folder = shutil.copytree(originals, tmp_path / "old")
    for path in folder.rglob("environment.jsonl"):
        lines = read_lines(path)
        lines[0]["versions"]["specguard"] = "0.0.9"
        rewrite_records(path, lines)
    return folder


def changed(path: Path, change: Callable[[Any], object]) -> None:
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def test_finished_work_of_another_version_is_read_as_it_is(old):
    from_run(old / "sgd")
    companions.trained(old, "sgd", resume=True)
    for name, study in STUDIES.items():
        study(old / name)


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda r: r["settings"].pop("seed"), "settings.seed: null before, 0 now"),
        (lambda r: r["settings"].update(later=7), "settings.later: 7 before, null now"),
        (lambda r: r.update(kind="later"), 'kind: "later" before'),
    ],
    ids=["lost", "new", "of another kind"],
)
def test_a_study_with_settings_of_another_version_is_refused_by_both_versions(old, name, change, named):
    changed(old / name / "study.json", change)
    with pytest.raises(RunError, match=f"started by version '0.0.9', and this is {__version__}") as caught:
        STUDIES[name](old / name)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "change", [lambda r: r["training"].pop("ema"), lambda r: r["training"].update(later=7)], ids=["lost", "new"]
)
def test_a_run_with_settings_of_another_version_is_not_resumed_by_this_one(old, change):
    changed(old / "sgd" / "run.json", change)
    (old / "sgd" / "result.json").unlink()
    if "ema" in json.loads((old / "sgd" / "run.json").read_text())["training"]:
        with pytest.raises(RunError, match=r"training\.later: 7 before, null now.*started by version '0\.0\.9'"):
            companions.trained(old, "sgd", resume=True)
    else:
        companions.trained(old, "sgd", resume=True)  # absent is as good as None, which is its default


@pytest.mark.parametrize("version", [None, 7, [], {}, "x" * 1000, "0.0.9\n0.1"])
def test_a_version_that_is_none_does_no_harm(old, version):
    path = old / "attack" / "environment.jsonl"
    rewrite_records(path, [{"versions": {"specguard": version}}])
    changed(old / "attack" / "study.json", lambda r: r.update(later=7))
    with pytest.raises(RunError, match="later") as caught:
        STUDIES["attack"](old / "attack")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(old))


def lost(key: str) -> Callable[[Any], object]:
    return lambda record: record.pop(key)


@pytest.mark.parametrize("key", ["config", "fingerprint"])
def test_a_model_without_what_this_version_needs_is_refused_with_one_sentence(old, key):
    changed(old / "sgd" / "model.json", lost(key))
    with pytest.raises(SpecGuardError) as caught:
        from_run(old / "sgd")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", STUDIES)
def test_records_in_the_form_of_another_version_are_refused_by_name(old, name):
    records = read_lines(old / name / "records.jsonl")
    for record in records:
        del record["label"]
    rewrite_records(old / name / "records.jsonl", records)
    (old / name / "summary.json").unlink()
    with pytest.raises(RunError, match=r"line 1 of .*records\.jsonl is not a valid record.*label"):
        STUDIES[name](old / name)
