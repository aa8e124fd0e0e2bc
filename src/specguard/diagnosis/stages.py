"""The stages of a diagnosis: each decides what it can do in its time, and then runs an ordinary study."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from specguard.diagnosis.attacks import decide_attack, decide_first, run_attacks
from specguard.diagnosis.others import decide_smooth, decide_spectrum, run_smoothing, run_spectra
from specguard.diagnosis.proofs import decide_proofs, run_proofs
from specguard.diagnosis.subject import Subject
from specguard.geometry import Norm
from specguard.records.diagnosis import Decision, DiagnosisSettings, Measured
from specguard.records.study import Watcher

Decide = Callable[[Subject, Measured, float, float], Decision]  # of the seconds, and the fraction of the whole
Run = Callable[[Subject, Decision, Watcher], Any]


@dataclass(frozen=True)
class Stage:
    """One study of a diagnosis.

    Args:
        name: of the stage, and of the folder of its study.
        title: what people are told that it does.
        share: of the time, relative to the other stages.
        decide: plans the stage.
        run: does what was planned.
    """

    name: str
    title: str
    share: float
    decide: Decide
    run: Run


def stages_of(settings: DiagnosisSettings) -> tuple[Stage, ...]:
    """The stages in order: what answers first, attacks, fragile blocks, proofs, smoothing.

    Args:
        settings: of the diagnosis, which say the norms.

    Returns:
        The stages.

    Example:
        >>> [stage.name for stage in stages_of(DiagnosisSettings(norm="l2"))]
        ['gradients', 'attacks-l2', 'spectrum', 'certificates-l2', 'smoothing']
    """
    norms = settings.norms
    attack, proof = 0.3 / len(norms), {"l2": 0.2, "linf": 0.15}
    first = Stage("gradients", "first attack, signs of obfuscated gradients", 0.15, decide_first, run_attacks)
    return (
        first,
        *(_attack_stage(norm, attack) for norm in norms),
        Stage("spectrum", "fragile blocks", 0.05, decide_spectrum, run_spectra),
        *(_proof_stage(norm, proof[norm]) for norm in reversed(norms)),
        *((Stage("smoothing", "smoothing", 0.1, decide_smooth, run_smoothing),) if "l2" in norms else ()),
    )


def _attack_stage(norm: Norm, share: float) -> Stage:
    return Stage(f"attacks-{norm}", f"attacks, {norm}", share, partial(decide_attack, norm=norm), run_attacks)


def _proof_stage(norm: Norm, share: float) -> Stage:
    decide: Decide = partial(decide_proofs, norm=norm)
    return Stage(f"certificates-{norm}", f"proofs, {norm}", share, decide, partial(run_proofs, norm=norm))
