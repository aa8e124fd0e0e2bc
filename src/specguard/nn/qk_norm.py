"""Attention with normalized queries and keys, as a sequence of four layers.

They are a linear map to [q | k | v], `HeadNorm`, `CoreAttention`, and a linear map.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import layer_norm, rms_norm

from specguard.errors import ConfigError
from specguard.nn.dot_product import Heads, Maps, attention_probabilities, mixed_values, queries_keys_values


class HeadNorm(nn.Module):
    """Normalize each head of q and of k in [q | k | v] over its channels; v is unchanged.

    Heads share their gains and shifts, as in timm.

    Args:
        dim: Channels of the queries.
        heads: Number of heads, a divisor of `dim`.
        eps: Added to the variance, or to the mean square.
        centered: LayerNorm if true, RMSNorm otherwise.

    Example:
        >>> HeadNorm(dim=4, heads=2)(torch.zeros(1, 3, 12)).shape
        torch.Size([1, 3, 12])
    """

    def __init__(self, dim: int, heads: int, eps: float = 1e-6, centered: bool = True) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise ConfigError(f"dim {dim} cannot be divided among {heads} heads")
        self.heads, self.eps, self.centered = heads, eps, centered
        self.gain = nn.Parameter(torch.ones(2, dim // heads))  # row 0: queries, row 1: keys
        self.shift = nn.Parameter(torch.zeros(2, dim // heads))

    def forward(self, x: Float[Tensor, "batch token qkv"]) -> Float[Tensor, "batch token qkv"]:
        q, k, v = x.unflatten(-1, (3, self.heads, -1)).unbind(-3)
        return torch.stack([self._normalize(q, 0), self._normalize(k, 1), v], -3).flatten(-3)

    def _normalize(self, x: Tensor, which: int) -> Tensor:
        size = (x.shape[-1],)
        if self.centered:
            return layer_norm(x, size, self.gain[which], self.shift[which], self.eps)
        return rms_norm(x, size, self.gain[which], self.eps) + self.shift[which]

    def extra_repr(self) -> str:
        return f"heads={self.heads}, eps={self.eps}, centered={self.centered}"


class CoreAttention(nn.Module):
    """softmax(Q K^T / sqrt(head_dim)) V of every head of [q | k | v], concatenated: attention without linear maps.

    Args:
        heads: Number of heads.
        fused: Whether the forward pass uses torch's fused kernel.

    Example:
        >>> CoreAttention(heads=2)(torch.zeros(1, 3, 12)).shape
        torch.Size([1, 3, 4])
    """

    def __init__(self, heads: int, fused: bool = True) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused

    def probabilities(self, x: Float[Tensor, "batch token qkv"]) -> Maps:
        """The attention maps, one per head; rows sum to one."""
        q, k, _ = self._split(x)
        return attention_probabilities(q, k)

    def forward(self, x: Float[Tensor, "batch token qkv"]) -> Float[Tensor, "batch token dim"]:
        return mixed_values(*self._split(x), self.fused).transpose(1, 2).flatten(2)

    def _split(self, x: Tensor) -> tuple[Heads, Heads, Heads]:
        if x.shape[-1] % (3 * self.heads):
            raise ConfigError(f"{x.shape[-1]} channels cannot be divided into q, k and v of {self.heads} heads")
        return queries_keys_values(x, self.heads)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, fused={self.fused}"
