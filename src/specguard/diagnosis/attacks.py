"""Attacks of a diagnosis: which suite, how many images and which radii fit the time."""

from specguard.attacks import APGD, PGD, Square, Suite
from specguard.diagnosis.plan import images_within, skipped, too_slow
from specguard.diagnosis.radii import attack_radii, limited
from specguard.diagnosis.subject import Subject
from specguard.errors import RunError
from specguard.geometry import Ball, Norm
from specguard.nn import Network, ViT
from specguard.records.attack import AttackSettings
from specguard.records.diagnosis import PLAN, Decision, Measured, SuiteChoice
from specguard.records.study import Watcher
from specguard.report.evidence import radius_text
from specguard.report.verdict import ATTACKED
from specguard.studies import run_attack, write_gallery

_QUERIES, _STEPS = 1000, 20
SUITES: dict[SuiteChoice, Suite] = {
    "quick": Suite((("pgd", PGD(steps=_STEPS)), ("cw", PGD(steps=_STEPS, loss="margin"))), cascade=True),
    "thorough": Suite(
        (("cw", PGD(steps=_STEPS, loss="margin")), ("apgd-ce", APGD()), ("square", Square(queries=_QUERIES))),
        cascade=True,
    ),
    "black box": Suite((("square", Square(queries=_QUERIES)),), cascade=True),
}
_FIRST, _ENOUGH = 50, 50  # images of the first attack; images for which the thorough suite is worth its time
_BATCH = 25


def suite_seconds(suite: SuiteChoice, measured: Measured) -> float:
    """The seconds that a suite takes for one image and one radius, if all its attacks run."""
    gradient, forward = measured.gradient or 0.0, measured.forward
    if suite == "quick":
        return 2 * _STEPS * gradient
    if suite == "thorough":
        return (_STEPS + APGD().steps) * gradient + _QUERIES * forward
    return _QUERIES * forward


def flag_seconds(measured: Measured) -> float:
    """The seconds that the search for signs of obfuscated gradients takes for one image."""
    return 240 * (measured.gradient or 0.0) + 600 * measured.forward


def decide_first(subject: Subject, measured: Measured, allotted: float, fraction: float) -> Decision:
    """One attack at the customary radius of a few images, with the search for signs of obfuscated gradients."""
    norm = subject.settings.norms[0]
    radius = max(subject.settings.radii, default=ATTACKED[norm])
    suite: SuiteChoice = "quick" if measured.gradient is not None else "black box"
    alone = suite_seconds(suite, measured)
    cost = alone + flag_seconds(measured)
    most = min(subject.most, _FIRST)
    count, flags = images_within(allotted, cost, most), True
    reason = f"{norm}, at the customary radius" if not subject.settings.radii else f"{norm}, at the radius given"
    if count < min(4, most):
        cost, flags = alone, False
        count = images_within(allotted, cost, most)
        reason += (
            f"; signs of obfuscated gradients are not looked for: "
            f"{too_slow('that', allotted, flag_seconds(measured) + alone, subject.settings.minutes, fraction).text}"
        )
    return _decided("gradients", subject, (radius,), suite, flags, count, cost, allotted, fraction, reason)


def decide_attack(subject: Subject, measured: Measured, allotted: float, fraction: float, norm: Norm) -> Decision:
    """Attacks at a few radii around that at which half of the first images are attacked successfully."""
    edge = measured.edge.get(norm)
    radii = subject.settings.radii or limited(attack_radii(norm, edge), norm, subject.pixels)
    if subject.settings.radii:
        reason = "the radii given"
    elif measured.gradient is None:
        reason = "the model has no gradients, so that only black-box attacks apply; radii are the customary ones"
    elif edge is None:
        reason = (
            f"no radius at which half of {measured.probed} images are attacked, so radii are the customary ones"
        )
    else:
        reason = (
            f"radii around {radius_text(edge)}, at which a short PGD changes the class of half of "
            f"{measured.probed} images, and the customary {radius_text(ATTACKED[norm])}"
        )
    suite: SuiteChoice = "black box" if measured.gradient is None else "thorough"
    most = subject.most
    if suite == "thorough":
        count = images_within(allotted, len(radii) * suite_seconds(suite, measured), most)
        if count < min(_ENOUGH, most):
            suite = "quick"
    cost = len(radii) * suite_seconds(suite, measured)
    count = images_within(allotted, cost, most)
    return _decided(f"attacks-{norm}", subject, radii, suite, False, count, cost, allotted, fraction, reason)


def _decided(
    stage: str,
    subject: Subject,
    radii: tuple[float, ...],
    suite: SuiteChoice,
    flags: bool,
    count: int,
    cost: float,
    allotted: float,
    fraction: float,
    reason: str,
) -> Decision:
    if count == 0:
        why = too_slow("an attack", allotted, cost, subject.settings.minutes, fraction)
        return skipped(stage, why, allotted, cost)
    return Decision(
        stage=stage,
        run=True,
        reason=reason,
        images=count,
        radii=radii,
        suite=suite,
        flags=flags,
        allotted=allotted,
        per_image=cost,
    )


def run_attacks(subject: Subject, decision: Decision, watch: Watcher) -> None:
    """Attack the images that were decided on, in an ordinary study."""
    if decision.suite is None:
        raise RunError(f"{subject.folder / PLAN} runs {decision.stage} without a suite of attacks")
    norm: Norm = "linf" if decision.stage.endswith("linf") else "l2"
    if decision.stage == "gradients":
        norm = subject.settings.norms[0]
    split, suite = subject.split(decision.images), SUITES[decision.suite]
    balls = tuple(Ball(norm, radius) for radius in decision.radii)
    settings = AttackSettings(seed=subject.settings.seed, batch=_BATCH, diagnose=decision.flags)
    folder, classes = subject.folder / decision.stage, subject.data.classes
    model = subject.model
    run_attack(
        model,
        split,
        classes,
        folder,
        suite,
        balls,
        settings,
        about=subject.of(split),
        device=subject.device,
        watch=watch,
    )
    if decision.stage == "gradients" and isinstance(model, ViT | Network):
        write_gallery(model, split, classes, folder, suite, balls, settings, device=subject.device)
