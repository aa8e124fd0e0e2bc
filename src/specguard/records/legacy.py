"""Reading studies of this version and of earlier ones: the only module with the formats before 0.2.

Before 0.2, the settings of a study were in a file named after its kind, summaries had no kind, methods were called
families, and attacks had one line per attack and image. Such files are converted to the current types.
"""

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from specguard.errors import RunError
from specguard.records.attack import AttackRecord, AttackStudy, AttackSummary
from specguard.records.base import Json, Record, Size, convert
from specguard.records.certificate import ARITHMETIC, CertificateRecord, CertificateSummary, CertifyStudy
from specguard.records.check import CheckStudy, CheckSummary
from specguard.records.io import LARGEST_FILE, each_record, read_json, read_record
from specguard.records.sensitivity import SensitivityStudy, SensitivitySummary
from specguard.records.shards import STUDY
from specguard.records.smoothing import SmoothStudy, SmoothSummary
from specguard.records.spectrum import SpectrumStudy, SpectrumSummary
from specguard.records.training import TrainingSummary

AnyStudy = AttackStudy | CertifyStudy | SmoothStudy | SpectrumStudy | SensitivityStudy | CheckStudy
AnySummary = (
    AttackSummary
    | CertificateSummary
    | SmoothSummary
    | SpectrumSummary
    | SensitivitySummary
    | CheckSummary
    | TrainingSummary
)
OLD_STUDIES = {  # the file of settings of a study of an earlier version, and its kind
    "evaluation.json": "attack",
    "certification.json": "certify",
    "cascade.json": "certify",
    "spectrum.json": "spectrum",
    "verification.json": "check",
    "smoothing.json": "smooth",
}
_KINDS = ("attack", "certify", "smooth", "spectrum", "sensitivity", "check", "training")


class _Elapsed(Record, frozen=True):
    seconds: Size


def read_summary(path: Path, most: int = LARGEST_FILE, *, links: bool = True) -> AnySummary | None:
    """The summary of a study or the result of a run, of any version; None for another JSON object."""
    record = read_json(path, most, links=links)
    if record.get("kind") not in _KINDS:
        upgraded = upgrade_summary(record)
        if upgraded is None:
            return None
        record = upgraded
    summary: AnySummary = convert(record, AnySummary, path)
    return summary


def read_stored_summary(path: Path, study: CertifyStudy) -> CertificateSummary:
    """The summary beside certificates, which must be that of their study."""
    summary = read_summary(path)
    if not isinstance(summary, CertificateSummary):
        raise RunError(f"{path} does not hold the summary of certificates")
    if summary.study != study:
        raise RunError(f"{path} does not hold the summary of this study: study differs from its records")
    return summary


def read_study(folder: Path) -> AnyStudy:
    """The header of the study in a folder, of any version."""
    if (folder / STUDY).exists():
        found: AnyStudy = read_record(folder / STUDY, AnyStudy)
        return found
    for name, kind in OLD_STUDIES.items():
        if (folder / name).exists():
            if kind not in ("attack", "certify", "spectrum"):
                raise RunError(f"{folder / name} is of an earlier version, and only its summary is read")
            upgraded = {"attack": _attack_study, "certify": _certify_study, "spectrum": _spectrum_study}[kind]
            converted: AnyStudy = convert(_apply(upgraded, read_json(folder / name), folder / name), AnyStudy, name)
            return converted
    raise RunError(f"{folder} does not hold a study: there is no {STUDY}")


def read_certificates(file: Path) -> tuple[CertifyStudy, list[CertificateRecord]]:
    """The certificates of a records.jsonl and the header of their study; other records are refused."""
    if (file.parent / "smoothing.json").exists():
        raise RunError(f"{file} holds probabilistic certificates of smoothing, which are counts and not proofs")
    study = read_study(file.parent)
    if isinstance(study, SmoothStudy):
        raise RunError(f"{file} holds probabilistic certificates of smoothing, which are counts and not proofs")
    if not isinstance(study, CertifyStudy):
        raise RunError(f"{file} holds no certificates")
    if (file.parent / STUDY).exists():
        return study, list(each_record(file, CertificateRecord))
    return study, list(old_records(file, CertificateRecord))


def study_records(folder: Path, kind: type[Any], *, digest: Any = None) -> Iterable[Any]:
    """The records of a study of any version, one at a time; links are not followed."""
    if os.path.lexists(folder / STUDY):
        return each_record(folder / "records.jsonl", kind, links=False, digest=digest)
    return old_records(folder / "records.jsonl", kind, links=False, digest=digest)


def old_records(file: Path, kind: type[Any], *, links: bool = True, digest: Any = None) -> Iterable[Any]:
    """The records of an earlier version, converted to the current type."""
    lines = each_record(file, dict[str, Any], links=links, digest=digest)
    if kind is AttackRecord:
        return [convert(record, AttackRecord, file) for record in _apply(_attack_records, lines, file)]
    upgrade: Any = _certificate_record if kind is CertificateRecord else dict
    return (convert(_apply(upgrade, line, file), kind, f"a record of {file}") for line in lines)


def old_seconds(folder: Path, most: int = LARGEST_FILE) -> float | None:
    """The seconds of a study of an earlier version, over all its starts; None where they are not recorded."""
    file = folder / "elapsed.jsonl"
    if not os.path.lexists(file):
        return None
    return math.fsum(line.seconds for line in each_record(file, _Elapsed, most, links=False))


def is_unsupported_summary(record: Json) -> bool:
    """Whether this is a summary of sensitivity or smoothing of an earlier version, which is no longer read."""
    return "layer" in record or record.get("kind") == "probabilistic"


def upgrade_summary(record: Json) -> Json | None:
    """A summary of an earlier version, recognized by its fields, in the current form; None for other objects."""
    for fields, upgrade in _SUMMARIES.items():
        if record.keys() >= set(fields):
            upgraded: Json = _apply(upgrade, record, "a summary of an earlier version")
            return upgraded
    return None


def _apply(upgrade: Any, record: Any, what: object) -> Any:
    """Apply `upgrade` to a record; a record that it fails on raises one sentence."""
    try:
        return upgrade(record)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise RunError(f"{what} is malformed: {type(error).__name__} {str(error)[:100]}") from error


def _about(settings: Json) -> Json:
    known: Json = {
        name: settings[name] for name in ("model", "data", "n", "weights_fingerprint", "subset") if name in settings
    }
    return {**known, "dataset": settings.get("dataset", "unknown")}


def _end(record: Json, seconds: Json | None = None) -> Json:
    """The fields at the end of all summaries."""
    return {"seconds": seconds or {}, "environment": record.get("environment", {})}


# Certificates ----------------------------------------------------------------------------------------------------


def _rename(record: Json, names: Json) -> Json:
    """Rename some fields of a record; unknown fields stay, and are refused later."""
    return {names.get(name, name): value for name, value in record.items()}


def _certify_study(settings: Json) -> Json:
    if settings.get("failure_probability", 0) != 0:
        raise RunError("probabilistic certificates are not proofs, and cannot be proved again")
    kept: Json = {name: settings[name] for name in ("radii", "norm", "batch", "seed") if name in settings}
    early = "verifiers" in settings
    return {
        "kind": "certify",
        "about": _about(settings),
        "settings": {
            **kept,
            "methods": settings["families"],
            "search": settings.get("search", False),
            "stop_early": early,
        },
        "attack": settings.get("attack", {}),
        "verifiers": settings.get("verifiers", {}),
        "arithmetic": settings.get("arithmetic", ARITHMETIC),
    }


def _certificate_record(line: Json) -> Json:
    record = _rename(line, {"family": "method", "loses": "losses", "reasons": "failures"})
    record["radii"] = [_radius_record(row) for row in line["radii"]]
    if "proofs" in line:
        record["proofs"] = {name: _proof(proof) for name, proof in line["proofs"].items()}
    if "norms" in line:
        record["norms"] = {
            name: _rename(norms, {"mu_uncentred": "mu_uncentered"}) for name, norms in line["norms"].items()
        }
    return record


def _radius_record(row: Json) -> Json:
    names = {"stage": "method", "by": "method", "rivals": "classes"}
    lists: Json = {
        name: [_rename(each, names) for each in row[name]] for name in ("stages", "proved") if name in row
    }
    return {**row, **lists}


def _proof(proof: Json) -> Json:
    return _rename(proof, {"rival": "other_class", "fall": "loss"})


def _certify_summary(record: Json) -> Json:
    stages = record.get("seconds_per_image", {})
    seconds = {("forward" if name == "network" else name): value * record["n"] for name, value in stages.items()}
    if seconds:
        seconds["total"] = sum(seconds.values())
    changed = ("settings", "seconds_per_image")
    return {
        **{name: value for name, value in record.items() if name not in changed},
        "kind": "certify",
        "study": _certify_study(record["settings"]),
        "radii": [_rename(row, {"attacked": "robust"}) for row in record["radii"]],
        **_end(record, seconds),
    }


def _early_summary(record: Json) -> Json:
    """The summary of a cascade, now a certification with `stop_early`."""
    if record["kind"] != "cascade":
        raise ValueError(f"unknown kind {record['kind']!r}")
    names = {"attacked": "robust", "with_third_party": "with_verifiers"}
    rows = []
    for row in record["radii"]:
        stages = [_rename(stage, {"stage": "method", "rivals": "classes"}) for stage in row["stages"]]
        rows.append({**_rename(row, names), "stages": stages})
    seconds: dict[str, float] = {}
    for entry in record.get("seconds", []):
        seconds[entry["stage"]] = seconds.get(entry["stage"], 0.0) + entry["seconds"]
    failures = [_rename(reason, {"stage": "method"}) for reason in record["reasons"]]
    study = _certify_study(record["settings"])
    if study["verifiers"] != record["rests_on"]:
        raise ValueError("it rests on other verifiers than those of its settings")
    changed = ("settings", "rests_on", "reasons")
    return {
        **{name: value for name, value in record.items() if name not in changed},
        "kind": "certify",
        "study": study,
        "radii": rows,
        "failures": failures,
        **_end(record, {**seconds, "total": sum(seconds.values())}),
    }


# Attacks ---------------------------------------------------------------------------------------------------------


def _attack_study(settings: Json) -> Json:
    names = ("seed", "batch", "precision", "diagnose", "save_images")
    return {
        "kind": "attack",
        "about": _about(settings),
        "attacks": settings["attacks"],
        "stop_early": settings["cascade"],
        "balls": settings["balls"],
        "settings": {name: settings[name] for name in names if name in settings},
    }


def _attack_records(lines: Iterable[Json]) -> list[Json]:
    """Merge the lines of each attack, ball and image into one record per image."""
    found: dict[int, Json] = {}
    for line in lines:
        record = found.setdefault(
            line["sample"],
            {
                "sample": line["sample"],
                "label": line["label"],
                "clean": line["before"],
                "outcomes": [],
                "warnings": [],
            },
        )
        names = ("attack", "norm", "radius", "predicted", "distance", "closest")
        record["outcomes"].append({**{name: line[name] for name in names}, "success": line["broken"]})
        record["warnings"] += [text for text in line.get("warnings", []) if text not in record["warnings"]]
    return list(found.values())


def _attack_summary(record: Json) -> Json:
    names = ("n", "clean", "attacks", "worst_case", "distances", "warnings", "flags")
    return {
        "kind": "attack",
        "study": _attack_study(record["settings"]),
        **{name: record[name] for name in names if name in record},
        "per_class": [_rename(row, {"class": "name"}) for row in record["per_class"]],
        **_end(record),
    }


# Others ----------------------------------------------------------------------------------------------------------


def _spectrum_study(settings: Json) -> Json:
    names = ("top", "tolerance", "most", "dense", "ball", "directions", "batch", "seed", "precision")
    return {
        "kind": "spectrum",
        "about": _about(settings),
        "settings": {"parts": settings["wanted"], **{name: settings[name] for name in names if name in settings}},
        "parts": settings["parts"],
    }


def _spectrum_summary(record: Json) -> Json:
    names = ("n", "parts", "exponent", "log_product", "growth", "weights")
    known: Json = {name: record[name] for name in names if name in record}
    return {"kind": "spectrum", "study": _spectrum_study(record["settings"]), **known, **_end(record)}


def _check_summary(record: Json) -> Json:
    settings = record["settings"]
    about = {"model": settings["model"], "data": "unknown", "dataset": "unknown", "n": settings["n"]}
    attack = settings["attack"] if isinstance(settings["attack"], dict) else {"type": settings["attack"]}
    names = ("n", "claims", "attacked", "least_room")
    return {
        "kind": "check",
        "study": {
            "kind": "check",
            "about": about,
            "records": settings["records"],
            "settings": {"seed": settings["seed"]},
            "attack": attack,
        },
        **{name: record[name] for name in names},
        "third_party": record.get("third_party", 0),
        **_end(record),
    }


def _smooth_summary(record: Json) -> Json:
    settings = record["settings"]
    drawn = {name: settings["smoothing"][name] for name in ("sigma", "n0", "n", "alpha")}
    names = ("n", "failure_probability", "abstained", "radii", "median_radius")
    return {
        "kind": "smooth",
        "study": {
            "kind": "smooth",
            "about": _about(settings),
            "settings": {"smoothing": drawn, **{name: settings[name] for name in ("radii", "batch", "seed")}},
            "function": settings["about"],
        },
        **{name: record[name] for name in names},
        "clean": record["right"],
        "assumed": record["supposed"],
        **_end(record),
    }


def _training_summary(record: Json) -> Json:
    return {"kind": "training", **record}


_SUMMARIES = {
    ("test_accuracy", "settings"): _training_summary,
    ("worst_case", "attacks", "settings"): _attack_summary,
    ("kind", "rests_on", "radii"): _early_summary,
    ("limits", "largest", "radii", "settings"): _certify_summary,
    ("claims", "least_room", "settings"): _check_summary,
    ("parts", "weights", "settings"): _spectrum_summary,
    ("supposed", "right", "radii", "settings"): _smooth_summary,
}
