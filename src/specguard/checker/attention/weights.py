"""The weights of attention in boxes, and their norms."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from specguard.checker.enclosure import Array, Box, spectral_norm_above


@dataclass(frozen=True)
class Weights:
    """Per head: W^Q, W^K, W^V of dim x head_dim, W^O of head_dim x dim, biases, H; the softmax weights."""

    Wq: Box
    Wk: Box
    Wv: Box
    Wo: Box
    bq: Box
    bk: Box
    bv: Box
    bo: Box
    skip: bool
    mix: Box  # per head
    fixed: Box | None  # head x token x token
    bias: Box | None = None  # of the logits, head x token x token

    @property
    def tau(self) -> Box:
        return Box.exact(1.0) / Box.exact(float(self.Wq.shape[2])).sqrt()

    @property
    def most_tau(self) -> float:
        return float(self.tau.size)

    @cached_property
    def q(self) -> Array:
        return np.asarray(spectral_norm_above(self.Wq))

    @cached_property
    def k(self) -> Array:
        return np.asarray(spectral_norm_above(self.Wk))

    @cached_property
    def v(self) -> Array:
        return np.asarray(spectral_norm_above(self.Wv))

    @cached_property
    def all_v(self) -> float:
        return float(spectral_norm_above(self.Wv.rearrange(lambda a: a.transpose(1, 0, 2).reshape(a.shape[1], -1))))

    @cached_property
    def o(self) -> float:
        return float(spectral_norm_above(self.Wo.rearrange(lambda a: a.reshape(-1, a.shape[2]))))

    @cached_property
    def B(self) -> Array:
        """`||W_l^Q W_l^K^T||`."""
        return np.asarray(spectral_norm_above(self.Wq @ self.Wk.T))

    @cached_property
    def VO(self) -> Box:
        return self.Wv @ self.Wo

    @cached_property
    def vo(self) -> Array:
        return np.asarray(spectral_norm_above(self.VO))
