"""Numbers without rounding: fractions, reals of a hundred digits, and either with its derivatives.

Arrays are NumPy's, of objects. A float64 is a fraction, exactly; what no fraction holds (roots, exponentials) is a
real of a context of its own, so nothing global is set. `Dual` is a number and its derivatives by the entries of the
input.
"""

from fractions import Fraction

import mpmath
import numpy as np

mp = mpmath.MPContext()
mp.dps = 100
mpf = mp.mpf


class Dual:
    """A number and its derivatives, an array: first-order arithmetic."""

    __slots__ = ("slope", "value")

    def __init__(self, value, slope):
        self.value, self.slope = value, slope

    def __add__(self, other):
        if isinstance(other, Dual):
            return Dual(self.value + other.value, self.slope + other.slope)
        return Dual(self.value + other, self.slope)

    __radd__ = __add__

    def __neg__(self):
        return Dual(-self.value, -self.slope)

    def __sub__(self, other):
        return self + (-other)

    def __rsub__(self, other):
        return -self + other

    def __mul__(self, other):
        if isinstance(other, Dual):
            return Dual(self.value * other.value, self.slope * other.value + other.slope * self.value)
        return Dual(self.value * other, self.slope * other)

    __rmul__ = __mul__

    def __truediv__(self, other):
        if isinstance(other, Dual):
            ratio = self.value / other.value
            return Dual(ratio, (self.slope - other.slope * ratio) / other.value)
        return Dual(self.value / other, self.slope / other)

    def __rtruediv__(self, other):
        return Dual(other / self.value, self.slope * (-other / (self.value * self.value)))

    def __lt__(self, other):
        return self.value < value(other)

    def __le__(self, other):
        return self.value <= value(other)

    def __gt__(self, other):
        return self.value > value(other)

    def __ge__(self, other):
        return self.value >= value(other)


def value(number):
    """A number without its derivatives."""
    return number.value if isinstance(number, Dual) else number


def exact(tensor):
    """The entries of a tensor, or a float, as fractions."""
    if isinstance(tensor, float | int):
        return Fraction(tensor)
    entries = [Fraction(entry) for entry in tensor.detach().double().flatten().tolist()]
    return _array(entries).reshape(tuple(tensor.shape))


def real(x):
    """A number or an array as reals of a hundred digits."""
    if isinstance(x, np.ndarray):
        return _array([real(entry) for entry in x.ravel()]).reshape(x.shape)
    if isinstance(x, Dual):
        return Dual(real(x.value), real(x.slope))
    return mpf(x.numerator) / x.denominator if isinstance(x, Fraction) else mpf(x)


def like(tensor, x):
    """A tensor or a float in numbers that go together with those of the array x."""
    found = exact(tensor)
    return real(found) if isinstance(value(x.ravel()[0]), mpf) else found


def with_derivatives(x):
    """The array x with every entry a variable."""
    entries, zero = list(x.ravel()), x.ravel()[0] * 0
    variables = []
    for position, entry in enumerate(entries):
        slope = _array([zero] * len(entries))
        slope[position] = zero + 1
        variables.append(Dual(entry, slope))
    return _array(variables).reshape(x.shape)


def squared(x):
    """The squared length of all entries of an array."""
    return sum(entry * entry for entry in x.ravel())


def within(computed, wanted, error):
    """Whether `||computed - wanted|| <= error`, a tensor or array, an array of numbers, and a float."""
    difference = (computed if isinstance(computed, np.ndarray) else like(computed, wanted)) - wanted
    return squared(difference) <= like(float(error), wanted) ** 2


def length(x):
    """The Euclidean length of all entries of an array, a real."""
    return mp.sqrt(real(squared(x)))


def _array(entries):
    found = np.empty(len(entries), dtype=object)
    found[:] = entries
    return found


def _function(f, slope):
    """A function of reals, entry by entry, and its derivative."""

    def at(t):
        return Dual(f(t.value), t.slope * slope(t.value)) if isinstance(t, Dual) else f(t)

    def whole(x):
        x = real(x)
        return _array([at(t) for t in x.ravel()]).reshape(x.shape) if isinstance(x, np.ndarray) else at(x)

    return whole


def _density(t):
    return mp.exp(-t * t / 2) / mp.sqrt(2 * mp.pi)


sqrt = _function(mp.sqrt, lambda t: 1 / (2 * mp.sqrt(t)))
exp = _function(mp.exp, mp.exp)
tanh = _function(mp.tanh, lambda t: mp.sech(t) ** 2)
sigmoid = _function(lambda t: 1 / (1 + mp.exp(-t)), lambda t: 1 / ((1 + mp.exp(-t)) * (1 + mp.exp(t))))
normal = _function(mp.ncdf, _density)
softplus = _function(lambda t: mp.log(1 + mp.exp(t)), lambda t: 1 / (1 + mp.exp(-t)))
