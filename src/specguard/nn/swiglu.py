"""The gated unit of SwiGLU, between a linear map to [gate | value] and a linear map."""

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import silu

from specguard.errors import ConfigError


class GatedUnit(nn.Module):
    """silu(gate) * value for channels [gate | value], silu(t) = t sigmoid(t): the middle of SwiGLU.

    Example:
        >>> import torch
        >>> GatedUnit()(torch.tensor([[0.0, 5.0]]))
        tensor([[0.]])
    """

    def forward(self, x: Float[Tensor, "*shape both"]) -> Float[Tensor, "*shape half"]:
        if x.shape[-1] % 2:
            raise ConfigError(f"a gated unit needs an even number of channels, not {x.shape[-1]}")
        gate, value = x.chunk(2, -1)
        return silu(gate) * value
