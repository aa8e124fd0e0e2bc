"""Pooling: which features of the tokens the head reads."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from specguard.errors import ConfigError


class ClassPool(nn.Module):
    """The first token.

    Example:
        >>> ClassPool()(torch.tensor([[[1.0], [3.0], [5.0]]]))
        tensor([[1.]])
    """

    def forward(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch dim"]:
        return x[:, 0]


class MeanPool(nn.Module):
    """The mean of all tokens but the first `skip`.

    Args:
        skip: Number of tokens to leave out at the beginning.

    Example:
        >>> MeanPool(skip=1)(torch.tensor([[[1.0], [3.0], [5.0]]]))
        tensor([[4.]])
    """

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
    """The first `count` tokens, concatenated: for heads that read more than a class token.

    Args:
        count: Number of tokens.

    Example:
        >>> FirstTokens(count=2)(torch.tensor([[[1.0], [3.0], [5.0]]]))
        tensor([[1., 3.]])
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch all"]:
        return x[:, : self.count].flatten(1)

    def extra_repr(self) -> str:
        return f"count={self.count}"


class ClassAndMean(nn.Module):
    """The class token, concatenated with the mean of the tokens after the first `skip`.

    Args:
        skip: Number of tokens that the mean leaves out at the beginning.

    Example:
        >>> ClassAndMean(skip=1)(torch.tensor([[[1.0], [3.0], [5.0]]]))
        tensor([[1., 4.]])
    """

    def __init__(self, skip: int = 1) -> None:
        super().__init__()
        self.skip = skip

    def forward(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch both"]:
        return torch.cat([x[:, 0], x[:, self.skip :].mean(1)], 1)

    def extra_repr(self) -> str:
        return f"skip={self.skip}"
