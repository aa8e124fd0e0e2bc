"""The reach of an attack as training sees it: never below what is found, and close to what is proved."""

import math
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from specguard.certificates import certify, program
from specguard.certificates.propagate import forward_pass, upper_radii
from specguard.data import digits
from specguard.errors import ConfigError
from specguard.geometry import Ball
from specguard.nn import (
    Attention,
    CertifiableConfig,
    MeanPool,
    PatchEmbedding,
    Residual,
    materialized,
    unfuse_attention,
)
from specguard.testing import max_change
from specguard.train import EMMA, LA, Certified, StepContext, estimate_feature_radius
from specguard.train.objectives import feature_radius as feature_radius_module

SMALL = {"image": 8, "patch": 4, "channels": 1, "dim": 16, "heads": 2, "depth": 2, "mean": (0.5,), "std": (0.5,)}
DESIGNS = {
    "skip": {},
    "steep": {"query_norm": 3.0, "mix": 0.9},
    "lofast": {"mixing": "residual", "projection": "layer", "feedforward": "sll", "value_norm": 0.5, "hidden": 11},
    "sharp": {"own_bias": 3.0, "query_norm": 1.0},
    "none": {"mixing": "none"},
}


def context(step: int = 99, steps: int = 100) -> StepContext:
    return StepContext(step, steps, 10, torch.Generator().manual_seed(0))


def images(count: int) -> Tensor:
    return digits().train.images[:count].double()


def network(design: str) -> nn.Module:
    return CertifiableConfig(**{**SMALL, **DESIGNS[design]}).fresh(0).double()


def plain() -> nn.Module:
    """Layers whose norms nobody declares."""
    generator = torch.Generator().manual_seed(1)
    layers = OrderedDict(
        patches=PatchEmbedding(1, 4, 8),
        attention=Residual(Attention(8, 2), 0.5),
        map=nn.Linear(8, 6),
        bend=nn.GELU(),
        pool=MeanPool(),
        head=nn.Linear(6, 3),
    )
    model = nn.Sequential(layers)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.4)
    return model.double().eval()


MODELS = {**{name: lambda name=name: network(name) for name in DESIGNS}, "plain": plain}


@pytest.mark.parametrize("radius", [0.01, 0.3])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_the_reach_is_never_below_what_is_found_and_close_to_what_is_proved(make, radius):
    model, x = make(), images(3)
    logits, reach = estimate_feature_radius(model, x, radius)
    torch.testing.assert_close(logits, model(x))
    before = nn.Sequential(
        OrderedDict(list(materialized(unfuse_attention(model)).named_children())[:-1])
    ).requires_grad_(False)
    found = max_change(before, x, radius, torch.Generator().manual_seed(0), 20)
    assert (found <= reach.detach() * (1 + 1e-9)).all()
    path, _ = forward_pass(program(model).steps, x)
    proved = upper_radii(path, torch.full((3,), radius, dtype=torch.float64), "local").at[path[-1].position]
    assert (proved <= reach.detach() * (1 + 1e-5)).all()
    assert (reach.detach() <= 8 * proved).all()


def test_the_derivative_of_the_reach_is_that_of_differences(monkeypatch):
    monkeypatch.setattr(
        feature_radius_module, "_SQUARINGS", 8
    )  # directions are held still, which is right where they are exact
    model, x = plain(), images(2)
    reach = estimate_feature_radius(model, x, 0.1)[1].sum()
    weights = [p for name, p in model.named_parameters() if not name.startswith("head")]
    gradients = torch.autograd.grad(reach, weights, allow_unused=True)
    generator = torch.Generator().manual_seed(2)
    along = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in weights]
    slope = sum((g * a).sum() for g, a in zip(gradients, along, strict=True) if g is not None)
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            torch._foreach_add_(weights, along, alpha=sign * 1e-6)
            values.append(estimate_feature_radius(model, x, 0.1)[1].sum())
            torch._foreach_add_(weights, along, alpha=-sign * 1e-6)
    torch.testing.assert_close((values[0] - values[1]) / 2e-6, slope, rtol=1e-5, atol=0)


@pytest.mark.parametrize("eps", [1e-3, 1.0, 10.0])
def test_a_sharp_attention_has_a_finite_reach_and_finite_derivatives(eps):
    model = CertifiableConfig(**{**SMALL, "own_bias": 40.0, "query_norm": 3.0}).fresh(0)
    reach = estimate_feature_radius(model, images(2).float(), eps)[1].sum()
    assert reach.isfinite()
    reach.backward()
    assert all(p.grad.isfinite().all() for name, p in model.named_parameters() if p.grad is not None)


def test_zero_weights_reach_nothing_and_have_finite_derivatives():
    model = plain()
    for weight in model.parameters():
        weight.data.zero_()
    _, reach = estimate_feature_radius(model, images(2), 0.1)
    reach.sum().backward()
    assert (reach == 0).all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_what_training_does_not_know_is_refused():
    unknown = nn.Sequential(OrderedDict(flatten=nn.Flatten(), bend=nn.CELU(), head=nn.Linear(64, 3)))
    with pytest.raises(ConfigError, match="behind a CELU is not implemented"):
        estimate_feature_radius(unknown, images(1), 0.1)
    with pytest.raises(ConfigError, match="no layer named 'head'"):
        estimate_feature_radius(nn.Sequential(nn.Flatten()), images(1), 0.1)
    with pytest.raises(ConfigError, match="not for a Linear"):
        estimate_feature_radius(nn.Linear(2, 2), images(1), 0.1)
    with pytest.raises(ConfigError, match="or 'local', not 'nearby'"):
        EMMA(0.1, lipschitz="nearby")


def linear(W: list[list[float]]) -> nn.Module:
    head = nn.Linear(len(W[0]), len(W), bias=False, dtype=torch.float64)
    head.weight = nn.Parameter(torch.tensor(W, dtype=torch.float64))
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), head=head))


def test_certified_training_is_cross_entropy_on_the_logits_that_an_attack_leaves():
    model = linear([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    x, targets = torch.tensor([[[[0.9, 0.2]]]], dtype=torch.float64), one_hot(torch.tensor([0]), 3).double()
    raised = model(x) + 0.3 * torch.tensor([[0.0, math.sqrt(2), 1.0]])
    wanted = cross_entropy(raised, targets)
    torch.testing.assert_close(Certified(0.3)(model, x, targets, context()), wanted)
    half = cross_entropy(model(x) + (raised - model(x)) / 2, targets)
    torch.testing.assert_close(Certified(0.3, ramp=1.0)(model, x, targets, context(49)), half)


def test_a_local_constant_of_one_is_the_number_one():
    model = linear([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    x, targets = torch.tensor([[[[0.9, 0.2]]]], dtype=torch.float64), one_hot(torch.tensor([0]), 3).double()
    for objective in (lambda constant: EMMA(0.3, constant), lambda constant: LA(lipschitz=constant)):
        values = [objective(constant)(model, x, targets, context()) for constant in (1.0, "local")]
        torch.testing.assert_close(*values)
    torch.testing.assert_close(
        LA(lipschitz=2.0)(model, x, targets, context()), LA()(lambda x: model(x) / 2, x, targets, context())
    )


def test_certified_training_certifies_more_than_standard_training_does():
    x, labels = digits().train.batch(slice(0, 300))
    test, theirs = digits().test.batch(slice(0, 40))
    counts = []
    for objective in (Certified(0.0), Certified(0.3)):
        model = CertifiableConfig(**{**SMALL, **DESIGNS["steep"], "depth": 1, "std": (1.0,)}).fresh(0)
        optimizer = torch.optim.Adam(model.parameters(), 0.02)
        for step in range(60):
            loss = objective(model.train(), x, one_hot(labels, 10).float(), context(step, 60))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        given = certify(model.eval(), test, theirs, Ball("l2", 0.2), ("local",), search=False)
        counts.append(int(given.certified.sum()))
    assert counts[1] > counts[0] + 10  # 3 and 21 were seen
