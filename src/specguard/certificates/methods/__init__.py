"""The methods of certification, from the cheapest to the dearest: objects with a name.

naive, specformer, lofast   radii through the network, then Proposition 1: `m_j` loses `sqrt(2) delta` at most
local                       radii by T1, T2 and local constants, then `||w_y - w_j|| delta` at the last linear layer
adjoint                     the identity `m_j(x + d) = m_j(x) + <g_0, d> + sum_k <g_{k+1}, r_k>`, remainders bounded
mixed                       the identity from the k-th step on and the local radius there, for the best k
"""

from collections.abc import Sequence

from specguard.certificates.methods.adjoint import ADJOINT, MIXED
from specguard.certificates.methods.base import LayerRadii, Method, losses_of
from specguard.certificates.methods.local import LOCAL
from specguard.certificates.methods.radii import LOFAST, NAIVE, SPECFORMER
from specguard.errors import ConfigError

__all__ = [
    "ADJOINT",
    "LOCAL",
    "LOFAST",
    "METHODS",
    "MIXED",
    "NAIVE",
    "SPECFORMER",
    "LayerRadii",
    "Method",
    "losses_of",
    "named_methods",
]

METHODS: tuple[Method, ...] = (NAIVE, SPECFORMER, LOFAST, LOCAL, ADJOINT, MIXED)


def named_methods(names: Sequence[str]) -> tuple[Method, ...]:
    """The methods of these names, in this order; an unknown or missing one is an error."""
    known = {method.name: method for method in METHODS}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"method {unknown[0]!r} is unknown; choose among {', '.join(known)}")
    if not names:
        raise ConfigError("at least one method is needed")
    return tuple(known[name] for name in names)  # type: ignore[index]
