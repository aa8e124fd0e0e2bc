"""Check certificates by an independent program that trusts nobody: proved again in NumPy, and attacked.

A record is a claim. For each, the image's hash, its label and its class are compared, every lower bound and every
certified radius is proved again by `specguard.checker`, every stored norm, radius and term is compared with the
checker's own, and every certified image is attacked at its largest certified radius, of the curve or of the search.
The summary beside the records must be what the records give. Any disagreement is an error. What rests on a verifier
of others cannot be proved again: it is attacked, and counted apart.

Results that the folder holds already are somebody's claims too, and are not believed: only who asks to `resume`
takes the records of an earlier check for right. Every number of the summary comes from the records anew.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from specguard.attacks import APGD, Attack
from specguard.checker import Image
from specguard.data import Split
from specguard.errors import RunError, SoundnessError
from specguard.geometry import Ball, Norm
from specguard.nn import answers_to
from specguard.records.base import About
from specguard.records.certificate import CertificateRecord, CertifyStudy, fits, summarize
from specguard.records.check import CheckRecord, CheckSettings, CheckStudy, CheckSummary
from specguard.records.check import summarize as summarize_check
from specguard.records.io import read_lines
from specguard.records.legacy import read_certificates, read_stored_summary
from specguard.records.store import described, file_digest
from specguard.records.study import Pending, Study, Tell, Watcher, check_summary, complete
from specguard.studies.counterexample import misclassified
from specguard.studies.recheck import l2_ball, prove_again
from specguard.studies.samples import Batch, in_order, labels_by_sample, stated_subset, subject

_BATCH = 20
ATTACK = APGD(steps=50, restarts=2, loss="margin")


@dataclass(frozen=True)
class CheckedStudy:
    """The claims of a file of records, and what they are about."""

    file: Path
    study: CertifyStudy
    records: tuple[CertificateRecord, ...]


def checked_study(file: Path) -> CheckedStudy:
    """The certificates of a records.jsonl and the study beside it, also of earlier versions."""
    if not read_lines(file, 1):  # a file that is no record at all is named before its study is looked for
        raise RunError(f"{file} holds no certificates")
    study, records = read_certificates(file)
    if len(records) != study.about.n:
        raise RunError(f"{file} holds {len(records)} records of {study.about.n} images")
    return CheckedStudy(file, study, tuple(records))


def run_check(
    claimed: CheckedStudy,
    model: nn.Module,
    split: Split,
    folder: Path,
    *,
    data: str,
    device: torch.device,
    attack: Attack = ATTACK,
    settings: CheckSettings,
    resume: bool = False,
    watch: Watcher = lambda progress: None,
) -> tuple[CheckSummary, int]:
    """Check every record, and return the summary and how many records were believed because of `resume`.

    `split` holds the images in the order of the records; `data` is the fingerprint of the data set. The first
    disagreement ends everything with a `SoundnessError` that names the image and the claim. A folder that holds
    results is refused, unless it is to `resume`: then what it holds is believed.
    """
    about = claimed.study.about
    if not answers_to(model, about.model):
        raise SoundnessError(f"{claimed.file} is about another model: the fingerprints differ")
    if about.data != data:
        raise SoundnessError(f"{claimed.file} is about other data: the hashes differ")
    if about.subset != stated_subset(split):
        raise RunError(f"{claimed.file} is about other images than those that it is to be checked with")
    labels = labels_by_sample(split)
    if len(labels) < len(claimed.records):
        raise RunError(f"{claimed.file} holds {len(claimed.records)} records, and there are {len(labels)} images")
    labels = dict(list(labels.items())[: len(claimed.records)])
    header = CheckStudy(
        about=About(model=about.model, data=data, dataset=about.dataset, n=about.n, subset=about.subset),
        records=file_digest(claimed.file),
        settings=settings,
        attack=described(attack),
    )
    work = _Check(claimed, model, split.to(device), attack, settings.seed)

    def summarized(records: Sequence[CheckRecord]) -> CheckSummary:
        _check_stored_summary(claimed)
        return summarize_check(records, header)

    done = 0

    def batch(begin: int, end: int, tell: Tell) -> tuple[list[CheckRecord], dict[str, float]]:
        nonlocal done
        done += end - begin
        return work.batch(begin, end), {}

    study = Study(
        header,
        labels,
        _BATCH,
        CheckRecord,
        CheckSummary,
        batch,
        fits=work.may_have_found,
        summarize=summarized,
        doing="checking",
    )
    found = complete(study, folder, device, watch, resume=resume)
    assert not isinstance(found, Pending)  # it has no shards
    return found, len(claimed.records) - done


def _check_stored_summary(claimed: CheckedStudy) -> None:
    """The summary of the study, where it has one, says what its records say."""
    path = claimed.file.parent / "summary.json"
    if not path.exists():
        return
    try:
        stored = read_stored_summary(path, claimed.study)
        check_summary(stored, summarize(claimed.records, claimed.study), path)
    except RunError as error:
        raise SoundnessError(str(error)) from error


class _Check:
    """The model as the checker reads it, and the records it is to check."""

    def __init__(self, claimed: CheckedStudy, model: nn.Module, split: Split, attack: Attack, seed: int) -> None:
        self.subject = subject(copy.deepcopy(model).eval().to(split.labels.device), split)
        self.split, self.attack, self.seed, self.study = split, attack, seed, claimed.study
        samples, labels = split.samples.tolist(), split.labels.tolist()
        self.records = dict(zip(samples, claimed.records, strict=False))  # there may be more images
        self.labels = dict(zip(samples, labels, strict=True))
        self.norm = claimed.study.settings.norm

    def batch(self, begin: int, end: int) -> list[CheckRecord]:
        """What was found right in these records."""
        samples = self.split.samples[begin:end]
        for sample in samples.tolist():
            if not self._belongs(sample):
                raise RunError(f"the record of image {sample} is not one of this study")
        positions = torch.arange(begin, end, device=self.split.labels.device)
        return in_order([line for batch in self.subject.batches(positions) for line in self._batch(batch)], samples)

    def _batch(self, batch: Batch) -> Iterator[CheckRecord]:
        """What was found right in the records of inputs of one shape."""
        samples = batch.samples.tolist()
        chosen = [self.records[sample] for sample in samples]
        attacked = [self._largest_certified(record) for record in chosen]
        self._attack(batch, attacked, self.norm)
        if self.norm != "l2":  # what was searched for are l2 radii
            self._attack(batch, [_largest_found(record) for record in chosen], "l2")
        pixels = batch.inputs.double().cpu().numpy()
        for i, (sample, record) in enumerate(zip(samples, chosen, strict=True)):
            image = Image.of(batch.prepared.read, pixels[i], int(batch.labels[i]))
            if (reach := attacked[i]) is not None:
                image.check_within(l2_ball(reach, pixels[i].size, self.norm)[0])
            claims, room = prove_again(image, record, pixels[i], self.study)
            yield CheckRecord(
                sample=sample,
                label=int(batch.labels[i]),
                claims=claims,
                room=room,
                attacked=attacked[i],
                third_party=record.third_party(self.study.verifiers),
            )

    def may_have_found(self, line: CheckRecord) -> bool:
        """Whether this can be what was found right in that record of the file, as far as the record tells."""
        record = self.records.get(line.sample)
        if record is None or not self._belongs(line.sample):
            return False
        expected = (self._largest_certified(record), record.third_party(self.study.verifiers))
        return (line.attacked, line.third_party) == expected

    def _belongs(self, sample: int) -> bool:
        record = self.records[sample]
        return (record.sample, record.label) == (sample, self.labels[sample]) and fits(record, self.study)

    def _largest_certified(self, record: CertificateRecord) -> float | None:
        """Of the curve, and in l2 of the search too."""
        curve = [row.radius for row in record.radii if row.verdict == "certified"]
        found = _largest_found(record) if self.norm == "l2" else None
        return max([*curve, *([] if found is None else [found])], default=None)

    def _attack(self, batch: Batch, radii: Sequence[float | None], norm: Norm) -> None:
        """No input is broken at its radius; balls lie in each other, so that the smaller ones need no attack."""
        exact = batch.prepared.exact
        for radius in sorted({radius for radius in radii if radius}):
            members = torch.tensor([i for i, r in enumerate(radii) if r == radius], device=batch.inputs.device)
            x, y, samples = batch.inputs[members].double(), batch.labels[members], batch.samples[members]
            within = Ball(norm, radius, box=self.subject.box)
            found = self.attack(exact, x, y, within, ids=samples, seed=self.seed).images
            if (wrong := misclassified(exact, x, found, y, within)).any():
                sample = int(samples[wrong][0])
                raise SoundnessError(f"image {sample} is certified at radius {radius:g}, and an attack breaks it")


def _largest_found(record: CertificateRecord) -> float | None:
    return max(record.largest.values(), default=0.0) or None  # methods that stop early search for none
