"""The certification methods, from the cheapest to the most expensive.

naive, specformer, lofast   radii through the network, then Proposition 1: `m_j` loses at most `sqrt(2) delta`
local                       radii by T1, T2 and local constants, then `||w_y - w_j|| delta` at the last linear layer
zonotope                    the smallest margin over an enclosure of the output: which entries move together
adjoint                     the identity `m_j(x + d) = m_j(x) + <g_0, d> + sum_k <g_{k+1}, r_k>`, bounds on r_k
mixed                       the identity from the k-th step on with the local radius there, for the best k
"""

from collections.abc import Sequence

from specguard.certificates.methods.adjoint import ADJOINT, MIXED
from specguard.certificates.methods.base import LayerRadii, Method, NativeMethod, losses_of
from specguard.certificates.methods.local import LOCAL
from specguard.certificates.methods.radii import LOFAST, NAIVE, SPECFORMER
from specguard.certificates.methods.zonotope import ZONOTOPE, ZonotopeMethod
from specguard.errors import ConfigError

__all__ = [
    "ADJOINT",
    "LOCAL",
    "LOFAST",
    "METHODS",
    "MIXED",
    "NAIVE",
    "SPECFORMER",
    "ZONOTOPE",
    "LayerRadii",
    "Method",
    "NativeMethod",
    "ZonotopeMethod",
    "losses_of",
    "named_methods",
]

METHODS: tuple[Method, ...] = (NAIVE, SPECFORMER, LOFAST, LOCAL, ZONOTOPE, ADJOINT, MIXED)


def named_methods(names: Sequence[str]) -> tuple[Method, ...]:
    """Look up methods by name.

    Args:
        names: at least one name.

    Returns:
        The methods, in this order.

    Raises:
        ConfigError: if a name is unknown, or there is none.

    Example:
        >>> from specguard.certificates import named_methods
        >>> [method.name for method in named_methods(["local", "adjoint"])]
        ['local', 'adjoint']
    """
    known = {method.name: method for method in METHODS}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"method {unknown[0]!r} is unknown; choose among {', '.join(known)}")
    if not names:
        raise ConfigError("at least one method is needed")
    return tuple(known[name] for name in names)  # type: ignore[index]
