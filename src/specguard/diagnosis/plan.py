"""The plan of a diagnosis: decisions that are written down before they are carried out, within a budget of time."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specguard.errors import RunError
from specguard.records.base import difference, plain
from specguard.records.diagnosis import PLAN, Decision, DiagnosisHeader, Measured, PlanLine, Spent
from specguard.records.io import RecordFile

Clock = Callable[[], float]


@dataclass
class Plan:
    """The lines of plan.jsonl, to which new ones are appended; a line that is there is not decided again.

    Args:
        folder: of the diagnosis.
        header: the model, data and settings; those of another diagnosis are refused.
    """

    folder: Path
    header: DiagnosisHeader
    file: RecordFile[Any] = field(init=False)

    def __post_init__(self) -> None:
        kind: Any = PlanLine
        self.file = RecordFile(self.folder / PLAN, kind)
        self.file.read()
        if self.file.torn:
            self.file.rewrite(self.file.records)
        if not self.file.records:
            self.file.append([self.header])
        first = self.file.records[0]
        if not isinstance(first, DiagnosisHeader):
            raise RunError(f"{self.file.path} does not begin with the settings of a diagnosis")
        if other := difference(plain(first), plain(self.header)):
            raise RunError(f"{self.folder} holds another diagnosis ({other}); name another folder")

    @property
    def measured(self) -> Measured | None:
        return next((line for line in self.file.records if isinstance(line, Measured)), None)

    @property
    def decisions(self) -> dict[str, Decision]:
        """The decisions by stage, in order."""
        return {line.stage: line for line in self.file.records if isinstance(line, Decision)}

    @property
    def spent(self) -> float:
        """The seconds that measuring, deciding and working took until now, in all sessions."""
        return sum(line.seconds for line in self.file.records if not isinstance(line, DiagnosisHeader))

    def add(self, line: Measured | Decision | Spent) -> None:
        self.file.append([line])


def allotment(budget: float, spent: float, share: float, later: Iterable[float]) -> float:
    """The seconds of a stage: its share, among the stages that are left, of the time that is left.

    Args:
        budget: seconds in all.
        spent: seconds gone.
        share: of this stage.
        later: the shares of the stages after it.

    Returns:
        Seconds, not negative. What a stage does not use goes to later ones.

    Example:
        >>> allotment(600.0, 120.0, 1.0, [1.0, 2.0])
        120.0
    """
    return max(0.0, budget - spent) * share / (share + sum(later))


def images_within(allotted: float, per_image: float, most: int) -> int:
    """How many images fit the time, at most `most`.

    Args:
        allotted: seconds.
        per_image: seconds per image.
        most: the largest number.

    Returns:
        The number, perhaps 0.

    Example:
        >>> images_within(10.0, 0.3, 100), images_within(1.0, 2.0, 100)
        (33, 0)
    """
    return most if per_image * most <= allotted else int(max(0.0, allotted) / per_image)


@dataclass(frozen=True)
class TooSlow:
    """Why something is skipped, in a sentence without its end, and the minutes that would be enough.

    They are None where time is not the reason.
    """

    text: str
    minutes: int | None = None


def in_seconds(seconds: float) -> str:
    """A time as a person writes it.

    Example:
        >>> in_seconds(0.0432), in_seconds(1234.5)
        ('0.043 s', '1,234 s')
    """
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:,.0f} s"


def too_slow(what: str, allotted: float, per_image: float, minutes: float, share: float) -> TooSlow:
    """Why there is no time for a stage, and how much would be enough.

    Args:
        what: the work of the stage, such as "a proof".
        allotted: seconds of the stage.
        per_image: seconds that one image takes.
        minutes: of the whole diagnosis.
        share: fraction of the whole that this stage has.

    Returns:
        The reason.

    Example:
        >>> too_slow("a proof", 10.0, 30.0, 1.0, 0.25).text
        'a proof takes about 30 s an image, and 10 s are left for it; --minutes 9 is enough for 4 images'
    """
    need = _up(minutes + max(4 * per_image - allotted, 0.0) / share / 60)
    text = (
        f"{what} takes about {in_seconds(per_image)} an image, and {in_seconds(max(allotted, 0.0))} are left for "
        f"it; --minutes {need} is enough for 4 images"
    )
    return TooSlow(text, need)


def skipped(stage: str, why: TooSlow, allotted: float, per_image: float, seconds: float = 0.0) -> Decision:
    """The decision to skip a stage for lack of time.

    Args:
        stage: its name.
        why: the reason.
        allotted: seconds of the stage.
        per_image: seconds that an image takes.
        seconds: what it took to find that out.

    Returns:
        The decision.

    Example:
        >>> skipped("spectrum", TooSlow("it takes too long", 3), 1.0, 9.0).minutes
        3
    """
    return Decision(
        stage=stage,
        run=False,
        reason=why.text,
        minutes=why.minutes,
        allotted=allotted,
        per_image=per_image,
        seconds=seconds,
    )


def _up(minutes: float) -> int:
    return int(minutes) + (minutes > int(minutes))
