"""What the checker may claim of a layer or a network, held against the exact function, without a tolerance."""

import numpy as np
import torch

from exact.boxes import fractions, holds
from exact.numbers import length, mpf, real
from exact.reference import adjoint, forward
from specguard.checker import METHODS, Image, read
from specguard.checker.enclosure import Box, norm_above
from specguard.checker.propagate import LayerAtPoint, backward_pass, forward_pass, layer_radii
from specguard.nn import materialized, unfuse_attention

PROPAGATIONS = ("naive", "specformer", "lofast", "local")


def plain(layer):
    """The function that is checked: weights in float64, nothing folded away, no kernels."""
    return materialized(unfuse_attention(layer.eval())).double().requires_grad_(False)


def function(layer, z):
    """The exact layer at one image's array of exact numbers."""
    return forward(layer, z[None])[0]


def moved(z, D):
    return real(fractions(z)) + real(D)


def upper(number):
    """The least float64 that is no less than a positive real, or the next."""
    found = float(number)
    return found if mpf(found) >= number else float(np.nextafter(found, np.inf))


def directions(rng, shape, radius, along=None):
    """Perturbations of this length, nearly: in all entries, in one entry, and along a given array, both ways."""
    alone = np.zeros(shape)
    alone.flat[rng.integers(alone.size)] = 1.0
    found = [rng.standard_normal(shape), alone] + ([along, -along] if along is not None and along.any() else [])
    return [fractions(radius * each / np.linalg.norm(each)) for each in found]


def check_point(layer, z, g, radii, seed=0, kinked=False):
    """One layer at z: its value, its adjoint, how far it spreads, and what its linear part leaves out.

    Where z may be on either side of a kink, the slope of either side will do for the adjoint.
    """
    (step,), f = read(layer.eval()).steps, plain(layer)
    point = step.make(Box.exact(z))
    clean = function(f, fractions(z))
    assert holds(point.output, clean), "the value is not in its box"
    back, remainder = point.vjp(Box.exact(g))
    wanted = adjoint(f, torch.tensor(z)[None], torch.tensor(g)[:, None])[:, 0]
    assert kinked or holds(back, wanted), "the adjoint is not in its box"
    for radius in radii:
        for D in directions(np.random.default_rng(seed), z.shape, radius, back.mid[0]):
            r = upper(length(D))
            change = function(f, moved(z, D)) - real(clean)
            for method in PROPAGATIONS:
                assert at_most(length(change), point.propagate(r, method)), f"it moves farther than {method} says"
            bounds = remainder(r).values()
            off = norm_above(Box.exact(back.rad), 1) * r
            for other in range(len(g)):
                terms = [bound[other] for bound in bounds]
                assert kinked or at_most(left(g, change, wanted, D, other), *terms), "a larger remainder"
                assert at_most(left(g, change, fractions(back.mid), D, other), off[other], *terms), "a larger one"


def check_path(layer, z, g, radius, seed=0):
    """Layers in a row, each at the input computed before it: the output's radius, and the adjoint's identity."""
    f, (path, output) = plain(layer), forward_pass(read(layer.eval()).steps, z)
    found = backward_pass(path, g)
    for D in [0 * fractions(z), *directions(np.random.default_rng(seed), z.shape, radius, found.g[0])]:
        r = upper(length(D)) if any(D.ravel()) else 0.0
        change = function(f, moved(z, D)) - real(fractions(output))
        for method in PROPAGATIONS:
            at, out = layer_radii(path, r, method)
            assert at_most(length(change), out), f"it moves farther than {method} says"
        bounds = [term for name, rest in found.remainders.items() for term in rest(at[name]).values()]
        for other in range(len(g)):
            size = left(g, change, fractions(found.g), D, other)
            assert at_most(size, *(np.broadcast_to(b, len(g))[other] for b in bounds)), (
                "the identity is off by more"
            )


def left(g, change, back, D, other):
    """What the linear part leaves out of a functional's change, but for what a hundred digits lose."""
    whole, linear = (real(fractions(g[other])) * change).sum(), (real(back[other]) * real(D)).sum()
    sizes = (abs(real(fractions(g[other])) * change)).sum() + (abs(real(back[other]) * real(D))).sum()
    return max(abs(whole - linear) - sizes * mpf(10) ** -70, mpf(0))


def at_most(number, *bounds):
    """Whether a real is at most a sum of bounds; what is infinite or no number claims nothing."""
    return not np.isfinite(bounds).all() or number <= sum(mpf(float(bound)) for bound in bounds)


def check_margins(model, x, label, radius, seed=0, methods=METHODS, entry=False):
    """The exact margins at exact points within a radius are at least what every method proves."""
    f, image = plain(model), Image.of(read(model.eval()), x, label)
    rng = np.random.default_rng(seed)
    some = image.proof(radius, "adjoint") if radius else None
    assert some is None or some.losses.shape == image.margins.shape
    along = backward_pass(image.path, image._functionals).g[int(np.argmin(image.margins))]
    points = [0 * fractions(x)]
    if entry:  # of an linf ball: every entry by as much
        points += [fractions(s * entry * np.where(along < 0, -1.0, 1.0)) for s in (1, -1)]
    elif radius:
        points += directions(rng, x.shape, radius * (1 - 2.0**-50), along)
    for D in points:
        assert length(D) <= mpf(radius)
        logits = function(f, moved(x, D))
        for method in methods:
            proof = image.proof(radius, method, entry) if entry else image.proof(radius, method)
            for other, margin, fall in zip(image.other_classes, image.margins, proof.losses, strict=True):
                if np.isfinite(fall):
                    exactly = real(logits[label] - logits[other])
                    assert mpf(float(margin)) - mpf(float(fall)) <= exactly, f"{method} proves too much"
    return image


def single(layer, z):
    """Whether a layer is one step of the checker's."""
    path, _ = forward_pass(read(layer.eval()).steps, z)
    return len(path) == 1 and isinstance(path[0], LayerAtPoint)
