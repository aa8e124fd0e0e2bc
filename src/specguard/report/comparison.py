"""Which runs may be compared: those whose accuracies are in the same norm and of the same images.

All others are set apart, with the reason.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from specguard.records.accuracy import Accuracy
from specguard.report.accuracies import (
    certificate_accuracies,
    clean_accuracy,
    median_radius,
    robust_accuracies,
    thin_out,
)
from specguard.report.images import Images, image_sets, images_of, norms, on_images
from specguard.report.run import Run

_RADII = 6  # the largest number that is shown


@dataclass(frozen=True)
class ComparedRun:
    """The accuracies of one run by radius, and by what it was attacked; `number` is its place in the report.

    `median` is the largest median certified l2 radius, with its method.
    """

    number: int
    clean: Accuracy | None
    robust: dict[float, Accuracy]
    certified: dict[float, Accuracy]
    attacks: str
    median: tuple[str, float] | None = None


@dataclass(frozen=True)
class Comparison:
    """Runs side by side, in one norm and on the same images; without a norm only their clean accuracies.

    Args:
        norm: the norm, or None.
        images: the images that all accuracies are of.
        rows: the runs.
        radii: the radii to show, ascending; not every run has all of them.
        same_attacks: whether all runs were attacked in the same way.
    """

    norm: str | None
    images: Images
    rows: tuple[ComparedRun, ...]
    radii: tuple[float, ...] = ()
    same_attacks: bool = True


@dataclass(frozen=True)
class SetApart:
    """A run whose results in a norm are not compared with those of others, and why."""

    number: int
    reason: str


def comparisons(runs: Sequence[Run]) -> tuple[list[Comparison], list[SetApart]]:
    """Group runs by norm and images.

    Args:
        runs: the runs of a report, in its order.

    Returns:
        Comparisons of two or more runs each, those of most runs first, and what is in none of them.

    Example:
        >>> from specguard.report.examples import example_run
        >>> found, apart = comparisons([example_run(), example_run()])
        >>> [(each.norm, each.images.n, len(each.rows)) for each in found], apart
        ([('l2', 4, 2)], [])
    """
    places: dict[tuple[str, Images], list[int]] = {}
    for number, run in enumerate(runs):
        for norm in _norms(run):
            for images in image_sets(run, norm):
                places.setdefault((norm, images), []).append(number)
    groups = {key: numbers for key, numbers in places.items() if len(numbers) > 1 and key[1].known}
    found = [_compare(runs, norm, images, numbers) for (norm, images), numbers in groups.items()]
    found.sort(key=lambda each: (-len(each.rows), each.norm, -each.images.n))
    apart = [
        SetApart(number, _reason(norm, images, number, places))
        for (norm, images), (number, *rest) in places.items()
        if (norm, images) not in groups
    ]
    apart += [
        SetApart(number, "it was neither attacked nor certified")
        for number, run in enumerate(runs)
        if not _norms(run)
    ]
    clean = _clean(runs, found)
    return [*found, *([] if clean is None else [clean])], sorted(apart, key=lambda each: each.number)


def _norms(run: Run) -> list[str]:
    return sorted(set[str]().union(*(norms(study) for study in (*run.attacks, *run.certificates))))


def _compare(runs: Sequence[Run], norm: str, images: Images, numbers: Iterable[int]) -> Comparison:
    rows, attacks = [], set()
    for number in numbers:
        run = on_images(runs[number], images)
        robust, certified = robust_accuracies(run), certificate_accuracies(run)
        names, settings = _attacks(run, norm)
        attacks.add(settings)
        rows.append(
            ComparedRun(
                number,
                clean_accuracy(run),
                {radius: accuracy for (kind, radius), accuracy in robust.items() if kind == norm},
                {radius: accuracy for (kind, radius), accuracy in certified.items() if kind == norm},
                names,
                median_radius(run) if norm == "l2" else None,
            )
        )
    radii = sorted({radius for row in rows for radius in (*row.robust, *row.certified)})
    return Comparison(norm, images, tuple(rows), tuple(thin_out(radii, _RADII)), len(attacks) == 1)


def _attacks(run: Run, norm: str) -> tuple[str, str]:
    """The names of the attacks on a run in this norm, and their settings as text that can be compared."""
    names, settings = [], []
    for study in run.attacks:
        if norm in norms(study):
            names += [attack.name for attack in study.summary.study.attacks]
            settings += [msgspec.to_builtins(attack) for attack in study.summary.study.attacks]
    for proof in run.certificates:
        if proof.norm == norm:
            names.append(f"{str(proof.summary.study.attack.get('type', 'attack')).lower()} of certify")
            settings.append(proof.summary.study.attack)
    return ", ".join(dict.fromkeys(names)), json.dumps(settings, sort_keys=True)


def _reason(norm: str, images: Images, number: int, places: dict[tuple[str, Images], list[int]]) -> str:
    if not images.known:
        return f"its records do not say which images its {norm} results are of"
    others = [other.named for (kind, other), numbers in places.items() if kind == norm and numbers != [number]]
    if not others:
        return f"no other run was attacked or certified in {norm}"
    return f"its {norm} results are of {images.named}, those of other runs of {' or '.join(others[:3])}"


def _clean(runs: Sequence[Run], found: Sequence[Comparison]) -> Comparison | None:
    """The clean accuracies of the runs on the same images, unless a comparison has all of them already."""
    places: dict[Images, list[int]] = {}
    for number, run in enumerate(runs):
        trained = () if run.training is None else (images_of(run.training),)
        for images in dict.fromkeys((*trained, *image_sets(run))):
            if images.known:
                places.setdefault(images, []).append(number)
    if not places:
        return None
    images, numbers = max(places.items(), key=lambda item: (len(item[1]), item[0].n))
    if len(numbers) < 2 or any({row.number for row in each.rows} >= set(numbers) for each in found):
        return None
    rows = [ComparedRun(number, clean_accuracy(on_images(runs[number], images)), {}, {}, "") for number in numbers]
    return Comparison(None, images, tuple(rows))
