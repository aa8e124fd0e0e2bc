"""Random numbers that belong to a sample, whatever batch, device or process it is in.

A generator hands out numbers in the order in which it is asked, so that a sample's numbers depend on who came
before. Here every sample has a key of its own, and its numbers are a hash of that key and a counter. Floating point
is touched only by operations that IEEE 754 rounds correctly (+, -, *, /, sqrt), never by a library's log or cos,
whose last bit depends on where in memory an element lies: the numbers are the same bits everywhere.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

_GOLDEN = -0x61C8864680B583EB  # 2^64 / golden ratio, as a signed number
# Coefficients of (pi/2)^k / k!: the circle in quarter turns.
_SINE = [(-1) ** (k // 2) * (math.pi / 2) ** k / math.factorial(k) for k in range(1, 17, 2)]
_COSINE = [(-1) ** (k // 2) * (math.pi / 2) ** k / math.factorial(k) for k in range(0, 17, 2)]
_ATANH = [2 / k for k in range(1, 27, 2)]


@dataclass(frozen=True)
class Noise:
    """A source of random numbers for each sample of a batch. It has no state: asked again, it says the same."""

    keys: Int64[Tensor, " batch"]

    @classmethod
    def of(cls, ids: Int64[Tensor, " batch"], seed: int) -> "Noise":
        """The source of the samples with these identities, under a seed."""
        start = torch.full_like(ids, _signed(seed))
        return cls(_mixed(_mixed(start) + ids))

    def fold(self, number: int) -> "Noise":
        """Another source for each sample, as if drawn from this one: for a restart, a step, a purpose."""
        return Noise(_mixed(self.keys + _mixed(torch.full_like(self.keys, _signed(number + 1)))))

    def __getitem__(self, index: Shaped[Tensor, " ..."]) -> "Noise":
        return Noise(self.keys[index])

    def __len__(self) -> int:
        return len(self.keys)

    def bits(self, shape: Sequence[int]) -> Int64[Tensor, "batch *shape"]:
        """64 random bits for each entry."""
        counter = torch.arange(1, math.prod(shape) + 1, device=self.keys.device)
        return _mixed(self.keys.unsqueeze(1) + counter * _GOLDEN).view(len(self), *shape)

    def uniform(self, shape: Sequence[int], dtype: torch.dtype) -> Float[Tensor, "batch *shape"]:
        """Uniform in (0, 1), on a grid as fine as float32's or float64's precision, never an end point."""
        digits = 52 if dtype == torch.float64 else 23
        return _open_interval(self.bits(shape), digits).to(dtype)

    def integers(self, high: int, shape: Sequence[int]) -> Int64[Tensor, "batch *shape"]:
        """Integers from 0 up to, not including, `high` (below 2^31, where the bias is out of sight)."""
        return _shifted(self.bits(shape), 32) * high >> 32

    def signs(self, shape: Sequence[int], dtype: torch.dtype) -> Float[Tensor, "batch *shape"]:
        """-1 or 1."""
        return (_shifted(self.bits(shape), 63) * 2 - 1).to(dtype)

    def normal(self, shape: Sequence[int], dtype: torch.dtype) -> Float[Tensor, "batch *shape"]:
        """Standard normal (Box and Muller 1958), with the logarithm and the circle as polynomials."""
        length = (-2 * _logarithm(_open_interval(self.bits(shape), 52))).sqrt()
        bits = self.fold(0).bits(shape)
        quarter = _open_interval(bits, 50) - 0.5  # (-1/2, 1/2) quarter turns
        x, y = _polynomial(_COSINE, quarter * quarter), quarter * _polynomial(_SINE, quarter * quarter)
        # Two of the low bits choose the quarter of the circle.
        across, swap = (bits & 1) * 2 - 1, (bits & 2) > 0
        return (length * across * torch.where(swap, y, x)).to(dtype)

    def directions(self, shape: Sequence[int], dtype: torch.dtype) -> Float[Tensor, "batch *shape"]:
        """Uniform on the unit sphere of l2."""
        normal = self.normal(shape, torch.float64)
        if not normal.numel():
            return normal.to(dtype)
        squares = normal.view(len(self), math.prod(shape)) ** 2
        while (width := squares.shape[1]) > 1:  # in pairs, because torch adds in an order that depends on the batch
            half = width // 2
            squares = torch.cat([squares[:, :half] + squares[:, half : 2 * half], squares[:, 2 * half :]], 1)
        return (normal / squares.sqrt().view(-1, *[1] * len(shape))).to(dtype)


def _mixed(z: Tensor) -> Tensor:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014), in int64 that wraps around."""
    z = z + _GOLDEN
    z = (z ^ _shifted(z, 30)) * -0x40A7B892E31B1A47
    z = (z ^ _shifted(z, 27)) * -0x6B2FB644ECCEEE15
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, places: int) -> Tensor:
    """To the right, filling with zeros."""
    return (z >> places) & ((1 << (64 - places)) - 1)


def _signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def _open_interval(bits: Tensor, digits: int) -> Tensor:
    """(k + 1/2) / 2^digits for the first `digits` bits k: exact in float64, and in float32 for 23."""
    return (_shifted(bits, 64 - digits).double() + 0.5) * 2.0**-digits


def _logarithm(x: Tensor) -> Tensor:
    """The natural logarithm to 1e-12: x = m 2^e with m near 1, and log m = 2 atanh((m - 1) / (m + 1))."""
    mantissa, exponent = torch.frexp(x)
    small = mantissa < math.sqrt(0.5)
    mantissa = torch.where(small, mantissa * 2, mantissa)
    ratio = (mantissa - 1) / (mantissa + 1)
    return ratio * _polynomial(_ATANH, ratio * ratio) + (exponent.double() - small.double()) * math.log(2)


def _polynomial(coefficients: Sequence[float], x: Tensor) -> Tensor:
    """By Horner's rule, one rounded operation at a time."""
    value = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + coefficient
    return value
