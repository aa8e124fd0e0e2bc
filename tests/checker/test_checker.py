"""The checker and the prover say the same of every model: two programs, written apart, that agree to rounding."""

import mpmath
import numpy as np
import pytest
import torch
from torch import nn

from helpers.proofs import NAMES, prepared_problem, upper_losses
from specguard.certificates import program
from specguard.checker import Image, read
from specguard.checker.enclosure import Box
from specguard.checker.layers import sll as checked_sll
from specguard.errors import ConfigError
from specguard.nn import (
    SLL,
    Attention,
    CertifiableConfig,
    ClassAndMean,
    ClassToken,
    CoreAttention,
    FirstTokens,
    GatedUnit,
    HeadNorm,
    MaxMin,
    MeanPool,
    PatchEmbedding,
    Positions,
    Residual,
    SkipAttention,
    SmoothProject,
    Softplus,
    Squareplus,
    ViT,
    ViTConfig,
)

SHAPE = (1, 8, 8)
BASE = {"image": 8, "patch": 4, "channels": 1, "classes": 3, "dim": 8, "depth": 2, "heads": 2}
BASE |= {"mean": (0.3,), "std": (0.6,)}
CONFIGS: dict[str, dict] = {
    "ordinary": {},
    "no bias": {"qkv_bias": False},
    "rmsnorm": {"norm": "rmsnorm"},
    "batchnorm": {"norm": "batchnorm"},
    "hard projection, relu": {"norm": "layerproject", "activation": "relu"},
    "smooth projection, squareplus": {"norm": "smoothproject", "activation": "squareplus", "pool": "mean"},
    "attention and its skip as one": {"norm": "none", "activation": "softplus"},
    "scaled": {"norm": "smoothproject", "activation": "gelu_tanh", "layer_scale": 0.3, "residual_scale": 0.7},
    "positional": {"local_blocks": 1},
    "convolutions": {"kernels": (1, 3, 5, 7), "pool": "mean"},
    "resized": {"resize": 12},
    "batch norm behind pooling": {"norm": "batchnorm", "pool": "all", "norm_after_pool": True},
    "above the dense limit": {"dim": 32, "patch": 1, "norm": "smoothproject"},
    "many classes": {"classes": 70, "norm": "smoothproject"},
}


def randomized(model: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.07 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def foreign(norm: nn.Module, pool: nn.Module, wide: int = 8) -> nn.Module:
    """A block as other libraries have it."""
    attention = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 24), norm, CoreAttention(norm.heads), nn.Linear(8, 8))
    mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), GatedUnit(), nn.Linear(6, 8))
    layers = [PatchEmbedding(1, 2, 8), ClassToken(8, 3), Positions(7, 8), Residual(attention), Residual(mlp)]
    return nn.Sequential(*layers, nn.SiLU(), pool, nn.Linear(wide, 3))


SMALL = {"image": 8, "patch": 4, "channels": 1, "classes": 3, "dim": 8, "depth": 2, "heads": 2}


def biased(size: float) -> nn.Module:
    """Attention whose logits have a position bias of this size."""
    layer = SkipAttention(8, 2, 0.6, position_bias=True, tokens=4)
    nn.init.normal_(layer.bias, std=size, generator=torch.Generator().manual_seed(3))
    return layer


def residual(hidden: int, activation: nn.Module, q: float = 1.0, size: float = 0.4) -> SLL:
    """SLL whose q differ by factors of about `exp(q)`."""
    layer, g = SLL(8, hidden, activation), torch.Generator().manual_seed(4)
    with torch.no_grad():
        layer.weight.copy_(size * torch.randn(hidden, 8, generator=g))
        layer.bias.copy_(0.3 * torch.randn(hidden, generator=g))
        layer.log_q.copy_(q * torch.randn(hidden, generator=g))
    return layer


LOFAST = {"mixing": "residual", "projection": "layer", "feedforward": "sll", "value_norm": 0.5, "hidden": 11}
MODELS = {
    name: (lambda config=config: ViT(ViTConfig(**{**BASE, **config}), torch.Generator().manual_seed(0)), SHAPE)
    for name, config in CONFIGS.items()
} | {
    "sorted pairs": (
        lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(16, 8), MaxMin(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
        ),
        (1, 4, 4),
    ),
    "skip in the values": (
        lambda: nn.Sequential(
            PatchEmbedding(1, 2, 8),
            SmoothProject(1.0),
            SkipAttention(8, 2, 0.3),
            MaxMin(),
            MeanPool(),
            nn.Linear(8, 3),
        ),
        (1, 4, 4),
    ),
    "positions in the logits": (
        lambda: nn.Sequential(PatchEmbedding(1, 2, 8), biased(3.0), biased(60.0), MeanPool(), nn.Linear(8, 3)),
        (1, 4, 4),
    ),
    "lipschitz by construction": (
        lambda: CertifiableConfig(**SMALL, mean=(0.5,), std=(0.4,)).fresh(0),
        SHAPE,
    ),
    "sll, relu": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 8), residual(11, nn.ReLU()), nn.Linear(8, 3)),
        (1, 4, 4),
    ),
    "sll, tanh, fewer neurons than channels": (
        lambda: nn.Sequential(PatchEmbedding(1, 2, 8), residual(5, nn.Tanh(), 4.0), MeanPool(), nn.Linear(8, 3)),
        (1, 4, 4),
    ),
    "sll, softplus, squareplus": (
        lambda: nn.Sequential(
            PatchEmbedding(1, 2, 8),
            residual(9, Softplus(3.0)),
            residual(12, Squareplus(0.5)),
            MeanPool(),
            nn.Linear(8, 3),
        ),
        (1, 4, 4),
    ),
    "lofast": (lambda: CertifiableConfig(**SMALL, **LOFAST, mean=(0.5,), std=(0.4,)).fresh(0), SHAPE),
    "normalized heads, gated, registers": (lambda: foreign(HeadNorm(8, 2), MeanPool(3)), (1, 4, 4)),
    "rms heads, class and mean": (lambda: foreign(HeadNorm(8, 2, 1e-3, False), ClassAndMean(3), 16), (1, 4, 4)),
    "linear maps, many classes": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, 8), nn.Linear(8, 70)),
        (1, 4, 4),
    ),
    "shifts": (
        lambda: CertifiableConfig(
            **SMALL | {"patch": 2, "mixing": "shift", "token_bias": True}, mean=(0.5,), std=(0.4,)
        ).fresh(0),
        SHAPE,
    ),
    "attention that starts as a shift": (
        lambda: CertifiableConfig(
            **SMALL | {"patch": 2, "mix": 1.0, "neighbor_bias": 8.0}, mean=(0.5,), std=(0.4,)
        ).fresh(0),
        SHAPE,
    ),
    "first tokens": (lambda: foreign(HeadNorm(8, 4, 1e-3), FirstTokens(2), 16), (1, 4, 4)),
    "no affine end": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.Tanh()), (1, 4, 4)),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_family_proves_the_same(name):
    make, shape = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)  # of layers that begin at random
        model = randomized(make(), 1)
    images = torch.rand(2, *shape, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        labels = model(images).argmax(1)
    p = prepared_problem(program(model), images, labels, NAMES)
    checked = [Image.of(read(model), images[i].double().numpy(), int(labels[i])) for i in range(2)]
    for i, image in enumerate(checked):
        places = [image.other_classes.index(int(j)) for j in p.other_classes[:, i]]
        assert np.allclose(image.margins[places], p.margins[:, i].numpy(), rtol=1e-9, atol=1e-9)
        for radius in (1e-6, 0.01, 0.4):
            losses = upper_losses(p, torch.full((2,), radius, dtype=torch.float64), NAMES)
            for method in NAMES:
                proof, wanted = image.proof(radius, method), losses[method]
                ratio = proof.losses[places] / wanted.total[:, i].numpy()
                assert (ratio <= 1 + 1e-7).all(), method
                assert (ratio >= 0.9).all() or name == "many classes", method
                assert proof.radii.keys() == {p.names[step] for step in wanted.radii}
                for step, own in wanted.radii.items():
                    assert 0.9 <= proof.radii[p.names[step]] / float(own[i]) <= 1 + 1e-7, (method, step)


def test_a_softmax_that_is_sure_of_its_key_is_as_flat_to_the_checker_as_to_the_prover():
    """Also where logits can move by nearly 300: a bound of 1/2 there made true certificates look wrong."""
    layer = randomized(Attention(4, 1, bias=False), 3).double()
    with torch.no_grad():
        layer.qkv.weight.copy_(20 * torch.eye(4).repeat(3, 1))
    X = 3 * torch.eye(4, dtype=torch.float64)
    node = program(layer).steps[0].rule(X[None])
    point = read(layer).steps[0].make(Box.exact(X.numpy()))
    flat = 0
    for radius in np.geomspace(1e-3, 1.0, 400):
        theirs = node.lam(torch.tensor([radius], dtype=torch.float64))[0].numpy()
        assert (point.lam(radius * (1 - 1e-9)) <= theirs * (1 + 1e-6) + 1e-130).all(), radius
        flat += bool((theirs < 1e-3).all())
    assert 100 < flat < 400


def test_more_heads_than_numpy_can_choose_among_are_read():
    model = randomized(nn.Sequential(nn.Linear(1, 210), CoreAttention(70), nn.Flatten(), nn.Linear(140, 2)), 1)
    image = Image.of(read(model), np.ones((2, 1)), 0)
    assert np.isfinite(image.proof(1e-3, "adjoint").losses).all()


def test_what_the_checker_cannot_read_is_named():
    with pytest.raises(ConfigError, match="1 is a CELU, which the checker cannot read"):
        read(nn.Sequential(nn.Linear(2, 2), nn.CELU()).eval())
    model = nn.Sequential(SLL(2, 2)).eval()
    model[0].activation = nn.SiLU().eval()  # which it does not take when it is made
    with pytest.raises(ConfigError, match="0 is an SLL with SiLU, whose slopes may leave"):
        read(model)


@pytest.mark.parametrize("change", [{"q": 400.0}, {"size": float("nan")}], ids=str)
def test_an_sll_whose_divisors_are_lost_in_rounding_is_refused(change):
    with pytest.raises(ConfigError, match=r"lost in rounding|not finite"):
        read(nn.Sequential(residual(6, nn.ReLU(), **change)).eval())


EXACT = {
    nn.ReLU: lambda t: max(t, 0),
    nn.Tanh: mpmath.tanh,
    Softplus: lambda t: mpmath.log1p(mpmath.exp(3 * t)) / 3,
}
WILD = {"plain": {}, "tiny": {"size": 1e-7}, "huge": {"size": 1e6}, "zero": {"size": 0.0}, "far apart": {"q": 9.0}}


def held(layer: SLL, widest: float) -> bool:
    """Whether the output of an SLL, computed with sixty digits, lies in its box, which is narrow."""
    x = np.random.default_rng(0).standard_normal(8)
    (step,) = read(nn.Sequential(layer).eval()).steps
    box = step.make(Box.exact(x)).output
    assert box.rad.max() < widest
    hidden, phi = range(len(layer.bias)), EXACT[type(layer.activation)]
    with mpmath.workdps(60):
        W, b = (mpmath.matrix(p.tolist()) for p in (layer.weight, layer.bias))
        q = [mpmath.exp(t) for t in layer.log_q.tolist()]
        G, s = W * W.T, [phi(h) for h in W * mpmath.matrix(x.tolist()) + b]
        T = [mpmath.fsum(abs(G[i, j]) * q[j] / q[i] for j in hidden) + mpmath.mpf(1e-12) for i in hidden]
        exact = [mpmath.mpf(x[k]) - 2 * mpmath.fsum(W[i, k] * s[i] / T[i] for i in hidden) for k in range(8)]
        return all(abs(e - mpmath.mpf(m)) <= r for e, m, r in zip(exact, box.mid.tolist(), box.rad, strict=True))


@pytest.mark.parametrize("weights", WILD)
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh(), Softplus(3.0)], ids=str)
def test_the_exact_output_of_an_sll_lies_in_its_box(activation, weights):
    assert held(residual(5, activation, **WILD[weights]), 1e-8)


def test_what_cancels_in_the_divisors_of_an_sll_is_in_its_box_and_would_be_missed(monkeypatch):
    """Rows at right angles, whose products are all rounding, times ratios of q."""
    layer = residual(5, nn.Tanh()).double()
    with torch.no_grad():
        layer.log_q[-1] = 20.0
        layer.weight.copy_(torch.linalg.qr(layer.weight.mT)[0].mT)
    assert held(layer, 1e-3)
    true = checked_sll._divisors
    monkeypatch.setattr(checked_sll, "_divisors", lambda W, log_q: Box.exact(true(W, log_q).mid))
    assert not held(layer, 1e-3)
