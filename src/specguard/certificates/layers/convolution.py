"""Convolutions along the tokens: affine maps, whose norms are bounded by those of circulant convolutions."""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from specguard.certificates.layers.affine import Affine, expect, linear
from specguard.certificates.node import Adjoint, Rule, length, product_error, up
from specguard.linalg import gamma, upper_gram, upper_length
from specguard.nn import TokenConvolution
from specguard.nn.settings import bias_of, kernel_width


def token_convolution(layer: TokenConvolution) -> Rule:
    """Grouped convolutions along the tokens, then a linear map of all groups."""
    convolutions: list[Any] = list(layer.kernels)
    for conv in convolutions:
        kernel_width(conv)
    out = linear(layer.out)
    kernels = [conv.weight.detach() for conv in convolutions]
    biases = [bias_of(conv) for conv in convolutions]
    sizes = [float(length(W[None])[0]) for W in kernels]

    def at(x: Tensor) -> Affine:
        expect(x, sum(W.shape[1] for W in kernels), 3)
        tokens, parts = x.shape[1], []
        error = x.new_zeros(len(x))
        for W, b, size, group in zip(kernels, biases, sizes, x.chunk(len(kernels), 2), strict=True):
            parts.append(windows(group, W.shape[2]) @ W.flatten(1).mT + b)
            magnitude = math.sqrt(W.shape[2]) * length(group) * size + math.sqrt(tokens) * float(upper_length(b))
            error = error + product_error(W[0].numel(), magnitude)
        norm = max(_convolution_norm(W, tokens) for W in kernels)
        last = out(torch.cat(parts, 2))
        assert isinstance(last, Affine)

        def transpose(g: Adjoint) -> Adjoint:
            groups = last.transpose(g).chunk(len(kernels), 3)
            return torch.cat([_transpose(part, W) for part, W in zip(groups, kernels, strict=True)], 3)

        widest = max(math.sqrt(W.shape[2]) * size for W, size in zip(kernels, sizes, strict=True))
        transpose_error = widest * (
            last.transpose_error + gamma(max(W[0].numel() for W in kernels) + 4) * last.norm
        )
        return Affine(last.output, up(last.error + error * last.norm), norm * last.norm, transpose, transpose_error)

    return at


def windows(x: Tensor, width: int) -> Tensor:
    """The entries of the neighbors of every token, channels first, zero beyond the ends."""
    return pad(x, (0, 0, width // 2, width // 2)).unfold(-2, width, 1).flatten(-2)


def _transpose(g: Tensor, W: Tensor) -> Tensor:
    """The transpose of a convolution: the convolution with the flipped kernel."""
    return windows(g, W.shape[2]) @ W.flip(2).transpose(0, 1).flatten(1).mT


def _convolution_norm(W: Float[Tensor, "out in width"], tokens: int) -> float:
    """An upper bound on the norm of a convolution over `tokens`, zero beyond the ends.

    It is a part of the circulant convolution of `N = tokens + width - 1` points, whose norm is the largest
    `||sum_k W_k exp(-2 pi i k m / N)||` over m; complex matrices are written as real ones of twice the size.
    """
    width, points = W.shape[2], tokens + W.shape[2] - 1
    steps = torch.arange(width, device=W.device)
    angles = (torch.arange(points, device=W.device)[:, None] * steps % points).to(W.dtype) * (2 * math.pi / points)
    real, imaginary = (torch.einsum("oik,mk->moi", W, wave(angles)) for wave in (torch.cos, torch.sin))
    whole = torch.cat([torch.cat([real, -imaginary], 2), torch.cat([imaginary, real], 2)], 1)
    taps = sum(float(length(W[None, :, :, k])[0]) for k in range(width))
    return float(upper_gram(whole).amax()) + 2 * gamma(width + 64) * taps
