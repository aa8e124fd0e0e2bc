"""SpecGuard: train vision transformers, attack them, and prove what no attack can do.

The names below are found when they are first asked for (PEP 562): a report is written without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specguard.version import __version__

if TYPE_CHECKING:
    from specguard.attacks import APGD, CWL2, FAB, FGSM, PGD, AutoAttack, Square
    from specguard.certificates import Certificate, certify
    from specguard.diagnosis import diagnose
    from specguard.evaluation import AttackResult, Evaluation, attack, evaluate
    from specguard.geometry import Ball
    from specguard.models import from_run, from_zoo
    from specguard.nn import ViT, ViTConfig, preset
    from specguard.penalties import MSVP, SpectralNorm

__all__ = [
    "APGD",
    "CWL2",
    "FAB",
    "FGSM",
    "MSVP",
    "PGD",
    "AttackResult",
    "AutoAttack",
    "Ball",
    "Certificate",
    "Evaluation",
    "SpectralNorm",
    "Square",
    "ViT",
    "ViTConfig",
    "__version__",
    "attack",
    "certify",
    "diagnose",
    "evaluate",
    "from_run",
    "from_zoo",
    "preset",
]
_HOMES = {
    "models": ("from_run", "from_zoo"),
    "attacks": ("APGD", "CWL2", "FAB", "FGSM", "PGD", "AutoAttack", "Square"),
    "certificates": ("Certificate", "certify"),
    "diagnosis": ("diagnose",),
    "evaluation": ("AttackResult", "Evaluation", "attack", "evaluate"),
    "geometry": ("Ball",),
    "nn": ("ViT", "ViTConfig", "preset"),
    "penalties": ("MSVP", "SpectralNorm"),
}


if not TYPE_CHECKING:  # a type checker shall see that other names do not exist

    def __getattr__(name: str) -> Any:
        for module, names in _HOMES.items():
            if name in names:
                return getattr(import_module(f"specguard.{module}"), name)
        raise AttributeError(f"module 'specguard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
