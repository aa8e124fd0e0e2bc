"""Studies of a model: each the work of one batch, with the life cycle of `records.study` around it."""

from specguard.studies.attack import attack_study, run_attack
from specguard.studies.baseline import linear_baseline, stored_baseline
from specguard.studies.certify import run_certify
from specguard.studies.check import checked_study, run_check
from specguard.studies.gallery import write_gallery
from specguard.studies.rollout import attention_rollout
from specguard.studies.samples import about_study, balls_of, first_samples, stated_samples
from specguard.studies.sensitivity import run_sensitivity
from specguard.studies.smooth import run_smooth
from specguard.studies.spectrum import run_spectrum

__all__ = [
    "about_study",
    "attack_study",
    "attention_rollout",
    "balls_of",
    "checked_study",
    "first_samples",
    "linear_baseline",
    "run_attack",
    "run_certify",
    "run_check",
    "run_sensitivity",
    "run_smooth",
    "run_spectrum",
    "stated_samples",
    "stored_baseline",
    "write_gallery",
]
