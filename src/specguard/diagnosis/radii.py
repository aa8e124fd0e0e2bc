"""Which radii a diagnosis looks at: powers of two of the customary ones, around what was found at a few images."""

import math
from collections.abc import Callable, Sequence

from specguard.geometry import Norm
from specguard.report.verdict import ATTACKED, PROVED

ATTACK_STEPS = range(-6, 3)  # powers of two of the customary radius, in which adversarial examples are looked for
_PROOF_STEPS = range(-20, 3)


def grid(norm: Norm) -> list[float]:
    """The radii at which adversarial examples are looked for: l2 0.25 or linf 4/255 times 2^-6 to 2^2.

    Args:
        norm: of the perturbations.

    Returns:
        Radii in ascending order.

    Example:
        >>> [round(255 * radius, 4) for radius in grid("linf")][4:]
        [1.0, 2.0, 4.0, 8.0, 16.0]
    """
    return [ATTACKED[norm] * 2.0**k for k in ATTACK_STEPS]


def smallest(radii: Sequence[float], succeeds: Callable[[float], bool]) -> float | None:
    """The smallest radius at which something succeeds that also succeeds at all larger ones, by bisection.

    Args:
        radii: in ascending order.
        succeeds: whether it succeeds at a radius.

    Returns:
        The radius; None if it does not succeed at the largest.

    Example:
        >>> smallest([1.0, 2.0, 4.0, 8.0], lambda radius: radius > 3)
        4.0
    """
    low, high = 0, len(radii)  # it succeeds from some place between them on
    while low < high:
        middle = (low + high) // 2
        if succeeds(radii[middle]):
            high = middle
        else:
            low = middle + 1
    return radii[high] if high < len(radii) else None


def attack_radii(norm: Norm, edge: float | None) -> tuple[float, ...]:
    """Radii to attack at: half, once and twice the edge, and the customary radius.

    Args:
        norm: of the perturbations.
        edge: the radius at which half of the first images are attacked successfully; None if at no radius.

    Returns:
        At most four radii in ascending order; without an edge, a quarter, a half and once the customary radius.

    Example:
        >>> attack_radii("l2", 0.0625)
        (0.03125, 0.0625, 0.125, 0.25)
    """
    customary = ATTACKED[norm]
    if edge is None:
        return (customary / 4, customary / 2, customary)
    return tuple(sorted({edge / 2, edge, 2 * edge, customary}))


def proof_radii(norm: Norm, reach: float) -> tuple[float, ...]:
    """Radii to certify at: half, once and twice the largest one of the grid that the first images are proved at.

    The grid is l2 36/255 or linf 2/255 times powers of two. The customary radius itself is added where it is
    at most eight times as large.

    Args:
        norm: of the perturbations.
        reach: the largest radius at which a first image was certified.

    Returns:
        Radii in ascending order.

    Example:
        >>> [round(255 * radius, 3) for radius in proof_radii("linf", 3 / 255)]
        [1.0, 2.0, 4.0]
    """
    customary = PROVED[norm]
    steps = [k for k in _PROOF_STEPS if customary * 2.0**k <= reach]
    place = steps[-1] if steps else _PROOF_STEPS[0]
    found = {customary * 2.0**k for k in (place - 1, place, place + 1)}
    if steps and place >= -3:
        found.add(customary)
    return tuple(sorted(found))


def limited(radii: Sequence[float], norm: Norm, pixels: int) -> tuple[float, ...]:
    """The radii without those that reach every image of so many entries.

    Args:
        radii: in ascending order.
        norm: of the perturbations.
        pixels: entries of an image.

    Returns:
        Those below the diameter of the box.

    Example:
        >>> limited((0.5, 1.0, 2.0), "linf", 64)
        (0.5,)
    """
    largest = 1.0 if norm == "linf" else math.sqrt(pixels)
    return tuple(radius for radius in radii if radius < largest)
