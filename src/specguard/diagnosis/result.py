"""What a diagnosis found, as a value and as text."""

from dataclasses import dataclass
from pathlib import Path

from specguard.diagnosis.plan import in_seconds
from specguard.records.accuracy import Accuracy
from specguard.records.diagnosis import Decision
from specguard.report import Verdict
from specguard.report.evidence import Evidence, radius_text


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """What a diagnosis found.

    Args:
        verdict: a headline, at most three sentences, and the next command.
        evidence: the numbers behind it, of all studies of the model.
        clean: the accuracy without perturbation of the images that were counted first.
        stages: what every stage was given, and why, or why it was skipped.
        folder: where the studies are; None if they were not kept.
        report: the HTML page; None if the studies were not kept.

    Example:
        >>> import torch
        >>> import specguard
        >>> from specguard.data import digits
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)).eval()
        >>> found = specguard.diagnose(model, digits(), minutes=0.05, images=4)
        >>> found.verdict.headline.split(":")[0]
        'Undertrained'
    """

    verdict: Verdict
    evidence: Evidence
    clean: Accuracy
    stages: tuple[Decision, ...]
    folder: Path | None
    report: Path | None

    def __str__(self) -> str:
        lines = [f"clean accuracy {self.clean}", *map(stage_line, self.stages), *_numbers(self.evidence)]
        lines += ["", str(self.verdict)]
        return "\n".join(lines + ([] if self.report is None else [f"report in {self.report}"]))

    __repr__ = __str__


def stage_line(decision: Decision) -> str:
    """What a stage was given and why, or why it is skipped.

    Args:
        decision: the stored decision.

    Returns:
        One line of text.

    Example:
        >>> stage_line(Decision(stage="spectrum", run=False, reason="no time is left"))
        'spectrum: skipped, no time is left'
    """
    if not decision.run:
        return f"{decision.stage}: skipped, {decision.reason}"
    parts = [f"{decision.images} image{'' if decision.images == 1 else 's'}"]
    if decision.radii:
        parts.append(f"at {', '.join(map(radius_text, decision.radii))}")
    if decision.suite is not None:
        parts.append(f"{decision.suite} attacks")
    if decision.methods:
        parts.append(f"by {', '.join(decision.methods)}")
    time_needed = f"about {in_seconds(decision.images * decision.per_image)} of {in_seconds(decision.allotted)}"
    return f"{decision.stage}: {', '.join(parts)} ({time_needed}); {decision.reason}"


def _numbers(found: Evidence) -> list[str]:
    """The accuracies within all balls."""
    lines = [f"attacked   {point.ball:<14} {point.accuracy}" for point in found.attacked if point.radius]
    lines += [f"proved     {point.ball:<14} {point.accuracy} {', '.join(point.by)}" for point in found.proved]
    lines += [f"smoothed   {point.ball:<14} {point.accuracy}" for point in found.smoothed]
    return ["", *lines]
