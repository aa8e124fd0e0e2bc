"""Attacks: searches for perturbations that change the class. A model is any callable from images to logits."""

from specguard.attacks.apgd import APGD
from specguard.attacks.autoattack import AutoAttack
from specguard.attacks.base import Adversarial, Attack
from specguard.attacks.cw import CWL2
from specguard.attacks.fab import FAB
from specguard.attacks.obfuscated_gradients import Flag, find_flags
from specguard.attacks.pgd import FGSM, PGD
from specguard.attacks.square import Square
from specguard.attacks.suites import Suite, named_attack, named_suite

__all__ = [
    "APGD",
    "CWL2",
    "FAB",
    "FGSM",
    "PGD",
    "Adversarial",
    "Attack",
    "AutoAttack",
    "Flag",
    "Square",
    "Suite",
    "find_flags",
    "named_attack",
    "named_suite",
]
