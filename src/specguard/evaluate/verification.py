"""Certificates checked by a second program that trusts nobody: proved again in NumPy, and attacked.

verification.json   which records of which model are checked; written once, at the start
environment.jsonl   versions, commit, hardware and command of every start
records.jsonl       one line per image: how many claims were proved again, and with how much room
summary.json        the numbers; its presence means that every record was found right

A record is a claim. For each, the image's hash, its label and its class are compared, every lower bound and every
certified radius is proved again by `evaluate.checker`, every stored norm, radius and term is compared with the
checker's own, and every certified image is attacked at its largest certified radius. Any disagreement is an error.
What a cascade took from a third party cannot be proved again: it is attacked, and counted apart.
"""

import copy
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from specguard.attacks import APGD
from specguard.certify import FAMILIES
from specguard.data import Split
from specguard.errors import RunError, SoundnessError
from specguard.evaluate.cascade_check import CLOSE, Agree, checked_cascade, l2_ball
from specguard.evaluate.cascade_summary import is_cascade_record, third_party
from specguard.evaluate.certified_summary import is_record
from specguard.evaluate.checker import Image, Proof
from specguard.evaluate.checker.enclosure import Array
from specguard.evaluate.checker.network import Fork
from specguard.evaluate.checker.network import Path as Walk
from specguard.evaluate.folder import Progress, Watcher, as_stored, open_folder, whole_batches
from specguard.evaluate.subjects import Group, subject
from specguard.geometry import Ball, Norm, per_sample
from specguard.nn import fingerprint
from specguard.runs import Json, append_lines, locked, read_json, read_lines, record_start, write_json

_TINY = 1e-12  # where the exact value is zero, such as values that one token has to itself, only rounding is left
_BATCH = 20
_ATTACK = APGD(steps=50, restarts=2, loss="margin")
_NORMS = ("norm", "zeta", "derivative_norm", "mu", "mu_uncentred", "xi", "norm_cv", "norm_xvo", "norm_p")


def verification(
    file: Path,
    model: nn.Module,
    split: Split,
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
    claims = read_json(_settings_of(file))
    records = read_lines(file)
    _check_study(file, claims, records, fingerprint(model), data, len(split))
    identity = {
        "records": hashlib.sha256(file.read_bytes()).hexdigest(),
        "model": claims["model"],
        "n": len(records),
    }
    with locked(folder):
        open_folder(folder, "verification", as_stored({**identity, "seed": seed, "attack": str(attack)}))
        if (folder / "summary.json").exists():
            return read_json(folder / "summary.json")
        record_start(folder, device)
        study = _Study(model, split.to(device), claims, records, attack, seed)
        path = folder / "records.jsonl"
        done = whole_batches(path, read_lines(path), len(records), _BATCH)
        for begin in range(len(done), len(records), _BATCH):
            watch(Progress(begin, len(records), "checking"))
            found = study.batch(begin, min(begin + _BATCH, len(records)))
            append_lines(path, *found)
            done += found
        watch(Progress(len(records), len(records), "done"))
        result = {
            "n": len(records),
            "claims": sum(line["claims"] for line in done),
            "attacked": sum(line["attacked"] is not None for line in done),
            "third_party": sum(line.get("third_party", False) for line in done),
            "least_room": min((line["room"] for line in done if line["room"] is not None), default=None),
            "settings": read_json(folder / "verification.json"),
            "environment": read_lines(folder / "environment.jsonl")[-1],
        }
        write_json(folder / "summary.json", result)
        return result


def _settings_of(file: Path) -> Path:
    """The settings beside the records: of a certification, or of a cascade."""
    if (file.parent / "smoothing.json").exists():
        raise RunError(f"{file} holds probabilistic certificates of smoothing, which are counts and not proofs")
    cascade = file.parent / "cascade.json"
    return cascade if cascade.exists() else file.parent / "certification.json"


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
            raise RunError(f"{_settings_of(file)} does not say what was certified")
    others = claims.get("verifiers") or {}
    if not isinstance(others, dict) or any(name in FAMILIES or type(others[name]) is not str for name in others):
        raise RunError(f"{_settings_of(file)} does not say which proofs are a third party's")
    if claims["model"] != model:
        raise SoundnessError(f"{file} is about another model: the hashes of the weights differ")
    if claims["data"] != data:
        raise SoundnessError(f"{file} is about other data: the hashes differ")
    if not len(records) == claims["n"] <= images:
        raise RunError(f"{file} holds {len(records)} records of {claims['n']} images")


class _Study:
    """The model as the checker reads it, and the records it is to check."""

    def __init__(
        self, model: nn.Module, split: Split, claims: Json, records: list[Json], attack: APGD, seed: int
    ) -> None:
        self.subject = subject(copy.deepcopy(model).eval().to(split.labels.device), split)
        self.split, self.records, self.attack, self.seed = split, records, attack, seed
        self.norm: Norm = claims["norm"]
        self.radii: list[float] = claims["radii"]
        self.families: list[str] = claims["families"]
        self.rests_on: dict[str, str] | None = claims.get("verifiers")  # None where it is no cascade

    def batch(self, begin: int, end: int) -> list[Json]:
        """What was found right in these records."""
        labels = self.split.labels[begin:end].tolist()
        for i, record in enumerate(self.records[begin:end]):
            if not self._belongs(record, begin + i, labels[i]):
                raise RunError(f"the record of image {begin + i} is not one of this study")
        samples = torch.arange(begin, end, device=self.split.labels.device)
        found = [line for group in self.subject.groups(samples) for line in self._group(group)]
        return sorted(found, key=lambda line: int(line["sample"]))

    def _group(self, group: Group) -> Iterator[Json]:
        """What was found right in the records of inputs of one shape."""
        samples = group.samples.tolist()
        attacked = [_largest_certified(self.records[sample]) for sample in samples]
        self._attacked(group, attacked)
        pixels = group.inputs.double().cpu().numpy()
        for i, sample in enumerate(samples):
            image, record = Image.of(group.form.read, pixels[i], int(group.labels[i])), self.records[sample]
            agree, theirs = _agreement(sample), False
            _same_image(image, record, pixels[i], agree)
            if self.rests_on is None:
                claims, room = _checked(image, record, pixels[i].size, self.norm, agree)
            else:
                claims, room = checked_cascade(image, record, pixels[i].size, self.norm, self.rests_on, agree)
                theirs = any(third_party(row, self.rests_on) for row in record["radii"])
            line = {"sample": sample, "claims": claims, "room": room, "attacked": attacked[i]}
            yield {**line, "third_party": theirs}

    def _belongs(self, record: Json, sample: int, label: int) -> bool:
        if self.rests_on is None:
            return is_record(record, sample, label, self.radii, self.families)
        return is_cascade_record(record, sample, label, self.radii, [*self.families, *self.rests_on])

    def _attacked(self, group: Group, radii: list[float | None]) -> None:
        """No certified image is broken at its largest certified radius; balls lie in each other."""
        exact = group.form.exact
        for radius in sorted({radius for radius in radii if radius}):
            members = torch.tensor([i for i, r in enumerate(radii) if r == radius], device=group.inputs.device)
            x, y, samples = group.inputs[members].double(), group.labels[members], group.samples[members]
            ball = Ball(self.norm, radius, box=self.subject.box)
            found = self.attack(exact, x, y, ball, ids=samples, seed=self.seed).images
            offset = found - x
            size = ball.distance(offset, torch.zeros_like(offset))
            inside = torch.where(size > radius, radius / size, 1.0) * (1 - 1e-12)
            with torch.no_grad():
                logits = exact(x + offset * per_sample(inside, offset))
            rivals = logits.scatter(1, y[:, None], -torch.inf).amax(1)
            margin = logits.gather(1, y[:, None])[:, 0] - rivals
            broken = margin < -1e-11 * (1 + logits.abs().amax(1))
            if broken.any():
                sample = int(samples[broken][0])
                raise SoundnessError(f"image {sample} is certified at radius {radius:g}, and an attack breaks it")


def _largest_certified(record: Json) -> float | None:
    return max((row["radius"] for row in record["radii"] if row["verdict"] == "certified"), default=None)


def _agreement(sample: int) -> Agree:
    def agree(what: str, right: bool) -> None:
        if not right:
            raise SoundnessError(f"image {sample}: {what}")

    return agree


def _same_image(image: Image, record: Json, pixels: Array, agree: Agree) -> None:
    agree("the hash of its pixels is another", hashlib.sha256(pixels.tobytes()).hexdigest() == record["input"])
    agree("its class is another", int(np.argmax(image.output)) == record["predicted"])
    least = float(image.margins.min())
    agree("its margin is another", abs(least - record["margin"]) <= CLOSE * (1 + np.abs(image.output).max()))


def _checked(image: Image, record: Json, size: int, norm: Norm, agree: Agree) -> tuple[int, float | None]:
    """How many claims of a record were proved again, and the least of the proved margins."""
    claims, rooms = 0, []
    for row in record["radii"]:
        radius, entry = l2_ball(row["radius"], size, norm)
        for family, claimed in row["lower"].items():
            if claimed is None:
                continue
            left = float((image.margins - image.proof(radius, family, entry).falls).min())
            near = CLOSE * (abs(claimed) + np.abs(image.output).max())
            agree(f"{family} claims a margin of {claimed:.6g} at radius {row['radius']:g}", left >= claimed - near)
            claims += 1
            if claimed > 0:
                agree(f"{family} does not certify radius {row['radius']:g}", left > 0)
                rooms.append(left)
    for family, radius in record["largest"].items():
        if radius > 0:
            left = float((image.margins - image.proof(radius, family).falls).min())
            agree(f"{family} does not certify its largest radius {radius:g}", left > 0)
            rooms.append(left)
            claims += 1
    for family, stored in record["proofs"].items():
        claims += _same_proof(image, family, stored, agree)
    for layer, name, own in _norms(image.path):
        claimed = record["norms"].get(layer, {}).get(name)
        if claimed is not None:
            right = np.shape(claimed) == np.shape(own) and bool(
                (own <= np.asarray(claimed) * (1 + CLOSE) + _TINY).all()
            )
            agree(f"{layer} claims a smaller {name}", right)
            claims += 1
    return claims, min(rooms, default=None)


def _same_proof(image: Image, family: str, stored: Json, agree: Agree) -> int:
    """Every radius and every term of a stored proof is no smaller than the checker's own."""
    proof: Proof = image.proof(stored["radius"], family)
    agree(f"the proof of {family} names no rival", stored["rival"] in image.rivals)
    rival = image.rivals.index(stored["rival"])
    size = 1 + np.abs(image.output).max()
    same = abs(stored["margin"] - image.margins[rival]) <= CLOSE * size
    agree(f"the proof of {family} claims another margin", same)
    agree(f"the proof of {family} does not hold", stored["fall"] < stored["margin"])
    agree(f"{family} claims a smaller fall", proof.falls[rival] <= stored["fall"] * (1 + CLOSE) + 1e-12 * size)
    agree(f"the proof of {family} has other layers", stored["radii"].keys() == proof.radii.keys())
    for layer, own in proof.radii.items():
        agree(f"{family} claims a smaller radius at {layer}", own <= stored["radii"][layer] * (1 + CLOSE))
    for (layer, term), values in proof.terms.items():
        claimed = stored["terms"].get(f"{layer}: {term}" if layer else term, 0.0)
        small = term == "rounding" or values[rival] <= claimed * (1 + CLOSE) + 1e-12
        agree(f"{family} claims a smaller {term} at {layer or 'the whole'}", bool(small or np.isinf(values[rival])))
    return 1 + len(proof.radii) + len(proof.terms)


def _norms(path: Walk) -> list[tuple[str, str, Any]]:
    """The checker's own norms, by layer and by the names that records use, as far as proofs have asked for them."""
    found: list[tuple[str, str, Any]] = []
    for place in path:
        if isinstance(place, Fork):
            found += _norms(place.branch)
            continue
        known: Mapping[str, Any] = vars(place.point)
        for name in (
            "norm",
            "zeta",
            "derivative_norm",
            "mu",
            "mu_uncentred",
            "xi",
            "norm_cv",
            "norm_xvo",
            "norm_p",
        ):
            if known.get(name) is not None:
                found.append((place.name, name, known[name]))
    return found
