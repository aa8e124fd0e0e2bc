"""What earlier versions have written is read as the types of today, with all of its numbers, or refused."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from specguard.errors import RunError
from specguard.records.accuracy import Accuracy
from specguard.records.attack import AttackRecord, AttackStudy, AttackSummary
from specguard.records.base import plain
from specguard.records.certificate import (
    ARITHMETIC,
    VACUOUS,
    CertificateRecord,
    CertificateSummary,
    CertifyStudy,
    fits,
    summarize,
)
from specguard.records.check import CheckSummary
from specguard.records.legacy import (
    is_unsupported_summary,
    old_records,
    old_seconds,
    read_certificates,
    read_stored_summary,
    read_study,
    read_summary,
    study_records,
)
from specguard.records.smoothing import SmoothSummary
from specguard.records.spectrum import SpectrumStudy, SpectrumSummary
from specguard.records.study import check_summary
from specguard.records.training import TrainingSummary

RECIPES = Path(__file__).parents[2] / "recipes"
PROOFS = RECIPES / "cifar10_certified" / "attention" / "proofs"
KINDS: dict[str, type[Any]] = {
    "result": TrainingSummary,
    "pgd": AttackSummary,
    "pgd_first1000": AttackSummary,
    "autoattack": AttackSummary,
    "full": AttackSummary,
    "certificates": CertificateSummary,
    "adjoint": CertificateSummary,
    "mean_attention": CertificateSummary,
    "summary": CertificateSummary,
    "checked": CheckSummary,
    "spectrum": SpectrumSummary,
    "smooth": SmoothSummary,
    "before": AttackSummary,
    "after": AttackSummary,
    "cifar10-timm-attack": AttackSummary,
    "cifar10-timm-certificates": CertificateSummary,
    "cifar10-timm-checked": CheckSummary,
}
ROWS = {path.stem for path in (RECIPES / "relational").glob("*.json")}  # of a recipe's own type
NO_SUMMARIES = {"arguments", "model", "baseline", "certification", "run", "entropy", "linear", "compared"}
OTHERS = NO_SUMMARIES | ROWS
FILES = sorted(path.relative_to(RECIPES).as_posix() for path in RECIPES.rglob("*.json"))


def of_kind(kind: type[Any]) -> list[str]:
    """The files of a kind that earlier versions wrote; those of today name their kind."""
    names = [name for name in FILES if KINDS.get(Path(name).stem) is kind]
    return [name for name in names if "kind" not in json.loads((RECIPES / name).read_text())]


def both(name: str) -> tuple[dict[str, Any], Any]:
    """A committed file as JSON, and as it is read."""
    return json.loads((RECIPES / name).read_text()), read_summary(RECIPES / name)


def renamed(record: dict[str, Any], **names: str) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in record.items()}


def written(folder: Path, name: str, record: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(record))
    return folder / name


# Committed summaries -----------------------------------------------------------------------------------------


def test_every_file_of_the_recipes_is_known_to_these_tests():
    assert {Path(name).stem for name in FILES} == KINDS.keys() | OTHERS
    found = Counter(KINDS[stem].__name__ for name in FILES if (stem := Path(name).stem) in KINDS)
    for kind, least in (("TrainingSummary", 40), ("AttackSummary", 30), ("CertificateSummary", 15)):
        assert found[kind] >= least
    assert found["SpectrumSummary"] >= 15
    assert found["CheckSummary"] >= 4


@pytest.mark.parametrize("name", [name for name in FILES if Path(name).stem in OTHERS])
def test_what_is_no_summary_is_none(name):
    assert read_summary(RECIPES / name) is None


@pytest.mark.parametrize("name", [name for name in FILES if Path(name).stem in KINDS])
def test_every_summary_is_read_as_its_type_and_read_again_as_it_is_written_today(name, tmp_path):
    found = read_summary(RECIPES / name)
    assert type(found) is KINDS[Path(name).stem]
    assert read_summary(written(tmp_path, "summary.json", plain(found))) == found


@pytest.mark.parametrize("name", of_kind(TrainingSummary))
def test_a_result_of_training_has_the_numbers_of_its_file(name):
    stored, found = both(name)
    assert {**plain(found), "environment": stored["environment"]} == {"kind": "training", **stored}
    assert plain(found.test_accuracy) == stored["test_accuracy"]
    assert found.test_accuracy.count == stored["metrics"]["test_correct"] or stored["weights"] == "ema"
    assert msgspec.structs.asdict(found.environment).items() >= stored["environment"].items()


@pytest.mark.parametrize("name", of_kind(AttackSummary))
def test_a_summary_of_attacks_has_the_numbers_of_its_file(name):
    stored, found = both(name)
    settings = stored["settings"]
    assert found.n == stored["n"] == stored["clean"]["n"]
    assert found.clean.count == stored["clean"]["count"]
    for part in ("clean", "attacks", "worst_case", "distances", "warnings", "flags"):
        assert plain(getattr(found, part)) == stored[part]
    assert [plain(row) for row in found.per_class] == [
        {key: value for key, value in renamed(row, **{"class": "name"}).items() if value not in (None, [])}
        for row in stored["per_class"]
    ]
    assert [row.accuracy.count for row in found.worst_case] == [
        row["accuracy"]["count"] for row in stored["worst_case"]
    ]
    study = found.study
    assert plain(study.about).items() >= {key: settings[key] for key in ("model", "data", "dataset", "n")}.items()
    assert study.stop_early is settings["cascade"] is stored["cascade"]
    assert plain(study.attacks) == settings["attacks"]
    assert plain(study.balls) == settings["balls"]
    for key in ("seed", "batch", "precision", "diagnose", "save_images"):
        assert getattr(study.settings, key) == settings[key]
    assert found.environment.commit == stored["environment"]["commit"]


@pytest.mark.parametrize("name", of_kind(CertificateSummary))
def test_a_summary_of_certificates_has_the_numbers_of_its_file(name):
    stored, found = both(name)
    settings, study = stored["settings"], found.study
    assert found.n == stored["n"] == settings["n"] == study.about.n
    assert plain(found.clean) == stored["clean"]
    assert [plain(row) for row in found.radii] == [renamed(row, attacked="robust") for row in stored["radii"]]
    for row, old in zip(found.radii, stored["radii"], strict=True):
        assert (row.robust.count, row.certified.count) == (old["attacked"]["count"], old["certified"]["count"])
        assert {key: by.count for key, by in row.by.items()} == {key: by["count"] for key, by in old["by"].items()}
        assert row.with_verifiers is None
    assert plain(found.largest) == stored["largest"]
    assert plain(found.limits) == stored["limits"]
    assert plain(found.growth) == stored.get("growth", [])
    assert found.vacuous_below == stored.get("vacuous_below", VACUOUS)
    assert study.settings.methods == tuple(settings["families"])
    assert study.settings.radii == tuple(settings["radii"])
    assert not study.settings.stop_early
    assert study.attack == settings["attack"]
    assert study.arithmetic == settings.get("arithmetic", ARITHMETIC)
    for key in ("norm", "search", "batch", "seed"):
        assert getattr(study.settings, key) == settings[key]
    assert plain(study.about).items() >= {key: settings[key] for key in ("model", "data", "dataset", "n")}.items()
    per_image = renamed(stored["seconds_per_image"], network="forward")
    seconds = {key: value * stored["n"] for key, value in per_image.items()}
    assert found.seconds == pytest.approx(seconds | {"total": sum(seconds.values())})


@pytest.mark.parametrize("name", of_kind(CheckSummary))
def test_a_summary_of_a_check_has_the_numbers_of_its_file(name):
    stored, found = both(name)
    for key in ("n", "claims", "attacked", "least_room"):
        assert getattr(found, key) == stored[key]
    assert found.third_party == stored.get("third_party", 0)
    settings = stored["settings"]
    assert (found.study.about.model, found.study.about.n) == (settings["model"], settings["n"])
    assert found.study.records == settings["records"]
    assert found.study.settings.seed == settings["seed"]
    assert settings["attack"] in (found.study.attack, found.study.attack["type"])
    assert found.environment.command == stored["environment"]["command"]


@pytest.mark.parametrize("name", of_kind(SpectrumSummary))
def test_a_summary_of_spectra_has_the_numbers_of_its_file(name):
    stored, found = both(name)
    settings, study = stored["settings"], found.study
    for key in ("n", "parts", "exponent", "log_product", "growth", "weights"):
        assert plain(getattr(found, key)) == stored[key]
    assert study.parts == tuple(settings["parts"])
    assert study.settings.parts == settings["wanted"]
    assert plain(study.settings.ball) == settings["ball"]
    for key in ("top", "tolerance", "most", "dense", "directions", "batch", "seed", "precision"):
        assert getattr(study.settings, key) == settings[key]
    assert plain(study.about).items() >= {key: settings[key] for key in ("model", "data", "dataset", "n")}.items()


# Committed certificates --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def proofs() -> tuple[CertifyStudy, list[CertificateRecord]]:
    return read_certificates(PROOFS / "records.jsonl")


def test_committed_certificates_are_read_record_by_record(proofs):
    study, records = proofs
    settings = json.loads((PROOFS / "certification.json").read_text())
    lines = [json.loads(line) for line in (PROOFS / "records.jsonl").read_text().splitlines()]
    assert len(records) == len(lines) == study.about.n == settings["n"] == 1000
    assert study == read_study(PROOFS)
    assert (study.settings.methods, study.settings.radii) == (("lofast", "local"), tuple(settings["radii"]))
    assert all(fits(record, study) for record in records)
    for record, line in zip(records, lines, strict=True):
        assert (record.sample, record.label, record.predicted) == (line["sample"], line["label"], line["predicted"])
        assert (record.margin, record.input, record.method) == (line["margin"], line["input"], line["family"])
        assert record.losses == line["loses"]
        assert record.largest == line["largest"]
        norms = {name: renamed(norm, mu_uncentred="mu_uncentered") for name, norm in line["norms"].items()}
        assert plain(record.norms) == norms
        assert plain(record.radii) == line["radii"]
        assert {name: plain(proof) for name, proof in record.proofs.items()} == {
            name: renamed(proof, rival="other_class", fall="loss") for name, proof in line.get("proofs", {}).items()
        }
    assert any(record.proofs for record in records)


def test_the_committed_summary_is_that_of_the_committed_certificates(proofs):
    study, records = proofs
    path = PROOFS / "summary.json"
    stored = read_stored_summary(path, study)
    check_summary(stored, summarize(records, study), path)
    assert stored.clean.count == sum(record.correct for record in records) == 612


def test_a_committed_summary_that_was_changed_by_hand_is_refused(proofs, tmp_path):
    study, records = proofs
    expected, whole = summarize(records, study), json.loads((PROOFS / "summary.json").read_text())
    one_more = plain(Accuracy.of(whole["radii"][0]["certified"]["count"] + 1, 1000))
    changes: list[dict[str, Any]] = [
        {"radii": [whole["radii"][0] | {"certified": one_more}, *whole["radii"][1:]]},
        {"clean": plain(Accuracy.of(613, 1000))},
        {"limits": [{"term": "rounding", "images": 612}]},
        {"largest": whole["largest"] | {"local": {"median": 0.5, "vacuous": 0}}},
        {"growth": []},
    ]
    for change in changes:
        path = written(tmp_path, "summary.json", whole | change)
        with pytest.raises(RunError, match="differs from its records"):
            check_summary(read_stored_summary(path, study), expected, path)
    for settings in ({"seed": 7}, {"batch": 5}, {"radii": whole["settings"]["radii"][:-1]}):
        path = written(tmp_path, "summary.json", whole | {"settings": whole["settings"] | settings})
        with pytest.raises(RunError, match=r"study differs|is malformed"):
            read_stored_summary(path, study)


def test_committed_certificates_are_read_one_at_a_time_too_and_have_their_time(proofs):
    assert list(study_records(PROOFS, CertificateRecord)) == proofs[1]
    (line,) = (PROOFS / "elapsed.jsonl").read_text().splitlines()
    assert old_seconds(PROOFS) == json.loads(line)["seconds"] > 0
    assert old_seconds(PROOFS.parent) is None


SPOILT_LINES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "unknown method": lambda r: r.update(family="magic"),
    "unknown field": lambda r: r.update(more=1),
    "no radii": lambda r: r.pop("radii"),
    "radii are a number": lambda r: r.update(radii=7),
    "a row that is none": lambda r: r.update(radii=["much"]),
    "a negative radius": lambda r: r["largest"].update(local=-1.0),
    "an unknown verdict": lambda r: r["radii"][0].update(verdict="perhaps"),
    "proofs that are none": lambda r: r.update(proofs=[1]),
    "half a proof": lambda r: r.update(proofs={"local": {"radius": 0.1}}),
}


@pytest.mark.parametrize("kind", SPOILT_LINES)
def test_an_old_record_that_cannot_be_is_refused_with_one_sentence(tmp_path, kind):
    shutil.copy(PROOFS / "certification.json", tmp_path)
    with (PROOFS / "records.jsonl").open() as lines:
        record = json.loads(next(lines))
    SPOILT_LINES[kind](record)
    file = tmp_path / "records.jsonl"
    file.write_text(json.dumps(record) + "\n")
    with pytest.raises(RunError, match=r"records\.jsonl is malformed") as caught:
        read_certificates(file)
    assert "\n" not in str(caught.value)


# Studies of earlier versions ---------------------------------------------------------------------------------


def test_certificates_that_hold_with_a_probability_are_refused(tmp_path):
    settings = json.loads((PROOFS / "certification.json").read_text())
    assert settings["failure_probability"] == 0
    written(tmp_path, "certification.json", settings | {"failure_probability": 0.001})
    (tmp_path / "records.jsonl").write_text("")
    with pytest.raises(RunError, match="are not proofs"):
        read_certificates(tmp_path / "records.jsonl")


@pytest.mark.parametrize("name", ["verification.json", "smoothing.json"])
def test_a_study_of_which_only_the_summary_is_read_is_refused(tmp_path, name):
    written(tmp_path, name, {})
    with pytest.raises(RunError, match=f"{name} is of an earlier version, and only its summary is read"):
        read_study(tmp_path)


def test_a_folder_without_a_study_and_one_of_another_kind_have_no_certificates(tmp_path):
    with pytest.raises(RunError, match=r"does not hold a study: there is no study\.json"):
        read_certificates(tmp_path / "records.jsonl")
    settings = json.loads((RECIPES / of_kind(SpectrumSummary)[0]).read_text())["settings"]
    written(tmp_path, "spectrum.json", settings)
    assert isinstance(read_study(tmp_path), SpectrumStudy)
    with pytest.raises(RunError, match="holds no certificates"):
        read_certificates(tmp_path / "records.jsonl")
    written(tmp_path / "new", "smoothing.json", {})
    with pytest.raises(RunError, match="counts and not proofs"):
        read_certificates(tmp_path / "new" / "records.jsonl")


def test_old_attacks_are_one_record_per_image(tmp_path):
    stored = json.loads((RECIPES / of_kind(AttackSummary)[0]).read_text())
    written(tmp_path, "evaluation.json", stored["settings"])
    study = read_study(tmp_path)
    assert isinstance(study, AttackStudy)
    assert study == read_summary(RECIPES / of_kind(AttackSummary)[0]).study
    line = {"label": 1, "before": 1, "norm": "linf", "predicted": 1, "distance": 0.0, "closest": None}
    lines = [
        {**line, "sample": 4, "attack": "a", "radius": 0.1, "broken": False, "warnings": ["w"]},
        {**line, "sample": 7, "attack": "a", "radius": 0.1, "broken": False},
        {**line, "sample": 4, "attack": "b", "radius": 0.1, "broken": True, "predicted": 2, "closest": 0.05,
         "warnings": ["w", "v"]},
    ]  # fmt: skip
    file = tmp_path / "records.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in lines))
    first, second = old_records(file, AttackRecord)
    assert (first.sample, first.label, first.clean, first.warnings) == (4, 1, 1, ("w", "v"))
    assert [(o.attack, o.success, o.predicted, o.closest) for o in first.outcomes] == [
        ("a", False, 1, None), ("b", True, 2, 0.05),
    ]  # fmt: skip
    assert (second.sample, len(second.outcomes), second.warnings) == (7, 1, ())
    file.write_text(json.dumps(lines[0] | {"radius": -0.1}) + "\n")
    with pytest.raises(RunError, match=r"records\.jsonl is malformed"):
        list(old_records(file, AttackRecord))
    del lines[0]["broken"]
    file.write_text(json.dumps(lines[0]) + "\n")
    with pytest.raises(RunError, match=r"records\.jsonl is malformed: KeyError 'broken'"):
        list(old_records(file, AttackRecord))


def cascade() -> dict[str, Any]:
    """The summary of a certification that stopped early, as it was written before."""
    settings = json.loads((PROOFS / "certification.json").read_text())
    settings = {key: value for key, value in settings.items() if key != "search"}
    settings |= {"n": 4, "radii": [0.1], "verifiers": {"abc": "a solver"}}
    return {
        "kind": "cascade",
        "n": 4,
        "clean": plain(Accuracy.of(3, 4)),
        "rests_on": {"abc": "a solver"},
        "radii": [
            {
                "radius": 0.1,
                "attacked": plain(Accuracy.of(3, 4)),
                "certified": plain(Accuracy.of(1, 4)),
                "with_third_party": plain(Accuracy.of(2, 4)),
                "broken": 1,
                "unknown": 1,
                "stages": [{"stage": "local", "images": 3, "rivals": 12, "certified": 1}],
            }
        ],
        "reasons": [{"stage": "abc", "reason": "it gave up", "images": 1}],
        "seconds": [{"stage": "local", "seconds": 1.5}, {"stage": "abc", "seconds": 2.0},
                    {"stage": "local", "seconds": 0.5}],
        "settings": settings,
        "environment": {"commit": "c"},
    }  # fmt: skip


def test_a_cascade_is_a_certification_that_stops_early(tmp_path):
    found = read_summary(written(tmp_path, "summary.json", cascade()))
    assert isinstance(found, CertificateSummary)
    assert found.study.settings.stop_early
    assert not found.study.settings.search
    assert found.study.verifiers == {"abc": "a solver"}
    (row,) = found.radii
    assert (row.robust.count, row.certified.count, row.with_verifiers.count) == (3, 1, 2)
    assert plain(row.stages) == [{"method": "local", "images": 3, "classes": 12, "certified": 1}]
    assert plain(found.failures) == [{"method": "abc", "reason": "it gave up", "images": 1}]
    assert found.seconds == {"local": 2.0, "abc": 2.0, "total": 4.0}
    assert found.environment.commit == "c"


@pytest.mark.parametrize(
    "change",
    [{"kind": "waterfall"}, {"rests_on": {}}, {"reasons": 7}, {"radii": [{}]}, {"n": 5}, {"seconds": ["much"]},
     {"more": 1}, {"settings": {}}],
    ids=str,
)  # fmt: skip
def test_a_cascade_that_cannot_be_is_refused_with_one_sentence(tmp_path, change):
    with pytest.raises(RunError, match="is malformed") as caught:
        read_summary(written(tmp_path, "summary.json", cascade() | change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "kind", [TrainingSummary, AttackSummary, CertificateSummary, CheckSummary, SpectrumSummary]
)
def test_an_old_summary_that_contradicts_itself_or_lacks_something_is_refused(tmp_path, kind):
    whole = json.loads((RECIPES / of_kind(kind)[0]).read_text())
    accuracy = {"value": 0.5, "count": 1, "n": 3, "interval95": [0.0, 1.0]}
    wrong: list[dict[str, Any]] = [{"settings": {}}, {"settings": 7}]
    if kind is TrainingSummary:
        wrong += [{"test_accuracy": accuracy}, {"weights": "best"}, {"metrics": {}}]
    else:
        wrong += [{"n": whole["n"] + 1}, {"n": "many"}]
    if kind in (AttackSummary, CertificateSummary):
        wrong += [{"clean": accuracy}]
    for change in wrong:
        with pytest.raises(RunError, match="is malformed") as caught:
            read_summary(written(tmp_path, "summary.json", whole | change))
        assert "\n" not in str(caught.value)


def test_old_summaries_of_sensitivity_and_smoothing_are_known_and_not_read(tmp_path):
    for record in ({"layer": "blocks.0", "n": 3, "radii": [], "weights": [], "settings": {}},
                   {"kind": "probabilistic", "about": "noise", "n": 3, "radii": [], "settings": {}}):  # fmt: skip
        assert is_unsupported_summary(record)
        assert read_summary(written(tmp_path, "result.json", record)) is None
    assert not is_unsupported_summary({"n": 3, "settings": {}})
