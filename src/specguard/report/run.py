"""A run directory as one value: its training, and the studies of the trained model."""

from dataclasses import dataclass
from pathlib import Path
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
UNKNOWN = "unknown"  # the data set of records that name none


@dataclass(frozen=True)
class FoundStudy(Generic[SummaryType]):
    """A study or training with its summary; `place` is its folder, or file, relative to the run.

    There is one environment per recorded start.
    """

    place: str
    summary: SummaryType
    environments: tuple[Environment, ...] = ()
    seconds: float | None = None

    @property
    def about(self) -> About | None:
        """The model and data of a study; None for a training."""
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
        """The size of the set of which a stratified subset was evaluated; None where none was."""
        return None if self.about is None or self.about.subset is None else self.about.subset.of

    def is_about(self, model: str | None, weights: str | None) -> bool:
        """Whether the study is of the model with these fingerprints of its function and its weights.

        Earlier versions record a single fingerprint, which may be that of the weights.
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
    """A finished training and its epochs."""

    epochs: tuple[EpochRecord, ...] = ()


@dataclass(frozen=True)
class FoundAttack(FoundStudy[AttackSummary]):
    """An attack study, and a few adversarial examples where they were saved."""

    gallery: GalleryImages | None = None


@dataclass(frozen=True)
class FoundCertificates(FoundStudy[CertificateSummary]):
    """A certification, and statistics over its images where their records are available."""

    images: CertifiedImages | None = None

    @property
    def norm(self) -> Norm:
        return self.summary.study.settings.norm

    @property
    def rows(self) -> list[RadiusSummary]:
        """The radii in ascending order."""
        return sorted(self.summary.radii, key=lambda row: row.radius)


@dataclass(frozen=True)
class FoundSpectrum(FoundStudy[SpectrumSummary]):
    """A spectrum study, and the largest singular value of each part at each image."""

    records: tuple[SpectrumRecord, ...] = ()


@dataclass(frozen=True)
class FoundSmoothing(FoundStudy[SmoothSummary]):
    """A smoothing study, and the certified radii of the images that it classifies correctly, ascending."""

    radii: tuple[float, ...] = ()

    @property
    def sigma(self) -> float:
        """The standard deviation of the noise."""
        return self.summary.study.settings.smoothing.sigma


@dataclass(frozen=True)
class UnfinishedStudy:
    """A study that was started and not completed, with `done` records of `n` images."""

    place: str
    kind: str
    done: int
    n: int | None
    environments: tuple[Environment, ...] = ()


@dataclass(frozen=True)
class Run:
    """The contents of a run directory, as `read_run` returns them.

    Args:
        label: the name of the run in tables and figures.
        training: the training; None where there is none, or it is unfinished.
        model: the record of the trained model.
        fingerprint: the fingerprint of the function of the model.
        classes: the names of the classes.
        attacks: attack studies.
        certificates: certifications.
        checks: independent checks of certificates.
        spectra: spectrum studies.
        smoothing: randomized smoothing studies.
        sensitivity: studies of single attention layers.
        unfinished: studies that were started and not completed.
        problems: one sentence per file that could not be read, or does not belong to the run.
        path: the directory, as it was named.

    Example:
        >>> from specguard.report.examples import example_run
        >>> run = example_run()
        >>> str(run.certificates[0].rows[-1].certified)
        '25.0 % [4.6, 69.9], n = 4'
    """

    label: str
    training: FoundTraining | None = None
    model: ModelRecord | None = None
    fingerprint: str | None = None
    classes: tuple[str, ...] = ()
    attacks: tuple[FoundAttack, ...] = ()
    certificates: tuple[FoundCertificates, ...] = ()
    checks: tuple[FoundStudy[CheckSummary], ...] = ()
    spectra: tuple[FoundSpectrum, ...] = ()
    smoothing: tuple[FoundSmoothing, ...] = ()
    sensitivity: tuple[FoundStudy[SensitivitySummary], ...] = ()
    unfinished: tuple[UnfinishedStudy, ...] = ()
    problems: tuple[str, ...] = ()
    path: Path | None = None

    @property
    def studies(self) -> tuple[FoundStudy[Summary | TrainingSummary], ...]:
        """All complete studies, in the order in which they are usually made."""
        trained = () if self.training is None else (self.training,)
        measured = (*self.attacks, *self.spectra, *self.sensitivity)
        return (*trained, *measured, *self.certificates, *self.smoothing, *self.checks)
