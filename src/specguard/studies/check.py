"""Check certificates with the independent checker, which proves them again in NumPy, and with an attack.

For every record, the hash of the image, its label and its predicted class are compared; every lower bound and every
certified radius is proved again by `specguard.checker`, but for bounds by enclosures that are not positive; every
stored norm, radius and term is compared with the checker's own; and every certified image is attacked at its
largest certified radius, at the given radii or of the search. The summary stored with the records must be that of
the records. Any disagreement raises a `SoundnessError`. Certificates of an external verifier cannot be proved
again: they are attacked and counted separately.

Results that the folder already holds are not trusted unless the check is told to `resume`. The summary is always
computed from the records.
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
from specguard.nn import matches_fingerprint
from specguard.records.base import About
from specguard.records.certificate import NATIVE, CertificateRecord, CertifyStudy, fits, summarize
from specguard.records.check import CheckRecord, CheckSettings, CheckStudy, CheckSummary
from specguard.records.check import summarize as summarize_check
from specguard.records.io import read_lines
from specguard.records.legacy import read_certificates, read_stored_summary
from specguard.records.store import described, file_digest
from specguard.records.study import Pending, Study, Tell, Watcher, check_summary, complete
from specguard.studies.counterexample import misclassified
from specguard.studies.recheck import l2_ball, prove_again
from specguard.studies.samples import Batch, in_order, labels_by_sample, samples_of, stated_subset

_BATCH = 20
ATTACK = APGD(steps=50, restarts=2, loss="margin")


@dataclass(frozen=True)
class CheckedStudy:
    """The certificates of a file and the study that they belong to.

    Args:
        file: The file of records.
        study: The header of the study.
        records: One record per image.

    Example:
        >>> claimed = checked_study(Path("runs/first/certificates/records.jsonl"))  # doctest: +SKIP
    """

    file: Path
    study: CertifyStudy
    records: tuple[CertificateRecord, ...]


def checked_study(file: Path | str) -> CheckedStudy:
    """Read the certificates of a records.jsonl and the study.json next to it, also of earlier versions.

    Args:
        file: The records.jsonl of a study of `run_certify`.

    Returns:
        The certificates, for `run_check`.

    Example:
        >>> claimed = checked_study(Path("runs/first/certificates/records.jsonl"))  # doctest: +SKIP
    """
    file = Path(file)
    if not read_lines(file, 1):  # report an empty file before a missing study.json
        raise RunError(f"{file} holds no certificates")
    study, records = read_certificates(file)
    if len(records) != study.about.n:
        raise RunError(f"{file} holds {len(records)} records of {study.about.n} images")
    return CheckedStudy(file, study, tuple(records))


def run_check(
    claimed: CheckedStudy,
    model: nn.Module,
    split: Split,
    folder: Path | str,
    *,
    data: str,
    device: torch.device,
    attack: Attack = ATTACK,
    settings: CheckSettings,
    resume: bool = False,
    watch: Watcher = lambda progress: None,
) -> tuple[CheckSummary, int]:
    """Check every certificate of a study with the independent checker and an attack.

    The first disagreement raises a `SoundnessError` that names the image and the claim.

    Args:
        claimed: The certificates; see `checked_study`.
        model: The model that they are about.
        split: The images, in the order of the records.
        folder: Where the records and the summary of the check are written.
        data: Fingerprint of the data set.
        device: Where the attack runs.
        attack: The attack on every certified image.
        settings: The seed of the attack.
        resume: Continue an interrupted check and trust the records in `folder`; otherwise a folder with results
            raises a `RunError`.
        watch: Called with the progress.

    Returns:
        The summary, and the number of records that were taken from an earlier check.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from specguard.attacks import PGD
        >>> from specguard.data import digits
        >>> from specguard.nn import ViT, preset
        >>> from specguard.records.certificate import CertifySettings
        >>> from specguard.studies import about_study, run_certify
        >>> model = ViT(preset("tiny_smooth", dim=8, heads=2), torch.Generator().manual_seed(0)).eval()
        >>> data = digits()
        >>> split = data.take(1, first=True)
        >>> about = about_study(model, data, split)
        >>> settings, cpu = CertifySettings(radii=(0.05,), methods=("naive",), search=False), torch.device("cpu")
        >>> with TemporaryDirectory() as folder:
        ...     proofs, checked = Path(folder) / "proofs", Path(folder) / "check"
        ...     summary = run_certify(model, split, proofs, settings, about=about, device=cpu)
        ...     summary, resumed = run_check(
        ...         checked_study(proofs / "records.jsonl"), model, split, checked,
        ...         data=data.fingerprint(), device=cpu, attack=PGD(steps=2), settings=CheckSettings(),
        ...     )
        >>> summary.n, resumed
        (1, 0)
    """
    folder = Path(folder)
    about = claimed.study.about
    if not matches_fingerprint(model, about.model):
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
    """Check that the stored summary of the study, if there is one, is that of its records."""
    path = claimed.file.parent / "summary.json"
    if not path.exists():
        return
    try:
        stored = read_stored_summary(path, claimed.study)
        check_summary(stored, summarize(claimed.records, claimed.study), path)
    except RunError as error:
        raise SoundnessError(str(error)) from error


class _Check:
    """The model as the checker reads it, and the records to check."""

    def __init__(self, claimed: CheckedStudy, model: nn.Module, split: Split, attack: Attack, seed: int) -> None:
        self.samples = samples_of(copy.deepcopy(model).eval().to(split.labels.device), split)
        self.split, self.attack, self.seed, self.study = split, attack, seed, claimed.study
        samples, labels = split.samples.tolist(), split.labels.tolist()
        self.records = dict(zip(samples, claimed.records, strict=False))  # there may be more images
        self.labels = dict(zip(samples, labels, strict=True))
        self.norm = claimed.study.settings.norm
        self.box = self.samples.box and claimed.study.settings.box

    def batch(self, begin: int, end: int) -> list[CheckRecord]:
        """The results of checking these records."""
        samples = self.split.samples[begin:end]
        for sample in samples.tolist():
            if not self._belongs(sample):
                raise RunError(f"the record of image {sample} is not one of this study")
        positions = torch.arange(begin, end, device=self.split.labels.device)
        return in_order([line for batch in self.samples.batches(positions) for line in self._batch(batch)], samples)

    def _batch(self, batch: Batch) -> Iterator[CheckRecord]:
        """The results of checking records of inputs of one shape."""
        samples = batch.samples.tolist()
        chosen = [self.records[sample] for sample in samples]
        attacked = [self._largest_certified(record) for record in chosen]
        self._attack(batch, attacked, self.norm)
        if self.norm != "l2":  # methods that are not native search for l2 radii
            self._attack(batch, [_largest_found(record, native=False) for record in chosen], "l2")
        pixels = batch.inputs.double().cpu().numpy()
        for i, (sample, record) in enumerate(zip(samples, chosen, strict=True)):
            image = Image.of(batch.prepared.read, pixels[i], int(batch.labels[i]))
            if (radius := attacked[i]) is not None:
                image.check_within(l2_ball(radius, pixels[i].size, self.norm)[0])
            claims, room = prove_again(image, record, pixels[i], self.study, box=self.box)
            yield CheckRecord(
                sample=sample,
                label=int(batch.labels[i]),
                claims=claims,
                room=room,
                attacked=attacked[i],
                third_party=record.third_party(self.study.verifiers),
            )

    def may_have_found(self, line: CheckRecord) -> bool:
        """Whether a stored result is consistent with its record of the file."""
        record = self.records.get(line.sample)
        if record is None or not self._belongs(line.sample):
            return False
        expected = (self._largest_certified(record), record.third_party(self.study.verifiers))
        return (line.attacked, line.third_party) == expected

    def _belongs(self, sample: int) -> bool:
        record = self.records[sample]
        return (record.sample, record.label) == (sample, self.labels[sample]) and fits(record, self.study)

    def _largest_certified(self, record: CertificateRecord) -> float | None:
        """The largest certified radius in the study's norm, of the given radii and of the search."""
        curve = [row.radius for row in record.radii if row.verdict == "certified"]
        found = _largest_found(record, native=True)
        if self.norm == "l2":
            found = max(found or 0.0, _largest_found(record, native=False) or 0.0) or None
        return max([*curve, *([] if found is None else [found])], default=None)

    def _attack(self, batch: Batch, radii: Sequence[float | None], norm: Norm) -> None:
        """Check that no input is attacked successfully at its radius; smaller balls need no attack."""
        exact = batch.prepared.exact
        for radius in sorted({radius for radius in radii if radius}):
            members = torch.tensor([i for i, r in enumerate(radii) if r == radius], device=batch.inputs.device)
            x, y, samples = batch.inputs[members].double(), batch.labels[members], batch.samples[members]
            within = Ball(norm, radius, box=self.box)
            found = self.attack(exact, x, y, within, ids=samples, seed=self.seed).images
            if (lost := misclassified(exact, x, found, y, within)).any():
                sample = int(samples[lost][0])
                raise SoundnessError(f"image {sample} is certified at radius {radius:g}, and an attack succeeds")


def _largest_found(record: CertificateRecord, *, native: bool) -> float | None:
    """The largest radius that native methods, or the others, found; those that stop early search for none."""
    found = (radius for method, radius in record.largest.items() if (method in NATIVE) == native)
    return max(found, default=0.0) or None
