"""Searches for perturbations that change a model's answer. Any callable from images to logits will do."""

from specguard.attacks.apgd import APGD
from specguard.attacks.cw import CWL2
from specguard.attacks.fab import FAB
from specguard.attacks.hunt import Adversarial, Attack
from specguard.attacks.pgd import FGSM, PGD
from specguard.attacks.square import Square

__all__ = ["APGD", "CWL2", "FAB", "FGSM", "PGD", "Adversarial", "Attack", "Square"]
