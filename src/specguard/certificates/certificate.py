"""Certificates: lower bounds on margins over a ball of perturbations, and the largest certified radius."""

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
    """Bound every margin from below over all perturbations within `ball`, for every image and method.

    Guarantee: lower bounds on the margins and on the certified radii of the exact function of the stored weights,
    in float64, rounding included; bounds of a verifier rest on what it states. Before anything is certified, the
    logits of the layers' rules are compared with the model's at the images and within the balls.

    Args:
        model: a classifier whose layers have rules, or its `program`, which prepares the weights only once.
        images: a batch of inputs; pixels must lie in [0, 1] if the ball is within the box.
        labels: the class of every image.
        ball: the perturbations, or several balls, which share the passes through the network. An linf ball is
            certified through the l2 ball around it, sqrt(entries) times as large, except by `zonotope`, which takes
            the linf ball itself, cut to the box, and for the first-order term of the adjoint, exact for either.
        methods: objects of `certificates.methods` or their names; all by default.
        search: whether to search the largest certified radius as well: an l2 radius, by bisection; that of
            `zonotope` is in the norm of the ball, by secants.
        stop_early: run methods from the cheapest to the most expensive, each only on the images and classes not yet
            certified, then the `verifiers`; without a search and without proof records.
        verifiers: external verifiers for what is still open; their certificates are counted separately.
        skip: images, as a mask, that are not given to the verifiers, which may take minutes per image.

    Returns:
        A `Certificate`, or one for every ball.

    Example:
        >>> import torch
        >>> from specguard import Ball, certify
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2)).eval()
        >>> model[1].weight.data, model[1].bias.data = torch.tensor([[1.0] * 4, [-1.0] * 4]), torch.zeros(2)
        >>> image = torch.full((1, 1, 2, 2), 0.5)
        >>> certificate = certify(model, image, torch.tensor([0]), Ball("l2", 0.1), ["adjoint"])
        >>> certificate.certified, certificate.radius.round(decimals=2)
        (tensor([True]), tensor([1.], dtype=torch.float64))
    """
    balls = (ball,) if isinstance(ball, Ball) else tuple(ball)
    chosen = _resolve_methods(methods)
    if not balls:
        raise ConfigError("at least one ball is needed")
    for each in balls:
        check_request(images, labels, each)
    if (verifiers or skip is not None) and not stop_early:
        raise ConfigError("verifiers run on what the methods leave open, so they need stop_early")
    check_verifiers(tuple(verifiers))
    network, labels = program(model) if isinstance(model, nn.Module) else model, labels.long()
    if stop_early:
        order = [method.name for method in METHODS]
        ordered = tuple(sorted(chosen, key=lambda method: order.index(method.name)))
        certificates = tuple(
            EarlyStop(network, images, labels, each).run(ordered, tuple(verifiers), skip) for each in balls
        )
    else:
        certificates = certify_all(network, images, labels, balls, chosen, search)
    return certificates[0] if isinstance(ball, Ball) else certificates


def _resolve_methods(methods: Sequence[Method | str]) -> tuple[Method, ...]:
    """The methods, once each; an object stands for itself and not for the default of its name."""
    names = list(dict.fromkeys(method if isinstance(method, str) else method.name for method in methods))
    given = {method.name: method for method in methods if not isinstance(method, str)}
    return tuple(given.get(method.name, method) for method in named_methods(names))
