"""Certificates checked by a second program that trusts nobody: proved again in NumPy, and attacked.

verification.json   which records of which model are checked; written once, at the start
environment.jsonl   versions, commit, hardware and command of every start
records.jsonl       one line per image: how many claims were proved again, and with how much room
summary.json        the numbers; its presence means that every record was found right

A record is a claim. For each, the image's hash, its label and its class are compared, every lower bound and every
certified radius is proved again by `evaluate.checker`, every stored norm, radius and term is compared with the
checker's own, and every certified image is attacked at its largest certified radius, of the curve or of the search.
The summary beside the records must be what the records give. Any disagreement is an error. What a cascade took from
a third party cannot be proved again: it is attacked, and counted apart.

Results that the folder holds already are somebody's claims too, and are not believed: only who asks to `resume`
takes the records of an earlier check for right. Every number of the summary comes from the records anew.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from specguard.attacks import APGD
from specguard.checker import FAMILIES, Image
from specguard.data import AnyData, Split
from specguard.errors import RunError, SoundnessError
from specguard.geometry import Ball, Norm
from specguard.nn import answers_to
from specguard.records.store import (
    Json,
    append_lines,
    lines_digest,
    locked,
    read_json,
    read_lines,
    record_start,
    write_json,
)
from specguard.studies.cascade_check import proved_cascade
from specguard.studies.cascade_summary import cascade_summary, is_cascade_record, third_party
from specguard.studies.certified_summary import certified_summary, is_record
from specguard.studies.chosen import in_order, samples_settings, stated_samples
from specguard.studies.counterexample import lost
from specguard.studies.folder import (
    Progress,
    Watcher,
    as_stored,
    nearly_equal,
    open_folder,
    stored_summary,
    whole_batches,
)
from specguard.studies.recheck import l2_ball, proved_claims
from specguard.studies.samples import Group, subject

_BATCH = 20
_ATTACK = APGD(steps=50, restarts=2, loss="margin")


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
    resume: bool = False,
    watch: Watcher = lambda progress: None,
) -> Json:
    """Check every record of `file`, the records.jsonl of a certification, and return the summary.

    `split` holds the images in the order of the records; `data` is the fingerprint of the data set. The first
    disagreement ends everything with a `SoundnessError` that names the image and the claim. A folder that holds
    results is refused, unless it is to `resume`: then what it holds is believed, and `taken` says of how many
    records.
    """
    claims = read_json(_settings_of(file))
    records = read_lines(file)
    _check_study(file, claims, records, model, data, len(split))
    if claims.get("subset") != samples_settings(split).get("subset"):
        raise RunError(f"{file} is about other images than those that it is to be checked with")
    identity = {
        "records": lines_digest(file),
        "model": claims["model"],
        "n": len(records),
    }
    with locked(folder):
        path, summary = folder / "records.jsonl", folder / "summary.json"
        if not resume and (path.exists() or summary.exists()):
            raise RunError(f"{folder} holds a check, which is not believed: resume it, or name another folder")
        open_folder(folder, "verification", as_stored({**identity, "seed": seed, "attack": str(attack)}))
        study = _Study(model, split.to(device), claims, records, attack, seed)
        done = read_lines(path)
        if len(done) > len(records) or not all(study.may_have_found(line, i) for i, line in enumerate(done)):
            raise RunError(f"{path} holds lines that do not belong to this verification")
        taken = len(done)
        if summary.exists():
            if len(done) < len(records):
                raise RunError(f"{path} holds {len(done)} lines of a verification of {len(records)} records")
            _check_summary(file.parent / "summary.json", claims, records)
            return {**stored_summary(summary, _summed(done, folder), {"environment"}), "taken": taken}
        record_start(folder, device)
        done = whole_batches(path, done, len(records), _BATCH)
        taken = len(done)
        for begin in range(len(done), len(records), _BATCH):
            watch(Progress(begin, len(records), "checking"))
            found = study.batch(begin, min(begin + _BATCH, len(records)))
            append_lines(path, *found)
            done += found
        watch(Progress(len(records), len(records), "done"))
        _check_summary(file.parent / "summary.json", claims, records)
        result = {**_summed(done, folder), "environment": read_lines(folder / "environment.jsonl")[-1]}
        write_json(summary, result)
        return {**result, "taken": taken}


def claimed_samples(file: Path, data: AnyData, count: int) -> Split:
    """The images of `data` that the `count` records of `file` are about, as the settings beside it say."""
    path = _settings_of(file)
    return stated_samples(read_json(path), data, count, path)


def _summed(done: list[Json], folder: Path) -> Json:
    return {
        "n": len(done),
        "claims": sum(line["claims"] for line in done),
        "attacked": sum(line["attacked"] is not None for line in done),
        "third_party": sum(line["third_party"] for line in done),
        "least_room": min((line["room"] for line in done if line["room"] is not None), default=None),
        "settings": read_json(folder / "verification.json"),
    }


def _is_line(line: Json, sample: int) -> bool:
    """Whether this is what was found right in the record of that image."""
    match line:
        case {
            "sample": int(number),
            "claims": int(claims),
            "room": float(room) | (None as room),
            "attacked": float() | int() | None,
            "third_party": bool(),
        } if number == sample and len(line) == 5:
            return claims >= 0 and (room is None or room > 0)
    return False


def _settings_of(file: Path) -> Path:
    """The settings beside the records: of a certification, or of a cascade."""
    if (file.parent / "smoothing.json").exists():
        raise RunError(f"{file} holds probabilistic certificates of smoothing, which are counts and not proofs")
    cascade = file.parent / "cascade.json"
    return cascade if cascade.exists() else file.parent / "certification.json"


def _check_study(file: Path, claims: Json, records: list[Json], model: nn.Module, data: str, images: int) -> None:
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
    radii, families, others = claims["radii"], claims["families"], claims.get("verifiers", {})
    known = all(isinstance(radius, int | float) and 0 <= radius < math.inf for radius in radii)  # NaN is not
    if not (known and radii and families):
        raise RunError(f"{_settings_of(file)} holds radii that are none")
    if unknown := [family for family in families if family not in FAMILIES]:
        raise RunError(f"{_settings_of(file)} names the family {unknown[0]!r}, which is unknown")
    if not isinstance(others, dict) or any(name in FAMILIES or type(others[name]) is not str for name in others):
        raise RunError(f"{_settings_of(file)} does not say which proofs are a third party's")
    if claims.get("failure_probability", 0) != 0:
        raise RunError(f"{file} is about certificates that hold with a probability, which nobody can prove again")
    if not answers_to(model, claims["model"]):
        raise SoundnessError(f"{file} is about another model: the fingerprints differ")
    if claims["data"] != data:
        raise SoundnessError(f"{file} is about other data: the hashes differ")
    if not len(records) == claims["n"] <= images:
        raise RunError(f"{file} holds {len(records)} records of {claims['n']} images")


def _check_summary(path: Path, claims: Json, records: list[Json]) -> None:
    """The summary of the study, where it has one, says what its records say."""
    if not path.exists():
        return
    stored = read_json(path)
    if "verifiers" in claims:
        own = cascade_summary(records, claims["radii"], claims["verifiers"])
    else:
        own = certified_summary(records, claims["radii"], claims["families"])
    own["settings"] = claims
    own = as_stored(own)
    if unknown := sorted(stored.keys() - own.keys() - {"environment", "seconds", "seconds_per_image"}):
        raise SoundnessError(f"{path} says more than its records do: {unknown[0]!r}")
    for key, value in own.items():
        if key in stored and not nearly_equal(stored[key], value):
            raise SoundnessError(f"{path} does not say what its records say: {key} differs")
        if key in ("n", "radii") and key not in stored:
            raise RunError(f"{path} does not hold the summary of certificates: it lacks {key}")


class _Study:
    """The model as the checker reads it, and the records it is to check."""

    def __init__(
        self, model: nn.Module, split: Split, claims: Json, records: list[Json], attack: APGD, seed: int
    ) -> None:
        self.subject = subject(copy.deepcopy(model).eval().to(split.labels.device), split)
        self.split, self.attack, self.seed = split, attack, seed
        self.records = dict(zip(split.samples.tolist(), records, strict=False))  # there may be more images
        self.norm: Norm = claims["norm"]
        self.radii: list[float] = claims["radii"]
        self.families: list[str] = claims["families"]
        self.rests_on: dict[str, str] | None = claims.get("verifiers")  # None where it is no cascade

    def batch(self, begin: int, end: int) -> list[Json]:
        """What was found right in these records."""
        samples, labels = self.split.samples[begin:end], self.split.labels[begin:end].tolist()
        for sample, label in zip(samples.tolist(), labels, strict=True):
            if not self._belongs(self.records[sample], sample, label):
                raise RunError(f"the record of image {sample} is not one of this study")
        positions = torch.arange(begin, end, device=self.split.labels.device)
        return in_order([line for group in self.subject.groups(positions) for line in self._group(group)], samples)

    def _group(self, group: Group) -> Iterator[Json]:
        """What was found right in the records of inputs of one shape."""
        samples = group.samples.tolist()
        chosen = [self.records[sample] for sample in samples]
        attacked = [self._largest_certified(record) for record in chosen]
        self._attacked(group, attacked, self.norm)
        if self.norm != "l2":  # what was searched for are l2 radii
            self._attacked(group, [_largest_found(record) for record in chosen], "l2")
        pixels = group.inputs.double().cpu().numpy()
        for i, (sample, record) in enumerate(zip(samples, chosen, strict=True)):
            image, theirs = Image.of(group.form.read, pixels[i], int(group.labels[i])), False
            if (reach := attacked[i]) is not None:
                image.check_within(l2_ball(reach, pixels[i].size, self.norm)[0])
            if self.rests_on is None:
                claims, room = proved_claims(image, record, pixels[i], self.norm)
            else:
                claims, room = proved_cascade(image, record, pixels[i], self.norm, self.rests_on)
                theirs = any(third_party(row, self.rests_on) for row in record["radii"])
            line = {"sample": sample, "claims": claims, "room": room, "attacked": attacked[i]}
            yield {**line, "third_party": theirs}

    def may_have_found(self, line: Json, place: int) -> bool:
        """Whether this can be what was found right in that record of the file, as far as the record tells."""
        sample, label = int(self.split.samples[place]), int(self.split.labels[place])
        record = self.records[sample]
        if not (_is_line(line, sample) and self._belongs(record, sample, label)):
            return False
        theirs = self.rests_on is not None and any(third_party(row, self.rests_on) for row in record["radii"])
        return (line["attacked"], line["third_party"]) == (self._largest_certified(record), theirs)

    def _belongs(self, record: Json, sample: int, label: int) -> bool:
        if self.rests_on is None:
            return is_record(record, sample, label, self.radii, self.families)
        return is_cascade_record(record, sample, label, self.radii, [*self.families, *self.rests_on])

    def _largest_certified(self, record: Json) -> float | None:
        """Of the curve, and in l2 of the search too."""
        curve = max((row["radius"] for row in record["radii"] if row["verdict"] == "certified"), default=None)
        found = _largest_found(record) if self.norm == "l2" else None
        return max((radius for radius in (curve, found) if radius is not None), default=None)

    def _attacked(self, group: Group, radii: Sequence[float | None], norm: Norm) -> None:
        """No input is broken at its radius; balls lie in each other, so that the smaller ones need no attack."""
        exact = group.form.exact
        for radius in sorted({radius for radius in radii if radius}):
            members = torch.tensor([i for i, r in enumerate(radii) if r == radius], device=group.inputs.device)
            x, y, samples = group.inputs[members].double(), group.labels[members], group.samples[members]
            ball = Ball(norm, radius, box=self.subject.box)
            found = self.attack(exact, x, y, ball, ids=samples, seed=self.seed).images
            if (wrong := lost(exact, x, found, y, ball)).any():
                sample = int(samples[wrong][0])
                raise SoundnessError(f"image {sample} is certified at radius {radius:g}, and an attack breaks it")


def _largest_found(record: Json) -> float | None:
    return max(record.get("largest", {}).values(), default=0.0) or None  # a cascade searches for none
