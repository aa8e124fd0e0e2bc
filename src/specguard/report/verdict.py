"""From numbers to a verdict: what is known about the robustness of a model, and the command to run next.

The rule, in this order. A 95 % interval stands behind each comparison, so that few images decide nothing.

undertrained   the clean accuracy is surely below halfway between guessing and all correct
certified      at l2 36/255 or linf 2/255, or beyond, at least half of the clean accuracy is proved
not robust     at l2 0.25 or linf 4/255, or within, attacks leave less than half of the clean accuracy, in each norm
unclear        attacks leave more, but there are signs of obfuscated gradients
unproved       at l2 0.25 or linf 4/255, or beyond, attacks of several steps leave at least half, in one norm
open           anything else: too few images, or no attack, or one of a single step, at these radii
"""

from dataclasses import dataclass, replace
from typing import Literal

from specguard.records.accuracy import Accuracy
from specguard.records.base import Norm
from specguard.report.evidence import Evidence, Point, evidence
from specguard.report.next_command import Commands
from specguard.report.run import Run

ATTACKED: dict[Norm, float] = {"l2": 0.25, "linf": 4 / 255}  # customary radii, at which attacks decide
PROVED: dict[Norm, float] = {"l2": 36 / 255, "linf": 2 / 255}  # the same of proofs
NORMS: tuple[Norm, ...] = ("linf", "l2")
_ONE_STEP = frozenset(("fgsm",))  # whose failure decides nothing
Judgment = Literal["robust", "not robust", "open"]


@dataclass(frozen=True)
class Verdict:
    """What is known about the robustness of a model, and what to do next.

    Args:
        headline: one sentence: what is known.
        sentences: at most three, with numbers: what attacks left, what is proved, what is unknown and why.
        command: the next command to run; None where there is none.

    Example:
        >>> from specguard.report.verdict import Verdict
        >>> print(Verdict("Not robust.", ("Attacks leave 3 of 100.",), "specguard train runs/mine"))
        Not robust.
        Attacks leave 3 of 100.
        next: specguard train runs/mine
    """

    headline: str
    sentences: tuple[str, ...]
    command: str | None

    def __str__(self) -> str:
        last = () if self.command is None else (f"next: {self.command}",)
        return "\n".join((self.headline, *self.sentences, *last))


@dataclass(frozen=True)
class NotTried:
    """Why a diagnosis certified nothing, and the minutes that would be enough; None where time is not the reason.

    Example:
        >>> NotTried("no method applies: the model is a Wrapped, for which there is no rule").minutes
    """

    reason: str
    minutes: int | None = None


def verdict(run: Run, proofs: NotTried | None = None, clean: Accuracy | None = None) -> Verdict | None:
    """Judge the robustness of a run's model from the studies that there are.

    Args:
        run: as `read_run` returns it.
        proofs: why nothing was certified, where a diagnosis knows it.
        clean: the accuracy without attack, where it was counted on more images than the studies have.

    Returns:
        The verdict; None of a run without any study or training.

    Example:
        >>> from specguard.report.examples import example_run
        >>> from specguard.report.verdict import verdict
        >>> print(verdict(example_run()).headline)
        Open: 50.0 % [15.0, 85.0], n = 4, remain under attack at l2 0.1, and larger radii were not attacked.
    """
    found = evidence(run)
    if found.clean is None:
        return None
    counted = found.clean if clean is None or clean.n <= found.clean.n else clean
    found = replace(found, clean=counted)
    headline, command = _headline(found, counted, Commands(run), run, proofs)
    sentences = (_attacks(found), _proofs(found, proofs), _unknown(found))
    return Verdict(headline, tuple(text for text in sentences if text), command)


def judged(points: tuple[Point, ...], norm: Norm) -> Judgment:
    """Whether attacks in a norm leave half of the clean accuracy at the customary radius."""
    own = [point for point in points if point.norm == norm]
    if any(point.falls and point.within(ATTACKED[norm]) for point in own):
        return "not robust"
    if any(point.holds and point.beyond(ATTACKED[norm]) and not _is_weak(point) for point in own):
        return "robust"
    return "open"


def _is_weak(point: Point) -> bool:
    """Whether no attack at this point took more than one step."""
    return bool(point.by) and set(point.by) <= _ONE_STEP


def _headline(
    found: Evidence, clean: Accuracy, commands: Commands, run: Run, proofs: NotTried | None
) -> tuple[str, str | None]:
    """The headline and the next command."""
    if clean.interval95[1] < _halfway(found.classes):
        text = f"Undertrained: without any attack only {clean} are classified correctly, which bounds robustness."
        return text, commands.train_longer()
    judgments = {norm: judged(found.attacked, norm) for norm in NORMS}
    if proof := _best_proof(found):
        return _certified(proof, _fallen(found, judgments), found, commands, run)
    robust = [norm for norm in NORMS if judgments[norm] == "robust"]
    if not robust and (fallen := _fallen(found, judgments)):
        text = f"Not robust: attacks at {fallen.ball} leave {fallen.accuracy} of {_percent(fallen.clean)} clean."
        return text, commands.finetune(fallen.norm, ATTACKED[fallen.norm])
    if found.flags and found.attacked:
        return _unclear(found, commands)
    if robust:
        point = _most_robust(found, robust[0])
        tail = "" if (fallen := _fallen(found, judgments)) is None else f", but not at {fallen.ball}"
        text = (
            f"Robust to the attacks tried at {point.ball}, where {point.accuracy} of {_percent(point.clean)} "
            f"clean remain{tail}; this is not proved."
        )
        return text, _toward_proof(found, point, commands, proofs)
    return _open(found, clean, commands)


def _halfway(classes: int | None) -> float:
    """Halfway between guessing and all correct."""
    return 0.5 if classes is None else (1 + 1 / max(classes, 1)) / 2


def _percent(accuracy: Accuracy) -> str:
    return f"{100 * accuracy.value:.1f} %"


def _best_proof(found: Evidence) -> Point | None:
    """The largest customary ball for which at least half of the clean accuracy is proved."""
    held = [point for point in found.proved if point.holds and point.beyond(PROVED[point.norm])]
    return max(held, key=lambda point: point.radius / PROVED[point.norm], default=None)


def _fallen(found: Evidence, judgments: dict[Norm, Judgment]) -> Point | None:
    """The smallest ball in which attacks leave less than half, where the model is not robust."""
    for norm in NORMS:
        if judgments[norm] == "not robust":
            return next(point for point in found.attacked if point.norm == norm and point.falls)
    return None


def _most_robust(found: Evidence, norm: Norm) -> Point:
    """The largest ball in which attacks leave at least half."""
    return [point for point in found.attacked if point.norm == norm and point.holds and not _is_weak(point)][-1]


def _certified(
    proof: Point, fallen: Point | None, found: Evidence, commands: Commands, run: Run
) -> tuple[str, str | None]:
    tail = "" if fallen is None else f"; at {fallen.ball} attacks leave {_percent(fallen.accuracy)}"
    text = f"Certified: at {proof.ball}, {proof.accuracy} of {_percent(proof.clean)} clean are proved{tail}."
    studies = [s for s in run.certificates if any(r.radius == proof.radius for r in s.summary.radii)]
    places = [s.place for s in studies if s.summary.study.settings.norm == proof.norm]
    abouts = [s.summary.study.about for s in studies if s.place in places]
    checked = any(check.summary.study.about in abouts for check in run.checks)
    if not checked and places and (command := commands.check(places[-1])) is not None:
        return text, command
    return text, commands.export()


def _unclear(found: Evidence, commands: Commands) -> tuple[str, str | None]:
    point, names = found.attacked[-1], " and ".join(flag.name for flag in found.flags)
    text = (
        f"Unclear: attacks leave {point.accuracy} at {point.ball}, but there are signs of obfuscated gradients "
        f"({names}), so that they may be too weak."
    )
    stronger = "autoattack" if {"apgd-t", "square"} <= found.attacks else "full"
    if "autoattack" in found.attacks:
        return text, None
    return text, commands.attack(point.norm, point.radius, stronger)


def _toward_proof(found: Evidence, point: Point, commands: Commands, proofs: NotTried | None) -> str | None:
    """What to do about a model that attacks leave robust."""
    if proofs is not None and not found.proof_tried:
        if proofs.minutes is None:  # no method applies
            return commands.train_for_certificates()
        return commands.diagnose("--minutes", str(proofs.minutes))
    if not found.proof_tried:
        return commands.certify(point.norm, PROVED[point.norm])
    if not found.smoothed and not any(proof.accuracy.count for proof in found.proved):
        return commands.smooth()
    return commands.train_for_certificates()


def _open(found: Evidence, clean: Accuracy, commands: Commands) -> tuple[str, str | None]:
    if not found.attacked:
        return f"Open: {clean} are classified correctly, and no attack has been tried.", commands.diagnose()
    small = [point for point in found.attacked if not point.beyond(ATTACKED[point.norm])]
    if len(small) == len(found.attacked):
        point = max(small, key=lambda point: point.radius / ATTACKED[point.norm])
        text = f"Open: {point.accuracy}, remain under attack at {point.ball}, and larger radii were not attacked."
        return text, commands.attack(point.norm, ATTACKED[point.norm], "full")
    point = next(point for point in found.attacked if point.beyond(ATTACKED[point.norm]))
    if _is_weak(point) and not point.falls:
        names = " and ".join(point.by)
        text = f"Open: {point.accuracy}, remain at {point.ball} under {names}, too weak an attack to decide."
        return text, commands.attack(point.norm, ATTACKED[point.norm], "full")
    text = f"Open: {point.accuracy}, remain under attack at {point.ball}, which does not decide at this radius."
    if point.falls:  # beyond the customary radius, where nothing was attacked
        return text, commands.attack(point.norm, ATTACKED[point.norm], "full")
    return text, commands.diagnose("--images", str(4 * point.accuracy.n), "--minutes", "60")


# Sentences --------------------------------------------------------------------------------------------------------


def _attacks(found: Evidence) -> str:
    """What attacks left, at one ball of each norm."""
    chosen = [point for norm in NORMS if (point := _shown(found.attacked, norm, ATTACKED[norm])) is not None]
    if not chosen:
        return f"Measured: {found.clean} are classified correctly without attack; no attack was run."
    parts = [f"{point.accuracy} at {point.ball}" for point in chosen]
    names = ", ".join(sorted({name for point in chosen for name in point.by}))
    flags = "; ".join(f"{flag.name}: {flag.message}" for flag in found.flags)
    after = f"; signs of obfuscated gradients: {flags}" if flags else ""
    if not found.flags_sought:
        after = "; signs of obfuscated gradients were not looked for"
    return f"Measured: of {found.clean} clean, attacks ({names}) leave {' and '.join(parts)}{after}."


def _shown(points: tuple[Point, ...], norm: Norm, radius: float) -> Point | None:
    """The point of a norm that is nearest to a radius, in ratio."""
    own = [point for point in points if point.norm == norm and point.radius > 0]
    return min(own, key=lambda p: max(p.radius / radius, radius / p.radius), default=None)


def _proofs(found: Evidence, proofs: NotTried | None) -> str:
    """What is proved, at one ball of each norm, or why nothing is."""
    if not found.proof_tried:
        why = "as no certification was run" if proofs is None else f"as {proofs.reason}"
        return f"Proved: nothing, {why}{_smoothed(found)}."
    held = tuple(point for point in found.proved if point.accuracy.count)
    chosen = [point for norm in NORMS if (point := _largest(held, norm)) is not None]
    if chosen:
        parts = [f"{point.accuracy} at {point.ball} ({', '.join(point.by)})" for point in chosen]
        return f"Proved: {' and '.join(parts)}{_smoothed(found)}."
    radii = [point for norm in NORMS for point in found.proved if point.norm == norm][:1]
    where = f" even at {radii[0].ball} of {radii[0].accuracy.n} images" if radii else ""
    return f"Proved: nothing{where}{_smoothed(found)}."


def _largest(points: tuple[Point, ...], norm: Norm) -> Point | None:
    """The largest ball at which half of the clean accuracy is proved, or the smallest ball."""
    own = [point for point in points if point.norm == norm and point.radius > 0]
    held = [point for point in own if 2 * point.accuracy.value >= point.clean.value]
    return held[-1] if held else own[0] if own else None


def _smoothed(found: Evidence) -> str:
    """What holds of the smoothed classifier, which is another function."""
    if (point := _largest(tuple(p for p in found.smoothed if p.accuracy.count), "l2")) is None:
        return ""
    return (
        f"; the smoothed classifier, another function, keeps {point.accuracy} at {point.ball} with a failure "
        "probability"
    )


def _unknown(found: Evidence) -> str:
    """What is neither proved nor refuted, and why: what was not applied, and the most fragile block."""
    parts = []
    gaps = [(point, count) for point, count in found.unknown if count and point.radius > 0]
    if gaps:
        point, count = max(gaps, key=lambda gap: (gap[0].beyond(PROVED[gap[0].norm]), -gap[0].radius))
        parts.append(
            f"{count} of {point.accuracy.n} images at {point.ball}, neither proved nor attacked successfully"
        )
    parts += [f"{f.method} was not applied: {f.reason}" for f in found.failures[:1]]
    if (block := found.block) is not None and block.step.mean is not None:
        parts.append(
            f"the most fragile block is {block.name}, which stretches a perturbation by up to "
            f"{block.step.mean:.3g} (mean of {block.step.n} images)"
        )
    return f"Unknown: {'; '.join(parts)}." if gaps or found.failures else f"Also: {parts[0]}." if parts else ""
