"""What the checker proves of whole networks holds at exact points: tied logits, bad scales, blunt arithmetic."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from exact.boxes import blunt, fractions, member
from exact.checker import at_most, check_margins, check_path, check_point, function, plain
from exact.numbers import mp, real
from specguard.checker import METHODS, Image, read
from specguard.checker.attention.point import Attention
from specguard.checker.enclosure import Box
from specguard.errors import ConfigError, SpecGuardError
from specguard.nn import (
    SLL,
    ClassAndMean,
    CoreAttention,
    GatedUnit,
    HeadNorm,
    LayerProject,
    LayerScale,
    MaxMin,
    MeanPool,
    PatchEmbedding,
    Residual,
    SkipAttention,
    SmoothProject,
    ViT,
    ViTConfig,
)

pytestmark = pytest.mark.filterwarnings("ignore:overflow|invalid|divide by zero:RuntimeWarning")
BASE = {"image": 4, "patch": 2, "channels": 1, "classes": 3, "dim": 4, "depth": 1, "heads": 2, "mlp_ratio": 1.5}
BASE |= {"mean": (0.3,), "std": (0.6,)}
CONFIGS = {
    "ordinary": {},
    "scaled": {"norm": "smoothproject", "activation": "gelu_tanh", "layer_scale": 0.3, "residual_scale": 0.7},
    "without norms": {"norm": "none", "activation": "softplus", "residual_scale": 0.3},
    "hard projection, relu": {"norm": "layerproject", "activation": "relu"},
    "batch norm, squareplus": {"norm": "batchnorm", "activation": "squareplus", "pool": "mean"},
    "positional": {"depth": 2, "local_blocks": 1},
    "convolutions": {"kernels": (1, 3), "pool": "mean"},
    "resized": {"resize": 6},
}


def tiny(config):
    return lambda: ViT(ViTConfig(**{**BASE, **config}), torch.Generator().manual_seed(0))


def parts():
    attention = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 12), HeadNorm(4, 2), CoreAttention(2), nn.Linear(4, 4))
    mlp = nn.Sequential(nn.RMSNorm(4, eps=1e-3), nn.Linear(4, 6), GatedUnit(), nn.Linear(3, 4))
    layers = [
        PatchEmbedding(1, 2, 4),
        Residual(attention, 0.3),
        Residual(mlp, 3.0),
        ClassAndMean(1),
        nn.Linear(8, 3),
    ]
    return nn.Sequential(*layers)


MODELS = {name: tiny(config) for name, config in CONFIGS.items()} | {
    "attention in parts, gated": parts,
    "sorted pairs": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(16, 6), MaxMin(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)
    ),
    "sll": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 5), SLL(5, 4, nn.Tanh()), nn.Linear(5, 3)),
    "no affine end": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.SiLU()),
    "branches in branches": lambda: nn.Sequential(
        PatchEmbedding(1, 2, 4),
        Residual(nn.Sequential(Residual(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), 0.1), nn.Linear(4, 4)), -1.3),
        MeanPool(),
        nn.Linear(4, 3),
    ),
    "more other classes than are taken at once": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(16, 4), nn.Tanh(), nn.Linear(4, 35)
    ),
}


def made(name, scale=1.0, seed=0):
    model, generator = MODELS[name](), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=generator)).mul_(scale)
    x = torch.rand(1, 4, 4, generator=generator, dtype=torch.float64).numpy()
    return model.double().eval(), x


@pytest.mark.parametrize("name", MODELS)
def test_no_exact_margin_is_below_what_is_proved(name):
    model, x = made(name)
    for radius in (0.0, 1e-14, 1e-3, 0.3):
        check_margins(model, x, 1, radius)


@pytest.mark.parametrize("name", MODELS)
def test_no_exact_margin_is_below_what_is_proved_however_blunt_arithmetic_is(name, monkeypatch):
    model, x = made(name, seed=1)
    g = np.random.default_rng(0).standard_normal((2, *plain(model)(torch.tensor(x)[None]).shape[1:]))
    blunt(monkeypatch)
    for radius in (0.0, 1e-7, 1e-2):
        check_margins(model, x, 0, radius)
    check_path(model, x, g, 1e-2)


@pytest.mark.parametrize("scale", [1e-8, 1e8])
@pytest.mark.parametrize("name", ["ordinary", "scaled", "without norms", "sorted pairs", "branches in branches"])
def test_badly_scaled_networks_prove_nothing_false(name, scale):
    model, x = made(name, scale)
    for radius in (0.0, 1e-12, 1e-3):
        check_margins(model, x, 2, radius)


def test_balls_of_the_largest_entry_prove_nothing_false(monkeypatch):
    for name in ("sorted pairs", "sll", "ordinary"):
        model, x = made(name)
        for entry in (1e-9, 0.05):
            check_margins(model, x, 1, entry * 4 * (1 + 1e-15), entry=entry)
    blunt(monkeypatch)
    check_margins(*made("sorted pairs"), 1, 1e-6 * 4 * (1 + 1e-15), entry=1e-6)


@pytest.mark.parametrize("depth", [1, 2])
def test_logits_that_are_nearly_tied_and_cancel_prove_nothing_false(depth):
    """Sums of 1e8 and more that leave a few last places: what is computed is often on the other side of zero."""
    rng, wrong = np.random.default_rng(0), 0
    for _ in range(50):
        first, last = nn.Linear(4, 6).double(), nn.Linear(6, 2).double()
        row = rng.integers(-(2**30), 2**30, 6) / 7
        with torch.no_grad():
            first.weight.copy_(torch.tensor(rng.standard_normal((6, 4))))
            first.bias.copy_(torch.tensor(rng.random(6)))
            last.weight.copy_(torch.tensor(np.stack([row, row + rng.integers(-1, 2, 6) * 2.0**-25])))
            last.bias.zero_()
        model = nn.Sequential(nn.Flatten(), first, *[nn.ReLU()] * (depth - 1), last)
        x = rng.random((1, 2, 2))
        for radius in (0.0, 1e-17):
            image = check_margins(model, x, 0, radius)
        exact = function(plain(model), fractions(x))
        computed = image.output[0] - image.output[1]
        wrong += (computed > 0) != (real(exact[0] - exact[1]) > 0)
    assert wrong > 3


@pytest.mark.parametrize("other", [2.0**-55, 3 * 2.0**-54, 0.1, -(2.0**-54)])
def test_a_difference_of_exact_logits_is_rounded_down(other):
    for x in (1.0, 1 + 2.0**-52, 1 - 2.0**-53):
        check_margins(nn.Sequential(nn.Flatten()), np.array([[[x, other]]]), 0, 0.0)
        check_margins(nn.Sequential(nn.Flatten()), np.array([[[x, other]]]), 0, 0.3)


def test_a_model_that_is_one_layer_is_that_layer():
    """And not a row of what it is made of."""
    for layer, width in ((Residual(nn.Linear(4, 4), 0.3), 4), (nn.Linear(4, 3), 3), (nn.LayerNorm(4), 4)):
        x = np.array([0.3, -1.0, 2.0, 0.1])
        check_path(layer.double(), x, np.eye(width), 0.1)
    with pytest.raises(ConfigError, match="the model is a Embedding, which the checker cannot read"):
        read(nn.Embedding(3, 4).eval())


def canceling(factor, scale):
    """`x + scale factor x`, next to nothing, so that nothing hides what is lost on the way."""
    layer = Residual(nn.Sequential(nn.Identity(), LayerScale(1, 1.0)), scale).double()
    with torch.no_grad():
        layer.branch[1].scale.fill_(factor)
    return layer


def test_what_a_scaled_functional_loses_is_felt_behind_the_branch_and_not_before_its_last_layer(monkeypatch):
    rng = np.random.default_rng(0)
    cases = [(float(f), rng.standard_normal((1, 1, 1))) for f in rng.uniform(1e8, 2e8, 40)]
    for factor, g in cases:
        check_path(canceling(factor, -1 / factor), np.zeros((1, 1)), g, 1.0)
    blunt(monkeypatch)
    for factor, g in cases[:10]:
        check_path(canceling(factor, -1 / factor), np.zeros((1, 1)), g, 1.0)


# Rules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-140, 1e-70, 1e-65, 1e70, 1e150])
@pytest.mark.parametrize("kind", [SmoothProject, LayerProject])
def test_projections_of_any_size_obey_the_laws(kind, size):
    rng = np.random.default_rng(3)
    for factor in (0.1, 0.6, 0.75, 3.0):
        z = rng.standard_normal((2, 3)) / math.sqrt(3) * size * factor
        check_point(kind(size), z, rng.standard_normal((2, 2, 3)), (1e-9 * size, 0.1 * size, size))


@pytest.mark.parametrize("place", [0.1, 0.45, 0.6, 2.0])
def test_the_bend_of_a_projection_along_a_line_is_bounded_by_no_less(place):
    """One channel, a small step: what is left out is half of the second derivative, next to the bound."""
    for sign in (1.0, -1.0):
        check_point(SmoothProject(1.0), np.array([[sign * place]]), np.ones((1, 1, 1)), (1e-3, 1e-5))


@pytest.mark.parametrize("size", [1e-300, 1e-160, 1e160, 1e300])
@pytest.mark.parametrize("kind", [SmoothProject, LayerProject])
def test_projections_whose_squares_are_lost_are_refused(kind, size):
    (step,) = read(kind(size).eval()).steps
    with pytest.raises(SpecGuardError, match="division"):
        step.make(Box.exact(np.full((2, 3), size))).output  # noqa: B018


@pytest.mark.parametrize(
    "layer", [SmoothProject(1.0), LayerProject(1.0), nn.RMSNorm(3, eps=1e-6), nn.LayerNorm(3)], ids=str
)
def test_huge_tokens_obey_the_laws_until_their_squares_overflow(layer):
    rng = np.random.default_rng(4)
    z, g = rng.standard_normal((2, 3)), rng.standard_normal((1, 2, 3))
    check_point(layer, 1e150 * z, g, (1e147, 1e150))
    for size in (1e160, 1e300):
        with pytest.raises(SpecGuardError, match="division"):
            check_point(layer, size * z, g, (size,))


@pytest.mark.parametrize("first", [2.0**34, 2.0**34 + 2.0**33, 1.0, 0.0])
def test_the_steepest_softmax_of_logits_in_a_box_is_no_steeper_than_said(first):
    """Two keys: its slope is `2 p (1 - p)`, next to `2 (1 - p)` where p is next to one."""
    layer = SkipAttention(2, 1, 1.0, position_bias=True, tokens=2).double()
    (step,) = read(layer.eval()).steps
    point = step.make(Box.exact(np.zeros((2, 2))))
    assert isinstance(point, Attention)
    for apart in (0.0, 1.0, 20.0, 300.0):
        for blur in (0.0, 0.7, 1.2, 1.4, 2.3):
            spacing = np.spacing(max(first, 1.0))
            S = Box(
                np.array([[[first + apart, first], [first, first + apart]]]), np.full((1, 2, 2), blur * spacing)
            )
            point.__dict__["S"] = S
            for sign in ([1, -1], [-1, 1], [1, 1]):
                x = member(S[0, 0], sign)
                p = 1 / (1 + mp.exp(real(x[1] - x[0])))
                assert at_most(2 * p * (1 - p), point.lam(0.0)[0, 0])


def test_the_steepest_softmax_of_a_head_that_is_given_queries_and_keys_is_no_steeper_than_said():
    """A query and seven keys at zero, one key shut out: only the product of their moves moves the logits."""
    (step,) = read(CoreAttention(1).eval()).steps
    head = step.make(Box.exact(np.zeros((7, 3)))).heads[0]
    head.__dict__["S"] = Box.exact(np.where(np.arange(7) == 0, -50.0, np.zeros((1, 7, 7))))
    radius = 1.5
    query, key, others = radius / math.sqrt(2), radius * math.sqrt(5 / 12), -radius / math.sqrt(60)
    assert query**2 + key**2 + 5 * others**2 <= radius**2 * (1 + 1e-15)
    up, down = (real(fractions(query * move)[()]) for move in (key, others))
    p = mp.exp(up) / (mp.exp(up) + 5 * mp.exp(down) + mp.exp(-50 + down))
    assert at_most(p, head.lam(radius)[0, 0])
    assert p > 0.4


def test_what_one_head_leaves_out_is_not_hidden_by_another_that_leaves_out_nothing():
    rng = np.random.default_rng(8)
    z, g = rng.standard_normal((3, 12)), rng.standard_normal((2, 3, 4))
    g[:, :, :2] = 0.0  # nothing is asked of the first head
    check_point(CoreAttention(2), z, g, (0.1, 1.0))


@pytest.mark.parametrize("name", ["ordinary", "scaled", "attention in parts, gated", "branches in branches"])
def test_radii_that_overflow_prove_nothing(name):
    model, x = made(name)
    label = int(Image.of(read(model), x, 0).output.argmax())
    image = Image.of(read(model), x, label)
    assert (image.margins > 0).all()
    for radius in (1e155, 1e300, math.inf):
        for method in METHODS:
            assert not (image.margins > image.proof(radius, method).losses).any()


def test_an_image_whose_numbers_overflow_is_proved_nothing():
    wide = nn.Linear(4, 4).double()
    with torch.no_grad():
        wide.weight.fill_(1e200)
    model = nn.Sequential(nn.Flatten(), wide, wide, nn.Linear(4, 3).double())
    for label in range(3):
        try:
            image = Image.of(read(model), np.ones((1, 2, 2)), label)
            losses = image.proof(0.1, "mixed").losses
        except (SpecGuardError, np.linalg.LinAlgError):
            continue
        assert not (image.margins > losses).any()
