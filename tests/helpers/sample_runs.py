"""Run directories as the package leaves them, of any size, made without a model: for tests of what reads them."""

import hashlib
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors.numpy import save_file

from specguard.records import attack as attacks
from specguard.records import certificate, check, sensitivity, smoothing, spectrum
from specguard.records.accuracy import Accuracy
from specguard.records.attack import AttackStudy, Gallery, NamedAttack, Outcome, Picture
from specguard.records.base import About, BallRecord, Environment
from specguard.records.certificate import (
    CertificateRecord,
    CertifySettings,
    CertifyStudy,
    Claim,
    RadiusRecord,
    Stage,
)
from specguard.records.io import append_records, rewrite_records, write_json, write_record
from specguard.records.spectrum import PartRecord, SpectrumRecord, WeightNorms, WeightSpectra
from specguard.records.study import Summary, Timing
from specguard.records.training import DataRecord, EpochRecord, ModelRecord, TrainingSettings, TrainingSummary

MODEL = "c0ffee" * 10 + "abcd"
METHODS: tuple[certificate.MethodName, ...] = ("lofast", "local", "adjoint")
RADII = (0.02, 0.05, 0.1)
GROUPS = {"embedding": "embedding", "blocks.0": "block", "blocks.1": "block", "head": "head"}
ENVIRONMENT = Environment(
    hardware={"cpu": "x86_64", "cores": 2, "threads": 1},
    versions={"specguard": "0.1.0", "torch": "2.13.0"},
    commit="0123456789abcdef0123456789abcdef01234567+",
    command="specguard train --run runs/sample",
)


def sample_run(run: Path, n: int = 40, name: str = "plain", norm: str = "l2", seed: int = 0) -> Path:
    """A run with most kinds of studies, of `n` images; `name` is what models, classes
    and attacks are called.
    """
    chance = random.Random(seed)
    run.mkdir(parents=True)
    classes = [f"{name} {number}" for number in range(5)]
    training(run, classes, n, name)
    attack(run / "attacks" / "quick", classes, n, name, norm, chance)
    certificates(run / "certificates" / "proofs", n, chance)
    checked(run / "verification" / "again", run / "certificates" / "proofs" / "records.jsonl", n)
    spectra(run / "spectrum" / "looked", n, chance)
    return run


def about(n: int) -> About:
    return About(model=MODEL, data="f00d", dataset="digits", n=n)


def begun(folder: Path, command: str, header: Any, seconds: float = 2.0) -> None:
    """A study that has been started, and has worked for so long."""
    folder.mkdir(parents=True, exist_ok=True)
    start = msgspec.structs.replace(ENVIRONMENT, command=command)
    rewrite_records(folder / "environment.jsonl", [start])
    if header is not None:
        write_record(folder / "study.json", header)
        append_records(folder / "timing.jsonl", [Timing(begin=0, seconds={"total": seconds})])


def ended(folder: Path, records: Iterable[Any], summary: Summary, seconds: dict[str, float] | None = None) -> None:
    """The study in this folder is complete."""
    rewrite_records(folder / "records.jsonl", records)
    spent = {"total": 2.0} if seconds is None else seconds
    write_record(folder / "summary.json", msgspec.structs.replace(summary, seconds=spent, environment=ENVIRONMENT))


def training(run: Path, classes: list[str], n: int, name: str) -> None:
    config = {"image": 8, "patch": 4, "dim": 32, "depth": 2, "heads": 2}
    begun(run, f"specguard train --run {name}", None)
    same = {"lr": 0.1, "penalty": 0.0, "test_loss": 1.0, "test_correct": n}
    epochs = [EpochRecord(epoch=e, step=e, loss=1 / e, test_accuracy=1 - 0.5 / e, **same) for e in (1, 2, 3)]
    rewrite_records(run / "metrics.jsonl", epochs)
    known = TrainingSettings(model=config, data=DataRecord(name=name, fingerprint="f00d"), training={"seed": 0})
    write_record(run / "run.json", known)
    write_record(
        run / "model.json",
        ModelRecord(config=config, fingerprint=MODEL, weights="raw", classes=tuple(classes)),
    )
    summary = TrainingSummary(
        test_accuracy=Accuracy.of(n - n // 20, n),
        weights="raw",
        fingerprint=MODEL,
        metrics=epochs[-1],
        seconds=61.0,
        settings=known,
        environment=ENVIRONMENT,
    )
    write_record(run / "result.json", summary)


def attack(folder: Path, classes: list[str], n: int, name: str, norm: Any, chance: random.Random) -> None:
    """Images fall at random, more at larger radii; one in twenty is misclassified from the start."""
    study = AttackStudy(
        about=about(n),
        attacks=(NamedAttack(name=name, settings={"type": "PGD"}),),
        stop_early=False,
        balls=tuple(BallRecord(norm=norm, radius=radius) for radius in RADII),
        settings=attacks.AttackSettings(),
    )
    begun(folder, "specguard attack runs/sample", study)
    records = []
    for sample in range(n):
        label, distance = sample % 5, chance.uniform(0, 0.3) if sample % 20 else 0.0
        outcomes = tuple(
            Outcome(
                attack=name,
                norm=norm,
                radius=radius,
                predicted=label if distance > radius else (label + 1) % 5,
                success=distance <= radius,
                distance=min(distance, radius),
                closest=distance if distance <= radius else None,
            )
            for radius in RADII
        )
        clean = label if sample % 20 else (label + 1) % 5
        records.append(attacks.AttackRecord(sample=sample, label=label, clean=clean, outcomes=outcomes))
    flag = attacks.FlagRecord(name="zero gradients", message=f"most gradients of {name} vanish")
    summary = msgspec.structs.replace(attacks.summarize(records, study, classes), flags=(flag,))
    ended(folder, records, summary)
    gallery(folder / "gallery", name, norm)


def gallery(folder: Path, name: str, norm: Any, pictures: int = 2) -> None:
    folder.mkdir()
    noise = np.random.default_rng(0)
    clean = noise.random((pictures, 1, 8, 8), dtype=np.float32)
    maps = noise.random((2, pictures, 2, 2), dtype=np.float32) / 4
    tensors = {"clean": clean, "adversarial": np.clip(clean + 0.05, 0, 1)}
    save_file(
        tensors | {"attention_clean": maps[0], "attention_adversarial": maps[1]}, folder / "images.safetensors"
    )
    entries = tuple(
        Picture(
            sample=sample,
            attack=name,
            norm=norm,
            radius=0.1,
            distance=0.05,
            label=name,
            predicted=f"not {name}",
            confidence=(0.9, 0.6),
        )
        for sample in range(pictures)
    )
    write_record(folder / "pictures.json", Gallery(pictures=entries))


def certificates(folder: Path, n: int, chance: random.Random) -> None:
    """The radius of every image is random by method; one in twenty is misclassified."""
    settings = CertifySettings(radii=RADII, methods=METHODS)
    study = CertifyStudy(about=about(n), settings=settings, attack={"type": "PGD"})
    begun(folder, "specguard certify runs/sample", study)
    records = []
    for sample in range(n):
        correct = sample % 20 != 0
        largest = {method: 0.05 * (k + 1) * chance.random() if correct else 0.0 for k, method in enumerate(METHODS)}
        rows = []
        for radius in RADII:
            proved = any(reach >= radius for reach in largest.values())
            rows.append(
                RadiusRecord(
                    radius=radius,
                    verdict="certified" if proved else "unknown" if correct else "broken",
                    lower={method: 1.0 if reach >= radius else -1 - reach for method, reach in largest.items()},
                )
            )
        last = rows[-1].lower
        records.append(
            CertificateRecord(
                sample=sample,
                label=sample % 5,
                predicted=sample % 5 if correct else (sample + 1) % 5,
                margin=1.0,
                input="beef",
                radii=tuple(rows),
                method=max(last, key=lambda method: last[method] or 0.0),
                losses={"blocks.0.attention: curvature" if sample % 3 else "first order": 0.6, "rounding": 1e-9},
                largest=largest,
            )
        )
    assert all(certificate.fits(record, study) for record in records)
    seconds = dict.fromkeys(METHODS, 0.01 * n) | {"total": 2.0}
    ended(folder, records, certificate.summarize(records, study), seconds)


def stop_early(folder: Path, n: int) -> None:
    """Methods that stop early: of four images one is certified by `local`, one by CROWN, and one is broken."""
    study = CertifyStudy(
        about=about(n),
        settings=CertifySettings(radii=RADII, methods=METHODS, stop_early=True, search=False),
        attack={"type": "PGD"},
        verifiers={"crown": "auto_LiRPA 0.6, which does not account for rounding"},
    )
    begun(folder, "specguard certify runs/sample --stop-early", study)
    records = []
    for sample in range(n):
        by = ("local", "crown", None, None)[sample % 4]
        row = {
            "verdict": "certified" if by else ("broken", "unknown")[sample % 2],
            "stages": (
                Stage(method="lofast", classes=4, left=4),
                Stage(method="local", classes=4, left=sample % 4),
            ),
            "proved": (Claim(method=by, classes=(1, 2), lower=0.5),) if by else (),
        }
        records.append(
            CertificateRecord(
                sample=sample,
                label=sample % 5,
                predicted=sample % 5,
                margin=1.0,
                input="beef",
                radii=tuple(RadiusRecord(radius=radius, **row) for radius in RADII),
                failures={"crown": "no memory"} if sample == 3 else {},
            )
        )
    assert all(certificate.fits(record, study) for record in records)
    ended(folder, records, certificate.summarize(records, study), {"lofast": 1.0, "local": 3.0, "total": 5.0})


def checked(folder: Path, file: Path, n: int) -> None:
    study = check.CheckStudy(
        about=about(n),
        records=hashlib.sha256(file.read_bytes()).hexdigest(),
        settings=check.CheckSettings(),
        attack={"type": "APGD"},
    )
    begun(folder, "specguard check runs/sample", study)
    same = {"claims": 7, "room": 1e-3, "third_party": False}
    records = [
        check.CheckRecord(sample=sample, label=sample % 5, attacked=0.1 if sample % 2 else None, **same)
        for sample in range(n)
    ]
    ended(folder, records, check.summarize(records, study))


def spectra(folder: Path, n: int, chance: random.Random) -> None:
    study = spectrum.SpectrumStudy(about=about(n), settings=spectrum.SpectrumSettings(), parts=tuple(GROUPS))
    begun(folder, "specguard spectrum runs/sample", study)
    records = [
        SpectrumRecord(
            sample=sample, label=sample % 5, parts={name: part(group, chance) for name, group in GROUPS.items()}
        )
        for sample in range(n)
    ]
    weights = tuple(
        WeightNorms(layer=f"blocks.{layer}.attention", kind=kind, sigma=(0.5 + layer, 0.7 + layer))
        for layer in (0, 1)
        for kind in "qkvo"
    )
    summary = spectrum.summarize(records, study)
    ended(folder, records, msgspec.structs.replace(summary, weights=WeightSpectra(after=weights, before=weights)))


def part(group: str, chance: random.Random, **known: float) -> PartRecord:
    sigma, step = known.get("sigma", 1 + chance.random()), known.get("step", 2 + chance.random())
    return PartRecord(
        group=group,
        kind="residual" if group == "block" else "map",
        sigma=(sigma,),
        residual=(0.0,),
        converged=True,
        step=step,
        entering=1.0,
        leaving=2.0,
        row_column=None,
    )


def smoothed(folder: Path, n: int) -> None:
    """A study of randomized smoothing: every second image is correct within 0.3."""
    study = smoothing.SmoothStudy(about=about(n), settings=smoothing.SmoothSettings())
    begun(folder, "specguard smooth runs/sample", study)
    records = [
        smoothing.SmoothRecord(
            sample=sample,
            label=sample % 5,
            input="beef",
            failure_probability=0.001,
            selected=sample % 5,
            count=9000,
            draws=10_000,
            lower_probability=0.88,
            predicted=None if sample % 2 else sample % 5,
            radius=0.0 if sample % 2 else 0.3,
        )
        for sample in range(n)
    ]
    ended(folder, records, smoothing.summarize(records, study))


def layer_sensitivity(folder: Path, n: int) -> None:
    """A study of one attention layer, at two radii."""
    study = sensitivity.SensitivityStudy(
        about=about(n),
        settings=sensitivity.SensitivitySettings(radii=(0.01, 0.1), input_norms=(), weight_changes=()),
        layer="blocks.0.attention",
    )
    begun(folder, "specguard sensitivity runs/sample", study)
    bounds = dict.fromkeys(sensitivity.BOUNDS, 2.0)
    records = [
        sensitivity.SensitivityRecord(
            sample=sample,
            label=sample % 5,
            layer=sensitivity.Layer(name=study.layer, tokens=4, dim=32, heads=2),
            input_norm=3.0,
            radii=tuple(sensitivity.Change(radius=r, found=1.0, bounds=bounds) for r in (0.01, 0.1)),
            head=(),
            input_norms=(),
        )
        for sample in range(n)
    ]
    ended(folder, records, sensitivity.summarize(records, study))


def changed(path: Path, **fields: Any) -> None:
    """The JSON file with some fields replaced."""
    write_json(path, json.loads(path.read_text()) | fields)
