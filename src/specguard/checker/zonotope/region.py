"""Balls of perturbations of one input, and their affine forms before and behind the embedding of patches."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from specguard.checker.enclosure import Array, Box, norm_above, outward
from specguard.checker.zonotope.form import Form
from specguard.checker.zonotope.maps import UNIT, gamma
from specguard.geometry import Norm


@dataclass(frozen=True)
class Region:
    """All inputs within `radius` of `pixels`, in [0, 1] with `box`; an l2 ball is not cut."""

    pixels: Array
    norm: Norm
    radius: float
    box: bool = False

    @cached_property
    def intervals(self) -> Box:
        """The interval of every entry: that of an linf ball."""
        low = self.pixels - self.radius
        high = self.pixels + self.radius
        wrong = 2 * UNIT * (np.abs(low) + np.abs(high))
        if self.box:
            low, high = np.clip(low, 0.0, 1.0), np.clip(high, 0.0, 1.0)
        mid = low / 2 + high / 2
        return Box(mid, np.asarray(outward(np.maximum(high - mid, mid - low) + wrong)))

    @cached_property
    def form(self) -> Form:
        """One symbol per entry."""
        eye = np.eye(self.pixels.size).reshape(*self.pixels.shape, -1)
        none, zero = np.zeros((*self.pixels.shape, 0)), np.zeros_like(self.pixels)
        if self.norm == "l2":
            return Form(self.pixels, eye * self.radius, none, none, zero, zero)
        half = self.intervals.rad
        return Form(self.intervals.mid, none, eye * half[..., None], none, zero, zero)

    def patches(self, W: Box, b: Box, mean: Box, std: Box) -> Form:
        """Adjacent patches of the normalized pixels, each times `W`: channels of a token by entries of a patch.

        Under an l2 ball, `W d = (W V) (V^T d) + (W - W V V^T) d` for any V with fewer columns; with columns that
        are orthonormal up to a defect, `||V^T d|| <= sqrt(1 + defect) ||d||`, and the last part is a rounding
        error.
        """
        channels, side = W.shape[1], W.shape[-1]
        down, right = (length // side for length in self.pixels.shape[1:])

        def cut(a: Array) -> Array:
            a = np.broadcast_to(a, self.pixels.shape)[:, : down * side, : right * side]
            a = a.reshape(channels, down, side, right, side)
            return a.transpose(1, 3, 0, 2, 4).reshape(down * right, -1)

        flat = (W / std).rearrange(lambda a: a.reshape(len(a), -1))
        center = Box.exact(self.pixels) if self.norm == "l2" else Box.exact(self.intervals.mid)
        output = (center - mean).rearrange(cut) @ flat.T + b
        tokens, dim = output.shape
        if self.norm == "l2":
            V = Box.exact(np.linalg.svd(flat.mid, full_matrices=False)[2].T)
            R = flat @ V
            rest = flat - Box.exact(R.mid) @ V.T
            defect = norm_above(V.T @ V - Box.exact(np.eye(V.shape[1])))
            stretch = float(outward(np.sqrt(1 + defect)))
            each = np.broadcast_to(R.mid * (stretch * self.radius), (tokens, *R.shape))
            # `R.mid` is taken as it is; the product with the radius is right to two roundings.
            wrong = outward(norm_above(rest, 1) + 4 * UNIT * norm_above(Box.exact(R.mid), 1)) * stretch
            rad = outward(output.rad + wrong * self.radius)
        else:
            half = cut(self.intervals.rad)
            each = flat.mid * half[:, None, :]
            rad = outward(output.rad + half @ (flat.rad + gamma(1) * np.abs(flat.mid)).T)
        blocks = np.zeros((tokens, dim, tokens, each.shape[-1]))
        for i in range(tokens):
            blocks[i, :, i] = each[i]
        rows = blocks.reshape(tokens, dim, -1)
        none, zero = np.zeros((tokens, dim, 0)), np.zeros((tokens, dim))
        ball, shared = (rows, none) if self.norm == "l2" else (none, rows)
        return Form(output.mid, ball, shared, none, zero, np.asarray(rad))
