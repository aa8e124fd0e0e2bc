"""What a proof may claim of a layer or a network, held against the exact function, without a tolerance."""

import math

import numpy as np
import torch

from exact.numbers import Dual, exact, length, like, mpf, real, squared, with_derivatives, within
from exact.reference import adjoint, forward, value_at
from helpers.proofs import NAMES, prepared_problem, upper_losses
from specguard.certificates import program
from specguard.certificates.propagate import LayerAtPoint, backward_pass, forward_pass, upper_radii
from specguard.nn import materialized, unfuse_attention


def plain(layer):
    """The layer that its rule reads: weights in float64, nothing folded away, no kernels."""
    return materialized(unfuse_attention(layer.eval())).double().requires_grad_(False)


def one_step(layer, z):
    """The node of a layer that is one step of a program."""
    (place,), _ = forward_pass(program(layer).steps, z)
    assert isinstance(place, LayerAtPoint)
    return place.node


def full(z, radius):
    return torch.full((len(z),), float(radius), dtype=torch.float64)


def check_value(layer, z, node=None):
    """`||output - f(z)|| <= error`, image by image."""
    node = one_step(layer, z) if node is None else node
    wanted, error = value_at(plain(layer), z), node.error.expand(len(z))
    assert node.output.shape == wanted.shape
    for image in range(len(z)):
        assert within(node.output[image], wanted[image], error[image]), "the output is off by more than its error"


def check_adjoint(layer, z, g):
    """`||vjp(g).adjoint - Df(z)^T g|| <= vjp(g).error`, other class by other class."""
    vjp, wanted = one_step(layer, z).vjp(g), adjoint(plain(layer), z, g)
    assert vjp.adjoint.shape == wanted.shape
    error = vjp.error.expand(g.shape[:2])
    for other in range(len(g)):
        for image in range(len(z)):
            found = within(vjp.adjoint[other, image], wanted[other, image], error[other, image])
            assert found, "the adjoint is off by more than its error"


def check_identity(layer, z, g, D, methods=("local",)):
    """The bounds of a path at `z + D`, D an array of one image's numbers: radii, and the identity of the adjoint.

    `||f(z + D) - output|| <= radius`; `<g, f(z + D) - output> - <adjoint, D>` is at most remainders and rounding.
    """
    path, output = forward_pass(program(layer).steps, z)
    r = upper(length(D))
    moved = forward(plain(layer), real(exact(z)) + real(D)[None])
    change = moved - like(output, moved)
    for method in methods:
        assert squared(change) <= like(float(upper_radii(path, full(z, r), method).out[0]), moved) ** 2, method
    found, radii = backward_pass(path, g), upper_radii(path, full(z, r), "local")
    for other in range(len(g)):
        allowed = mpf(0)
        for name, vjp in found.vjps.items():
            for term in vjp.remainder(radii.at[name]).values():
                allowed += mpf(float(term[other, 0]))
        for name, (ahead, back) in found.rounding.items():
            allowed += mpf(float(ahead[other, 0])) + mpf(float(back[other, 0])) * mpf(float(radii.at[name][0]))
            if name in found.scaling:
                allowed += mpf(float(found.scaling[name][other, 0])) * mpf(float(radii.ends[name][0]))
        left = (real(exact(g[other])) * real(change)).sum()
        left -= (real(exact(found.adjoint[other])) * real(D)[None]).sum()
        assert abs(left) <= allowed, "the remainder is larger than its bound"


def check_margins(model, x, label, D, methods=NAMES, largest=float("inf")):
    """`m_j(x + D)` is at least what every method proves within ||D||, for one image x and an array D."""
    images, labels = x[None], torch.tensor([label])
    p = prepared_problem(program(model), images, labels, methods)
    radius = upper(length(D)) if any(D.ravel()) else 0.0
    losses = upper_losses(p, full(images, radius), methods, largest)
    logits = real(forward(plain(model), real(exact(images)) + real(D)[None]))[0]
    for method, loss in losses.items():
        for row, other in enumerate(p.other_classes[:, 0].tolist()):
            margin = logits[label] - logits[other]
            proved = mpf(float(p.margins[row, 0])) - mpf(float(loss.total[row, 0]))
            assert proved <= margin, f"{method} proves {float(proved)}, and the margin is {float(margin)}"


def matrix(layer, z):
    """The exact matrix of an affine layer's linear part, for one image."""
    output = forward(plain(layer), with_derivatives(exact(z))).ravel()
    return np.stack([entry.slope if isinstance(entry, Dual) else 0 * output[-1].slope for entry in output])


def positive_definite(c, S):
    """Whether `c I - S`, for an array S, has a Cholesky factorization, in a hundred digits."""
    M = -S
    for i in range(len(M)):
        M[i, i] += c
    for i in range(len(M)):
        if not M[i, i] > 0:
            return False
        for j in range(i + 1, len(M)):
            if M[j, i]:
                M[j, i:] = M[j, i:] - M[i, i:] * (M[j, i] / M[i, i])
    return True


def bounds_norm(c, A):
    """Whether `||A|| <= c`, for a float or real c and an array: a bound that is attained passes by 50 digits."""
    A = real(A if len(A) >= len(A.T) else A.T)
    return positive_definite(mpf(c) ** 2 * (1 + mpf(10) ** -50), A.T @ A)


def upper(number):
    """A float64 that is no less than a positive real, and the least or the next."""
    found = float(number)
    return found if mpf(found) >= number else math.nextafter(found, math.inf)
