"""Convolutions along the tokens, in boxes."""

import itertools
import math

import numpy as np

from specguard.checker.enclosure import Box, concatenate, outward, spectral_norm_above
from specguard.checker.layers.affine import Linear, linear
from specguard.checker.node import Maker


def token_convolution(kernels: list[tuple[Box, Box]], W: Box, b: Box) -> Maker:
    """Convolutions along the tokens, group by group, zero beyond the ends, then a linear map.

    The norm of a convolution is at most that of the circulant convolution on enough points,
    `max_m ||sum_k W_k z_m^k||`.
    """
    out = linear(W, b)

    def at(x: Box) -> Linear:
        tokens, parts, begin, norm = x.shape[0], [], 0, 0.0
        slices = []
        for kernel, bias in kernels:
            group = slice(begin, begin + kernel.shape[1])
            slices.append(group)
            parts.append(_convolve(x[:, group], kernel) + bias)
            begin = group.stop
            norm = max(norm, _circulant_norm(kernel, tokens))
        last = out(concatenate(parts, 1))
        assert isinstance(last, Linear)

        def transpose(g: Box) -> Box:
            g = last.transpose(g)
            flipped = [kernel.rearrange(lambda a: a[:, :, ::-1].swapaxes(0, 1)) for kernel, _ in kernels]
            return concatenate(
                [_convolve(g[..., s], k) for s, k in zip(_outputs(kernels), flipped, strict=True)], -1
            )

        return Linear(last.output, float(outward(norm * last.norm)), transpose)

    return at


def _outputs(kernels: list[tuple[Box, Box]]) -> list[slice]:
    ends = np.cumsum([0, *(kernel.shape[0] for kernel, _ in kernels)])
    return [slice(int(a), int(b)) for a, b in itertools.pairwise(ends)]


def _convolve(x: Box, kernel: Box) -> Box:
    """`y_t = sum_k x_{t + k - center} W_k^T`."""
    width, tokens = kernel.shape[2], x.shape[-2]
    half = width // 2
    wide = x.rearrange(lambda a: np.pad(a, [(0, 0)] * (a.ndim - 2) + [(half, half), (0, 0)]))
    total = Box.exact(0.0)
    for k in range(width):
        total = total + wide[..., k : k + tokens, :] @ kernel[:, :, k].T
    return total


def _circulant_norm(kernel: Box, tokens: int) -> float:
    width = kernel.shape[2]
    points = tokens + width - 1
    largest = 0.0
    for m in range(points // 2 + 1):
        angle = 2 * math.pi / points * ((m * np.arange(width)) % points)
        real, imaginary = ((kernel * Box(wave(angle), np.full(width, 1e-13))).sum(2) for wave in (np.cos, np.sin))
        whole = concatenate([concatenate([real, -imaginary], 1), concatenate([imaginary, real], 1)], 0)
        largest = max(largest, float(spectral_norm_above(whole)))
    return largest
