"""The models of "ViT as a Cauchy problem": accuracy, spectra of their blocks, and what of the paper shows."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from published.cells import RECIPES, interval, read, table

sys.path.insert(0, str(RECIPES))

from cauchy.claims import Diagnosis, cauchy_claims, diagnoses
from cauchy.correlation import RankCorrelation

CIFAR10, DIGITS = RECIPES / "cifar10_cauchy", RECIPES / "digits_cauchy"
MEASURES = {
    "sigma": "mean sigma(J_F) of the blocks",
    "step": "mean sigma(I + J_F) of the blocks",
    "largest": "sigma(J_F) of the largest block",
    "exponent": "exponent of Eq. 15, sum of sigma(J_F)",
    "log_product": "log of the product of sigma(I + J_F)",
    "growth": "log growth of a PGD perturbation",
    "network": "sigma of the whole network",
}
KINDS = {
    "networks": "all networks",
    "models": "means over seeds",
    "vits": "ViTs alone",
    "covits": "CoViTs alone",
}


def cifar10_cauchy() -> str:
    """The rows that were run on CIFAR-10, and at 32 pixels what of the paper shows."""
    return "\n".join([*rows_of(CIFAR10), *claims_of(diagnoses(CIFAR10, "*_32-*"))])


def digits_cauchy() -> str:
    """The same models on the embedded digits."""
    return "\n".join([*rows_of(DIGITS), *claims_of(found_on_digits())])


def found_on_digits() -> Sequence[Diagnosis]:
    """The networks that were trained on digits."""
    return diagnoses(DIGITS)


def claims_on_digits() -> dict[str, Any]:
    """What of the paper shows there."""
    return cauchy_claims(found_on_digits())


def rows_of(recipe: Path) -> list[str]:
    """Clean accuracy, robust accuracy by PGD-20 and, where they were computed, the spectra of the blocks."""
    known = {found.name: found for found in diagnoses(recipe)}
    head = ["model, seed", "clean", "PGD-20, l2 0.25", "0.5"]
    if known:
        head += ["sigma(J_F), mean (spread)", "sigma(I + J_F)", "exponent of Eq. 15", "log growth of PGD"]
    rows = []
    for name in names_in(recipe):
        record = read(recipe / name / "pgd.json")
        found = {attack["radius"]: attack["accuracy"]["value"] for attack in record["attacks"]}
        cells = [model_label(name), interval(record["clean"])]
        cells += [f"{100 * found[radius]:.1f}\u00a0%" for radius in (0.25, 0.5)]
        if name in known:
            of = known[name].measures
            cells += [f"{of['sigma']:.2f} ({known[name].spread:.2f})", f"{of['step']:.2f}"]
            cells += [f"{of[key]:.2f}" for key in ("exponent", "growth")]
        rows.append(cells + [""] * (len(head) - len(cells)))
    return table(head, rows)


def names_in(recipe: Path) -> list[str]:
    """The networks of a recipe: ViTs first, small images first."""
    found = [path.parent.name for path in recipe.glob("*/pgd.json")]
    return sorted(found, key=lambda name: ("_224" in name, "covit" in name, name))


def model_label(name: str) -> str:
    """covit_t1_patch4_32-0 as CoViT-T1, 32 px, 0."""
    model, _, seed = name.rpartition("-")
    kind, size, *rest = model.split("_")
    pixels = f", {rest[-1]} px" if rest else ""
    return f"{'CoViT' if kind == 'covit' else 'ViT'}-{size.upper()}{pixels}, {seed}"


def claims_of(found: Sequence[Diagnosis]) -> list[str]:
    """Rank correlations with robustness, CoViT beside ViT, and the largest block; nothing of no rows."""
    if not found:
        return []
    claims = cauchy_claims(found)
    correlations = [
        [f"{MEASURES[row['measure']]}, {row['radius']:g}", *(_correlation(row[kind]) for kind in KINDS)]
        for row in claims["correlations"]
    ]
    differences = [
        [
            f"PGD-20, l2 {row['radius']:g}" if row["radius"] else "clean",
            points(row["networks"]),
            points(row["models"]),
        ]
        for row in claims["covit_minus_vit"]
    ]
    ends = claims["largest_block"]
    last = [
        f"Of {claims['n']} networks, the first block has the largest sigma(J_F) in {ends['first']}, the last in "
        f"{ends['last']};",
        f"in {ends['both_above_all_others']} these two are above all others.",
    ]
    if claims["unconverged"]:
        last.append(f"Singular values that did not converge: {claims['unconverged']}.")
    head = ["accuracy of CoViT less that of its ViT, points", "networks", "means over seeds"]
    first = ["rank correlation with accuracy under PGD-20, l2", *KINDS.values()]
    return ["", *table(first, correlations), "", *table(head, differences), "", *last]


def _correlation(found: dict[str, Any] | None) -> str:
    return "" if found is None else str(RankCorrelation(**found))


def points(found: dict[str, Any] | None) -> str:
    """A difference in points, with its interval."""
    if found is None:
        return ""
    low, high = (100 * end for end in found["interval95"])
    return f"{100 * found['mean']:+.1f} [{low:+.1f}, {high:+.1f}], n = {found['n']}"
