"""Diagnoses on disk: plan.jsonl, with what was measured, what each stage was given and why, and what it took.

Decisions depend on measured times, and are written before they are carried out: a diagnosis that is started again
reads them, and so comes to the same result.
"""

from typing import Annotated, Literal

from specguard.errors import ConfigError
from specguard.records.accuracy import Accuracy
from specguard.records.base import About, Count, Name, Norm, Record, SeedSetting, Size, setting
from specguard.records.certificate import MethodName

PLAN = "plan.jsonl"
SuiteChoice = Literal["quick", "thorough", "black box"]


class DiagnosisSettings(Record, frozen=True):
    """How long a diagnosis may take, and what it is about."""

    minutes: Annotated[
        float, setting("time for all of it, from which the images and methods are planned", gt=0, le=1e6)
    ] = 10.0
    norm: Annotated[Norm | None, setting("norm of the perturbations")] = None
    radii: Annotated[
        tuple[Size, ...], setting("radii of attacks and proofs, in pixels of [0, 1], such as 8/255", "--radius")
    ] = ()
    images: Annotated[Count | None, setting("", "")] = None
    first: Annotated[bool, setting("", "")] = False
    memory: Annotated[float | None, setting("GiB for certificates")] = None
    seed: SeedSetting = 0

    def __post_init__(self) -> None:
        if not 0 < self.minutes <= 1e6:
            raise ConfigError(f"minutes must be positive, not {self.minutes:g}")
        if self.radii and self.norm is None:
            raise ConfigError("--radius needs --norm: a radius in l2 is another than in linf")
        if any(radius <= 0 for radius in self.radii) or len(set(self.radii)) < len(self.radii):
            raise ConfigError("radii must be positive, and none may be given twice")
        if self.memory is not None and not 0 < self.memory < 2**30:
            raise ConfigError(f"memory must be positive and below 2^30 GiB, not {self.memory:g}")
        if self.images is not None and self.images < 1:
            raise ConfigError(f"images must be at least 1, not {self.images}")

    @property
    def norms(self) -> tuple[Norm, ...]:
        return ("linf", "l2") if self.norm is None else (self.norm,)


class DiagnosisHeader(Record, frozen=True, tag_field="kind", tag="diagnosis"):
    """The model, data and settings: the first line of the plan."""

    about: About
    settings: DiagnosisSettings


class Measured(Record, frozen=True, tag_field="kind", tag="measured"):
    """What the first images showed: the clean accuracy, seconds per image, and how far adversarial examples are.

    `gradient` is None of a model without gradients. `edge` is the smallest radius of the grid of a norm at which a
    short PGD changes the class of half of `probed` images; None where there is none.
    """

    clean: Accuracy
    forward: Size
    gradient: Size | None
    probed: Count
    edge: dict[Norm, Size | None]
    seconds: Size


class Decision(Record, frozen=True, tag_field="kind", tag="decision", omit_defaults=True):
    """What a stage was given, and why: decided once, and then kept.

    `allotted` are the seconds that it may take, `per_image` those that an image is expected to take, and `seconds`
    what it took to find that out. Of a stage that is skipped for lack of time, `minutes` would be enough.
    """

    stage: Name
    run: bool
    reason: Name
    images: Count = 0
    radii: tuple[Size, ...] = ()
    suite: SuiteChoice | None = None
    flags: bool = False
    methods: tuple[MethodName, ...] = ()
    samples: Count = 0
    minutes: Count | None = None
    allotted: Size = 0.0
    per_image: Size = 0.0
    seconds: Size = 0.0


class Spent(Record, frozen=True, tag_field="kind", tag="spent"):
    """The seconds that a stage took until it was complete or interrupted."""

    stage: Name
    seconds: Size


PlanLine = DiagnosisHeader | Measured | Decision | Spent
