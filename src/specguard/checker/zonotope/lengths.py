"""Upper bounds on spectral norms of stacks of matrices, and on the lengths of the deviations of tokens."""

import numpy as np

from specguard.checker.enclosure import Array, Box, norm_above, outward
from specguard.checker.zonotope.form import Form, euclidean
from specguard.checker.zonotope.maps import UNIT, gamma
from specguard.errors import SoundnessError


def spectral_above(A: Array) -> Array:
    """Upper bounds on the spectral norms of the matrices on the last two axes.

    With any V, `||G|| <= ||V^T G V||_inf / (1 - ||V^T V - I||)` for the smaller Gram matrix G of a matrix.
    """
    if not A.shape[-1] or not A.shape[-2]:
        return np.zeros(A.shape[:-2])
    A, exponent = scaled(A if A.shape[-2] >= A.shape[-1] else np.swapaxes(A, -1, -2))
    G, error = _gram(np.swapaxes(A, -1, -2))
    V = Box.exact(eigh(G)[1])
    rotated = V.T @ (Box.exact(G) @ V)
    most = outward(outward(rotated.size.sum(-1)).max(-1) / (1 - defect_of(V))) + error
    return np.asarray(outward(np.ldexp(np.sqrt(outward(most)), exponent)))


def factor_of_gram(G: Array, error: Array) -> Array:
    """C with `A A^T <= C C^T` for every A whose `A A^T` is within `error` of the symmetric G in the Frobenius norm.

    `A A^T <= V diag(w) V^T + (residual + error) I`, and `I <= V V^T / (1 - defect)`.
    """
    w, V = eigh(G)
    box = Box.exact(V)
    residual = norm_above(Box.exact(G) - (box * Box.exact(w[..., None, :])) @ box.T, G.ndim - 2)
    # The columns of C are right to three roundings, which changes C C^T by less than 16 u trace(C C^T).
    trace = np.maximum(w, 0.0).sum(-1)
    shift = outward((residual + error + 64 * UNIT * trace + 1e-290) / (1 - defect_of(box)))
    return np.asarray(V * np.sqrt(np.maximum(w, 0.0) + shift[..., None])[..., None, :])


def eigh(G: Array) -> tuple[Array, Array]:
    """Eigenvalues and eigenvectors of symmetric matrices; where one is not finite, those of zero."""
    finite = np.isfinite(G).all((-1, -2), keepdims=True)
    w, V = np.linalg.eigh(np.where(finite, G, 0.0))
    return w, V


def scaled(A: Array) -> tuple[Array, Array]:
    """The matrices times powers of two, with entries of at most 1; the exponents that undo it."""
    exponent = np.frexp(np.abs(A).max((-1, -2), initial=0.0))[1]
    return np.ldexp(A, -exponent[..., None, None]), exponent


def _gram(A: Array) -> tuple[Array, Array]:
    """`A A^T` as computed, and a bound on its error in the Frobenius norm."""
    G = A @ np.swapaxes(A, -1, -2)
    square = np.einsum("...ij,...ij->...", A, A)
    return (G + np.swapaxes(G, -1, -2)) / 2, np.asarray(outward((gamma(A.shape[-1]) + 4 * UNIT) * square))


def defect_of(V: Box) -> Array:
    defect = norm_above(V.T @ V - Box.exact(np.eye(V.shape[-1])), V.mid.ndim - 2)
    if not (defect < 0.5).all():
        raise SoundnessError("the checker's eigenvectors are not orthogonal")
    return np.asarray(outward(defect))


def length_above(z: Form) -> Array:
    """Upper bounds on the l2 lengths of the deviations of all vectors on the last axis, the smaller of two.

    By entries, or `sigma(ball) + |E eta| + |fresh + rad|`. With positive weights m, by Cauchy-Schwarz,
    `|E eta|^2 <= lmax(sum_s E_s E_s^T / m_s) sum_s m_s`; the weights are the lengths of the columns.
    """
    axes = z.mid.ndim - 1
    by_entry = norm_above(Box.exact(z.reach), axes)
    total = spectral_above(z.ball) + norm_above(Box.exact(outward(z.fresh + z.rad)), axes)
    if z.shared.shape[-1] + z.local.shape[-1]:
        E = np.concatenate([z.shared, z.local], -1)
        m = np.maximum(euclidean(np.swapaxes(E, -1, -2)), 1e-150)
        E /= np.sqrt(m)[..., None, :]
        total = total + outward(spectral_above(E) * np.sqrt(outward(m.sum(-1))))
    return np.asarray(np.minimum(by_entry, outward(total)))
