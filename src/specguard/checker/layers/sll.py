"""SLL in boxes: `x - B^T s(W x + b)` with `B = 2 T^-1 W`, one row of W per neuron."""

from dataclasses import dataclass

import numpy as np

from specguard.checker.enclosure import Box, outward
from specguard.checker.layers.activations import Map, Neurons
from specguard.checker.layers.curves import Curve
from specguard.checker.node import Maker, Remainder
from specguard.errors import ConfigError

_OFFSET = 1e-12  # added to every entry of T, by the layer's definition
_MAX_RELATIVE_ERROR = 1e-3  # of T


@dataclass(frozen=True)
class SLL:
    """The layer at x; a box encloses the exact B.

    A change d of x becomes `d - B^T S W d` for a diagonal S of slopes in [0, 1]. Its squared length is at most
    `|d|^2 - 4 (W d)^T T^-1 (S - S^2) (W d) <= |d|^2`, because `W W^T <= T`: with `Q = diag(q)`, the Gershgorin
    discs of `Q^-1 (T - W W^T) Q` lie right of zero.
    """

    x: Box
    neurons: Neurons
    B: Box
    affine = False

    @property
    def output(self) -> Box:
        return self.x - self.neurons.output @ self.B

    def propagate(self, radius: float, method: str) -> float:
        return float(outward(radius))

    def vjp(self, g: Box) -> tuple[Box, Remainder]:
        """Only the neurons are nonlinear; their functional is `-B g`."""
        adjoint, remainder = self.neurons.vjp(-(g @ self.B.T))
        return g + adjoint, remainder


def sll(before: Map, log_q: Box, phi: Curve) -> Maker:
    """SLL with an activation whose slopes lie in [0, 1]."""
    assert before.W is not None
    B = second_map(before.W, log_q)
    return lambda x: SLL(x, Neurons(before, phi, before(x)), B)


def second_map(W: Box, log_q: Box) -> Box:
    """B, one row per neuron."""
    return W * 2.0 / _divisors(W, log_q).rearrange(lambda a: a[:, None])


def _divisors(W: Box, log_q: Box) -> Box:
    """The diagonal of T: `T_i = sum_j |W W^T|_ij q_j / q_i`, plus `_OFFSET`."""
    with np.errstate(over="ignore", invalid="ignore"):
        ratios = (log_q[None, :] - log_q[:, None]).exp()
        T = ((W @ W.T).abs() * ratios).sum(1) + _OFFSET
        known = (T.rad < _MAX_RELATIVE_ERROR * T.mid).all()  # False where anything overflowed
    if not known:
        raise ConfigError("the sums that an SLL divides by are lost in rounding, so it cannot be checked")
    return T
