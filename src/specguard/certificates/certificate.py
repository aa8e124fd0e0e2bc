"""Certificates: what no perturbation of a ball can do to these images, and the largest such ball."""

from collections.abc import Sequence
from typing import overload

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from specguard.certificates.every_method import certify_all
from specguard.certificates.methods import METHODS, Method, named_methods
from specguard.certificates.prepare import check_request
from specguard.certificates.rules import Program, program
from specguard.certificates.stop_early import EarlyStop
from specguard.certificates.value import Certificate
from specguard.certificates.verifier import Verifier, check_verifiers
from specguard.errors import ConfigError
from specguard.geometry import Ball


@overload
def certify(
    model: nn.Module | Program,
    images: Float[Tensor, "batch *shape"],
    labels: Int[Tensor, " batch"],
    ball: Ball,
    methods: Sequence[Method | str] = ...,
    *,
    search: bool = ...,
    stop_early: bool = ...,
    verifiers: Sequence[Verifier] = ...,
    skip: Bool[Tensor, " batch"] | None = ...,
) -> Certificate: ...


@overload
def certify(
    model: nn.Module | Program,
    images: Float[Tensor, "batch *shape"],
    labels: Int[Tensor, " batch"],
    ball: Sequence[Ball],
    methods: Sequence[Method | str] = ...,
    *,
    search: bool = ...,
    stop_early: bool = ...,
    verifiers: Sequence[Verifier] = ...,
    skip: Bool[Tensor, " batch"] | None = ...,
) -> tuple[Certificate, ...]: ...


def certify(
    model: nn.Module | Program,
    images: Float[Tensor, "batch *shape"],
    labels: Int[Tensor, " batch"],
    ball: Ball | Sequence[Ball],
    methods: Sequence[Method | str] = METHODS,
    *,
    search: bool = True,
    stop_early: bool = False,
    verifiers: Sequence[Verifier] = (),
    skip: Bool[Tensor, " batch"] | None = None,
) -> Certificate | tuple[Certificate, ...]:
    """Prove, for every image and method, what perturbations within `ball` cannot do.

        certificate = specguard.certify(model, images, labels, Ball("l2", 0.1))
        certificate.certified, certificate.radius

    Args:
        model: a classifier of layers that proofs know, or its `program`, so that weights are taken apart once.
        images: a batch of inputs; pixels in [0, 1] where the ball is within the box.
        labels: the class of every image.
        ball: the perturbations; of several balls, each gets its certificate, and the network is looked at once. An
            linf ball is certified through the l2 ball around it, sqrt(entries) times as large, but for the first
            order of the adjoint, which is exact for either.
        methods: objects of `certificates.methods`, or their names.
        search: whether to look for the largest certified l2 radius too, by bisection from below.
        stop_early: try methods from the cheapest to the dearest, each only on the images and classes that are left,
            then the `verifiers`. There is no search, and there are no proofs beside the bounds.
        verifiers: provers of others behind our own; what they prove is counted apart.
        skip: images that verifiers, which may take minutes each, need not look at.

    Returns:
        A `Certificate`, or one for every ball.

    Guarantee: lower bounds on the margins of the exact function of the stored weights, and radii from below, in
    float64, rounding included; for bounds of a verifier, what it rests on. What proofs read and what torch computes
    are compared at the images and within the balls, before anything is certified.
    """
    balls = (ball,) if isinstance(ball, Ball) else tuple(ball)
    chosen = _resolve_methods(methods)
    if not balls:
        raise ConfigError("at least one ball is needed")
    for each in balls:
        check_request(images, labels, each)
    if (verifiers or skip is not None) and not stop_early:
        raise ConfigError("verifiers look at what is left, so that they need stop_early")
    check_verifiers(tuple(verifiers))
    network, labels = program(model) if isinstance(model, nn.Module) else model, labels.long()
    if stop_early:
        ordered = tuple(method for method in METHODS if method in chosen)
        certificates = tuple(
            EarlyStop(network, images, labels, each).run(ordered, tuple(verifiers), skip) for each in balls
        )
    else:
        certificates = certify_all(network, images, labels, balls, chosen, search)
    return certificates[0] if isinstance(ball, Ball) else certificates


def _resolve_methods(methods: Sequence[Method | str]) -> tuple[Method, ...]:
    names = [method if isinstance(method, str) else method.name for method in methods]
    return named_methods(list(dict.fromkeys(names)))
