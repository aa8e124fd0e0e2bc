"""Certificates checked by a second program that trusts nobody: proved again in NumPy, and attacked.

verification.json   which records of which model are checked; written once, at the start
environment.jsonl   versions, commit, hardware and command of every start
records.jsonl       one line per image: how many claims were proved again, and with how much room
summary.json        the numbers; its presence means that every record was found right

A record is a claim. For each, the image's hash, its label and its class are compared, every lower bound and every
certified radius is proved again by `evaluate.checker`, every stored norm, radius and term is compared with the
checker's own, and every certified image is attacked at its largest certified radius, of the curve or of the search.
Any disagreement is an error.
"""

import copy
import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from specguard.attacks import APGD
from specguard.data import Dataset
from specguard.errors import RunError, SoundnessError
from specguard.evaluate.certified_summary import is_record
from specguard.evaluate.checker import FAMILIES, Image, read
from specguard.evaluate.claims import proved_claims
from specguard.evaluate.folder import Progress, Watcher, as_stored, open_folder, stored_summary, whole_batches
from specguard.geometry import Ball, Norm, per_sample
from specguard.nn import fingerprint, materialised
from specguard.runs import Json, append_lines, locked, read_json, read_lines, record_start, write_json

_BATCH = 20
_ATTACK = APGD(steps=50, restarts=2, loss="margin")


def verification(
    file: Path,
    model: nn.Module,
    split: Dataset,
    folder: Path,
    *,
    data: str,
    device: torch.device,
    attack: APGD = _ATTACK,
    seed: int = 1,
    watch: Watcher = lambda progress: None,
) -> Json:
    """Check every record of `file`, the records.jsonl of a certification, and return the summary.

    `split` holds the images in the order of the records; `data` is the fingerprint of the data set. The first
    disagreement ends everything with a `SoundnessError` that names the image and the claim.
    """
    claims = read_json(file.parent / "certification.json")
    records = read_lines(file)
    _check_study(file, claims, records, fingerprint(model), data, len(split))
    identity = {
        "records": hashlib.sha256(file.read_bytes()).hexdigest(),
        "model": claims["model"],
        "n": len(records),
    }
    with locked(folder):
        open_folder(folder, "verification", as_stored({**identity, "seed": seed, "attack": str(attack)}))
        path, summary = folder / "records.jsonl", folder / "summary.json"
        done = read_lines(path)
        if len(done) > len(records) or not all(_is_line(line, number) for number, line in enumerate(done)):
            raise RunError(f"{path} holds lines that do not belong to this verification")
        if summary.exists():
            if len(done) < len(records):
                raise RunError(f"{path} holds {len(done)} lines of a verification of {len(records)} records")
            return stored_summary(summary, _summed(done, folder), {"environment"})
        record_start(folder, device)
        study = _Study(model, split.to(device), claims, records, attack, seed)
        done = whole_batches(path, done, len(records), _BATCH)
        for begin in range(len(done), len(records), _BATCH):
            watch(Progress(begin, len(records), "checking"))
            found = study.batch(begin, min(begin + _BATCH, len(records)))
            append_lines(path, *found)
            done += found
        watch(Progress(len(records), len(records), "done"))
        result = {**_summed(done, folder), "environment": read_lines(folder / "environment.jsonl")[-1]}
        write_json(summary, result)
        return result


def _summed(done: list[Json], folder: Path) -> Json:
    return {
        "n": len(done),
        "claims": sum(line["claims"] for line in done),
        "attacked": sum(line["attacked"] is not None for line in done),
        "least_room": min((line["room"] for line in done if line["room"] is not None), default=None),
        "settings": read_json(folder / "verification.json"),
    }


def _is_line(line: Json, sample: int) -> bool:
    """Whether this is what was found right in the record of that image."""
    match line:
        case {
            "sample": int(number),
            "claims": int(),
            "room": float() | None,
            "attacked": float() | int() | None,
        } if number == sample and len(line) == 4:
            return True
    return False


def _check_study(file: Path, claims: Json, records: list[Json], model: str, data: str, images: int) -> None:
    match claims:
        case {
            "model": str(),
            "data": str(),
            "n": int(),
            "radii": list(),
            "families": list(),
            "norm": "l2" | "linf",
        }:
            pass
        case _:
            raise RunError(f"{file.parent / 'certification.json'} does not say what was certified")
    radii, families = claims["radii"], claims["families"]
    if not all(
        isinstance(radius, int | float) and 0 <= radius < math.inf for radius in radii
    ):  # NaN compares false
        raise RunError(f"{file.parent / 'certification.json'} holds radii that are none")
    if unknown := [family for family in families if family not in FAMILIES]:
        raise RunError(f"{file.parent / 'certification.json'} names the family {unknown[0]!r}, which is unknown")
    if claims.get("failure_probability", 0) != 0:
        raise RunError(f"{file} is about certificates that hold with a probability, which nobody can prove again")
    if claims["model"] != model:
        raise SoundnessError(f"{file} is about another model: the hashes of the weights differ")
    if claims["data"] != data:
        raise SoundnessError(f"{file} is about other data: the hashes differ")
    if not len(records) == claims["n"] <= images:
        raise RunError(f"{file} holds {len(records)} records of {claims['n']} images")


class _Study:
    """The model as the checker reads it, and the records it is to check."""

    def __init__(
        self, model: nn.Module, split: Dataset, claims: Json, records: list[Json], attack: APGD, seed: int
    ) -> None:
        self.exact = materialised(copy.deepcopy(model)).double().eval().to(split.labels.device)
        self.steps = read(model)
        self.split, self.records, self.attack, self.seed = split, records, attack, seed
        self.norm: Norm = claims["norm"]
        self.radii: list[float] = claims["radii"]
        self.families: list[str] = claims["families"]

    def batch(self, begin: int, end: int) -> list[Json]:
        """What was found right in these records."""
        images, labels = self.split.batch(torch.arange(begin, end, device=self.split.labels.device))
        chosen = self.records[begin:end]
        for i, record in enumerate(chosen):
            if not is_record(record, begin + i, int(labels[i]), self.radii, self.families):
                raise RunError(f"the record of image {begin + i} is not one of this study")
        attacked = [self._largest_certified(record) for record in chosen]
        self._attacked(images, labels, attacked, begin, self.norm)
        if self.norm != "l2":  # what was searched for are l2 radii
            self._attacked(images, labels, [_largest_found(record) for record in chosen], begin, "l2")
        pixels = images.double().cpu().numpy()
        found = []
        for i, record in enumerate(chosen):
            image = Image.of(self.steps, pixels[i], int(labels[i]))
            claims, room = proved_claims(image, record, pixels[i], self.norm)
            found.append({"sample": begin + i, "claims": claims, "room": room, "attacked": attacked[i]})
        return found

    def _largest_certified(self, record: Json) -> float | None:
        """Of the curve, and in l2 of the search too."""
        curve = max((row["radius"] for row in record["radii"] if row["verdict"] == "certified"), default=None)
        found = _largest_found(record) if self.norm == "l2" else None
        return max((radius for radius in (curve, found) if radius is not None), default=None)

    def _attacked(
        self, images: Tensor, labels: Tensor, radii: Sequence[float | None], begin: int, norm: Norm
    ) -> None:
        """No image is broken at its radius; balls lie in each other, so that the smaller ones need no attack."""
        for radius in sorted({radius for radius in radii if radius}):
            members = torch.tensor([i for i, r in enumerate(radii) if r == radius], device=images.device)
            x, y = images[members].double(), labels[members]
            ball = Ball(norm, radius)
            found = self.attack(self.exact, x, y, ball, ids=members + begin, seed=self.seed).images
            offset = found - x
            size = ball.distance(offset, torch.zeros_like(offset))
            inside = torch.where(size > radius, radius / size, 1.0) * (1 - 1e-12)
            with torch.no_grad():
                logits = self.exact(x + offset * per_sample(inside, offset))
            rivals = logits.scatter(1, y[:, None], -torch.inf).amax(1)
            margin = logits.gather(1, y[:, None])[:, 0] - rivals
            broken = margin < -1e-11 * (1 + logits.abs().amax(1))
            if broken.any():
                sample = begin + int(members[broken][0])
                raise SoundnessError(f"image {sample} is certified at radius {radius:g}, and an attack breaks it")


def _largest_found(record: Json) -> float | None:
    return max(record["largest"].values(), default=0.0) or None
