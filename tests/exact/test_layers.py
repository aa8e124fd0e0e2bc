"""Every rule against the exact function of its layer: outputs and adjoints are off by their error at most.

A error is a bound that is mostly a hundred times what it bounds; so every case makes one term of it the largest by
far, by weights, biases and points of sizes that have nothing to do with each other.
"""

import pytest
import torch
from torch import nn

from certificates.layers import LAYERS, made
from exact.laws import bounds_norm, check_adjoint, check_identity, check_value, full, matrix, one_step
from exact.numbers import exact, mpf, real
from specguard.certificates import rules
from specguard.nn import (
    ClassAndMean,
    ClassToken,
    CoreAttention,
    CyclicShift,
    HeadNorm,
    LayerScale,
    MeanPool,
    Normalize,
    PatchEmbedding,
    Positions,
    Resize,
    SmoothProject,
    TokenBatchNorm,
    TokenConvolution,
)

SINGLE = [name for name in LAYERS if name not in ("normalized attention", "residual mlp")]  # those of one step
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


def along(layer, z, weights):
    """Tokens nearly along one long vector, and weights that are orthogonal to it but for rounding."""
    base = torch.linspace(0.3, 1.7, z.shape[-1]).double()
    with torch.no_grad():
        for W in weights:
            W.sub_((W * base).sum(-1, keepdim=True) * base / (base @ base))
    return layer, 1e8 * z[..., :1] * base + z


def far_from_zero(maker, dim):
    """Tokens whose entries differ by far less than they are large."""
    layer, z = maker(), torch.randn(1, 2, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return layer.double().eval(), 1e8 + z


def canceling_batch_norm():
    """A bias that is the mean, scaled, but for a little: their difference is mostly rounding."""
    layer, z = TokenBatchNorm(3).double().eval(), torch.full((1, 2, 3), 1e-3, dtype=torch.float64)
    with torch.no_grad():
        layer.norm.running_mean.copy_(1e8 * torch.tensor([1.1, 2.3, 0.7]))
        layer.norm.running_var.copy_(torch.tensor([0.3, 0.7, 1.9]))
        layer.norm.bias.copy_(layer.norm.running_mean / (layer.norm.running_var + layer.norm.eps).sqrt())
    return layer, z


def canceling_convolution():
    layer, z = made("token convolution")
    layer, z = layer.double(), z[:1].double()
    layer, z = along(layer, z, [])
    base = torch.linspace(0.3, 1.7, 6).double().chunk(3)
    with torch.no_grad():
        for conv, part in zip(layer.kernels, base, strict=True):
            W = conv.weight  # out, in, tap: orthogonal over the inputs of every tap
            W.sub_((W * part[:, None]).sum(1, keepdim=True) * part[:, None] / (part @ part))
    return layer, z


def convolution_with_a_long_last_bias():
    layer, z = made("token convolution")
    layer, z = layer.double(), z[:1].double()
    with torch.no_grad():
        layer.out.bias.mul_(1e9)
    return layer, z


def core_of_long_heads():
    """Queries and keys along one vector, so that all logits are large and nearly equal."""
    layer, z = far_from_zero(lambda: CoreAttention(1, fused=False), 6)
    z -= 1e8
    z[..., :4] = 100 + z[..., :4] / 100
    return layer, z


def core_of_long_values():
    layer, z = core_of_long_heads()
    z[..., :4] = (z[..., :4] - 100) * 100
    z[..., 4:] *= 1e6
    return layer, z


CANCELLING = {
    "core attention, long values": core_of_long_values,
    "core attention": core_of_long_heads,
    "layer norm": lambda: far_from_zero(lambda: nn.LayerNorm(4), 4),
    "layer norm of large eps": lambda: far_from_zero(lambda: nn.LayerNorm(4, 10.0), 4),
    "head norm, q": lambda: head_norm(0),
    "head norm, k": lambda: head_norm(1),
    "batch norm": canceling_batch_norm,
    "token convolution": canceling_convolution,
    "token convolution, last bias": convolution_with_a_long_last_bias,
}


def head_norm(which):
    layer, z = far_from_zero(lambda: HeadNorm(4, 2), 12)
    parts = z.view(1, 2, 3, 4)
    parts[:, :, 1 - which] -= 1e8
    parts[:, :, 2] -= 1e8
    return layer, z


@pytest.mark.parametrize("name", CANCELLING)
def test_what_cancels_on_the_way_is_in_the_slacks(name):
    layer, z = CANCELLING[name]()
    check_value(layer, z)
    check_adjoint(layer, z, functionals(layer, z))


def test_the_largest_bend_of_a_projection_is_attained():
    x, along_it = torch.tensor([[[0.5, 0.0, 0.0]]]).double(), torch.tensor([[[[1.0, 0.0, 0.0]]]]).double()
    for sign in (1, -1):
        check_identity(SmoothProject(1.0).eval(), x, along_it, real(exact(sign * 1e-3 * along_it[0, 0])))


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
    "normalize": (lambda: Normalize((0.4, 0.6), (0.3, 0.7)), (2, 1, 2)),
    "resize": (lambda: Resize(3), (1, 4, 5)),
    "patches": (lambda: PatchEmbedding(2, 2, 3), (2, 2, 4)),
    "normalized patches": (
        lambda: nn.Sequential(Normalize((0.4, 0.6), (0.3, 0.7)), PatchEmbedding(2, 2, 3)),
        (2, 2, 4),
    ),
    "class token": (lambda: ClassToken(2), (2, 2)),
    "positions": (lambda: Positions(2, 2), (2, 2)),
    "cyclic shift": (lambda: CyclicShift(3, ((-1, 2),)), (9, 1)),
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
            assert bounds_norm(mpf(float(node.propagate(full(z, radius), "local"))) / mpf(radius), A)


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
