"""Every layer of the closed set as an exact function, written anew from its definition.

`forward(layer, x)` takes an array of numbers (`numbers.py`), images first, and gives one. Weights are those of the
plain layer, a float64 being a fraction; only irrational numbers are rounded, to a hundred digits. `adjoint` is
`Df(z)^T g`, by derivatives along every entry of the input. Small sizes only: it is slow.
"""

import math
from fractions import Fraction

import numpy as np
from torch import nn

from exact.numbers import Dual, exact, exp, like, mp, normal, real, sigmoid, softplus, sqrt, tanh, with_derivatives
from specguard import nn as ours


def forward(layer, x):
    """The exact value of a layer, or of a sequence of layers, in eval mode, at an array of numbers."""
    return FUNCTIONS[type(layer)](layer, x)


def value_at(layer, z):
    """The exact value at a tensor of images."""
    return forward(layer, exact(z))


def adjoint(layer, z, g):
    """`Df(z)^T g` for a tensor z of images and a tensor g of functionals of the output, a stack per other class."""
    images = [_pulled(layer, exact(z[i : i + 1]), g[:, i]) for i in range(len(z))]
    return np.stack(images, 1)


def _pulled(layer, x, g):
    output = forward(layer, with_derivatives(x)).ravel()
    h = like(g.flatten(1), output)
    total = np.full((len(g), x.size), h.ravel()[0] * 0, dtype=object)
    for entry, factors in zip(output, h.T, strict=True):
        if isinstance(entry, Dual):  # what is no dual does not depend on the input
            total += factors[:, None] * entry.slope
    return total.reshape(len(g), *x.shape[1:])


# Affine maps ------------------------------------------------------------------------------------------------------


def _linear(layer, x):
    y = x @ like(layer.weight, x).T
    return y if layer.bias is None else y + like(layer.bias, x)


def _patches(layer, x):
    conv, side = layer.map, layer.map.kernel_size[0]
    rows, columns = x.shape[2] // side, x.shape[3] // side
    cut = x[:, :, : rows * side, : columns * side].reshape(len(x), x.shape[1], rows, side, columns, side)
    patches = cut.transpose(0, 2, 4, 1, 3, 5).reshape(len(x), rows * columns, -1)
    W = like(conv.weight, x)
    y = patches @ W.reshape(len(W), -1).T
    return y if conv.bias is None else y + like(conv.bias, x)


def _resize(layer, x):
    R, C = (_interpolation(side, layer.size) for side in x.shape[-2:])
    if isinstance(like(0.0, x), mp.mpf):
        R, C = real(R), real(C)
    return R @ x @ C.T


def _interpolation(old, new):
    """Linear interpolation between the centers of pixels; beyond the outermost, their values."""
    A = np.full((new, old), Fraction(0), dtype=object)
    for row in range(new):
        place = min(max((row + Fraction(1, 2)) * old / new - Fraction(1, 2), Fraction(0)), Fraction(old - 1))
        left = math.floor(place)
        right = min(left + 1, old - 1)
        A[row, left] += 1 - (place - left)
        A[row, right] += place - left
    return A


def _batch_norm(layer, x):
    norm = layer.norm
    y = real(x - like(norm.running_mean, x)) / sqrt(exact(norm.running_var) + exact(norm.eps))
    return y if norm.weight is None else y * real(exact(norm.weight)) + real(exact(norm.bias))


def _token_convolution(layer, x):
    groups = np.split(x, len(layer.kernels), axis=2)
    return _linear(
        layer.out, np.concatenate([_convolved(c, g) for c, g in zip(layer.kernels, groups, strict=True)], 2)
    )


def _convolved(conv, x):
    W, tokens, middle = like(conv.weight, x), x.shape[1], conv.kernel_size[0] // 2
    y = np.full((len(x), tokens, len(W)), like(0.0, x), dtype=object)
    for token in range(tokens):
        for tap in range(W.shape[2]):
            if 0 <= token + tap - middle < tokens:
                y[:, token] += x[:, token + tap - middle] @ W[:, :, tap].T
    return y if conv.bias is None else y + like(conv.bias, x)


def _class_token(layer, x):
    token = like(layer.token, x)
    return np.concatenate([np.repeat(token, len(x), 0), x], 1)


def _cyclic_shift(layer, x):
    y, side, width = x.copy(), layer.side, x.shape[2] // len(layer.steps)
    for group, (down, right) in enumerate(layer.steps):
        channels = slice(group * width, (group + 1) * width)
        for row in range(side):
            for column in range(side):
                new = (row + down) % side * side + (column + right) % side
                y[:, new, channels] = x[:, row * side + column, channels]
    return y


def _mean(x):
    return x.sum(1) / x.shape[1]


# Norms and activations --------------------------------------------------------------------------------------------


def _layer_project(layer, x):
    R = real(exact(layer.radius))
    size = sqrt((x * x).sum(-1, keepdims=True))
    return real(x) * (R / np.maximum(size, R))


def _smooth_project(layer, x):
    R = exact(layer.radius)
    return real(x) * (real(R) / sqrt(real((x * x).sum(-1, keepdims=True)) + real(R * R)))


def _layer_norm(layer, x):
    return _normalized(x, layer.eps, layer.weight, layer.bias, centered=True)


def _rms_norm(layer, x):
    return _normalized(x, layer.eps, layer.weight, None, centered=False)


def _normalized(x, eps, weight, bias, *, centered):
    c = x - x.sum(-1, keepdims=True) / x.shape[-1] if centered else x
    y = real(c) / sqrt(real((c * c).sum(-1, keepdims=True) / x.shape[-1]) + real(exact(eps)))
    y = y if weight is None else y * real(exact(weight))
    return y if bias is None else y + real(exact(bias))


def _head_norm(layer, x):
    parts = x.reshape(*x.shape[:2], 3, layer.heads, -1)
    normed = [
        _normalized(parts[:, :, i], layer.eps, layer.gain[i], layer.shift[i], centered=layer.centered)
        for i in (0, 1)
    ]
    return np.stack([*normed, real(parts[:, :, 2])], 2).reshape(x.shape)


def _gelu(layer, x):
    x = real(x)
    if layer.approximate == "none":
        return x * normal(x)
    return x * (1 + tanh(mp.sqrt(2 / mp.pi) * (x + real(exact(0.044715)) * x * x * x))) / 2


def _relu(layer, x):
    return np.maximum(x, like(0.0, x))


def _softplus(layer, x):
    beta = real(exact(layer.beta))
    return softplus(real(x) * beta) / beta


def _squareplus(layer, x):
    return (real(x) + sqrt(real(x * x) + real(exact(layer.b)))) / 2


def _max_min(layer, x):
    first, second = np.split(x, 2, -1)
    return np.concatenate([np.maximum(first, second), np.minimum(first, second)], -1)


def _gated_unit(layer, x):
    gate, given = np.split(real(x), 2, -1)
    return gate * sigmoid(gate) * given


def _sll(layer, x):
    W, log_q = exact(layer.weight), real(exact(layer.log_q))
    T = (real(abs(W @ W.T)) * exp(log_q[None, :] - log_q[:, None])).sum(1) + real(exact(1e-12))
    hidden = real(forward(layer.activation, x @ like(layer.weight, x).T + like(layer.bias, x)))
    return real(x) - 2 * ((hidden / T) @ real(W))


# Attention --------------------------------------------------------------------------------------------------------


def _softmax(S):
    top = np.vectorize(lambda s: s.value if isinstance(s, Dual) else s, otypes=[object])(S).max(-1, keepdims=True)
    weights = exp(S - top)
    return weights / weights.sum(-1, keepdims=True)


def _attended(qkv, heads, mixture, bias=None):
    """`concat_l(mixture(softmax(S))_l V_l)` for [q | k | v]."""
    q, k, v = np.moveaxis(qkv.reshape(*qkv.shape[:2], 3, heads, -1), (2, 3), (0, 2))  # batch head token channel
    S = real(q @ np.swapaxes(k, -1, -2)) / mp.sqrt(q.shape[-1])
    P = mixture(_softmax(S if bias is None else S + real(exact(bias))))
    return np.swapaxes(P @ real(v), 1, 2).reshape(*qkv.shape[:2], -1)


def _core_attention(layer, x):
    return _attended(x, layer.heads, lambda P: P)


def _attention(layer, x):
    return _linear(layer.out, _attended(_linear(layer.qkv, x), layer.heads, lambda P: P))


def _skip_attention(layer, x):
    mix, eye = real(exact(layer.mix)), real(np.eye(x.shape[1], dtype=object))
    return _linear(
        layer.out,
        _attended(_linear(layer.qkv, x), layer.heads, lambda P: (1 - mix) * eye + mix * P, layer.bias),
    )


def _gated_attention(layer, x):
    gate = sigmoid(exact(layer.gate))[:, None, None]
    positional = _softmax(real(np.moveaxis(_linear(layer.position, exact(layer.offsets)), 2, 0)))
    return _linear(
        layer.out,
        _attended(_linear(layer.qkv, x), layer.heads, lambda P: (1 - gate) * P + gate * positional),
    )


def _sequence(layer, x):
    for inner in layer.children() if isinstance(layer, ours.ViT) else layer._modules.values():
        x = forward(inner, x)
    return x


def _residual(layer, x):
    change = forward(layer.branch, x)
    x = real(x) if isinstance(like(0.0, change), mp.mpf) else x
    return x + like(layer.scale, change) * change


FUNCTIONS = {
    nn.Linear: _linear,
    nn.Identity: lambda layer, x: x,
    nn.Dropout: lambda layer, x: x,
    nn.Flatten: lambda layer, x: x.reshape(len(x), -1),
    ours.Normalize: lambda layer, x: (x - like(layer.mean, x)) / like(layer.std, x),
    ours.Resize: _resize,
    ours.PatchEmbedding: _patches,
    ours.ClassToken: _class_token,
    ours.CyclicShift: _cyclic_shift,
    ours.Positions: lambda layer, x: x + like(layer.table, x),
    ours.ClassPool: lambda layer, x: x[:, 0],
    ours.MeanPool: lambda layer, x: _mean(x[:, layer.skip :]),
    ours.LayerScale: lambda layer, x: x * like(layer.scale, x),
    ours.TokenBatchNorm: _batch_norm,
    ours.TokenConvolution: _token_convolution,
    ours.LayerProject: _layer_project,
    ours.SmoothProject: _smooth_project,
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _rms_norm,
    ours.MaxMin: _max_min,
    ours.GatedUnit: _gated_unit,
    ours.FirstTokens: lambda layer, x: x[:, : layer.count].reshape(len(x), -1),
    ours.ClassAndMean: lambda layer, x: np.concatenate([x[:, 0], _mean(x[:, layer.skip :])], 1),
    ours.HeadNorm: _head_norm,
    ours.CoreAttention: _core_attention,
    ours.SLL: _sll,
    ours.Attention: _attention,
    ours.SkipAttention: _skip_attention,
    ours.GatedPositionalAttention: _gated_attention,
    nn.GELU: _gelu,
    nn.ReLU: _relu,
    nn.SiLU: lambda layer, x: real(x) * sigmoid(x),
    nn.Tanh: lambda layer, x: tanh(x),
    ours.Softplus: _softplus,
    ours.Squareplus: _squareplus,
    ours.Residual: _residual,
    nn.Sequential: _sequence,
    ours.Block: _sequence,
    ours.ViT: _sequence,
    ours.Network: _sequence,
}
