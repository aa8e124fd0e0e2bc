"""Run directories as the package leaves them, of any size, made without a model: for tests of what reads them."""

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from helpers.lines import append_lines, rewrite_lines
from specguard.records.accuracy import Proportion
from specguard.records.io import write_json

Json = dict[str, Any]
MODEL = "c0ffee" * 10 + "abcd"
FAMILIES = ("lofast", "local", "adjoint")
RADII = (0.02, 0.05, 0.1)
PARTS = ("embedding", "blocks.0", "blocks.1", "head")
ENVIRONMENT = {
    "hardware": {"cpu": "x86_64", "cores": 2, "threads": 1},
    "versions": {"specguard": "0.1.0", "torch": "2.13.0"},
    "commit": "0123456789abcdef0123456789abcdef01234567+",
    "command": "specguard train --run runs/sample",
}


def sample_run(run: Path, n: int = 40, name: str = "plain", norm: str = "l2", seed: int = 0) -> Path:
    """A run with every kind of study, of `n` images; `name` is what models, classes and attacks are called."""
    chance = random.Random(seed)
    run.mkdir(parents=True)
    classes = [f"{name} {number}" for number in range(5)]
    training(run, classes, n, name)
    attack(run / "attacks" / "quick", classes, n, name, norm, chance)
    certificates(run / "certificates" / "proofs", n, chance)
    check(run / "verification" / "again", run / "certificates" / "proofs" / "records.jsonl", n)
    spectrum(run / "spectrum" / "looked", n, chance)
    return run


def settings(n: int, **more: Any) -> Json:
    return {"model": MODEL, "data": "f00d", "dataset": "digits", "n": n, **more}


def begun(folder: Path, command: str, seconds: float = 2.0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rewrite_lines(folder / "environment.jsonl", [ENVIRONMENT | {"command": command}])
    append_lines(folder / "elapsed.jsonl", {"seconds": seconds})


def training(run: Path, classes: list[str], n: int, name: str) -> None:
    config = {"image": 8, "patch": 4, "dim": 32, "depth": 2, "heads": 2}
    begun(run, f"specguard train --run {name}")
    rewrite_lines(
        run / "metrics.jsonl", [{"epoch": e, "loss": 1 / e, "test_accuracy": 1 - 0.5 / e} for e in (1, 2, 3)]
    )
    known = {"model": config, "data": {"name": name, "fingerprint": "f00d"}, "training": {"seed": 0}}
    write_json(run / "run.json", known)
    write_json(run / "model.json", {"config": config, "fingerprint": MODEL, "classes": classes})
    accuracy = Proportion(n - n // 20, n).record()
    result = {"test_accuracy": accuracy, "fingerprint": MODEL, "seconds": 61.0, "settings": known}
    write_json(run / "result.json", result | {"environment": ENVIRONMENT})


def attack(folder: Path, classes: list[str], n: int, name: str, norm: str, chance: random.Random) -> None:
    begun(folder, "specguard attack runs/sample")
    balls = [(norm, radius) for radius in RADII]
    left = {radius: n - round((0.1 + 3 * radius) * n) for radius in RADII}
    rows = [{"norm": k, "radius": r, "accuracy": Proportion(left[r], n).record()} for k, r in balls]
    each = n // len(classes)
    per_class = [
        {
            "class": label,
            "n": each,
            "clean": Proportion(each - 1, each).record(),
            "worst_case": [
                {"norm": k, "radius": r, "accuracy": Proportion(chance.randrange(each), each).record()}
                for k, r in balls
            ],
        }
        for label in classes
    ]
    summary = {
        "n": n,
        "clean": Proportion(n - n // 20, n).record(),
        "attacks": [{"attack": name, **row} for row in rows],
        "cascade": False,
        "worst_case": rows,
        "distances": {},
        "per_class": per_class,
        "warnings": [],
        "flags": [{"name": "zero gradients", "message": f"most gradients of {name} vanish"}],
        "settings": settings(n, attacks=[], balls=[]),
        "environment": ENVIRONMENT,
    }
    write_json(folder / "evaluation.json", settings(n))
    write_json(folder / "summary.json", summary)
    gallery(folder / "gallery", name, norm)


def gallery(folder: Path, name: str, norm: str, pictures: int = 2) -> None:
    folder.mkdir()
    noise = np.random.default_rng(0)
    clean = noise.random((pictures, 1, 8, 8), dtype=np.float32)
    maps = noise.random((2, pictures, 2, 2), dtype=np.float32) / 4
    tensors = {"clean": clean, "adversarial": np.clip(clean + 0.05, 0, 1)}
    save_file(
        tensors | {"attention_clean": maps[0], "attention_adversarial": maps[1]}, folder / "images.safetensors"
    )
    entry = {
        "attack": name,
        "norm": norm,
        "radius": 0.1,
        "distance": 0.05,
        "label": name,
        "predicted": f"not {name}",
    }
    entries = [entry | {"sample": k, "confidence": [0.9, 0.6]} for k in range(pictures)]
    write_json(folder / "pictures.json", {"pictures": entries})


def certificates(folder: Path, n: int, chance: random.Random) -> None:
    begun(folder, "specguard certify runs/sample")
    records, counts = [], {radius: dict.fromkeys(FAMILIES, 0) for radius in RADII}
    broken, certified = dict.fromkeys(RADII, 0), dict.fromkeys(RADII, 0)
    for sample in range(n):
        largest = {family: 0.05 * (k + 1) * chance.random() for k, family in enumerate(FAMILIES)}
        right = sample % 20 != 0
        rows = []
        for radius in RADII:
            proved = [family for family in FAMILIES if right and largest[family] >= radius]
            verdict = "certified" if proved else "unknown" if right else "broken"
            for family in proved:
                counts[radius][family] += 1
            certified[radius] += verdict == "certified"
            broken[radius] += verdict == "broken"
            rows.append({"radius": radius, "verdict": verdict, "lower": dict.fromkeys(FAMILIES, 0.5)})
        term = "blocks.0.attention: curvature" if sample % 3 else "first order"
        record = {"sample": sample, "label": sample % 5, "predicted": sample % 5 if right else (sample + 1) % 5}
        record |= {"margin": 1.0, "radii": rows, "loses": {term: 0.6, "rounding": 1e-9}, "largest": largest}
        records.append(record)
    rewrite_lines(folder / "records.jsonl", records)
    rows = [
        {
            "radius": radius,
            "attacked": Proportion(n - broken[radius], n).record(),
            "certified": Proportion(certified[radius], n).record(),
            "by": {family: Proportion(counts[radius][family], n).record() for family in FAMILIES},
            "broken": broken[radius],
            "unknown": n - broken[radius] - certified[radius],
        }
        for radius in RADII
    ]
    known = settings(n, norm="l2", radii=list(RADII), families=list(FAMILIES), search=True)
    write_json(folder / "certification.json", known)
    summary = {
        "n": n,
        "clean": Proportion(n - broken[RADII[0]], n).record(),
        "radii": rows,
        "largest": {family: {"median": 0.03, "vacuous": 0} for family in FAMILIES},
        "limits": [{"term": "first order", "images": 3}],
        "seconds_per_image": dict.fromkeys(FAMILIES, 0.01),
        "settings": known,
        "environment": ENVIRONMENT,
    }
    write_json(folder / "summary.json", summary)


def check(folder: Path, records: Path, n: int) -> None:
    begun(folder, "specguard verify-certificates runs/sample")
    known = {"records": hashlib.sha256(records.read_bytes()).hexdigest(), "model": MODEL, "n": n}
    write_json(folder / "verification.json", known)
    summary = {"n": n, "claims": 7 * n, "attacked": n // 2, "least_room": 1e-3, "settings": known}
    write_json(folder / "summary.json", summary)


def spectrum(folder: Path, n: int, chance: random.Random) -> None:
    begun(folder, "specguard spectrum runs/sample")
    groups = dict(zip(PARTS, ("embedding", "block", "block", "head"), strict=True))
    records = []
    for sample in range(n):
        parts = {
            part: {"group": group, "kind": "map", "sigma": [1 + chance.random()], "step": 2 + chance.random()}
            for part, group in groups.items()
        }
        records.append({"sample": sample, "label": 0, "parts": parts})
    rewrite_lines(folder / "records.jsonl", records)
    weights = [
        {"layer": f"blocks.{layer}.attention", "kind": kind, "sigma": [0.5 + layer, 0.7 + layer]}
        for layer in (0, 1)
        for kind in "qkvo"
    ]
    write_json(folder / "spectrum.json", settings(n))
    spread = {"n": n, "mean": 1.5, "std": 0.1, "quantiles": None}
    summary = {
        "n": n,
        "parts": [],
        "exponent": spread,
        "log_product": spread,
        "growth": spread,
        "weights": {"after": weights, "before": weights},
        "settings": settings(n, parts=list(PARTS)),
        "environment": ENVIRONMENT,
    }
    write_json(folder / "summary.json", summary)


def changed(path: Path, **fields: Any) -> None:
    """The JSON file with some fields replaced."""
    write_json(path, json.loads(path.read_text()) | fields)
