"""Run every method on every image: bounds for all balls, the largest certified radius, and its proof record."""

import math
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from specguard.certificates.methods import LayerRadii, Method, NativeMethod, losses_of
from specguard.certificates.methods.base import where
from specguard.certificates.prepare import Clock, check_same_function, digest, prepare_problem
from specguard.certificates.problem import (
    MarginLoss,
    Problem,
    by_class,
    describe,
    l2_radius,
    lower_radius,
)
from specguard.certificates.propagate import norms
from specguard.certificates.rules import Program
from specguard.certificates.value import Certificate, Norms
from specguard.errors import ConfigError
from specguard.geometry import Ball, Norm
from specguard.records.certificate import Proof


def certify_all(
    network: Program,
    images: Tensor,
    labels: Tensor,
    balls: tuple[Ball, ...],
    methods: tuple[Method, ...],
    search: bool,
) -> tuple[Certificate, ...]:
    """A certificate for every ball, from one forward and one backward pass."""
    clock, size = Clock(images), images[0].numel()
    with clock.stage("forward"):
        p = prepare_problem(network, images, labels, backward=any(method.needs_backward for method in methods))
    refused = {norm: refusals(methods, p, norm) for norm in dict.fromkeys(ball.norm for ball in balls)}
    losses: list[dict[str, MarginLoss]] = []
    enclosing = next((method for method in methods if isinstance(method, NativeMethod)), None)
    for ball in balls:
        layer_radii = LayerRadii.of_ball(p, ball, enclosing)
        at_ball: dict[str, MarginLoss] = {}
        for method in methods:
            with clock.stage(method.name, p):
                at_ball[method.name] = method.upper_loss(p, layer_radii)
        losses.append(at_ball)
    lower = [{name: p.margins - loss.total for name, loss in at_ball.items()} for at_ball in losses]
    common = [method for method in methods if not isinstance(method, NativeMethod)]
    largest: dict[str, Tensor] = {}
    proofs: dict[str, list[Proof | None]] = {}
    start = torch.zeros_like(p.margins[0])
    for method in common:
        with clock.stage(f"{method.name} search", p):
            largest[method.name] = (
                lower_radius(p, losses_of(method, p), start) if search else torch.zeros_like(p.margins[0])
            )
            start = torch.maximum(start, largest[method.name])
    for method in common:
        with clock.stage(f"{method.name} proof", p):
            proofs[method.name] = _proofs(p, *_farthest_in_l2(p, method, balls, losses, largest[method.name]))
    native: dict[Ball, dict[str, _Searched]] = {}
    for ball in balls:
        if (kind := _kind(ball)) not in native:
            native[kind] = {}
            for method in (method for method in methods if isinstance(method, NativeMethod)):
                with clock.stage(f"{method.name} search", p):
                    native[kind][method.name] = _searched(p, method, kind, balls, losses, search)
    within = [torch.full_like(start, l2_radius(ball, size)) for ball in balls]
    found = [
        torch.sqrt(torch.tensor(float(size))) * radius if kind.norm == "linf" else radius
        for kind, by_name in native.items()
        for radius, _ in by_name.values()
    ]
    check_same_function(network, images, torch.stack([*within, *largest.values(), *found]).amax(0))
    shared = {
        "model": network.fingerprint,
        "images": tuple(map(digest, images)),
        "labels": labels,
        "predicted": p.predicted,
        "margins": by_class(p, p.margins),
        "norms": _norms(p, len(labels)),
        "seconds": clock.seconds,
    }
    certificates = []
    for ball, at_ball, bounds in zip(balls, losses, lower, strict=True):
        own = native[_kind(ball)]
        radii = {**largest, **{name: radius for name, (radius, _) in own.items()}}
        proved = {**proofs, **{name: found for name, (_, found) in own.items()}}
        certificates.append(
            Certificate(
                ball=ball,
                lower={name: by_class(p, value) for name, value in bounds.items()},
                terms=_explain(p, at_ball, bounds),
                largest={method.name: radii[method.name] for method in methods},
                failures=tuple(dict(why) for _ in labels) if (why := refused[ball.norm]) else (),
                proofs=tuple(
                    {m.name: proof for m in methods if (proof := proved[m.name][i]) is not None}
                    for i in range(len(labels))
                ),
                **shared,  # type: ignore[arg-type]
            )
        )
    return tuple(certificates)


def refusals(methods: Sequence[Method], p: Problem, norm: Norm) -> dict[str, str]:
    """Why methods cannot be applied to this network in balls of this norm, in a sentence by method.

    Raises:
        ConfigError: if no method is left.
    """
    refused: dict[str, str] = {
        method.name: why
        for method in methods
        if isinstance(method, NativeMethod) and (why := method.refusal(p.network, p.images, norm)) is not None
    }
    if len(refused) == len(methods):
        raise ConfigError(next(iter(refused.values())))
    return refused


_Searched = tuple[Tensor, list[Proof | None]]  # the largest radii, and their proofs


def _kind(ball: Ball) -> Ball:
    """What balls of the same norm and box share."""
    return Ball(ball.norm, 0.0, box=ball.box and ball.norm == "linf")


def _searched(
    p: Problem,
    method: NativeMethod,
    kind: Ball,
    balls: tuple[Ball, ...],
    losses: Sequence[Mapping[str, MarginLoss]],
    search: bool,
) -> _Searched:
    """The largest certified radii in the norm of `kind`, and the proofs at these and at the given radii."""
    radius = torch.zeros_like(p.margins[0])
    loss = MarginLoss(torch.full_like(p.margins, torch.inf), {})
    if search:
        radius, loss = method.search(p, kind)
    found = [
        (float(ball.radius), at_ball[method.name])
        for ball, at_ball in zip(balls, losses, strict=True)
        if _kind(ball) == kind
    ]
    return radius, _proofs(p, *_farthest(p, loss, radius, found))


def _farthest_in_l2(
    p: Problem,
    method: Method,
    balls: tuple[Ball, ...],
    losses: Sequence[Mapping[str, MarginLoss]],
    largest: Float[Tensor, " batch"],
) -> tuple[MarginLoss, Float[Tensor, " batch"]]:
    """The losses at the largest l2 radius that is certified, of the search's and of the given ones; and the radius.

    Of an linf ball, the l2 ball around it is tried where the linf ball is certified.
    """
    evaluate, size = losses_of(method, p), p.images[0].numel()
    found: list[tuple[float | Tensor, MarginLoss]] = []
    around = torch.zeros_like(largest)
    for ball, at_ball in zip(balls, losses, strict=True):
        if ball.norm == "l2":
            found.append((float(ball.radius), at_ball[method.name]))
        else:
            holds = (p.margins > at_ball[method.name].total).all(0)
            around = torch.where(holds, around.clamp(min=l2_radius(ball, size)), around)
    if (around > largest).any():
        found.append((around, evaluate(around)))
    return _farthest(p, evaluate(largest), largest, found)


def _farthest(
    p: Problem,
    loss: MarginLoss,
    radius: Float[Tensor, " batch"],
    found: Sequence[tuple[float | Float[Tensor, " batch"], MarginLoss]],
) -> tuple[MarginLoss, Float[Tensor, " batch"]]:
    """`loss` and `radius` or, where they certify a larger radius, one of `found`."""
    for at, there in found:
        better = (p.margins > there.total).all(0) & (at > radius)
        radius = torch.where(better, at, radius)
        loss = where(better, there, loss)
    return loss, radius


def _proofs(p: Problem, loss: MarginLoss, radius: Float[Tensor, " batch"]) -> list[Proof | None]:
    """The proof record of every image at its largest certified radius; None where nothing is certified."""
    left = p.margins - loss.total
    hardest = left.argmin(0)[None]
    columns = {
        "radius": radius,
        "other_class": p.other_classes.gather(0, hardest)[0],
        "margin": p.margins.gather(0, hardest)[0],
        "loss": loss.total.gather(0, hardest)[0],
    }
    radii = {p.names[step]: values.tolist() for step, values in loss.radii.items()}
    terms = {describe(key, p.names): term.gather(0, hardest)[0].tolist() for key, term in loss.terms.items()}
    bounds = [[None if b == math.inf else b for b in row] for row in by_class(p, left).tolist()]
    certified = ((left > 0).all(0) & (radius > 0)).tolist()
    whole = {name: values.tolist() for name, values in columns.items()}
    return [
        Proof(
            **{name: values[i] for name, values in whole.items()},
            lower=tuple(bounds[i]),
            radii={name: values[i] for name, values in radii.items()},
            terms={name: values[i] for name, values in terms.items() if values[i] > 0},
        )
        if certified[i]
        else None
        for i in range(len(certified))
    ]


def _norms(p: Problem, count: int) -> tuple[Norms, ...]:
    """The norms that the bounds used, by image."""
    by_layer = {
        layer: {name: value.cpu().tolist() for name, value in sizes.items()}
        for layer, sizes in norms(p.path).items()
    }
    return tuple(
        {
            layer: {name: tuple(v[i]) if isinstance(v[i], list) else v[i] for name, v in sizes.items()}
            for layer, sizes in by_layer.items()
        }
        for i in range(count)
    )


def _explain(
    p: Problem, losses: Mapping[str, MarginLoss], lower: Mapping[str, Float[Tensor, "other batch"]]
) -> tuple[Mapping[str, float], ...]:
    """The terms of each image's best method at the class with the smallest margin, largest first."""
    names = list(losses)
    best = torch.stack([lower[name].amin(0) for name in names]).argmax(0).tolist()
    hardest = {name: lower[name].argmin(0).tolist() for name in names}
    columns = {
        name: {key: term.cpu() for key, term in losses[name].terms.items()} for name in {names[i] for i in best}
    }
    terms_by_image = []
    for image, number in enumerate(best):
        name = names[number]
        other = hardest[name][image]
        terms = {describe(key, p.names): float(term[other, image]) for key, term in columns[name].items()}
        terms_by_image.append(dict(sorted(terms.items(), key=lambda item: -item[1])))
    return tuple(terms_by_image)
