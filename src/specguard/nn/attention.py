"""Dot-product attention, ConViT's gated positional attention, and access to their weights and maps.

Each layer has two forward paths that agree up to rounding. `fused=True` uses torch's
`scaled_dot_product_attention`; `fused=False` forms the probabilities explicitly, for attention maps and for
forward-mode and second-order derivatives, which the fused kernel does not support.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from specguard.errors import ConfigError
from specguard.nn.dot_product import (
    Bias,
    Heads,
    Maps,
    attention_probabilities,
    mixed_values,
    queries_keys_values,
)
from specguard.nn.qk_norm import CoreAttention
from specguard.nn.settings import fraction

Tokens = Float[Tensor, "batch token dim"]


class Attention(nn.Module):
    """Multi-head self-attention: softmax(Q K^T / sqrt(head_dim)) V of every head, concatenated and mapped by W^O.

    Args:
        dim: Channels of a token.
        heads: Number of heads, a divisor of `dim`.
        bias: Whether the map to queries, keys and values has a bias.
        fused: Whether the forward pass uses torch's fused kernel.

    Example:
        >>> layer = Attention(dim=8, heads=2)
        >>> layer(torch.zeros(1, 3, 8)).shape
        torch.Size([1, 3, 8])
    """

    def __init__(self, dim: int, heads: int, bias: bool = True, fused: bool = True) -> None:
        super().__init__()
        self.heads = _check_heads(dim, heads)
        self.fused = fused
        self.qkv = nn.Linear(dim, 3 * dim, bias=bias)
        self.out = nn.Linear(dim, dim)

    def probabilities(self, x: Tokens) -> Maps:
        """The attention maps P, one per head; rows sum to one."""
        q, k, _ = queries_keys_values(self.qkv(x), self.heads)
        return attention_probabilities(q, k)

    def forward(self, x: Tokens) -> Tokens:
        q, k, v = queries_keys_values(self.qkv(x), self.heads)
        mixed = mixed_values(q, k, v, self.fused)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def extra_repr(self) -> str:
        return f"heads={self.heads}, fused={self.fused}"


class GatedPositionalAttention(nn.Module):
    """ConViT: P = (1 - g) softmax(Q K^T / sqrt(head_dim)) + g softmax(positions), g = sigmoid(gate) per head.

    The positional logits are a learned linear function of (dx, dy, dx^2 + dy^2) between patches of a
    `side` x `side` grid without a class token.  Reference: d'Ascoli et al. 2021, Eq. (7).

    Args:
        dim: Channels of a token.
        heads: Number of heads, a divisor of `dim`.
        side: Patches along one edge of the image; the layer takes side^2 tokens.
        bias: Whether the map to queries, keys and values has a bias.
        fused: Whether the forward pass uses torch's fused kernel.

    Example:
        >>> layer = GatedPositionalAttention(dim=8, heads=2, side=2)
        >>> layer(torch.zeros(1, 4, 8)).shape
        torch.Size([1, 4, 8])
    """

    offsets: Tensor

    def __init__(self, dim: int, heads: int, side: int, bias: bool = False, fused: bool = True) -> None:
        super().__init__()
        self.heads = _check_heads(dim, heads)
        self.fused = fused
        self.qkv = nn.Linear(dim, 3 * dim, bias=bias)
        self.out = nn.Linear(dim, dim)
        self.position = nn.Linear(3, heads)
        self.gate = nn.Parameter(torch.ones(heads))
        row, col = torch.arange(side).repeat_interleave(side), torch.arange(side).repeat(side)
        dx, dy = col[None, :] - col[:, None], row[None, :] - row[:, None]
        offsets = torch.stack([dx, dy, dx**2 + dy**2], dim=-1).float()
        self.register_buffer("offsets", offsets, persistent=False)

    def positional(self) -> Float[Tensor, "head token token"]:
        """softmax(positions): the same for every image."""
        return self.position(self.offsets).permute(2, 0, 1).softmax(-1)

    def probabilities(self, x: Tokens) -> Maps:
        """The gated attention maps, one per head; rows sum to one."""
        q, k, _ = queries_keys_values(self.qkv(x), self.heads)
        return torch.lerp(attention_probabilities(q, k), self.positional().expand(len(x), -1, -1, -1), self._gate())

    def forward(self, x: Tokens) -> Tokens:
        q, k, v = queries_keys_values(self.qkv(x), self.heads)
        content = mixed_values(q, k, v, self.fused)
        mixed = torch.lerp(content, self.positional().to(v.dtype) @ v, self._gate().to(v.dtype))
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _gate(self) -> Tensor:
        return self.gate.sigmoid().view(-1, 1, 1)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, fused={self.fused}"


class SkipAttention(nn.Module):
    """Attention with the skip connection in the value space: P = (1 - mix) I + mix softmax(Q K^T / sqrt(head_dim)).

    With orthogonal W^V and W^O its linear part has the norm of P, which is near one unless one token receives most
    of the attention. A position bias does not depend on the image, so it adds nothing to the Lipschitz constant.

    Args:
        dim: Channels of a token.
        heads: Number of heads, a divisor of `dim`.
        mix: Weight of attention against the identity, between 0 and 1.
        bias: Whether the map to queries, keys and values has a bias.
        fused: Whether the forward pass uses torch's fused kernel.
        position_bias: Whether a learned `bias`, one entry per head and pair of tokens, is added to the logits.
        tokens: Number of tokens; required with `position_bias`, and only then.

    Example:
        >>> layer = SkipAttention(dim=8, heads=2, mix=0.3, position_bias=True, tokens=3)
        >>> layer(torch.zeros(1, 3, 8)).shape
        torch.Size([1, 3, 8])
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        heads: int,
        mix: float = 0.5,
        bias: bool = True,
        fused: bool = True,
        *,
        position_bias: bool = False,
        tokens: int | None = None,
    ) -> None:
        super().__init__()
        if position_bias != (tokens is not None) or (tokens is not None and tokens < 1):
            raise ConfigError("tokens, at least 1, must be given with position_bias, and only then")
        self.heads = _check_heads(dim, heads)
        self.mix = fraction("mix", mix)
        self.fused = fused
        self.qkv = nn.Linear(dim, 3 * dim, bias=bias)
        self.out = nn.Linear(dim, dim)
        self.register_parameter(
            "bias", None if tokens is None else nn.Parameter(torch.zeros(heads, tokens, tokens))
        )

    def probabilities(self, x: Tokens) -> Maps:
        """The mixed attention maps, one per head; rows sum to one."""
        q, k, _ = queries_keys_values(self.qkv(x), self.heads)
        maps = attention_probabilities(q, k, self._positions(q))
        return torch.lerp(torch.eye(x.shape[1], dtype=x.dtype, device=x.device), maps, self.mix)

    def forward(self, x: Tokens) -> Tokens:
        q, k, v = queries_keys_values(self.qkv(x), self.heads)
        content = mixed_values(q, k, v, self.fused, self._positions(q))
        return self.out(torch.lerp(v, content, self.mix).transpose(1, 2).flatten(2))

    def _positions(self, q: Heads) -> Bias | None:
        """The bias of the logits, in the dtype of the queries; fused kernels require four axes."""
        if self.bias is None:
            return None
        if self.bias.shape[-1] != q.shape[-2]:
            raise ConfigError(f"its positions are for {self.bias.shape[-1]} tokens, not {q.shape[-2]}")
        return self.bias.to(q.dtype)[None]

    def extra_repr(self) -> str:
        tokens = "" if self.bias is None else f", tokens={self.bias.shape[-1]}"
        return f"heads={self.heads}, mix={self.mix}, fused={self.fused}{tokens}"


@dataclass(frozen=True)
class AttentionWeights:
    """The weights of one attention layer as the layer stores them; gradients flow to its parameters.

    A head of q, k or v is a block of output rows of its matrix; a head of o is a block of input columns.

    Args:
        layer: Name of the layer in its model.
        heads: Number of heads.
        rows: Matrices by the names that they stack along their output rows, such as ("qkv", W) for one joint map.
        o: The output matrix W^O.

    Example:
        >>> (weights,) = attention_weights(Attention(dim=8, heads=2))
        >>> weights.matrix("q").shape, weights.per_head("q").shape
        (torch.Size([8, 8]), torch.Size([2, 4, 8]))
    """

    layer: str
    heads: int
    rows: tuple[tuple[str, Float[Tensor, "_ _"]], ...]  # sizes may differ
    o: Float[Tensor, "_ _"]

    def matrix(self, which: str) -> Float[Tensor, "out in"]:
        """The whole matrix of "q", "k", "v" or "o"."""
        if which == "o":
            return self.o
        names, weight = next((names, weight) for names, weight in self.rows if which in names)
        return weight.unflatten(0, (len(names), -1))[names.index(which)]

    def per_head(self, which: str) -> Float[Tensor, "head out in"]:
        """The matrices of the heads of "q", "k", "v" or "o"."""
        if which == "o":
            return self.o.unflatten(1, (self.heads, -1)).transpose(0, 1)
        return self.matrix(which).unflatten(0, (self.heads, -1))


_KINDS = (Attention, GatedPositionalAttention, SkipAttention)
_ALL = (*_KINDS, CoreAttention)  # CoreAttention has no weights


def attention_weights(model: nn.Module) -> tuple[AttentionWeights, ...]:
    """The q, k, v and o matrices of every attention layer of this package in `model`, in order.

    `specguard.models.attention_weights` also reads models of timm, transformers, torchvision and torch.

    Args:
        model: Any module that contains `Attention`, `GatedPositionalAttention` or `SkipAttention`.

    Returns:
        One `AttentionWeights` per layer.

    Example:
        >>> model = nn.Sequential(Attention(dim=8, heads=2), Attention(dim=8, heads=4))
        >>> [(weights.layer, weights.heads) for weights in attention_weights(model)]
        [('0', 2), ('1', 4)]
    """
    return tuple(
        AttentionWeights(name, layer.heads, (("qkv", layer.qkv.weight),), layer.out.weight)
        for layer, name in _attention_layers(model, _KINDS).items()
    )


def _attention_layers(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> dict[Any, str]:
    """Every layer of these kinds with its name, in order; subclasses are refused, as they may compute anything."""
    found: dict[Any, str] = {}
    _find_attention(model, "", kinds, found)
    return found


def _find_attention(
    module: nn.Module, name: str, kinds: tuple[type[nn.Module], ...], found: dict[Any, str]
) -> None:
    """Add the attention layers below `module`: `named_modules` at a quarter of its cost."""
    if isinstance(module, kinds):
        if type_before_parametrizations(module) not in kinds:
            raise ConfigError(
                f"{name or 'the model'} is a subclass of attention, {type(module).__name__}, unknown here"
            )
        found.setdefault(module, name)
        return
    for child, inner in module._modules.items():
        if inner is not None:
            _find_attention(inner, f"{name}.{child}" if name else child, kinds, found)


def unfuse_attention(model: nn.Module) -> nn.Module:
    """A copy of `model` whose attention does not use the fused kernel; parameters and buffers are shared.

    The copy supports forward-mode and second-order derivatives.

    Args:
        model: Any module; attention layers of this package are switched to `fused=False`.

    Returns:
        The copy.

    Example:
        >>> model = Attention(dim=8, heads=2)
        >>> twin = unfuse_attention(model)
        >>> model.fused, twin.fused, twin.qkv.weight is model.qkv.weight
        (True, False, True)
    """
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, memo=dict(shared))
    for layer in _attention_layers(twin, _ALL):
        layer.fused = False
    return twin


def attention_maps(model: nn.Module, images: Float[Tensor, "batch *shape"]) -> tuple[Maps, ...]:
    """The attention probabilities of every layer for these images, in order.

    Args:
        model: Any module with attention layers of this package.
        images: A batch of inputs of `model`.

    Returns:
        For every layer a tensor of shape batch x heads x tokens x tokens, whose rows sum to one.

    Example:
        >>> (maps,) = attention_maps(Attention(dim=8, heads=2), torch.zeros(1, 3, 8))
        >>> maps.shape
        torch.Size([1, 2, 3, 3])
    """
    maps: list[Tensor] = []
    twin = unfuse_attention(model)
    for layer in _attention_layers(twin, _ALL):
        layer.register_forward_pre_hook(lambda layer, inputs: maps.append(layer.probabilities(*inputs)))
    twin(images)
    return tuple(maps)


def _check_heads(dim: int, heads: int) -> int:
    if heads < 1 or dim % heads:
        raise ConfigError(f"dim {dim} cannot be divided among {heads} heads")
    return heads
