"""Every rule against the exact function of its layer: outputs and adjoints are off by their slack at most.

A slack is a bound that is mostly a hundred times what it bounds; so every case makes one term of it the largest by
far, by weights, biases and points of sizes that have nothing to do with each other.
"""

import pytest
import torch
from torch import nn

from certify.layers import LAYERS, made
from exact.laws import bounds_norm, check_adjoint, check_value, full, matrix, one_step
from exact.numbers import mpf
from specguard.certify import rules
from specguard.nn import (
    ClassAndMean,
    ClassToken,
    LayerScale,
    MeanPool,
    Normalise,
    PatchEmbedding,
    Positions,
    Resize,
    TokenBatchNorm,
    TokenConvolution,
)

SINGLE = [name for name in LAYERS if name not in ("normalised attention", "residual mlp")]  # those of one step
SIZES = (1.0, 1e-9, 1e-4, 1e4, 1e8)


def scaled(name, seed):
    """A layer with every tensor of a size of its own, and one point."""
    layer, z = made(name, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    layer, z = layer.double(), z[:1].double()
    with torch.no_grad():
        for tensor in (*layer.parameters(), z):
            tensor.mul_(
                1 + torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * 1e-3
            )  # odd mantissas
            if seed:
                tensor.mul_(SIZES[int(torch.randint(len(SIZES), (), generator=generator))])
        if hasattr(layer, "log_q"):
            layer.log_q.clamp_(-30, 30)
    return layer, z


def functionals(layer, z, seed=0):
    with torch.no_grad():
        shape = layer(z).shape
    return torch.randn(1, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", SINGLE)
def test_outputs_and_adjoints_are_within_their_slacks_whatever_the_sizes(name):
    for seed in range(4):
        layer, z = scaled(name, seed)
        check_value(layer, z)
        check_adjoint(layer, z, functionals(layer, z, seed))


MANY = {
    "linear": (lambda: nn.Linear(1, 1), (2000, 1)),
    "patches": (lambda: PatchEmbedding(1, 1, 1), (1, 50, 40)),
    "convolution": (lambda: TokenConvolution(1, (1,)), (2000, 1)),
    "layer norm": (lambda: nn.LayerNorm(2, 1e-2), (1000, 2)),
}


@pytest.mark.parametrize("name", MANY)
def test_a_bias_is_added_to_every_token(name):
    """Many tokens, each of which loses nearly all of itself beside a bias of 1."""
    maker, shape = MANY[name]
    layer, z = (
        maker().double().eval(),
        torch.randn(1, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
    )
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.full(parameter.shape, 1.0 if parameter.ndim == 1 else 1e-9))
        if isinstance(layer, nn.LayerNorm):
            layer.weight.fill_(1e-9)
        if isinstance(layer, TokenConvolution):
            layer.out.weight.fill_(1.0)
            layer.out.bias.zero_()
    check_value(layer, z)


AFFINE = {
    "linear": (lambda: nn.Linear(3, 2), (2, 3)),
    "normalise": (lambda: Normalise((0.4, 0.6), (0.3, 0.7)), (2, 1, 2)),
    "resize": (lambda: Resize(3), (1, 4, 5)),
    "patches": (lambda: PatchEmbedding(2, 2, 3), (2, 2, 4)),
    "normalised patches": (
        lambda: nn.Sequential(Normalise((0.4, 0.6), (0.3, 0.7)), PatchEmbedding(2, 2, 3)),
        (2, 2, 4),
    ),
    "class token": (lambda: ClassToken(2), (2, 2)),
    "positions": (lambda: Positions(2, 2), (2, 2)),
    "mean of three": (MeanPool, (3, 2)),
    "mean of five behind two": (lambda: MeanPool(2), (7, 1)),
    "class and mean": (ClassAndMean, (4, 2)),
    "class and mean of all three": (lambda: ClassAndMean(0), (3, 1)),
    "class and mean of all five": (lambda: ClassAndMean(0), (5, 1)),
    "layer scale": (lambda: LayerScale(3, 1.0), (2, 3)),
    "batch norm": (lambda: TokenBatchNorm(3), (2, 3)),
    "token convolution": (lambda: TokenConvolution(2, (3, 1)), (3, 2)),
}


@pytest.mark.parametrize("name", AFFINE)
def test_the_norm_of_an_affine_layer_is_not_below_that_of_its_exact_matrix(name):
    maker, shape = AFFINE[name]
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        layer, z = maker().double().eval(), torch.randn(1, *shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            for tensor in (*layer.parameters(), *layer.buffers()):
                if tensor.is_floating_point():
                    tensor.copy_(torch.rand(tensor.shape, generator=generator, dtype=torch.float64) + 0.1)
        node, A = one_step(layer, z), matrix(layer, z)
        assert bounds_norm(node.norm, A)
        for radius in (1e-14, 0.3, 1e6):
            assert bounds_norm(mpf(float(node.spread(full(z, radius), "local"))) / mpf(radius), A)


def test_every_layer_with_a_rule_is_among_the_cases():
    kinds = {kind for kind in rules._RULES if kind.__module__.startswith(("torch", "specguard"))}  # not of tests
    found = {type(inner) for name in SINGLE for inner in LAYERS[name][0]().modules()}
    assert not kinds - found
    pairs = {
        tuple(type(inner) for inner in layer.children())
        for name in SINGLE
        if isinstance(layer := LAYERS[name][0](), nn.Sequential)
    }
    assert {kind for _, kind in rules._PAIRS} >= {second for _, second in pairs}
