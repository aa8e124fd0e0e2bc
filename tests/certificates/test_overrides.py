"""Models that are not what they seem: a program must be the function that the model computes, or be refused."""

from collections import OrderedDict
from contextlib import suppress

import pytest
import torch
from jaxtyping import config
from torch import nn

from specguard.certificates import certify, program
from specguard.errors import ConfigError, DataError
from specguard.geometry import Ball
from specguard.nn import (
    GatedPositionalAttention,
    LayerProject,
    LayerScale,
    MeanPool,
    Normalize,
    PatchEmbedding,
    Positions,
    Residual,
    SmoothProject,
    TokenConvolution,
    ViT,
    ViTConfig,
)
from specguard.testing import check_rule

pytestmark = pytest.mark.usefixtures("as_shipped")


@pytest.fixture
def as_shipped(monkeypatch):
    """Users run without the type checks of the tests."""
    monkeypatch.setattr(config, "jaxtyping_disable", True)


def filled(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return model.eval().requires_grad_(False)


def points(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def obeys_or_is_refused(model, x):
    """The laws hold, or one clear error says why there is no proof."""
    with suppress(ConfigError, DataError):
        check_rule(model, x, radii=(0.1, 1.0), methods=("local",))


@pytest.mark.parametrize("kind", ["linear", "activation", "residual"])
def test_a_layer_that_is_used_twice_is_counted_twice_or_refused(kind):
    linear = nn.Linear(3, 3)
    layers = {
        "linear": (linear, linear),
        "activation": (linear, shared := nn.Tanh(), nn.Linear(3, 3), shared),
        "residual": (block := Residual(nn.Sequential(linear, nn.Tanh())), nn.Identity(), block),
    }[kind]
    obeys_or_is_refused(filled(nn.Sequential(*layers)), points(2, 3))


def test_a_layer_that_is_used_twice_is_not_certified_beyond_where_it_breaks():
    linear = nn.Linear(2, 2, bias=False)
    linear.weight.data.copy_(3 * torch.eye(2))
    model = nn.Sequential(linear, linear, linear).eval().requires_grad_(False)
    x = torch.tensor([[0.6, 0.5]])
    try:
        given = certify(model, x, torch.tensor([0]), Ball("l2", 0.01))
    except (ConfigError, DataError):
        return
    torch.testing.assert_close(float(given.margins[0, 1]), 2.7, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["b: c", "b", "a branch", "a: rounding", "first order"])
def test_the_name_of_a_layer_changes_no_certificate(name):
    def model(inner):
        branch = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
        layers = [("a", Residual(branch, 0.7)), (inner, nn.GELU()), ("d", nn.Linear(5, 3))]
        return filled(nn.Sequential(OrderedDict(layers)), 1)

    x = points(4, 5)
    labels = model("plain")(x).argmax(1)
    wanted = certify(model("plain"), x, labels, Ball("l2", 0.1))
    try:
        given = certify(model(name), x, labels, Ball("l2", 0.1))
    except ConfigError:
        return
    for method in wanted.lower:
        torch.testing.assert_close(given.lower[method], wanted.lower[method], rtol=1e-12, atol=0)
        torch.testing.assert_close(given.largest[method], wanted.largest[method], rtol=1e-12, atol=0)


BROADCAST = {
    "one channel where the normalization has two": (Normalize((0.1, 0.2), (0.5, 0.3)), (2, 1, 2, 3)),
    "one token where there are four positions": (Positions(4, 3), (2, 1, 3)),
    "one entry where the scale has four": (LayerScale(4, 1.0), (2, 3, 1)),
    "one channel in normalized patches": (
        nn.Sequential(Normalize((0.1, 0.2), (0.5, 0.3)), PatchEmbedding(2, 2, 3)), (2, 1, 4, 6),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROADCAST)
def test_numbers_that_are_repeated_by_broadcasting_are_counted_or_refused(name):
    layer, shape = BROADCAST[name]
    x = points(*shape)
    width = layer(x).flatten(1).shape[1]
    model = filled(nn.Sequential(layer, nn.Flatten(), nn.Linear(width, 3)))
    for p in layer.parameters():
        p.abs_()
    model[2].weight.copy_(torch.outer(torch.tensor([2.0, -0.3, 0.5]), torch.ones(width)))  # repeated numbers add up
    labels = model(x).argmax(1)
    try:
        given = certify(model, x, labels, Ball("l2", 0.1))
    except (ConfigError, DataError):
        return
    x = x.double()
    function = model.double()
    logits = function(x)
    J = torch.func.vmap(torch.func.jacrev(lambda z: function(z[None])[0]))(x).flatten(2)
    gaps = logits.gather(1, labels[:, None]) - logits
    rates = (J.gather(1, labels[:, None, None].expand(-1, 1, J.shape[2])) - J).norm(dim=2)
    exact = (gaps / rates).nan_to_num(nan=torch.inf).amin(1)
    assert (given.radius <= exact * (1 + 1e-9)).all()  # the network is affine: this is the distance to its boundary


@pytest.mark.parametrize("shape", [(2, 1, 7, 7), (2, 1, 12, 12), (2, 3, 6, 6)])
def test_images_that_a_vit_refuses_are_refused_by_its_proof(shape):
    size = {"image": 6, "patch": 6, "channels": 1, "mean": (0.5,), "std": (0.5,)}
    model = ViT(ViTConfig(**size, classes=3, dim=4, depth=1, heads=2, pool="mean")).eval()
    with pytest.raises(ConfigError):
        model(torch.rand(shape))
    with pytest.raises((ConfigError, DataError)):
        certify(model, torch.rand(shape), torch.tensor([0, 1]), Ball("l2", 0.1))


def convolutions(**settings):
    layer = TokenConvolution(4, (3, 1))
    layer.kernels[0] = nn.Conv1d(2, 2, 3, **settings)
    return layer


def patches(*kernel, **settings):
    layer = PatchEmbedding(2, 2, 3)
    layer.map = nn.Conv2d(2, 3, *kernel, **settings)
    return layer


REPLACED = {
    "dilated": (lambda: convolutions(padding=2, dilation=2), (2, 5, 4)),
    "circular": (lambda: convolutions(padding=1, padding_mode="circular"), (2, 5, 4)),
    "no padding of a group": (lambda: convolutions(padding="same"), (2, 5, 4)),
    "overlapping one way": (lambda: patches(2, stride=(2, 1)), (2, 2, 4, 6)),
    "oblong": (lambda: patches((2, 3), stride=(2, 3)), (2, 2, 4, 6)),
    "overlapping": (lambda: patches(2, stride=1), (2, 2, 4, 5)),
    "odd size": (lambda: patches(2, stride=2), (2, 2, 5, 7)),
}


@pytest.mark.parametrize("name", REPLACED)
def test_a_convolution_of_another_geometry_is_known_or_refused(name):
    maker, shape = REPLACED[name]
    obeys_or_is_refused(filled(maker()), points(*shape))


def test_a_model_with_one_class_or_no_layer_is_one_clear_error_or_certified():
    for model, x in ((nn.Linear(4, 1), points(2, 4)), (nn.Sequential(), points(2, 4))):
        with suppress(ConfigError, DataError):
            given = certify(filled(model), x, torch.tensor([0, 0]), Ball("l2", 0.1))
            assert not any(radius.isnan().any() for radius in given.largest.values())


def test_outputs_that_are_no_logits_are_one_clear_error():
    with pytest.raises((ConfigError, DataError)):
        certify(filled(nn.Linear(4, 3)), points(2, 5, 4), torch.tensor([0, 0]), Ball("l2", 0.1))


def test_hidden_state_beside_the_layers_is_no_part_of_the_program():
    model = filled(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    assert len(program(model).steps) == 2
    del model[1]
    assert len(program(model).steps) == 2
    check_rule(model, points(2, 3), radii=(0.1,), methods=("local",))


def test_a_pooled_model_of_one_image_obeys_the_laws():
    check_rule(filled(nn.Sequential(MeanPool(), nn.LayerNorm(3), nn.Linear(3, 2))), points(1, 5, 3), radii=(0.1,))


# Numbers that vanish or overflow ------------------------------------------------------------------------------


def _scaled(*factors: float) -> list[nn.Module]:
    layers = []
    for factor in factors:
        layer = nn.Linear(2, 2, bias=False).double()
        with torch.no_grad():
            layer.weight.copy_(factor * torch.eye(2, dtype=torch.float64))
        layers.append(layer)
    return layers


def _last(weight: float, bias: float) -> nn.Module:
    """(bias, weight x_0)."""
    layer = nn.Linear(2, 2).double()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[0.0, 0.0], [weight, 0.0]], dtype=torch.float64))
        layer.bias.copy_(torch.tensor([bias, 0.0], dtype=torch.float64))
    return layer


@pytest.mark.parametrize(
    "layers",
    [
        lambda: [*_scaled(1e160), LayerProject(1.0), _last(1.0, 0.1)],
        lambda: [*_scaled(3e38, 3e38, 3e38), SmoothProject(1.0), _last(1.0, 0.1)],
        lambda: [*_scaled(1e-170, 1e-170, 1e150), _last(1e150, 1e-41)],
        lambda: [SmoothProject(1e70), _last(1.0, 0.1)],
        lambda: [Residual(nn.Sequential(*_scaled(1.0), nn.Tanh()), 1e100), _last(1.0, 0.1)],
    ],
    ids=["weights", "activations", "small weights", "radius", "scale"],
)
def test_sizes_that_vanish_or_overflow_in_a_proof_are_refused(layers):
    model = nn.Sequential(*layers()).eval()
    with pytest.raises(ConfigError, match="outside the range of the rounding analysis"):
        certify(model, torch.tensor([[0.9, 0.1]]), torch.tensor([0]), Ball("l2", 0.5))


def test_small_numbers_that_vanish_are_never_certified_away():
    """Every factor is within bounds, but not their product: 1e-200 before the last layers bring it back."""
    model = nn.Sequential(*_scaled(*[1e-50] * 7, *[1e50] * 6), _last(1e50, 0.1)).eval()
    image, label, ball = torch.tensor([[0.9, 0.1]]), torch.tensor([0]), Ball("l2", 0.5)
    assert not certify(model, image, label, ball, ("naive", "lofast", "local")).certified.any()
    with pytest.raises(ConfigError, match=r"derivative of .* is not finite"):
        certify(model, image, label, ball, ("adjoint",))


def test_a_replaced_method_that_forward_calls_is_refused():
    layer = GatedPositionalAttention(6, 2, 2).eval()
    layer._gate = lambda: torch.zeros(2, 1, 1)
    with pytest.raises(ConfigError, match="replaced _gate function"):
        program(nn.Sequential(layer).eval())


def test_an_activation_that_overwrites_its_input_is_refused():
    """At the head of a branch it would change what the skip connection adds."""
    for kind in (nn.ReLU, nn.SiLU):
        model = nn.Sequential(Residual(nn.Sequential(kind(inplace=True), nn.Linear(4, 4))), nn.Linear(4, 2)).eval()
        with pytest.raises(ConfigError, match="overwrites its input"):
            program(model)


def test_a_mean_that_leaves_out_less_than_nothing_is_refused():
    with pytest.raises(ConfigError, match="cannot leave out"):
        MeanPool(-1)
    pool = MeanPool()
    pool.skip = -2
    with pytest.raises(ConfigError, match="skip must be a whole number"):
        certify(nn.Sequential(pool, nn.Linear(4, 2)).eval(), points(1, 3, 4), torch.tensor([0]), Ball("l2", 0.1))
