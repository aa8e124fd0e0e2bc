"""SpecGuard: train vision transformers, attack them, and prove what no attack can do."""

from specguard.adapt import from_run
from specguard.attacks import APGD, CWL2, FAB, FGSM, PGD, AutoAttack, Square
from specguard.certify import Certificate
from specguard.geometry import Ball
from specguard.nn import ViT, ViTConfig, preset
from specguard.penalties import MSVP, SpectralNorm
from specguard.version import __version__

__all__ = [
    "APGD",
    "CWL2",
    "FAB",
    "FGSM",
    "MSVP",
    "PGD",
    "AutoAttack",
    "Ball",
    "Certificate",
    "SpectralNorm",
    "Square",
    "ViT",
    "ViTConfig",
    "__version__",
    "from_run",
    "preset",
]
