"""Random networks of all layer types: whatever is certified of them stands attacks, and the checker agrees.

SPECGUARD_NETWORKS=300 tries as many networks; continuous integration tries fewer, which hold every layer type too.
"""

import itertools
import os
import random
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from torch import nn

from helpers.proofs import NAMES
from specguard.attacks import APGD, PGD
from specguard.certificates import certify
from specguard.certificates.rules import _RULES
from specguard.checker import Image, read
from specguard.geometry import Ball
from specguard.nn import (
    SLL,
    Attention,
    Block,
    ClassAndMean,
    ClassPool,
    ClassToken,
    CoreAttention,
    CyclicShift,
    FirstTokens,
    GatedPositionalAttention,
    GatedUnit,
    HeadNorm,
    LayerProject,
    LayerScale,
    MaxMin,
    MeanPool,
    Normalize,
    PatchEmbedding,
    Positions,
    Residual,
    Resize,
    SkipAttention,
    SmoothProject,
    Softplus,
    Squareplus,
    TokenBatchNorm,
    TokenConvolution,
)
from specguard.studies.counterexample import misclassified
from specguard.studies.recheck import l2_ball

COUNT = int(os.environ.get("SPECGUARD_NETWORKS", "16"))
DIM, SIDE, IMAGES = 6, 2, 4  # six channels: one, two and three heads; four patches
ATTACKS = (PGD(steps=30, loss="margin"), APGD(steps=30, loss="margin"))

SHIFTS = ((0, 1), (1, 0), (1, 1))


class Draws:
    """Random choices, the kinds of layers in turn, so that none is left out."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.turns = {}

    def turn(self, what: str, *makers):
        """One of these, each as often as the others."""
        if what not in self.turns:
            order = list(range(len(makers)))
            self.random.shuffle(order)
            self.turns[what] = itertools.cycle(order)
        return makers[next(self.turns[what])]()

    def size(self) -> float:
        return 2 ** self.random.uniform(-4, 1)


def norm(d: Draws, dim: int) -> nn.Module:
    return d.turn(
        "norm",
        lambda: nn.LayerNorm(dim, eps=10 ** d.random.uniform(-6, -1)),
        lambda: nn.RMSNorm(dim, eps=10 ** d.random.uniform(-6, -1)),
        lambda: TokenBatchNorm(dim),
        lambda: LayerProject(d.size()),
        lambda: SmoothProject(d.size()),
        nn.Identity,
        lambda: nn.Dropout(0.5),
    )


def activation(d: Draws) -> nn.Module:
    return d.turn(
        "activation",
        nn.GELU,
        lambda: nn.GELU("tanh"),
        nn.ReLU,
        nn.SiLU,
        nn.Tanh,
        lambda: Softplus(d.size()),
        lambda: Squareplus(d.size()),
    )


def mixing(d: Draws, tokens: int) -> nn.Module:
    heads = d.random.choice((1, 2, 3))
    bias = d.random.random() < 0.5
    return d.turn(
        "mixing",
        lambda: Attention(DIM, heads, bias),
        lambda: SkipAttention(DIM, heads, d.random.random(), bias),
        lambda: SkipAttention(DIM, heads, d.random.random(), bias, position_bias=True, tokens=tokens),
        lambda: (
            GatedPositionalAttention(DIM, heads, SIDE, bias) if tokens == SIDE**2 else Attention(DIM, heads, bias)
        ),
        lambda: TokenConvolution(DIM, (1, 3, 5)),
        lambda: CyclicShift(SIDE, d.random.choice((SHIFTS, SHIFTS[::-1]))) if tokens == SIDE**2 else nn.Identity(),
        lambda: nn.Sequential(
            nn.Linear(DIM, 3 * DIM, bias),
            HeadNorm(DIM, heads, 10 ** d.random.uniform(-4, -1), d.random.random() < 0.5 and DIM // heads > 1),
            CoreAttention(heads),
            nn.Linear(DIM, DIM),
        ),
    )


def part(d: Draws, tokens: int) -> nn.Module:
    """Something from tokens to as many tokens."""
    scale = d.random.choice((1.0, 1.0, 0.5, 0.7, -0.3))
    scaled = [LayerScale(DIM, 1.0)] if d.random.random() < 0.3 else []
    return d.turn(
        "part",
        lambda: Residual(nn.Sequential(norm(d, DIM), mixing(d, tokens), *scaled), scale),
        lambda: Residual(mixing(d, tokens), scale),
        lambda: mixing(d, tokens),
        lambda: Residual(nn.Sequential(norm(d, DIM), nn.Linear(DIM, 9), activation(d), nn.Linear(9, DIM)), scale),
        lambda: Residual(nn.Sequential(norm(d, DIM), nn.Linear(DIM, 10), GatedUnit(), nn.Linear(5, DIM)), scale),
        lambda: SLL(
            DIM, 5, d.turn("sll", nn.ReLU, nn.Tanh, lambda: Softplus(d.size()), lambda: Squareplus(d.size()))
        ),
        lambda: Block(OrderedDict(map=nn.Linear(DIM, DIM), sort=MaxMin())),
        lambda: nn.Sequential(MaxMin(), activation(d), norm(d, DIM)),
        lambda: Residual(activation(d), scale),
    )


def network(d: Draws) -> tuple[nn.Module, tuple[int, ...]]:
    """A random network, and the shape of its images."""
    channels, classes = d.random.choice((1, 2)), d.random.choice((2, 3, 5))
    layers: list[nn.Module] = []
    side = 4
    if d.random.random() < 0.3:
        layers, side = [Resize(4)], d.random.choice((3, 5))
    if d.random.random() < 0.7:
        layers.append(Normalize([0.4] * channels, [0.3] * channels))
    layers.append(PatchEmbedding(channels, 2, DIM))
    tokens = SIDE**2
    if d.random.random() < 0.5:
        more = d.random.choice((1, 2))
        layers.append(ClassToken(DIM, more))
        tokens += more
    if d.random.random() < 0.7:
        layers.append(Positions(tokens, DIM))
    layers += [part(d, tokens) for _ in range(d.random.choice((1, 2, 3)))]
    first = d.random.choice((1, 2))
    pool, width = d.turn(
        "pool",
        lambda: (ClassPool(), DIM),
        lambda: (MeanPool(d.random.choice((0, 1))), DIM),
        lambda: (FirstTokens(first), first * DIM),
        lambda: (ClassAndMean(d.random.choice((0, 1))), 2 * DIM),
        lambda: (nn.Flatten(), tokens * DIM),
    )
    layers += [pool, *([norm(d, width)] if d.random.random() < 0.3 else []), nn.Linear(width, classes)]
    layers += [nn.Tanh()] if d.random.random() < 0.1 else []
    model = nn.Sequential(*layers).eval()
    generator, size = torch.Generator().manual_seed(d.random.randrange(2**31)), d.size()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm1d):
                layer.running_var.copy_(0.1 + torch.rand(layer.num_features, generator=generator))
                layer.running_mean.copy_(torch.randn(layer.num_features, generator=generator))
    return model.requires_grad_(False), (channels, side, side)


def networks(count: int):
    """So many networks; one sequence of draws makes them all, so that kinds take their turns across them."""
    d = Draws(0)
    return [network(d) for _ in range(count)]


NETWORKS = networks(COUNT)


def test_the_networks_hold_every_layer_that_proofs_know():
    met = {type(layer) for model, _ in NETWORKS for layer in model.modules()}
    inner = {nn.Conv1d, nn.Conv2d, nn.BatchNorm1d}  # which stand within others
    shipped = {kind for kind in _RULES if kind.__module__.startswith(("torch.", "specguard."))}  # not of examples
    assert shipped - inner <= met


def breaks(exact: nn.Module, image: torch.Tensor, label: torch.Tensor, ball: Ball) -> bool:
    """Whether an attack leads the image to another class within the ball."""
    x, y, ids = image[None], label[None], torch.tensor([0])
    return any(
        bool(misclassified(exact, x, attack(exact, x, y, ball, ids=ids).images, y, ball)) for attack in ATTACKS
    )


def test_the_attacks_break_what_is_claimed_wrongly():
    """Certified radii made ten times as large are broken often enough for a false one to be noticed."""
    broken = 0
    for model, shape in NETWORKS[:8]:
        image = torch.rand(1, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        exact = nn.Sequential(*model).double().eval()
        label = exact(image).argmax(1)
        radius = float(certify(model, image, label, Ball("l2", 0.05)).radius)
        broken += breaks(exact, image[0], label[0], Ball("l2", 10 * radius, box=False)) if radius > 0 else 0
    assert broken >= 3


def drawn(number):
    """A network, its copy in float64, and images with the classes that it predicts."""
    model, shape = NETWORKS[number]
    generator = torch.Generator().manual_seed(number)
    images = torch.rand(IMAGES, *shape, generator=generator, dtype=torch.float64)
    exact = nn.Sequential(*model).double().eval()
    return model, exact, images, exact(images).argmax(1)


@pytest.mark.parametrize("number", range(COUNT))
def test_what_is_certified_of_a_random_network_stands_attacks_and_is_proved_again(number):
    model, exact, images, labels = drawn(number)
    box = bool(number % 2)
    for ball in (Ball("l2", 0.05, box=box), Ball("linf", 0.01, box=box)):
        given = certify(model, images, labels, ball, NAMES, search=ball.norm == "l2")
        radii = torch.where(given.certified, ball.radius, 0.0)
        radii = torch.maximum(radii, given.radius) if ball.norm == "l2" else radii
        for i in (radii > 0).nonzero()[:, 0].tolist():
            assert not breaks(exact, images[i], labels[i], Ball(ball.norm, float(radii[i]), box=box)), (ball, i)
    reading, method = read(model), NAMES[number % len(NAMES)]
    given = certify(model, images[:1], labels[:1], Ball("l2", 0.05), (method,))
    image = Image.of(reading, images[0].numpy(), int(labels[0]))
    if (radius := float(given.largest[method][0])) > 0:
        assert (image.margins > image.proof(radius, method).losses).all()


@pytest.mark.parametrize("number", range(COUNT))
def test_what_zonotopes_certify_of_a_random_network_stands_attacks_and_is_proved_again(number):
    model, exact, images, labels = drawn(number)
    reading = read(model)
    for ball in (Ball("l2", 0.01, box=False), Ball("linf", 0.01, box=bool(number % 2))):
        radii = certify(model, images, labels, ball, ("zonotope",)).largest["zonotope"]
        for i in (radii > 0).nonzero()[:, 0].tolist():
            radius = float(radii[i])
            assert not breaks(exact, images[i], labels[i], Ball(ball.norm, radius, box=ball.box)), (ball, i)
            image = Image.of(reading, images[i].numpy(), int(labels[i]))
            assert (image.zonotope(ball.norm, radius, ball.box).lower > 0).all(), (ball, i)
        half = replace(ball, radius=float(radii.max()) / 2)
        found = certify(model, images, labels, half, ("zonotope", "mixed"), search=False)
        for i in (found.lower["mixed"] > 0).all(1).nonzero()[:, 0].tolist():
            assert not breaks(exact, images[i], labels[i], half), (half, i)
            image = Image.of(reading, images[i].numpy(), int(labels[i]))
            distances = image.zonotope(half.norm, half.radius, half.box).distances
            l2, entry = l2_ball(half.radius, images[i].numel(), half.norm)
            assert (image.margins > image.proof(l2, "mixed", entry, distances).losses).all(), (half, i)
