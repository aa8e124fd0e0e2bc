"""What a run directory can hold, as frozen values: a training, and studies of the model that came out of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from specguard.records.accuracy import Proportion
from specguard.records.base import Json


@dataclass(frozen=True)
class Origin:
    """Where a study lies, what it is about, and how it was made."""

    place: str  # its folder, below the run
    model: str | None  # the fingerprint of the function; of the weights, in records of earlier versions
    dataset: str | None
    environments: tuple[Json, ...]  # one for every start that is known
    seconds: float | None
    subset_of: int | None = None  # how many images there were, where a stratified subset of them was looked at
    weights: str | None = None  # the fingerprint of the weights, beside that of the function

    def is_about(self, model: str | None, weights: str | None) -> bool:
        """Whether this may be about the model of these fingerprints; what does not say may be."""
        if self.model is None or model is None:
            return True
        if self.weights is not None and weights is not None:
            return self.model == model
        return bool({self.model, self.weights} & {model, weights} - {None})


@dataclass(frozen=True)
class Training:
    """A finished training."""

    origin: Origin
    accuracy: Proportion
    settings: Json
    epochs: tuple[Json, ...]


@dataclass(frozen=True)
class AttackRow:
    attack: str
    norm: str
    radius: float
    accuracy: Proportion


@dataclass(frozen=True)
class ClassRow:
    """One class: what is right, and what stands each worst case."""

    name: str
    clean: Proportion
    worst: tuple[AttackRow, ...]


@dataclass(frozen=True)
class Picture:
    """One broken image, as arrays that are known to be images, and what the model saw in it."""

    sample: int
    attack: str
    norm: str
    radius: float
    distance: float
    label: str
    predicted: str
    confidence: tuple[float, float]
    key: int  # its place in the arrays of the gallery


@dataclass(frozen=True)
class Gallery:
    pictures: tuple[Picture, ...]
    arrays: Mapping[
        str, object
    ]  # clean, adversarial; attention_clean and attention_adversarial where there is some


@dataclass(frozen=True)
class Attacked:
    """An evaluation under attack."""

    origin: Origin
    n: int
    clean: Proportion
    rows: tuple[AttackRow, ...]
    worst: tuple[AttackRow, ...]
    cascade: bool
    classes: tuple[ClassRow, ...]
    flags: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]
    gallery: Gallery | None = None


@dataclass(frozen=True)
class RadiusRow:
    radius: float
    attacked: Proportion
    certified: Proportion
    by: Mapping[str, Proportion]
    broken: int
    unknown: int


@dataclass(frozen=True)
class Margins:
    """What the records of single images say together."""

    best: tuple[float, ...]  # the largest certified l2 radius of every image that is right, ascending
    largest: Mapping[str, tuple[float, ...]]  # the same by family
    terms: tuple[tuple[str, int, float], ...]  # term: images it limits, mean share of what their margins lose
    classes: tuple[tuple[int, int, int, tuple[int, ...]], ...]  # label, n, right, certified at every radius
    digest: str  # of the file


@dataclass(frozen=True)
class Certified:
    """A certification."""

    origin: Origin
    n: int
    norm: str
    clean: Proportion
    rows: tuple[RadiusRow, ...]
    medians: Mapping[str, float | None]
    vacuous: Mapping[str, int]
    limits: tuple[tuple[str, int], ...]
    per_image: Mapping[str, float]  # seconds
    searched: bool
    margins: Margins | None = None


@dataclass(frozen=True)
class Checked:
    """A file of certificates that a second program has proved again."""

    origin: Origin
    n: int
    claims: int
    attacked: int
    records: str  # digest of the file


@dataclass(frozen=True)
class WeightNorms:
    layer: str
    kind: str
    sigma: tuple[float, ...]


@dataclass(frozen=True)
class Looked:
    """Spectra of the blocks of a model, and of its weights."""

    origin: Origin
    n: int
    paths: Mapping[str, float]  # exponent, log_product, growth
    after: tuple[WeightNorms, ...]
    before: tuple[WeightNorms, ...]
    records: tuple[Json, ...] = ()


@dataclass(frozen=True)
class Unfinished:
    """A study that has been started and not completed."""

    origin: Origin
    kind: str
    done: int
    n: int | None


@dataclass(frozen=True)
class Run:
    """Everything found in a run directory, and what was found wrong with it."""

    label: str
    training: Training | None = None
    model: Json = field(default_factory=dict)
    fingerprint: str | None = None
    classes: tuple[str, ...] = ()
    attacked: tuple[Attacked, ...] = ()
    certified: tuple[Certified, ...] = ()
    checked: tuple[Checked, ...] = ()
    looked: tuple[Looked, ...] = ()
    unfinished: tuple[Unfinished, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Of everything that is complete, in the order in which it is usually done."""
        trained = () if self.training is None else (self.training.origin,)
        looked = tuple(study.origin for study in self.looked)
        proved = (*(study.origin for study in self.certified), *(study.origin for study in self.checked))
        return (*trained, *(study.origin for study in self.attacked), *looked, *proved)
