"""Attacks and groups of attacks by name."""

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
    """Named attacks. In a cascade each attacks only what the ones before did not break."""

    attacks: tuple[tuple[str, Attack], ...]
    cascade: bool = False


def named_attack(name: str, classes: int, **changes: Any) -> Attack:
    """The attack of that name with some of its settings changed.

    With fewer classes than a DLR loss needs, apgd-dlr and apgd-t climb the margin instead, as their settings show.
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
        raise ConfigError(f"the attack fgsm is one step from the image itself and has no {_words(changes)}")
    return replace(attack, **changes)


def _words(names: Iterable[str]) -> str:
    return " and ".join(name.replace("_", " ") for name in sorted(names))


def named_suite(name: str, classes: int) -> Suite:
    """quick: a first look. full: the ingredients of AutoAttack, this package's own. autoattack: the original."""
    if name == "quick":
        return Suite(tuple((attack, named_attack(attack, classes)) for attack in ("fgsm", "pgd", "cw")))
    if name == "full":
        strong = {attack: named_attack(attack, classes) for attack in ("apgd-ce", "apgd-t")}
        strong |= {"fab": named_attack("fab", classes, leave=True), "square": named_attack("square", classes)}
        return Suite(tuple(strong.items()), cascade=True)
    if name == "autoattack":
        return Suite((("autoattack", AutoAttack()),))
    raise ConfigError(f"suite {name!r} is unknown; choose one of {', '.join(get_args(SuiteName))}")
