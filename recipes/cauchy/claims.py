"""What of "ViT as a Cauchy problem" shows in trained networks: their spectra beside what an attack leaves of them.

Pure functions of the summaries that `specguard attack` and `specguard spectrum` leave.

Usage, with this folder's parent on PYTHONPATH: python -m cauchy.claims FOLDER [PATTERN]
PATTERN chooses rows, such as '*_32-*'; the claims are printed as JSON.
"""

import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scipy.stats import t

from cauchy.correlation import rank_correlation
from specguard.errors import RunError
from specguard.records.accuracy import Accuracy
from specguard.records.attack import AttackSummary
from specguard.records.legacy import read_summary
from specguard.records.spectrum import Distribution, SpectrumSummary

Json = dict[str, Any]
MEASURES = ("sigma", "step", "largest", "exponent", "log_product", "growth", "network")


@dataclass(frozen=True)
class Diagnosis:
    """A trained network: its name, such as vit_t1-0 for seed 0, what an attack leaves of it, and its spectra.

    `robust` is accuracy by radius and `blocks` the mean of sigma_max(J_F) over the images, block by block. Of the
    `measures`, `sigma` is the mean of these, `step` that of I + J_F, `largest` the block with the most; `exponent`
    is the sum of Eq. (15), `log_product` the logarithm of the product of the steps, `growth` that of how much
    longer the blocks make a PGD perturbation; `network` is the mean of sigma_max from pixels to logits.
    """

    name: str
    clean: Accuracy
    robust: Mapping[float, float]
    blocks: tuple[float, ...]
    spread: float
    measures: Mapping[str, float]
    unconverged: int

    @property
    def model(self) -> str:
        return self.name.rpartition("-")[0]


def diagnosis(name: str, attack: AttackSummary, spectrum: SpectrumSummary) -> Diagnosis:
    """From the two summaries of one network, whose fingerprint must be the same."""
    if attack.study.about.model != spectrum.study.about.model:
        raise RunError(f"the attack and the spectra of {name} are of two networks")
    parts = {part.name: part for part in spectrum.parts}
    blocks = [part for part in parts.values() if part.group == "block"]
    together = (spectrum.exponent, spectrum.log_product, spectrum.growth)
    if not blocks or "network" not in parts or any(each is None or each.mean is None for each in together):
        raise RunError(f"the spectra of {name} lack its blocks, the whole network, or a perturbation to follow")
    sigmas = [_mean(part.sigma[0]) for part in blocks]
    squares = ((part.sigma[0].std or 0.0) ** 2 + _mean(part.sigma[0]) ** 2 for part in blocks)
    sigma = statistics.fmean(sigmas)
    measures = {
        "sigma": sigma,
        "step": statistics.fmean(_mean(part.step) for part in blocks),
        "largest": max(sigmas),
        **{key: _mean(each) for key, each in zip(("exponent", "log_product", "growth"), together, strict=True)},
        "network": _mean(parts["network"].sigma[0]),
    }
    return Diagnosis(
        name,
        attack.clean,
        {row.radius: row.accuracy.value for row in attack.worst_case if row.norm == "l2"},
        tuple(sigmas),
        math.sqrt(max(0.0, statistics.fmean(squares) - sigma**2)),  # over all blocks and images at once
        measures,
        sum(part.unconverged for part in (*blocks, parts["network"])),
    )


def _mean(values: Distribution | None) -> float:
    assert values is not None
    assert values.mean is not None
    return values.mean


def diagnoses(folder: Path, pattern: str = "*") -> tuple[Diagnosis, ...]:
    """Of the rows in a folder that have both: ROW/pgd.json and ROW/spectrum.json, or the studies of these names."""
    found = []
    for row in sorted(folder.glob(pattern)):
        files = [_summary(row / study) for study in ("pgd", "spectrum")]
        if all(path.exists() for path in files):
            attack, spectrum = (read_summary(path) for path in files)
            if not (isinstance(attack, AttackSummary) and isinstance(spectrum, SpectrumSummary)):
                raise RunError(f"{row} does not hold the summaries of an attack and of spectra")
            found.append(diagnosis(row.name, attack, spectrum))
    return tuple(found)


def cauchy_claims(found: Sequence[Diagnosis]) -> Json:
    """Whether robustness follows the spectra, whether CoViT is the more robust, and which block stands out.

    Robustness is accuracy at each radius that all networks were attacked at. What is said of `networks` takes seeds
    of one model as independent, which they are not quite; of `models`, the means over seeds; of `vits` and
    `covits`, the networks of one kind, where nothing follows from the kind alone. CoViT is compared with the ViT of
    its size, by Student's interval for the mean of differences.
    """
    radii = sorted(set.intersection(*(set(each.robust) for each in found))) if found else []
    if not radii:
        raise RunError("there are no rows with spectra and with an attack in l2 at a common radius")
    networks = {each.name: _numbers([each], radii) for each in found}
    by_model = {each.model: [other for other in found if other.model == each.model] for each in found}
    models = {model: _numbers(seeds, radii) for model, seeds in by_model.items()}
    covits = {name: numbers for name, numbers in networks.items() if name.startswith("covit")}
    vits = {name: numbers for name, numbers in networks.items() if name not in covits}
    groups = {"networks": networks, "models": models, "vits": vits, "covits": covits}
    largest = [each.blocks.index(max(each.blocks)) for each in found]
    return {
        "n": len(found),
        "unconverged": sum(each.unconverged for each in found),
        "correlations": [
            {"measure": measure, "radius": radius}
            | {name: _correlation(group, measure, radius) for name, group in groups.items()}
            for radius in radii
            for measure in MEASURES
        ],
        "covit_minus_vit": [
            {"radius": radius, "networks": _difference(networks, radius), "models": _difference(models, radius)}
            for radius in (0.0, *radii)
        ],
        "largest_block": {
            "first": sum(i == 0 for i in largest),
            "last": sum(i == len(each.blocks) - 1 > 0 for i, each in zip(largest, found, strict=True)),
            "both_above_all_others": sum(_ends_stand_out(each.blocks) for each in found),
        },
    }


def _numbers(some: Sequence[Diagnosis], radii: Sequence[float]) -> dict[str | float, float]:
    """The means of measures by name and of accuracies by radius, where 0 is clean."""
    accuracies = [{0.0: each.clean.value, **each.robust} for each in some]
    return {measure: statistics.fmean(each.measures[measure] for each in some) for measure in MEASURES} | {
        radius: statistics.fmean(found[radius] for found in accuracies) for radius in (0.0, *radii)
    }


def _summary(study: Path) -> Path:
    kept = study.with_suffix(".json")
    return kept if kept.exists() else study / "summary.json"


def _correlation(rows: Mapping[str, Mapping[str | float, float]], measure: str, radius: float) -> Json | None:
    """None where there are too few pairs, or nothing to order."""
    x, y = ([numbers[key] for numbers in rows.values()] for key in (measure, radius))
    if len(x) < 4 or min(x) == max(x) or min(y) == max(y):
        return None
    return asdict(rank_correlation(x, y))


def _difference(rows: Mapping[str, Mapping[str | float, float]], radius: float) -> Json | None:
    """Of the accuracy of covit_X and vit_X, over all X of which there are both; None for less than two of them."""
    pairs = {name: name.removeprefix("co") for name in rows if name.startswith("covit")}
    values = [rows[covit][radius] - rows[vit][radius] for covit, vit in pairs.items() if vit in rows]
    if len(values) < 2:
        return None
    mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    reach = float(t.ppf(0.975, len(values) - 1)) * error
    return {"mean": mean, "interval95": [mean - reach, mean + reach], "n": len(values)}


def _ends_stand_out(blocks: Sequence[float]) -> bool:
    """Whether the first and the last block are the two with the largest values."""
    return len(blocks) > 2 and min(blocks[0], blocks[-1]) > max(blocks[1:-1])


if __name__ == "__main__":
    folder, pattern = [*sys.argv[1:], "*"][:2]
    print(json.dumps(cauchy_claims(diagnoses(Path(folder), pattern)), indent=2))
