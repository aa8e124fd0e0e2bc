"""A run directory as one value: its training, and studies of the model that came out of it."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from specguard.records.attack import AttackSummary
from specguard.records.base import About, Environment, Norm
from specguard.records.certificate import CertificateSummary, RadiusSummary
from specguard.records.check import CheckSummary
from specguard.records.sensitivity import SensitivitySummary
from specguard.records.smoothing import SmoothSummary
from specguard.records.spectrum import SpectrumRecord, SpectrumSummary
from specguard.records.study import Summary
from specguard.records.training import EpochRecord, ModelRecord, TrainingSummary
from specguard.report.certified_images import CertifiedImages
from specguard.report.gallery import GalleryImages

SummaryType = TypeVar("SummaryType", bound=Summary | TrainingSummary, covariant=True)
UNKNOWN = "unknown"  # the data set of a record that does not name one


@dataclass(frozen=True)
class FoundStudy(Generic[SummaryType]):
    """What was done to a model, and where it lies: `place` is its folder, or its file, below the run.

    There is one environment for every start that is known.
    """

    place: str
    summary: SummaryType
    environments: tuple[Environment, ...] = ()
    seconds: float | None = None

    @property
    def about(self) -> About | None:
        """Which model and data a study is about; None for a training."""
        return None if isinstance(self.summary, TrainingSummary) else self.summary.study.about

    @property
    def dataset(self) -> str | None:
        """The name of the data, where it is known."""
        name = (
            self.summary.settings.data.name
            if isinstance(self.summary, TrainingSummary)
            else self.summary.study.about.dataset
        )
        return None if name == UNKNOWN else name

    @property
    def subset_of(self) -> int | None:
        """How many images there were, where a stratified subset of them was looked at."""
        return None if self.about is None or self.about.subset is None else self.about.subset.of

    def is_about(self, model: str | None, weights: str | None) -> bool:
        """Whether this is about the model of these fingerprints, of its function and of its weights.

        Earlier versions have one fingerprint only, which may be that of the weights.
        """
        if model is None:
            return True
        if isinstance(self.summary, TrainingSummary):
            own, own_weights = self.summary.fingerprint, self.summary.weights_fingerprint
        else:
            own, own_weights = self.summary.study.about.model, self.summary.study.about.weights_fingerprint
        if own_weights is not None and weights is not None:
            return bool(own == model)
        return bool({own, own_weights} & {model, weights} - {None})


@dataclass(frozen=True)
class FoundTraining(FoundStudy[TrainingSummary]):
    """A finished training, epoch by epoch."""

    epochs: tuple[EpochRecord, ...] = ()


@dataclass(frozen=True)
class FoundAttack(FoundStudy[AttackSummary]):
    """An evaluation under attack, and a few adversarial examples, where they were kept."""

    gallery: GalleryImages | None = None


@dataclass(frozen=True)
class FoundCertificates(FoundStudy[CertificateSummary]):
    """A certification, and what its single images say, where their records lie beside the summary."""

    images: CertifiedImages | None = None

    @property
    def norm(self) -> Norm:
        return self.summary.study.settings.norm

    @property
    def rows(self) -> list[RadiusSummary]:
        """The radii, the smallest first."""
        return sorted(self.summary.radii, key=lambda row: row.radius)


@dataclass(frozen=True)
class FoundSpectrum(FoundStudy[SpectrumSummary]):
    """Spectra of the blocks, and those of single images with the largest singular value of every part."""

    records: tuple[SpectrumRecord, ...] = ()


@dataclass(frozen=True)
class UnfinishedStudy:
    """A study that has been started and not completed: how many records of how many images there are."""

    place: str
    kind: str
    done: int
    n: int | None
    environments: tuple[Environment, ...] = ()


@dataclass(frozen=True)
class Run:
    """Everything found in a run directory, and one sentence for everything that is wrong with it."""

    label: str
    training: FoundTraining | None = None
    model: ModelRecord | None = None
    fingerprint: str | None = None
    classes: tuple[str, ...] = ()
    attacks: tuple[FoundAttack, ...] = ()
    certificates: tuple[FoundCertificates, ...] = ()
    checks: tuple[FoundStudy[CheckSummary], ...] = ()
    spectra: tuple[FoundSpectrum, ...] = ()
    smoothing: tuple[FoundStudy[SmoothSummary], ...] = ()
    sensitivity: tuple[FoundStudy[SensitivitySummary], ...] = ()
    unfinished: tuple[UnfinishedStudy, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def studies(self) -> tuple[FoundStudy[Summary | TrainingSummary], ...]:
        """Everything that is complete, in the order in which it is usually done."""
        trained = () if self.training is None else (self.training,)
        looked = (*self.attacks, *self.spectra, *self.sensitivity)
        return (*trained, *looked, *self.certificates, *self.smoothing, *self.checks)
