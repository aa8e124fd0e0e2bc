"""Midpoint-radius interval arithmetic in NumPy, the arithmetic of the checker.

A `Box` stands for every array x with `|x - mid| <= rad`, entry by entry. Every operation returns a box that
contains the exact results for all arrays in its arguments' boxes, its own rounding included: float64, `u = 2^-53`,
a sum of n products is accurate to `gamma(n)` of the sum of their sizes, and elementary functions to 32 u. Radii are
rounded up. Nothing here is shared with the arithmetic of the certificates.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specguard.errors import SoundnessError

Array = NDArray[np.float64]
_UNIT = 2.0**-53
_OUTWARD = 1 + 2.0**-35  # for the rounding of radii, which are sums of at most 2^17 positive terms
_TINY = 1e-290  # for underflow
_SMALLEST = 1e-300  # smaller numbers may be inaccurate or zero by underflow


def outward(value: Any) -> Any:
    """Round up an upper bound by the error of its own computation."""
    return value * _OUTWARD + _TINY


def _gamma(count: int) -> float:
    return 1.01 * (count + 4) * _UNIT


@dataclass(frozen=True)
class Box:
    """All arrays within `rad` of `mid`."""

    mid: Array
    rad: Array

    @staticmethod
    def exact(values: Any) -> "Box":
        mid = np.asarray(values, dtype=np.float64)
        return Box(mid, np.zeros_like(mid))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.mid.shape

    @property
    def size(self) -> Array:
        """Upper bounds on the absolute values of the entries."""
        return np.asarray(outward(np.abs(self.mid) + self.rad))

    def rearrange(self, change: Callable[[Array], Array]) -> "Box":
        """Move, drop or repeat entries; no arithmetic."""
        return Box(change(self.mid), change(self.rad))

    @property
    def T(self) -> "Box":
        return self.rearrange(lambda x: np.swapaxes(x, -1, -2))

    def __getitem__(self, index: Any) -> "Box":
        return self.rearrange(lambda x: x[index])

    def __neg__(self) -> "Box":
        return Box(-self.mid, self.rad)

    def __add__(self, other: "Box | float") -> "Box":
        b = as_box(other)
        mid = self.mid + b.mid
        return Box(mid, outward(self.rad + b.rad + _UNIT * np.abs(mid)))

    def __sub__(self, other: "Box | float") -> "Box":
        return self + -as_box(other)

    def __mul__(self, other: "Box | float") -> "Box":
        b = as_box(other)
        mid = self.mid * b.mid
        return Box(mid, outward(np.abs(self.mid) * b.rad + self.rad * b.size + _UNIT * np.abs(mid)))

    def __matmul__(self, other: "Box") -> "Box":
        size, relative_error = np.abs(self.mid), _gamma(self.shape[-1])
        rad = size @ (other.rad + relative_error * np.abs(other.mid))
        if self.rad.any():
            rad = rad + self.rad @ other.size
        mid = self.mid @ other.mid
        return Box(mid, np.asarray(outward(rad + _UNIT * np.abs(mid))))  # infinite where the midpoint is

    def __truediv__(self, other: "Box | float") -> "Box":
        b = as_box(other)
        least = np.abs(b.mid) - b.rad * _OUTWARD
        if not (least > 0).all():
            raise SoundnessError("division by a box that contains zero")
        mid = self.mid / b.mid
        return Box(mid, outward(self.rad / least + np.abs(mid) * (b.rad / least) + _UNIT * np.abs(mid)))

    def sum(self, axis: int, keepdims: bool = False) -> "Box":
        error = (self.rad + _gamma(self.shape[axis]) * np.abs(self.mid)).sum(axis, keepdims=keepdims)
        mid = self.mid.sum(axis, keepdims=keepdims)
        return Box(mid, np.asarray(outward(error + _UNIT * np.abs(mid))))  # infinite where the midpoint is

    def mean(self, axis: int, keepdims: bool = False) -> "Box":
        return self.sum(axis, keepdims) / float(self.shape[axis])

    def sqrt(self) -> "Box":
        """`|sqrt x - sqrt a| <= min(sqrt |x - a|, |x - a| / sqrt a)`."""
        mid = np.sqrt(np.maximum(self.mid, 0.0))
        near = np.divide(self.rad, mid, out=np.full_like(mid, np.inf), where=mid > 0)
        return Box(mid, outward(np.minimum(np.sqrt(self.rad), near) + _UNIT * mid))

    def apply(self, function: Callable[[Array], Array], max_slope: float, scale: float = 1.0) -> "Box":
        """Apply an elementary function of slope <= `max_slope`, accurate to 32 u of `|f(x)| + |x| + scale`."""
        mid = function(self.mid)
        return Box(mid, outward(max_slope * self.rad + 32 * _UNIT * (np.abs(mid) + np.abs(self.mid) + scale)))

    def abs(self) -> "Box":
        return Box(np.abs(self.mid), self.rad)

    def exp(self) -> "Box":
        """An error r of the exponent is a factor of at most `exp(r)`."""
        mid = np.exp(self.mid)
        return Box(mid, outward(np.maximum(mid, _SMALLEST) * (np.expm1(outward(self.rad)) + 32 * _UNIT)))

    def softmax(self) -> "Box":
        """Over the last axis: an error r of the logits is a factor of at most `exp(2 r)` of the probabilities."""
        top = self.mid.max(-1, keepdims=True)
        e = np.exp(self.mid - top)
        p = e / e.sum(-1, keepdims=True)
        logit_error = self.rad.max(-1, keepdims=True) + _UNIT * np.abs(self.mid - top).max(-1, keepdims=True)
        relative_error = np.expm1(outward(2 * logit_error)) + _gamma(p.shape[-1] + 64)
        return Box(p, outward(np.maximum(p, _SMALLEST) * relative_error))


def as_box(value: "Box | float") -> Box:
    return value if isinstance(value, Box) else Box.exact(value)


def concatenate(boxes: list[Box], axis: int) -> Box:
    return Box(np.concatenate([b.mid for b in boxes], axis), np.concatenate([b.rad for b in boxes], axis))


def norm_above(x: Box, axes: int = 0) -> Any:
    """An upper bound on the l2 norm over all but the first `axes` axes."""
    return outward(_length(x.size, axes))


def norm_below(x: Box, axes: int = 0) -> Any:
    """A lower bound on the same norm."""
    return np.maximum(_length(x.mid, axes) / _OUTWARD - outward(_length(x.rad, axes)), 0.0) / _OUTWARD


def _length(x: Array, axes: int) -> Any:
    """The computed norm, scaled so that squares neither overflow nor underflow."""
    flat = np.abs(x).reshape(*x.shape[:axes], -1)
    top = flat.max(-1, initial=0.0)
    scaled = flat / np.where(top > 0, top, 1.0)[..., None]
    return top * np.sqrt((scaled * scaled).sum(-1))


def spectral_norm_above(A: Box) -> Any:
    """An upper bound on the spectral norm of every matrix of a stack.

    With V from any eigensolver and `G = B^T B` as computed, B the midpoint: `||B||^2 <= ||G|| + error`, and
    `||G|| <= ||V^T G V||_inf / (1 - ||V^T V - I||_F)`, whatever V is. The radius adds its Frobenius norm.
    """
    if A.mid.ndim > 2:
        return np.array([spectral_norm_above(A[i]) for i in range(A.shape[0])])
    B = A.mid if A.shape[0] >= A.shape[1] else A.mid.T
    top = np.abs(B).max(initial=0.0)
    rad_norm = norm_above(Box.exact(A.rad))
    if not top:
        return rad_norm
    B = np.ldexp(B, -int(np.frexp(top)[1]))  # exact: a power of two
    exact = Box.exact(B)
    G = exact.T @ exact
    V = Box.exact(np.linalg.eigh(G.mid)[1])
    rotated = V.T @ (Box.exact(G.mid) @ V)
    defect = norm_above(V.T @ V - Box.exact(np.eye(len(V.mid))))
    if not defect < 0.5:
        raise SoundnessError("the checker's eigenvectors are not orthogonal")
    rows = outward(rotated.size.sum(1).max() / (1 - outward(defect)))
    return outward(
        np.ldexp(np.sqrt(outward(rows + norm_above(Box.exact(G.rad)))), int(np.frexp(top)[1])) + rad_norm
    )


def eigenvalue_above(S: Box) -> float:
    """An upper bound on the largest eigenvalue of a symmetric matrix, or 0 if that is larger.

    With V from any eigensolver and `x = V y`, `x^T S x = y^T (V^T S V) y`, and `|y|^2 <= |x|^2 / (1 - d)` for
    `d = ||V^T V - I||`. Gershgorin discs bound the rotated matrix. The radius adds its Frobenius norm.
    """
    top = np.abs(S.mid).max(initial=0.0)
    rad_norm = norm_above(Box.exact(S.rad))
    if not top:
        return float(rad_norm)
    exponent = int(np.frexp(top)[1])
    B = Box.exact(np.ldexp((S.mid + S.mid.T) / 2, -exponent))
    V = Box.exact(np.linalg.eigh(B.mid)[1])
    rotated = V.T @ (B @ V)
    defect = norm_above(V.T @ V - Box.exact(np.eye(len(V.mid))))
    if not defect < 0.5:
        raise SoundnessError("the checker's eigenvectors are not orthogonal")
    discs = rotated.size.sum(1) - np.abs(np.diag(rotated.mid)) + np.diag(rotated.mid)
    edge = outward(np.maximum(discs + 1e-15 * rotated.size.sum(1), 0.0).max() / (1 - outward(defect)))
    symmetric_error = 2.0**-52 * norm_above(Box.exact(S.mid))  # adding and halving
    return float(outward(np.ldexp(edge, exponent) + rad_norm + symmetric_error))
