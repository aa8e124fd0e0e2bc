"""Writes docs/formats.md: every file that runs and studies leave, and the JSON Schema of their records.

python docs/formats.py
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from specguard.records import (
    attack,
    baseline,
    certificate,
    check,
    diagnosis,
    export,
    sensitivity,
    smoothing,
    spectrum,
    training,
    zoo,
)
from specguard.records.base import Environment
from specguard.records.study import Timing

PAGE = Path(__file__).with_name("formats.md")
KINDS: dict[str, tuple[Any, Any, Any, str]] = {
    "attack": (attack.AttackStudy, attack.AttackRecord, attack.AttackSummary, "specguard attack"),
    "certify": (
        certificate.CertifyStudy,
        certificate.CertificateRecord,
        certificate.CertificateSummary,
        "specguard certify",
    ),
    "check": (check.CheckStudy, check.CheckRecord, check.CheckSummary, "specguard check"),
    "smooth": (smoothing.SmoothStudy, smoothing.SmoothRecord, smoothing.SmoothSummary, "specguard smooth"),
    "spectrum": (spectrum.SpectrumStudy, spectrum.SpectrumRecord, spectrum.SpectrumSummary, "specguard spectrum"),
    "sensitivity": (
        sensitivity.SensitivityStudy,
        sensitivity.SensitivityRecord,
        sensitivity.SensitivitySummary,
        "specguard sensitivity",
    ),
}
_INTRODUCTION = """# Files

Everything that a run or a study leaves is JSON, or safetensors for arrays, and has the schema below. Fields that
are not declared are refused, and so are numbers out of range. This page is written by `python docs/formats.py` from
the types that write and read these files (`specguard.records`), so that anybody can write another checker of
certificates, or another reader.

## A study

Every study has one folder:

| file | what it holds |
|---|---|
| `study.json` | what is studied, and how; written once, at the start |
| `environment.jsonl` | versions, commit, hardware and command of every start |
| `records.jsonl` | one line per image, in the order of the data |
| `timing.jsonl` | seconds, batch by batch |
| `shards/2-of-8/` | the same files of one process of several |
| `summary.json` | the numbers; its presence means that the study is complete |

A summary is a function of the records, but for `seconds`, `environment`, the `flags` of an attack and the `weights`
of a spectrum. `input` is a SHA-256 of an image's entries as little-endian float64.

## Earlier versions

Before version 0.2 the settings lay in a file named after the kind of study (`evaluation.json`,
`certification.json`, `cascade.json`, `spectrum.json`, `smoothing.json`, `verification.json`), summaries had no
`kind`, methods were called families, and an attack had one line per attack and image. `specguard.records.legacy`
reads them: they are shown in reports and checked, but not continued.
"""


OTHERS: dict[str, Any] = {
    "`environment.jsonl`, a line": Environment,
    "`timing.jsonl` of a study, a line": Timing,
    "`gallery/pictures.json` of an attack": attack.Gallery,
    "`baseline.json` of a certification": baseline.LinearBaseline,
    "`plan.jsonl` of a diagnosis, the first line": diagnosis.DiagnosisHeader,
    "`plan.jsonl`, what was measured": diagnosis.Measured,
    "`plan.jsonl`, what a stage was given": diagnosis.Decision,
    "`plan.jsonl`, what it took": diagnosis.Spent,
    "`run.json` of a training": training.TrainingSettings,
    "`model.json` of a training": training.ModelRecord,
    "`metrics.jsonl` of a training, a line": training.EpochRecord,
    "`timing.jsonl` of a training, a line": training.EpochTiming,
    "`result.json` of a training": training.TrainingSummary,
    "metadata `specguard` of an exported file": export.ExportRecord,
    "`card.json` of a model of the zoo": zoo.Card,
}


def page() -> str:
    """The whole page: which file has which type, and all types, one a line."""
    types = [kind for study in KINDS.values() for kind in study[:3]] + list(OTHERS.values())
    _, components = msgspec.json.schema_components(types, ref_template="#/{name}")
    rows = [
        f"| `{kind}` | `{command}` | " + " | ".join(f"`{each.__name__}`" for each in study) + " |"
        for kind, (*study, command) in KINDS.items()
    ]
    others = [f"| {file} | `{kind.__name__}` |" for file, kind in OTHERS.items()]
    schema = ",\n".join(f'"{name}": {json.dumps(component)}' for name, component in sorted(components.items()))
    return "\n".join(
        (
            _INTRODUCTION,
            "## Types\n",
            "| kind | command | `study.json` | a line of `records.jsonl` | `summary.json` |",
            "|---|---|---|---|---|",
            *rows,
            "",
            "| file | type |",
            "|---|---|",
            *others,
            "",
            "## JSON Schema\n",
            f"```json\n{{\n{schema}\n}}\n```",
            "",
        )
    )


if __name__ == "__main__":
    PAGE.write_text(page())
