"""CROWN through auto_LiRPA: what is written again is the same function, and every guard holds.

The real auto_LiRPA cannot be installed here; a stand-in with its names and interval bounds takes its place.
"""

import importlib.util
import sys

import pytest
import torch
from torch import nn

from certificates.layers import LAYERS, made
from certificates.lirpa import stand_in
from helpers.registry import MODELS
from specguard.certificates import CROWN, Attempt, certify, lowering, register_rule, rules
from specguard.errors import ConfigError
from specguard.geometry import Ball
from specguard.nn import Attention, MeanPool, SmoothProject, ViT, materialized

BALL = Ball("l2", 1e-3, box=False)


SHARED = stand_in()


@pytest.fixture
def lirpa(monkeypatch):
    """The stand-in, whose canaries are looked at once; what a test does to its graphs is undone."""
    monkeypatch.setitem(sys.modules, "auto_LiRPA", SHARED)
    yield SHARED
    for name in set(vars(SHARED.BoundedModule)) & {"lie", "forward_lie", "compute_bounds"}:
        delattr(SHARED.BoundedModule, name)


def small(seed: int = 0) -> nn.Module:
    """One projected attention layer, a mean, and a head; some images of it."""
    g = torch.Generator().manual_seed(seed)
    model = nn.Sequential(
        SmoothProject(1.5), Attention(6, 2), nn.Linear(6, 7), nn.ReLU(), MeanPool(), nn.Linear(7, 4)
    )
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=g))
    return model.eval().requires_grad_(False)


def images(model: nn.Module, count: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(count, 3, 6, generator=torch.Generator().manual_seed(9))
    return x, model.double()(x.double()).argmax(1)


def everyone(labels, classes=4):
    return torch.ones(len(labels), classes, dtype=torch.bool).scatter(1, labels[:, None], False)


# What is written again --------------------------------------------------------------------------------------------


def erf(name: str) -> bool:
    return name in ("gelu", "neurons, gelu")


@pytest.mark.parametrize("name", [name for name in LAYERS if not erf(name)])
def test_every_layer_written_again_is_the_same_function_and_the_stand_in_takes_it(name, lirpa):
    layer, x = made(name)
    written, exact = lowering.lower(layer, tuple(x.shape[1:])), materialized(layer).double()
    for point in (x[:1].double(), x[1:2].double()):
        wanted = exact(point)
        assert (written(point) - wanted).abs().max() <= 1e-12 * (1 + wanted.abs().max())
    torch.set_default_dtype(torch.float64)
    try:
        graph = lirpa.BoundedModule(written, x[:1].double())
        moved = lirpa.BoundedTensor(x[:1].double(), lirpa.PerturbationLpNorm(norm=2, eps=1e-6))
        flat = exact(x[:1].double())
        if flat.ndim == 2:
            C = torch.eye(flat.shape[1])[None]
            lower, _ = graph.compute_bounds(x=(moved,), C=C, method="CROWN", bound_upper=False)
            assert (lower <= flat).all()
            assert (lower >= flat - 1e-2 * (1 + flat.abs())).all()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_written_again_or_refused_by_the_name_of_its_gelu(name):
    config = MODELS[name]
    model = ViT(config, torch.Generator().manual_seed(1)).eval()
    shape = (config.channels, config.image, config.image)
    if config.activation == "gelu":
        with pytest.raises(ConfigError, match=r"blocks\.0\.mlp.*GELU by erf cannot be lowered"):
            lowering.lower(model, shape)
        return
    x = torch.rand(1, *shape, generator=torch.Generator().manual_seed(2)).double()
    wanted = materialized(model).double()(x)
    assert (lowering.lower(model, shape)(x) - wanted).abs().max() <= 1e-6 * wanted.abs().max()


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Foreign(nn.Module):
    def forward(self, x):
        return x


def test_what_cannot_be_written_again_is_named(own_rules):
    with pytest.raises(ConfigError, match="0 is a Doubled"):
        lowering.lower(nn.Sequential(Doubled(3, 2)).eval(), (3,))
    register_rule(Foreign, rules.affine.identity)
    with pytest.raises(ConfigError, match="1 is a Foreign, which has no lowering"):
        lowering.lower(nn.Sequential(nn.Linear(3, 2), Foreign()).eval(), (3,))


# What comes out ---------------------------------------------------------------------------------------------------


def sound_and_certified(model, x, labels, found):
    """No sample of the ball has a margin below its bound, and some bounds are positive."""
    d = torch.randn(200, *x.shape, generator=torch.Generator().manual_seed(3)).double()
    d = d / d.flatten(2).norm(dim=2)[..., None, None] * BALL.radius
    logits = model.double()((x.double() + d).flatten(0, 1)).view(200, len(x), 4)
    margins = logits.gather(2, labels.view(1, -1, 1).expand(200, -1, 1)) - logits
    wanted = everyone(labels)
    assert (found.lower[wanted] <= margins.amin(0)[wanted]).all()
    assert (found.lower[wanted] > 0).any()
    assert (found.lower[~wanted] == -torch.inf).all()


def test_bounds_are_sound_and_the_model_is_certified_by_a_third_party(lirpa):
    model = small()
    x, labels = images(model)
    crown = CROWN(model, (3, 6))
    assert "auto_LiRPA 0.0 (stand-in), CROWN" in crown.rests_on
    found = crown.attempt(x, labels, BALL, everyone(labels))
    assert found.reasons == (None,) * len(x)
    sound_and_certified(model, x, labels, found)
    given = certify(model, x, labels, BALL, ("naive",), stop_early=True, verifiers=(crown,))
    assert given.verifiers == {"crown": crown.rests_on}
    assert (given.third_party <= given.certified).all()


def test_what_our_own_proofs_certify_never_reaches_it(lirpa):
    model = small()
    x, labels = images(model)
    crown = CROWN(model, (3, 6))
    given = certify(model, x, labels, BALL, ("mixed",), stop_early=True, verifiers=(crown,))
    assert given.certified.all()
    assert not given.third_party.any()
    assert list(given.asked) == ["mixed", "crown"]
    assert not given.asked["crown"].any()


def test_only_the_other_classes_that_are_left_are_asked_about(lirpa):
    model = small()
    x, labels = images(model)
    asked = []
    plain = lirpa.BoundedModule.compute_bounds

    def noted(self, x=None, C=None, **options):
        asked.append(C.shape[1])
        return plain(self, x, C, **options)

    crown = CROWN(model, (3, 6))
    lirpa.BoundedModule.compute_bounds = noted
    radius = float(certify(model, x, labels, BALL, ("local",)).radius.median()) * 1.05
    ball = Ball("l2", radius, box=False)
    given = certify(model, x, labels, ball, ("local",), stop_early=True, verifiers=(crown,))
    left = given.asked["crown"]
    assert asked == left[left > 0].tolist()
    assert 0 < len(asked) < len(x) or min(asked) < 3


# Guards -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def guarded(lirpa):
    """A verifier that passed its canaries, and what it says once the library lies as told."""
    model = small()
    x, labels = images(model)
    crown = CROWN(model, (3, 6))

    def ask(**lies):
        for name, lie in lies.items():
            setattr(lirpa.BoundedModule, name, lie)
        return crown.attempt(x, labels, BALL, everyone(labels))

    return ask


def failed(found: Attempt, why: str) -> None:
    assert (found.lower == -torch.inf).all()
    assert all(reason is not None and why in reason for reason in found.reasons)


def test_bounds_that_are_not_finite_are_no_bounds(guarded):
    failed(guarded(lie=lambda self, lower: lower * torch.nan), "not finite")
    failed(guarded(lie=lambda self, lower: lower + torch.inf), "not finite")


def test_bounds_in_float32_are_no_bounds(guarded):
    failed(guarded(lie=lambda self, lower: lower.float()), "float64")


def test_bounds_of_another_shape_are_no_bounds(guarded):
    failed(guarded(lie=lambda self, lower: lower[:, 1:]), "one for every other class")


def test_a_graph_that_computes_something_else_is_refused(guarded):
    failed(guarded(forward_lie=lambda self, out: out * (1 + 2e-6)), "does not compute what the model computes")
    failed(guarded(forward_lie=lambda self, out: out * torch.nan), "does not compute what the model computes")


def test_an_exception_means_unknown_and_its_reason_is_kept(guarded, lirpa):
    def fails(self, lower):
        raise RuntimeError("Einsum is not supported\nand a page of advice")

    failed(guarded(lie=fails), "RuntimeError: Einsum is not supported")


def test_a_graph_with_a_power_is_refused(lirpa, monkeypatch):
    class Squared(nn.Module):
        def forward(self, x):
            return x**2

    model = nn.Sequential(nn.Linear(3, 2)).eval()
    crown = CROWN(model, (3,))
    crown._bounds.lowered = nn.Sequential(crown._bounds.lowered, Squared())
    x, labels = torch.ones(1, 3), torch.tensor([0])
    failed(crown.attempt(x, labels, BALL, everyone(labels, 2)), "BoundPow, whose bounds are unsound")


def test_bounds_within_the_tolerance_of_zero_certify_nothing(lirpa):
    """Margins of 1e-6 of the logits, which a proof with rounding accounted for would certify at radius zero."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False)).eval().requires_grad_(False)
    model[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    x, labels = torch.tensor([[1.0, 1.0 - 1e-6]]), torch.tensor([0])
    assert bool(certify(model, x, labels, Ball("l2", 0.0, box=False), search=False).certified)
    found = CROWN(model, (2,)).attempt(x, labels, Ball("l2", 0.0, box=False), everyone(labels, 2))
    assert -1e-5 < float(found.lower[0, 1]) < 0


LIES = {
    "a bound above": lambda self, lower: lower + 0.5,
    "half the radius": None,
    "nan": lambda self, lower: lower * torch.nan,
}


@pytest.mark.parametrize("name", LIES)
def test_a_library_that_lies_about_a_canary_is_refused(name, monkeypatch):
    lirpa = stand_in()
    monkeypatch.setitem(sys.modules, "auto_LiRPA", lirpa)
    lirpa.BoundedModule.lie = LIES[name]
    if name == "half the radius":
        halved = type(
            "Halved", (), {"__init__": lambda self, eps, norm: self.__dict__.update(eps=eps / 2, norm=norm)}
        )
        lirpa.PerturbationLpNorm = halved
        # An interval of half the width around an l2 ball may be sound; a linear map under linf is not.
    with pytest.raises(ConfigError, match="canary"):
        CROWN(small(), (3, 6))


def test_a_library_that_is_missing_broken_or_another_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "auto_LiRPA", None)
    with pytest.raises(ConfigError, match="which is not installed"):
        CROWN(small(), (3, 6))
    other = stand_in()
    del other.PerturbationLpNorm
    monkeypatch.setitem(sys.modules, "auto_LiRPA", other)
    with pytest.raises(ConfigError, match="has no PerturbationLpNorm"):
        CROWN(small(), (3, 6))
    with pytest.raises(ConfigError, match="method 'magic' is unknown"):
        CROWN(small(), (3, 6), "magic")


def test_the_default_type_is_what_it_was_whatever_happens(guarded):
    def fails(self, lower):
        raise RuntimeError("no")

    guarded(lie=fails)
    assert torch.get_default_dtype() == torch.float32


def test_the_real_auto_lirpa_where_it_is_installed():
    """Not here; but a machine that has it tries the adapter against it."""
    if importlib.util.find_spec("auto_LiRPA") is None:
        pytest.skip("auto_LiRPA is not installed")
    model = small()
    x, labels = images(model, 2)
    found = CROWN(model, (3, 6)).attempt(x, labels, BALL, everyone(labels))
    assert found.reasons == (None, None)
    sound_and_certified(model, x, labels, found)
