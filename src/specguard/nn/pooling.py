"""Pools: what the head reads of all tokens."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from specguard.errors import ConfigError


class ClassPool(nn.Module):
    """The first token."""

    def forward(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch dim"]:
        return x[:, 0]


class MeanPool(nn.Module):
    """The mean of all tokens but the first `skip`."""

    def __init__(self, skip: int = 0) -> None:
        super().__init__()
        if skip < 0:
            raise ConfigError(f"a mean cannot leave out {skip} tokens")
        self.skip = skip

    def forward(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch dim"]:
        return x[:, self.skip :].mean(1)

    def extra_repr(self) -> str:
        return f"skip={self.skip}"


class FirstTokens(nn.Module):
    """The first `count` tokens, one behind the other in one row: for heads that read more than a class token."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch all"]:
        return x[:, : self.count].flatten(1)

    def extra_repr(self) -> str:
        return f"count={self.count}"


class ClassAndMean(nn.Module):
    """The class token, and behind it the mean of the tokens that follow the first `skip`."""

    def __init__(self, skip: int = 1) -> None:
        super().__init__()
        self.skip = skip

    def forward(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch both"]:
        return torch.cat([x[:, 0], x[:, self.skip :].mean(1)], 1)

    def extra_repr(self) -> str:
        return f"skip={self.skip}"
