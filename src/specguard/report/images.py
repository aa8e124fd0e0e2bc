"""Which images a study evaluated: accuracies are compared only where they are of the same ones."""

from dataclasses import dataclass, field, replace
from typing import Any

from specguard.records.base import Subset
from specguard.records.training import TrainingSummary
from specguard.report.run import UNKNOWN, FoundStudy, Run


@dataclass(frozen=True)
class Images:
    """The images of a study: the fingerprint of their data set, how many, and the rule that chose them.

    Args:
        data: the fingerprint of the data set.
        n: the number of images; without a rule they are the first.
        subset: the rule that chose them.
        dataset: the name of the data set, where it is known.

    Example:
        >>> Images("f00d", 360, dataset="digits").named
        '360 images of digits'
    """

    data: str
    n: int
    subset: Subset | None = None
    dataset: str | None = field(default=None, compare=False)

    @property
    def known(self) -> bool:
        """Whether the records say which images these are."""
        return self.data != UNKNOWN

    @property
    def text(self) -> str:
        """How many images, and of which set they are a stratified subset, if they are."""
        more = "" if self.subset is None else f", a subset of {self.subset.of:,} stratified by class"
        return f"{self.n:,} images{more}"

    @property
    def named(self) -> str:
        """The same with the name of the data set."""
        return self.text.replace(" images", f" images of {self.dataset}", 1) if self.dataset else self.text


def images_of(study: FoundStudy[Any]) -> Images:
    """The images of a study; of a training, those of its test accuracy."""
    if isinstance(study.summary, TrainingSummary):
        data = study.summary.settings.data
        return Images(data.fingerprint, study.summary.test_accuracy.n, dataset=study.dataset)
    about = study.summary.study.about
    return Images(about.data, study.summary.n, about.subset, study.dataset)


def image_sets(run: Run, norm: str | None = None) -> list[Images]:
    """The images of all attack studies and certifications in a norm, or in any; those of most images first."""
    found = [images_of(study) for study in (*run.attacks, *run.certificates) if norm in (None, *norms(study))]
    return sorted(dict.fromkeys(found), key=lambda images: (-images.n, images.subset is None))


def norms(study: FoundStudy[Any]) -> set[str]:
    """The norms of the balls of an attack study or a certification."""
    if hasattr(study.summary, "worst_case"):
        return {row.norm for row in study.summary.worst_case}
    return {study.summary.study.settings.norm}


def on_images(run: Run, images: Images) -> Run:
    """The run with only those accuracies that are of these images: of training, attacks, proofs and smoothing."""
    return replace(
        run,
        training=run.training if run.training is not None and images_of(run.training) == images else None,
        attacks=tuple(study for study in run.attacks if images_of(study) == images),
        certificates=tuple(study for study in run.certificates if images_of(study) == images),
        smoothing=tuple(study for study in run.smoothing if images_of(study) == images),
    )
