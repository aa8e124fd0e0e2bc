"""The rule of SLL, a residual layer that is 1-Lipschitz by construction: `x + phi(x W^T + b) B^T`.

W is the stored weight and `B = -2 W^T T^-1`, where T is a function of W and q. The construction holds for T in
exact arithmetic, and so for the layer's exact function, without a check. The error of the computed B enters the
errors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from specguard.certificates.layers import curves
from specguard.certificates.layers.activations import Neurons, linear_map
from specguard.certificates.layers.affine import upper_norm
from specguard.certificates.node import VJP, Adjoint, Method, Radius, Rule, length, product_error, up
from specguard.errors import ConfigError
from specguard.linalg import UNIT, gamma
from specguard.nn import SLL, Softplus, Squareplus

# All of them have slopes between 0 and 1.
ACTIVATIONS: dict[type[nn.Module], Callable[[Any], curves.Activation]] = {
    nn.ReLU: curves.relu,
    nn.Tanh: curves.tanh,
    Softplus: curves.softplus,
    Squareplus: curves.squareplus,
}
_LARGEST_LOG_RATIO = 300.0  # beyond this difference of logarithms, ratios of q underflow or overflow


@dataclass(frozen=True)
class SLLNode:
    """SLL at a point: its neurons there, the computed B, its norm, and `B_error >= ||B - exact B||_F`.

    Guarantee: outputs are at most as far apart as inputs, because `T >= W^T W` by Gershgorin and slopes lie in
    [0, 1]; rounding of T, of B and of all products is in the errors.
    Reference: Araujo et al. 2023, Theorem 3.
    """

    x: Tensor
    neurons: Neurons
    B: Float[Tensor, "dim hidden"]
    norm: float
    B_error: float
    affine = False

    @property
    def output(self) -> Tensor:
        return self.x + self.neurons.output @ self.B.mT

    @property
    def error(self) -> Float[Tensor, " batch"]:
        hidden, neuron_error = length(self.neurons.output), self.neurons.error
        product = product_error(self.B.shape[1], hidden * float(length(self.B[None])[0]))
        added = 2 * UNIT * (length(self.output) + length(self.x))
        return up((self.norm + self.B_error) * neuron_error + self.B_error * hidden + product + added)

    def propagate(self, radius: Radius, method: Method) -> Radius:
        return up(radius)

    def vjp(self, g: Adjoint) -> VJP:
        """`g` plus the vjp of the neurons with `B^T g`, whose remainder is the only one.

        The error of the computed `B^T g` is a fraction of |g|. It acts through the neurons' linear part, of norm
        `max_slope ||W||`, and their remainder, at most twice that per radius: three times in all.
        """
        inner = self.neurons.vjp(g @ self.B)
        adjoint = g + inner.adjoint
        size = float(length(self.B[None])[0])
        g_error = (self.B_error + gamma(self.B.shape[0] + 4) * size) * length(g, 2)
        slope = self.neurons.phi.max_slope * self.neurons.map.norm
        error = inner.error + 3 * slope * g_error + 2 * UNIT * length(adjoint, 2)
        return VJP(adjoint, up(error), inner.remainder)


def residual(layer: SLL) -> Rule:
    """The rule of SLL."""
    W = layer.weight.detach()
    before = nn.utils.skip_init(nn.Linear, W.shape[1], W.shape[0], dtype=W.dtype, device=W.device)
    before.weight, before.bias = layer.weight, layer.bias
    before_map, phi = linear_map(before), ACTIVATIONS[type(layer.activation)](layer.activation)
    B, relative_error = second_map(layer)
    B_error = float(up((relative_error + 4 * UNIT) * length(B[None]))[0])
    norm = upper_norm(B)
    return lambda x: SLLNode(x, Neurons(before_map.at(x), before_map, phi), B, norm, B_error)


def second_map(layer: SLL) -> tuple[Float[Tensor, "dim hidden"], float]:
    """B as computed, and a bound on the relative error of its entries but for 4 roundings."""
    relative_error = _relative_error(layer)
    return -2 * (layer.weight.detach() / layer.scale().detach()[:, None]).mT, relative_error


def _relative_error(layer: SLL) -> float:
    """A bound on the relative error of the entries of the computed 1 / T.

    The error of an entry of `W W^T` is at most `gamma |W| |W|^T`; the relative error of a ratio of q grows with the
    size of its logarithm.
    """
    W, log_q = layer.weight.detach(), layer.log_q.detach()
    log_ratios = log_q[None, :] - log_q[:, None]
    if float(log_ratios.abs().max()) > _LARGEST_LOG_RATIO or float(log_q.abs().max()) > 1e6:
        raise ConfigError("its q are too far apart for the rounding analysis")
    T = layer.scale().detach()
    products = gamma(W.shape[1] + 4) * ((W.abs() @ W.abs().mT) * log_ratios.exp()).sum(1)
    sums = gamma(W.shape[0] + 64) * (1 + float(log_ratios.abs().max())) * T
    relative_error = float((2 * (products + sums) / T).max())
    if not relative_error < 1e-3:  # NaN compares false
        raise ConfigError("the sums it divides by are lost in rounding")
    return 2 * relative_error  # at least 1 / (1 - relative_error) - 1
