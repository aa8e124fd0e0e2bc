"""What the studies of a run say about robustness: accuracies within balls, attacked and proved."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from specguard.records.accuracy import Accuracy
from specguard.records.attack import FlagRecord
from specguard.records.base import Norm
from specguard.records.certificate import CertificateSummary, Failure
from specguard.records.spectrum import PartSummary
from specguard.report.run import FoundStudy, FoundTraining, Run

_NEARLY = 1 + 1e-9  # radii that were written as 0.0157 and as 4/255 differ by rounding


@dataclass(frozen=True)
class Point:
    """The accuracy within a ball, and without perturbation on the same images; `by` names attacks or methods."""

    norm: Norm
    radius: float
    accuracy: Accuracy
    clean: Accuracy
    by: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether at least half of the clean accuracy remains, by the lower end of the 95 % interval."""
        return self.clean.count > 0 and self.accuracy.interval95[0] >= self.clean.value / 2

    @property
    def falls(self) -> bool:
        """Whether less than half of the clean accuracy remains, by the upper end of the 95 % interval."""
        return self.accuracy.interval95[1] < self.clean.value / 2

    @property
    def ball(self) -> str:
        """The norm and the radius, as `linf 4/255`."""
        return f"{self.norm} {radius_text(self.radius)}"

    def within(self, radius: float) -> bool:
        """Whether the radius of this point is at most `radius`, up to rounding."""
        return self.radius <= radius * _NEARLY

    def beyond(self, radius: float) -> bool:
        """Whether the radius of this point is at least `radius`, up to rounding."""
        return self.radius * _NEARLY >= radius


@dataclass(frozen=True)
class Evidence:
    """The numbers of a run that a verdict rests on, of one model and one data set.

    Args:
        clean: the accuracy without perturbation, of the most images.
        attacked: accuracies under attack.
        proved: certified accuracies, without third-party verifiers.
        smoothed: accuracies of the smoothed classifier within radii, with a failure probability.
        attacks: the names of all attacks.
        flags: signs of obfuscated gradients.
        flags_sought: whether an attack study looked for them.
        failures: why methods were not applied, for how many images.
        proof_tried: whether there is a certification.
        unknown: images that are neither certified nor attacked successfully, at the radii of `proved`.
        block: the part of the network that amplifies perturbations most.
        classes: the number of classes, where it is known.
    """

    clean: Accuracy | None
    attacked: tuple[Point, ...] = ()
    proved: tuple[Point, ...] = ()
    smoothed: tuple[Point, ...] = ()
    attacks: frozenset[str] = frozenset()
    flags: tuple[FlagRecord, ...] = ()
    flags_sought: bool = True
    failures: tuple[Failure, ...] = ()
    proof_tried: bool = False
    unknown: tuple[tuple[Point, int], ...] = ()
    block: PartSummary | None = None
    classes: int | None = None


def radius_text(radius: float) -> str:
    """A radius as people write it: three digits, or 4/255.

    Args:
        radius: in pixels of [0, 1].

    Returns:
        Text that the command line reads as this radius.

    Example:
        >>> radius_text(4 / 255), radius_text(0.25)
        ('4/255', '0.25')
    """
    steps, short = 255 * radius, f"{radius:.3g}"
    whole = round(2 * steps) / 2
    if abs(float(short) - radius) > 1e-9 * radius and 0 < whole <= 255 and abs(steps - whole) < 1e-6:
        return f"{whole:g}/255"
    return short


def evidence(run: Run) -> Evidence:
    """Collect what the studies of a run say about the robustness of its model.

    Studies of another model are left out; where a run was studied on several data sets, the one with the most
    studies counts, or that of the training.

    Args:
        run: as `read_run` returns it.

    Returns:
        The numbers, with where they come from.

    Example:
        >>> from specguard.report.examples import example_run
        >>> [point.ball for point in evidence(example_run()).proved]
        ['l2 0.05', 'l2 0.1']
    """
    belongs, trained_on_them = _chosen(run)
    attacks = [study.summary for study in run.attacks if belongs(study)]
    proofs = [study.summary for study in run.certificates if belongs(study)]
    smooth = [study.summary for study in run.smoothing if belongs(study)]
    spectra = [study.summary for study in run.spectra if belongs(study)]
    clean = [run.training.summary.test_accuracy] if run.training is not None and trained_on_them else []
    clean += [summary.clean for summary in attacks]
    clean += [summary.clean for summary in proofs]
    attacked = [
        Point(row.norm, row.radius, row.accuracy, s.clean, tuple(a.name for a in s.study.attacks))
        for s in attacks
        for row in s.worst_case
    ]
    attacked += [
        Point(s.study.settings.norm, row.radius, row.robust, s.clean, (_attack_name(s),))
        for s in proofs
        for row in s.radii
    ]
    unknown = [(_proof(s, number), s.radii[number].unknown) for s in proofs for number in range(len(s.radii))]
    blocks = [part for s in spectra for part in s.parts if part.group == "block" and part.step.mean is not None]
    counted = [len(run.classes), *(len(s.per_class) for s in attacks)]
    return Evidence(
        clean=max(clean, key=lambda accuracy: accuracy.n, default=None),
        attacked=_one_each(attacked),
        proved=_one_each([point for point, _ in unknown], highest=True),
        smoothed=_one_each(
            [Point("l2", row.radius, row.certified, s.clean) for s in smooth for row in s.radii], highest=True
        ),
        attacks=frozenset(attack.name for s in attacks for attack in s.study.attacks),
        flags=tuple({flag.name: flag for s in attacks for flag in s.flags}.values()),
        flags_sought=not attacks or any(s.study.settings.diagnose for s in attacks),
        failures=tuple(failure for s in proofs for failure in s.failures),
        proof_tried=bool(proofs),
        unknown=tuple(unknown),
        block=max(blocks, key=lambda part: part.step.mean or 0.0, default=None),
        classes=max(counted) or None,
    )


def _chosen(run: Run) -> tuple[Any, bool]:
    """Which studies are of the model of the run and of one data set, and whether it was trained on that."""
    weights = None if run.model is None else run.model.weights_fingerprint
    own = [study for study in run.studies if study.is_about(run.fingerprint, weights)]
    keys = Counter((s.about.model, s.about.data) for s in own if s.about is not None and s.about.n > 0)
    data = None if run.training is None else run.training.summary.settings.data.fingerprint
    if not keys:
        return lambda study: False, True
    key = max(keys, key=lambda key: (key[1] == data, keys[key]))

    def belongs(study: FoundStudy[Any]) -> bool:
        if isinstance(study, FoundTraining) or study.about is None or study not in own:
            return False
        known = run.fingerprint is not None or study.about.model == key[0]
        return known and study.about.data == key[1]

    return belongs, key[1] == data


def _proof(summary: CertificateSummary, number: int) -> Point:
    row = summary.radii[number]
    best = max((a.count for a in row.by.values()), default=0)
    methods = tuple(name for name, accuracy in row.by.items() if best and accuracy.count == best)
    methods = methods or tuple(stage.method for stage in row.stages if stage.certified)
    return Point(summary.study.settings.norm, row.radius, row.certified, summary.clean, methods)


def _attack_name(summary: CertificateSummary) -> str:
    return str(summary.study.attack.get("type", "attack")).lower()


def _one_each(points: Iterable[Point], *, highest: bool = False) -> tuple[Point, ...]:
    """One point per ball, by norm and radius: what is least surely robust, since a weak attack proves little.

    That has the lowest upper end of the 95 % interval, relative to the clean accuracy of the same images: stronger
    attacks, and more images of the same attack, lower it. Of proofs, which all hold, it is the highest accuracy of
    the most images.
    """
    found: dict[tuple[str, str], Point] = {}

    def rank(point: Point) -> tuple[float, int]:
        accuracy = point.accuracy
        if highest:
            return accuracy.n, accuracy.count
        return -accuracy.interval95[1] / (point.clean.value or 1.0), accuracy.n

    for point in points:
        key = (point.norm, f"{point.radius:.9g}")
        found[key] = max([point, *([found[key]] if key in found else [])], key=rank)
    return tuple(sorted(found.values(), key=lambda point: (point.norm, point.radius)))
