"""Counter-based random numbers per sample, independent of batch, device and process.

With a stateful generator, the numbers of a sample depend on the samples drawn before it. Here every sample has its
own key, and its numbers are a hash of that key and a counter. Only operations that IEEE 754 rounds correctly
(+, -, *, /, sqrt) are used, never a library's log or cos, whose last bit can depend on the memory layout: the same
key gives the same bits everywhere.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

_GOLDEN = -0x61C8864680B583EB  # 2^64 / golden ratio, as a signed integer
# Coefficients of sine and cosine in quarter turns: (pi/2)^k / k!.
_SINE = [(-1) ** (k // 2) * (math.pi / 2) ** k / math.factorial(k) for k in range(1, 17, 2)]
_COSINE = [(-1) ** (k // 2) * (math.pi / 2) ** k / math.factorial(k) for k in range(0, 17, 2)]
_ATANH = [2 / k for k in range(1, 27, 2)]


@dataclass(frozen=True)
class Noise:
    """A stateless random number generator for each sample of a batch: the same call gives the same numbers.

    Args:
        keys: one 64-bit key per sample.

    Example:
        >>> import torch
        >>> from specguard.rng import Noise
        >>> rng = Noise.of(torch.tensor([3, 7]), seed=0)
        >>> torch.equal(rng.normal((2,), torch.float64)[1:], rng[1:].normal((2,), torch.float64))
        True
    """

    keys: Int64[Tensor, " batch"]

    @classmethod
    def of(cls, ids: Int64[Tensor, " batch"], seed: int) -> "Noise":
        """The generators of the samples with these identities, for one seed."""
        start = torch.full_like(ids, _to_signed(seed))
        return cls(_splitmix64(_splitmix64(start) + ids))

    def fold(self, number: int) -> "Noise":
        """Derive an independent generator for each sample: for a restart, a step, a purpose."""
        return Noise(_splitmix64(self.keys + _splitmix64(torch.full_like(self.keys, _to_signed(number + 1)))))

    def __getitem__(self, index: Shaped[Tensor, " ..."]) -> "Noise":
        return Noise(self.keys[index])

    def __len__(self) -> int:
        return len(self.keys)

    def bits(self, shape: Sequence[int]) -> Int64[Tensor, "batch *shape"]:
        """64 random bits for each entry."""
        counter = torch.arange(1, math.prod(shape) + 1, device=self.keys.device)
        return _splitmix64(self.keys.unsqueeze(1) + counter * _GOLDEN).view(len(self), *shape)

    def uniform(self, shape: Sequence[int], dtype: torch.dtype) -> Float[Tensor, "batch *shape"]:
        """Uniform in the open interval (0, 1), on a grid as fine as the precision of float32 or float64."""
        digits = 52 if dtype == torch.float64 else 23
        return _open_interval(self.bits(shape), digits).to(dtype)

    def integers(self, high: int, shape: Sequence[int]) -> Int64[Tensor, "batch *shape"]:
        """Uniform integers in [0, `high`), for `high` below 2^31, where the bias is negligible."""
        return _shift_right(self.bits(shape), 32) * high >> 32

    def signs(self, shape: Sequence[int], dtype: torch.dtype) -> Float[Tensor, "batch *shape"]:
        """-1 or 1."""
        return (_shift_right(self.bits(shape), 63) * 2 - 1).to(dtype)

    def normal(self, shape: Sequence[int], dtype: torch.dtype) -> Float[Tensor, "batch *shape"]:
        """Standard normal (Box and Muller 1958), with logarithm, sine and cosine as polynomials."""
        length = (-2 * _logarithm(_open_interval(self.bits(shape), 52))).sqrt()
        bits = self.fold(0).bits(shape)
        quarter = _open_interval(bits, 50) - 0.5  # (-1/2, 1/2) quarter turns
        x, y = _polynomial(_COSINE, quarter * quarter), quarter * _polynomial(_SINE, quarter * quarter)
        # Two of the low bits choose the quarter of the circle.
        across, swap = (bits & 1) * 2 - 1, (bits & 2) > 0
        return (length * across * torch.where(swap, y, x)).to(dtype)

    def directions(self, shape: Sequence[int], dtype: torch.dtype) -> Float[Tensor, "batch *shape"]:
        """Uniform on the l2 unit sphere."""
        normal = self.normal(shape, torch.float64)
        if not normal.numel():
            return normal.to(dtype)
        squares = normal.view(len(self), math.prod(shape)) ** 2
        while (width := squares.shape[1]) > 1:  # pairwise: the summation order of torch depends on the batch
            half = width // 2
            squares = torch.cat([squares[:, :half] + squares[:, half : 2 * half], squares[:, 2 * half :]], 1)
        return (normal / squares.sqrt().view(-1, *[1] * len(shape))).to(dtype)


def _splitmix64(z: Tensor) -> Tensor:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014), in wrapping int64 arithmetic."""
    z = z + _GOLDEN
    z = (z ^ _shift_right(z, 30)) * -0x40A7B892E31B1A47
    z = (z ^ _shift_right(z, 27)) * -0x6B2FB644ECCEEE15
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, places: int) -> Tensor:
    """Logical right shift: fills with zeros."""
    return (z >> places) & ((1 << (64 - places)) - 1)


def _to_signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def _open_interval(bits: Tensor, digits: int) -> Tensor:
    """(k + 1/2) / 2^digits for the first `digits` bits k: exact in float64, and in float32 for 23."""
    return (_shift_right(bits, 64 - digits).double() + 0.5) * 2.0**-digits


def _logarithm(x: Tensor) -> Tensor:
    """The natural logarithm to 1e-12: x = m 2^e with m near 1, and log m = 2 atanh((m - 1) / (m + 1))."""
    mantissa, exponent = torch.frexp(x)
    small = mantissa < math.sqrt(0.5)
    mantissa = torch.where(small, mantissa * 2, mantissa)
    ratio = (mantissa - 1) / (mantissa + 1)
    return ratio * _polynomial(_ATANH, ratio * ratio) + (exponent.double() - small.double()) * math.log(2)


def _polynomial(coefficients: Sequence[float], x: Tensor) -> Tensor:
    """Evaluate by Horner's rule, one rounded operation at a time."""
    value = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + coefficient
    return value
