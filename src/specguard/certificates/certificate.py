"""Certificates: lower bounds on margins over a ball of perturbations, and the largest certified radius."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypedDict, Unpack, overload

from jaxtyping import Bool
from torch import Tensor, nn

from specguard.certificates.every_method import certify_all
from specguard.certificates.methods import METHODS, Method, named_methods
from specguard.certificates.rules import Program, program
from specguard.certificates.stop_early import EarlyStop
from specguard.certificates.value import Certificate, joined
from specguard.certificates.verifier import Verifier, check_verifiers
from specguard.errors import ConfigError, DataError, each_warning_once
from specguard.geometry import Ball
from specguard.inputs import (
    BallLike,
    ImagesLike,
    LabelsLike,
    as_ball,
    as_images,
    as_labels,
    as_stream,
    eval_mode,
    warn_of_normalization,
    warn_of_train_mode,
)
from specguard.models.convert import convert_as_given, is_convertible

_BATCH = 25  # images certified together, of data that come in batches


class Options(TypedDict, total=False):
    """The options of `certify`."""

    search: bool
    stop_early: bool
    verifiers: Sequence[Verifier]
    skip: Bool[Tensor, " batch"] | None
    n: int | None
    batch: int | None
    watch: Callable[[int, int | None], None]


Model = nn.Module | Program


@overload
def certify(
    model: Model,
    images: ImagesLike,
    labels: LabelsLike,
    ball: BallLike,
    methods: Sequence[Method | str] = ...,
    **options: Unpack[Options],
) -> Certificate: ...


@overload
def certify(
    model: Model,
    images: ImagesLike,
    labels: LabelsLike,
    ball: Sequence[Ball],
    methods: Sequence[Method | str] = ...,
    **options: Unpack[Options],
) -> tuple[Certificate, ...]: ...


@overload
def certify(
    model: Model,
    images: Any,
    labels: str,
    ball: float,
    methods: Sequence[Method | str] = ...,
    **options: Unpack[Options],
) -> Certificate: ...


@overload
def certify(
    model: Model,
    images: Any,
    labels: Ball,
    *,
    methods: Sequence[Method | str] = ...,
    **options: Unpack[Options],
) -> Certificate: ...


def certify(
    model: Any,
    images: Any,
    labels: Any = None,
    ball: Any = None,
    methods: Sequence[Method | str] = METHODS,
    *,
    search: bool = True,
    stop_early: bool = False,
    verifiers: Sequence[Verifier] = (),
    skip: Bool[Tensor, " batch"] | None = None,
    n: int | None = None,
    batch: int | None = None,
    watch: Callable[[int, int | None], None] = lambda done, count: None,
) -> Certificate | tuple[Certificate, ...]:
    """Bound every margin from below over all perturbations within `ball`, for every image and method.

    Guarantee: lower bounds on the margins and on the certified radii of the exact function of the stored weights,
    in float64, rounding included; bounds of a verifier rest on what it states. Before anything is certified, the
    logits of the layers' rules are compared with the model's at the images and within the balls.

    Args:
        model: a classifier whose layers have rules, or its `program`, which prepares the weights only once; or a
            model of timm, torchvision or transformers, converted as a function of what it is given, without
            normalization. Of a model in train mode, the function in eval mode is certified.
        images: a batch of inputs: a tensor, an array or a list, taken as they are, in float64; pixels must lie in
            [0, 1] if the ball is within the box. Or data with labels, as `specguard.attack` takes them: then comes
            the ball, as `certify(model, data, "l2", 0.1)` or `certify(model, data, Ball("l2", 0.1))`.
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
        n: at most this many images.
        batch: images certified together; of data 25 by default, and else all of them.
        watch: called with the number of images certified so far, and of all where it is known.

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
    if isinstance(ball, str) and isinstance(methods, int | float):
        raise ConfigError(f'norm and radius are one argument here: write Ball("{ball}", {methods:.6g})')
    data, labels, balls, several = _request(images, labels, ball)
    chosen = _resolve_methods(methods)
    if (verifiers or skip is not None) and not stop_early:
        raise ConfigError("verifiers run on what the methods leave open, so they need stop_early")
    check_verifiers(tuple(verifiers))
    box = any(each.box for each in balls)
    found: list[tuple[Certificate, ...]] = []
    with each_warning_once():
        network: Program | None = model if isinstance(model, Program) else None
        place = network.model if network is not None else model
        if labels is not None and n is None and batch is None:
            images = as_images(data, model=place, box=box, exact=True)
            chunks: Iterable[tuple[Tensor, Tensor]] = [(images, as_labels(labels, len(images)))]
            count: int | None = len(images)
        else:
            stream = as_stream(data, labels, n=n, batch=batch or _BATCH, model=place, box=box, exact=True)
            chunks, count = ((chunk.images, chunk.labels) for chunk in stream), stream.count
        done = 0
        for x, y in chunks:
            y = y.to(x.device)
            if not len(x):
                raise DataError("there are no images to certify")
            network = program_of(model, x) if network is None else network
            if stop_early:
                order = [method.name for method in METHODS]
                ordered = tuple(sorted(chosen, key=lambda method: order.index(method.name)))
                mask = None if skip is None else skip[done : done + len(x)]
                if skip is not None and mask is not None and len(mask) != len(x):
                    raise DataError(f"skip needs one entry for each image, and has {len(skip)}")
                found.append(
                    tuple(EarlyStop(network, x, y, each).run(ordered, tuple(verifiers), mask) for each in balls)
                )
            else:
                found.append(certify_all(network, x, y, balls, chosen, search))
            done += len(x)
            watch(done, count)
    certificates = tuple(joined(parts) for parts in zip(*found, strict=True))
    return certificates if several else certificates[0]


def _request(images: Any, labels: Any, ball: Any) -> tuple[Any, Any, tuple[Ball, ...], bool]:
    """Images or data, labels unless these are in the data, the balls, and whether the call named several."""
    if isinstance(labels, str):  # certify(model, data, "l2", 0.1)
        return images, None, (as_ball(labels, ball),), False
    if ball is None and (isinstance(labels, Ball) or _is_pair(labels)):  # certify(model, data, Ball("l2", 0.1))
        return images, None, (as_ball(labels),), False
    if ball is None or isinstance(ball, Ball | str | int | float) or _is_pair(ball):
        return images, labels, (as_ball(ball),), False
    balls = tuple(as_ball(each) for each in ball)
    if not balls:
        raise ConfigError("at least one ball is needed")
    return images, labels, balls, True


def _is_pair(ball: Any) -> bool:
    return isinstance(ball, tuple | list) and len(ball) == 2 and isinstance(ball[0], str)


def program_of(model: Any, images: Tensor) -> Program:
    """The program of a model in eval mode; a model of another library is converted."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"a {type(model).__name__} cannot be certified, since a proof needs layers: give a torch module; "
            "specguard.attack takes any callable"
        )
    warn_of_train_mode(model)
    with eval_mode(model):
        if not is_convertible(model):
            return program(model)
        warn_of_normalization(model)
        return program(convert_as_given(model, images))


def _resolve_methods(methods: Sequence[Method | str]) -> tuple[Method, ...]:
    """The methods, once each; an object stands for itself and not for the default of its name."""
    methods = (methods,) if isinstance(methods, str) else methods
    names = list(dict.fromkeys(method if isinstance(method, str) else method.name for method in methods))
    given = {method.name: method for method in methods if not isinstance(method, str)}
    return tuple(given.get(method.name, method) for method in named_methods(names))
