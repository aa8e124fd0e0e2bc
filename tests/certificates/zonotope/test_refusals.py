"""What the method refuses: settings that make no sense, rules that are none, bounds that the model contradicts."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from specguard.certificates import certify, register_rule
from specguard.certificates.layers.affine import Affine
from specguard.certificates.methods import ZonotopeMethod
from specguard.certificates.zonotope.enclosure import rearrange
from specguard.certificates.zonotope.rules import IDENTITY, Enclosure
from specguard.errors import ConfigError, SoundnessError
from specguard.geometry import Ball
from specguard.nn import MaxMin, Normalize, PatchEmbedding
from specguard.testing import BrokenLawError, check_rule


class Reverse(nn.Module):
    def forward(self, x):
        return x.flip(-1)


def reverse(layer):
    return lambda x: Affine(x.flip(-1), x.new_zeros(len(x)), 1.0, lambda g: g.flip(-1), 0.0)


@pytest.fixture
def registered(own_rules):
    def register(enclosure):
        register_rule(Reverse, reverse, enclosure=enclosure)
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), Reverse(), nn.Linear(4, 3)).double().eval()

    return register


def certified(model, norm="linf", radius=0.01):
    x = torch.rand(12, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return certify(model, x, model(x).argmax(1), Ball(norm, radius, box=False), ["zonotope"])


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_a_wrong_rule_of_a_layer_that_was_registered_certifies_nothing(registered, norm):
    model = registered(lambda layer: IDENTITY)
    with pytest.raises(SoundnessError, match="something else than its layers say: margins are below the bounds"):
        certified(model, norm)


def test_a_right_rule_of_a_layer_that_was_registered_certifies(registered):
    def enclosure(layer):
        return Enclosure(lambda z, name, first: rearrange(z, lambda x: x.flip(-1)), "each token alone")

    assert certified(registered(enclosure)).certified.any()


WRONG = {
    "generators a millionth too short": lambda z: replace(z, generators=(1 - 1e-6) * z.generators),
    "no symbols of entries": lambda z: replace(z, fresh=None),
    "a center that is elsewhere": lambda z: replace(z, center=z.center + 1),
    "an entry less": lambda z: rearrange(z, lambda x: x[..., 1:]),
    "error symbols that are a ball": lambda z: replace(
        z, balls=z.balls + z.symbols()[0] + z.symbols()[1], shared=(), local=()
    ),
    "one symbol for all tokens": lambda z: replace(z, shared=(*z.shared, *z.local), local=()),
}


@pytest.mark.parametrize("wrong", [None, *WRONG])
def test_check_rule_tests_rules_for_zonotopes_too(wrong, registered):
    """With symbols of a ball, of all tokens, of each token and of each entry."""

    def enclosure(layer):
        change = (lambda z: z) if wrong is None else WRONG[wrong]
        return Enclosure(lambda z, name, first: change(rearrange(z, lambda x: x.flip(-1))), "each token alone")

    model = registered(enclosure)[1:2].eval()
    points = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if wrong is None:
        check_rule(model, points, radii=(0.1, 1.0))
    else:
        with pytest.raises(BrokenLawError, match=r"the zonotope of radius 0\.1 does not contain every output: "):
            check_rule(model, points, radii=(0.1, 1.0))


def test_a_layer_without_a_rule_is_refused_with_the_remedy(registered):
    with pytest.raises(ConfigError, match="1 has no rule for zonotopes; register_rule"):
        certified(registered(None))


def test_what_is_no_rule_is_refused(registered):
    with pytest.raises(ConfigError, match="the rule of Reverse for zonotopes is 5, which cannot be called"):
        registered(5)
    with pytest.raises(ConfigError, match="the rule of 1 for zonotopes is 'x', which is no Enclosure"):
        certified(registered(lambda layer: "x"))


@pytest.mark.parametrize("symbols", [0, -1, True, 1.5, "5"])
def test_symbols_are_a_positive_whole_number(symbols):
    with pytest.raises(ConfigError, match="symbols must be a whole number of at least 1, not"):
        ZonotopeMethod(symbols)


@pytest.mark.parametrize("memory", [0, -5, math.nan])
def test_memory_is_positive(memory):
    with pytest.raises(ConfigError, match="memory must be a positive number of bytes, not"):
        ZonotopeMethod(memory=memory)


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_statistics_of_pixels_that_broadcast_otherwise_are_followed(norm):
    """A standard deviation per column, of images as wide as they have channels."""
    normalize = Normalize((0.0,) * 4, (1.0,) * 4)
    normalize.std = torch.tensor([[[0.01, 1.0, 1.0, 1.0]]])
    torch.manual_seed(0)
    model = nn.Sequential(normalize, PatchEmbedding(4, 4, 2), nn.Flatten(), nn.Linear(2, 2)).double().eval()
    x = torch.rand(6, 4, 4, 4, dtype=torch.float64)
    y = model(x).argmax(1)
    found = certify(model, x, y, Ball(norm, 1e-3, box=False), ["zonotope", "adjoint"])
    assert torch.allclose(found.lower["zonotope"], found.lower["adjoint"], rtol=1e-3)


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_pairs_of_several_rows_of_an_image_do_not_err_together(norm):
    """The rows of a channel, which is what a token is of an image, cancel in the head."""
    model = nn.Sequential(MaxMin(), nn.Flatten(), nn.Linear(4, 2)).double().eval()
    with torch.no_grad():
        model[2].weight.copy_(torch.tensor([[1.0, 0, -1, 0], [0, 0, 0, 0]]))
        model[2].bias.copy_(torch.tensor([0.05, 0.0]))
    x = torch.full((1, 1, 2, 2), 0.5, dtype=torch.float64)
    found = certify(model, x, torch.tensor([0]), Ball(norm, 0.1, box=False), ["zonotope"])
    moved = x + torch.tensor([[[[0.0, 0.0], [0.07, 0.07 * (norm == "linf")]]]])
    assert model(moved)[0].diff() > 0  # misclassified within the ball
    assert not found.certified.any()
