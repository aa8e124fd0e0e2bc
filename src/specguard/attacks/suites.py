"""Attacks and suites of attacks by name."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

from specguard.attacks.apgd import APGD
from specguard.attacks.autoattack import AutoAttack
from specguard.attacks.base import Attack
from specguard.attacks.cw import CWL2
from specguard.attacks.fab import FAB
from specguard.attacks.pgd import FGSM, PGD
from specguard.attacks.square import Square
from specguard.errors import ConfigError
from specguard.records.attack import AttackName, SuiteName


@dataclass(frozen=True)
class Suite:
    """Named attacks, run in order.

    Args:
        attacks: pairs of a name and an attack
        cascade: run each attack only on the images that no attack before it misclassified

    Example:
        >>> from specguard.attacks import PGD, Square, Suite
        >>> suite = Suite((("pgd", PGD()), ("square", Square())), cascade=True)
        >>> [name for name, attack in suite.attacks]
        ['pgd', 'square']
    """

    attacks: tuple[tuple[str, Attack], ...]
    cascade: bool = False


def named_attack(name: str, classes: int, **changes: Any) -> Attack:
    """The attack of a name, with changed settings.

    With fewer classes than the DLR loss needs, apgd-dlr and apgd-t use the margin loss.

    Args:
        name: fgsm, pgd, cw (PGD on the margin), apgd-ce, apgd-dlr, apgd-t, fab, square, cw-l2 or autoattack
        classes: of the model
        **changes: settings that differ from the defaults of the attack

    Returns:
        The attack.

    Example:
        >>> from specguard.attacks import named_attack
        >>> named_attack("cw", classes=10, steps=40)
        PGD(steps=40, step_size=None, restarts=1, start='random', loss='margin', leave=True)
    """
    attacks: dict[str, Attack] = {
        "fgsm": FGSM,
        "pgd": PGD(),
        "cw": PGD(loss="margin"),
        "apgd-ce": APGD(),
        "apgd-dlr": APGD(loss="dlr" if classes >= 3 else "margin"),
        "apgd-t": APGD(loss="dlr" if classes >= 4 else "margin", targets=9),
        "fab": FAB(),
        "square": Square(),
        "cw-l2": CWL2(),
        "autoattack": AutoAttack(),
    }
    if name not in attacks:
        raise ConfigError(f"attack {name!r} is unknown; choose one of {', '.join(get_args(AttackName))}")
    attack: Any = attacks[name]
    if unknown := changes.keys() - {f.name for f in fields(attack)}:
        raise ConfigError(f"the attack {name} has no {_words(unknown)}")
    if name == "fgsm" and changes:
        raise ConfigError(f"the attack fgsm is a single step from the image and has no {_words(changes)}")
    return replace(attack, **changes)


def _words(names: Iterable[str]) -> str:
    return " and ".join(name.replace("_", " ") for name in sorted(names))


def named_suite(name: str, classes: int) -> Suite:
    """The suite of a name.

    Args:
        name: quick (FGSM, PGD and CW); full (this package's APGD-CE, APGD-T, FAB and Square as a cascade); or
            autoattack, the original package
        classes: of the model

    Returns:
        The suite.

    Example:
        >>> from specguard.attacks import named_suite
        >>> [name for name, attack in named_suite("full", classes=10).attacks]
        ['apgd-ce', 'apgd-t', 'fab', 'square']
    """
    if name == "quick":
        return Suite(tuple((attack, named_attack(attack, classes)) for attack in ("fgsm", "pgd", "cw")))
    if name == "full":
        strong = {attack: named_attack(attack, classes) for attack in ("apgd-ce", "apgd-t")}
        strong |= {"fab": named_attack("fab", classes, leave=True), "square": named_attack("square", classes)}
        return Suite(tuple(strong.items()), cascade=True)
    if name == "autoattack":
        return Suite((("autoattack", AutoAttack()),))
    raise ConfigError(f"suite {name!r} is unknown; choose one of {', '.join(get_args(SuiteName))}")
