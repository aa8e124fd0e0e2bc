"""Boxes against exact numbers: their members, whether they hold a result, and arithmetic made blunt on purpose."""

from fractions import Fraction

import numpy as np

from exact.numbers import mpf, real
from specguard.checker.enclosure import Box
from specguard.checker.reading import Reading

SHARE = 2.0**-16  # of its size, by which blunt arithmetic misplaces every result


def fractions(x):
    """An array of floats as fractions, exactly."""
    found = np.empty(np.shape(x), dtype=object)
    found.ravel()[:] = [Fraction(float(entry)) for entry in np.ravel(x)]
    return found


def member(box, sign):
    """The array of exact numbers `mid + sign rad`, a corner of the box where signs are 1 or -1."""
    return fractions(box.mid) + np.asarray(sign, dtype=object) * fractions(box.rad)


def holds(box, exact):
    """Whether a box holds exact numbers; where the radius is infinite or no number, it claims nothing."""
    exact = np.asarray(exact, dtype=object)
    assert box.mid.shape == box.rad.shape == exact.shape
    return all(_near(*entry) for entry in zip(box.mid.ravel(), box.rad.ravel(), exact.ravel(), strict=True))


def _near(mid, rad, exact):
    if not np.isfinite(rad):
        return True
    if not np.isfinite(mid):
        return False
    convert = real if isinstance(exact, mpf) else (lambda number: number)
    return abs(convert(Fraction(float(mid))) - exact) <= convert(Fraction(float(rad)))


def blunt(monkeypatch, seed=0, inwards=False):
    """Let every operation of boxes give a wider box whose middle is off by a `SHARE` of its size.

    Such a box holds the exact result as well, so every law must still hold, and what a rule forgets of the radii it
    is given shows at the scale of that share instead of at that of rounding. `inwards`, all middles are too small.
    """
    rng = np.random.default_rng(seed)

    def blunted(name):
        sharp = getattr(Box, name)

        def operation(self, *args, **settings):
            found = sharp(self, *args, **settings)
            off = SHARE * np.abs(found.mid)
            sign = -np.sign(found.mid) if inwards else rng.choice([-1.0, 1.0], found.shape)
            return Box(found.mid + off * sign, found.rad + 1.001 * off)

        monkeypatch.setattr(Box, name, operation)

    monkeypatch.setattr(Reading, "check", lambda self, point, output: None)  # blunt logits are not the model's
    for name in ("__add__", "__mul__", "__matmul__", "__truediv__", "sum", "sqrt", "apply", "exp", "softmax"):
        blunted(name)
