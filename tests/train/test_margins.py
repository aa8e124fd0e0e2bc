"""Objectives that ask for margins have the values of their formulas, the right gradients, and the effect."""

import math
from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from specguard.certificates import certify
from specguard.data import digits
from specguard.errors import ConfigError
from specguard.geometry import Ball
from specguard.nn import Attention, MaxMin, MeanPool, SkipAttention, orthogonal
from specguard.records.store import described
from specguard.train import EMMA, LA, Certified, CrossEntropy, InputGradient, PGDTraining, StepContext, Training


def context(step: int = 99, steps: int = 100) -> StepContext:
    return StepContext(step, steps, 10, torch.Generator().manual_seed(0))


class Headed(nn.Module):
    """A linear model, in float64, with the head that EMMA looks for."""

    def __init__(self, weight: list[list[float]]) -> None:
        super().__init__()
        self.head = nn.Linear(len(weight[0]), len(weight), bias=False, dtype=torch.float64)
        self.head.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1))


def pictures(*rows: list[float]) -> Tensor:
    """Images of one row of pixels each."""
    return torch.tensor(rows, dtype=torch.float64)[:, None, None]


def targets(labels: list[int], classes: int) -> Tensor:
    return one_hot(torch.tensor(labels), classes).double()


@dataclass(frozen=True)
class Doubled:
    """L = 2 |w|, of the first weight."""

    def __call__(self, model: nn.Module) -> Tensor:
        return 2 * next(model.parameters()).norm()


# Values -----------------------------------------------------------------------------------------------------------


def test_emma_raises_the_other_logits_by_the_reach_of_the_attack_but_not_beyond_the_margin():
    model = Headed([[3.0, 0.0], [0.0, 4.0], [3.0, 1.0]])
    x = pictures([1.0, 0.5])
    # z = (3, 2, 3.5), y = 0: |w_0 - w_1| = 5, |w_0 - w_2| = 1. With eps L = 0.5 the reaches are 2.5 and 0.5, the
    # margins 1 and -0.5, so e = (0.4, 0.01): the logits become 3, 3 and 3.505.
    wanted = -3 + math.log(math.exp(3) + math.exp(3) + math.exp(3.505))
    loss = EMMA(0.25, lipschitz=2.0)(model, x, targets([0], 3), context())
    assert float(loss.detach()) == pytest.approx(wanted, rel=1e-12)
    # y = 1: |w_1 - w_2| = sqrt(18), both margins negative.
    wanted = -2 + math.log(math.exp(3.025) + math.exp(2) + math.exp(3.5 + 0.005 * math.sqrt(18)))
    loss = EMMA(0.25, lipschitz=2.0)(model, x, targets([1], 3), context())
    assert float(loss.detach()) == pytest.approx(wanted, rel=1e-12)


def test_emma_without_a_radius_is_cross_entropy_and_with_a_large_margin_the_whole_reach_counts():
    model, x = Headed([[3.0, 0.0], [0.0, 4.0]]), pictures([2.0, 0.1])
    plain = cross_entropy(model(x), targets([0], 2))
    torch.testing.assert_close(EMMA(0.0)(model, x, targets([0], 2), context()), plain)
    whole = cross_entropy(model(x) + torch.tensor([0.0, 0.5]), targets([0], 2))
    torch.testing.assert_close(EMMA(0.1)(model, x, targets([0], 2), context()), whole)
    assert whole > plain


def test_the_constant_of_emma_may_be_a_function_of_the_model():
    model, x = Headed([[3.0, 0.0], [0.0, 4.0]]), pictures([2.0, 0.1])
    by_number = EMMA(0.01, lipschitz=10.0)(model, x, targets([0], 2), context())
    torch.testing.assert_close(EMMA(0.01, lipschitz=Doubled())(model, x, targets([0], 2), context()), by_number)


@pytest.mark.parametrize(("step", "eps"), [(0, 0.002), (24, 0.05), (49, 0.1), (50, 0.1), (99, 0.1)])
def test_the_radius_of_emma_grows_over_the_first_part_of_training(step, eps):
    assert EMMA(0.1, ramp=0.5).eps(context(step)) == pytest.approx(eps)
    assert EMMA(0.1, ramp=0.0).eps(context(step)) == 0.1


def test_la_has_the_value_of_its_formula():
    model, x = Headed([[1.0], [0.0], [-2.0]]), pictures([1.5])
    # z - 2 1_y = (-0.5, 0, -3) for y = 0, over T = 0.75
    parts = [math.exp(t / 0.75) for t in (-0.5, 0.0, -3.0)]
    p = parts[0] / sum(parts)
    wanted = -0.75 * (1 - p) ** 5 * math.log(p)
    assert float(LA()(model, x, targets([0], 3), context()).detach()) == pytest.approx(wanted, rel=1e-12)
    plain = LA(temperature=1.0, offset=0.0, beta=0.0)(model, x, targets([2], 3), context())
    torch.testing.assert_close(plain, cross_entropy(model(x), targets([2], 3)))


def test_la_is_finite_where_a_class_has_won_or_lost_altogether():
    model, x = Headed([[1.0], [0.0]]), pictures([1e4])
    for label, wanted in ((0, 0.0), (1, 1e4 + 2.0)):
        loss = LA()(model, x, targets([label], 2), context())
        assert float(loss.detach()) == pytest.approx(wanted)
        assert torch.autograd.grad(loss, model.head.weight)[0].isfinite().all()


def test_the_input_gradient_of_a_linear_model_is_the_one_of_the_formula():
    model = Headed([[3.0, 0.0], [0.0, 4.0]])
    x = pictures([1.0, 0.5], [0.2, 0.3], [0.0, -1.0])
    wanted = targets([0, 1, 1], 2)
    loss = cross_entropy(model(x), wanted)
    squares = ((model(x).softmax(1) - wanted) @ model.head.weight).square().sum(1)
    found = InputGradient(0.7)(model, x, wanted, context())
    torch.testing.assert_close(found.double(), loss + 0.7 * squares.mean(), rtol=1e-6, atol=0)


# Gradients --------------------------------------------------------------------------------------------------------


def deep() -> nn.Module:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Flatten(), nn.Linear(3, 4), nn.Tanh())
    return nn.Sequential(OrderedDict(body=body, head=nn.Linear(4, 3))).double()


@pytest.mark.parametrize(
    "objective",
    [LA(), LA(beta=1.0), InputGradient(0.5, LA(beta=0.0)), InputGradient(0.5, EMMA(0.0)), EMMA(5.0, ramp=0.0)],
    ids=str,
)
def test_gradients_are_those_of_finite_differences(objective):
    model, x = deep(), torch.rand(5, 1, 1, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = targets([0, 1, 2, 1, 0], 3)
    if isinstance(objective, EMMA):  # far ahead, so that every share is 1 and its being detached does not show
        with torch.no_grad():
            model.head.weight.mul_(1e-2)
            model.head.bias.copy_(torch.tensor([9.0, 0.0, -9.0]))
        wanted = targets([0] * 5, 3)
    gradients = torch.autograd.grad(objective(model, x, wanted, context()), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        for index in range(0, parameter.numel(), 5):
            ends = []
            for sign in (1, -1):
                with torch.no_grad():
                    parameter.view(-1)[index] += sign * 1e-6
                ends.append(float(objective(model, x, wanted, context()).detach()))
                with torch.no_grad():
                    parameter.view(-1)[index] -= sign * 1e-6
            slope = (ends[0] - ends[1]) / 2e-6
            assert float(gradient.view(-1)[index]) == pytest.approx(slope, rel=1e-5, abs=1e-8)


def test_the_share_of_emma_is_not_differentiated_but_its_distances_are():
    model, x = Headed([[3.0, 0.0], [0.0, 4.0]]), pictures([1.0, 0.6])
    W = model.head.weight
    (gradient,) = torch.autograd.grad(EMMA(0.25, ramp=0.0)(model, x, targets([0], 2), context()), W)
    share = 0.6 / 1.25  # margin 0.6, reach 1.25
    moved = torch.stack([W[0] @ x[0, 0, 0], W[1] @ x[0, 0, 0] + share * 0.25 * (W[0] - W[1]).norm()])
    (wanted,) = torch.autograd.grad(cross_entropy(moved[None], targets([0], 2)), W)
    torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("make", [lambda: Attention(6, 2), lambda: SkipAttention(6, 2, 0.5)])
def test_the_input_gradient_takes_attention_on_its_explicit_path_and_leaves_it_as_it_was(make):
    layer = make()
    model = nn.Sequential(nn.Flatten(1, 2), layer, MeanPool(), nn.Linear(6, 3))
    x = torch.randn(2, 1, 4, 6, generator=torch.Generator().manual_seed(0))
    loss = InputGradient(1.0)(model, x, targets([0, 2], 3).float(), context())
    loss.backward()
    assert layer.fused
    assert layer.qkv.weight.grad.any()


# Settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EMMA(-0.1), "radius of EMMA"),
        (lambda: EMMA(math.nan), "radius of EMMA"),
        (lambda: EMMA(0.1, lipschitz=0.0), "Lipschitz constant must be positive"),
        (lambda: EMMA(0.1, ramp=1.5), "ramp of EMMA"),
        (lambda: LA(temperature=0.0), "temperature of LA"),
        (lambda: LA(offset=-1.0), "offset of LA"),
        (lambda: LA(beta=0.5), "beta of LA"),
        (lambda: LA(radius=0.0), "radius of LA"),
        (lambda: Certified(0.1, ramp=-1.0), "ramp of certified training"),
        (lambda: InputGradient(math.inf), "weight of a penalty"),
        (lambda: InputGradient(0.1, PGDTraining(Ball("l2", 0.1))), "PGDTraining is taken at images of its own"),
    ],
)
def test_bad_settings_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_what_the_objectives_cannot_use_is_refused():
    x, wanted = torch.rand(2, 1, 1, 3), targets([0, 1], 3).float()
    for model, name, message in (
        (nn.Sequential(nn.Flatten(), nn.Linear(3, 3)), "head", "no layer named 'head'"),
        (nn.Sequential(nn.Flatten(), nn.Linear(3, 3), nn.Tanh()), "2", "is a Tanh, no linear layer"),
        (lambda x: x.flatten(1), "head", "needs a module"),
    ):
        with pytest.raises(ConfigError, match=message):
            EMMA(0.1, head=name)(model, x, wanted, context())
    with pytest.raises(ConfigError, match="train without compile"):
        InputGradient(0.1)(torch.compile(nn.Linear(3, 3)), x, wanted, context())


def test_the_objectives_are_part_of_a_runs_settings():
    objective = InputGradient(0.1, EMMA(0.2, lipschitz=Doubled()))
    assert described(Training(objective=objective))["objective"] == {
        "type": "InputGradient",
        "weight": 0.1,
        "inner": {
            "type": "EMMA",
            "radius": 0.2,
            "lipschitz": {"type": "Doubled"},
            "ramp": 0.5,
            "head": "head",
        },
    }
    assert described(LA(lipschitz="local")) == {
        "type": "LA",
        "temperature": 0.75,
        "offset": 2.0,
        "beta": 5.0,
        "lipschitz": "local",
        "radius": 0.1,
        "head": "head",
    }


# The effect -------------------------------------------------------------------------------------------------------


def trained(objective: object, steps: int = 80) -> nn.Module:
    """A 1-Lipschitz network for digits, trained a little."""
    torch.manual_seed(0)
    body, head = orthogonal(nn.Linear(64, 32)), nn.Linear(32, 10)
    model = nn.Sequential(OrderedDict(flatten=nn.Flatten(), body=body, sort=MaxMin(), head=head))
    images, labels = digits().train.batch(slice(0, 300))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for step in range(steps):
        loss = objective(model, images, one_hot(labels, 10).float(), context(step, steps))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def certified(model: nn.Module, radius: float) -> int:
    images, labels = digits().test.batch(slice(0, 60))
    return int(certify(model, images, labels, Ball("l2", radius), ("local",), search=False).certified.sum())


def test_margins_are_what_these_objectives_give():
    models = [trained(CrossEntropy(), 0), trained(CrossEntropy()), trained(EMMA(0.6)), trained(LA())]
    start, standard, by_emma, by_la = (certified(model, 0.4) for model in models)
    assert start < 10
    assert min(by_emma, by_la) > start + 30
    assert abs(by_emma - standard) < 6
    assert certified(models[2], 0.8) > 1.5 * certified(models[1], 0.8)


def test_the_input_gradient_becomes_smaller_under_its_penalty():
    images, labels = digits().test.batch(slice(0, 60))
    sizes = []
    for objective in (CrossEntropy(), InputGradient(1.0)):
        x = images.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(cross_entropy(trained(objective, 40)(x), labels, reduction="sum"), x)
        sizes.append(float(gradient.flatten(1).square().sum(1).mean()))
    assert sizes[1] < 0.9 * sizes[0]
