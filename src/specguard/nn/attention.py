"""Dot-product attention, ConViT's gated positional attention, and where their weights are.

Each layer has two forward paths that agree to rounding. `fused=True` uses torch's `scaled_dot_product_attention`;
`fused=False` writes the probabilities out, for attention maps and for forward-mode and second-order derivatives,
which the fused kernel does not have.
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
    """softmax(Q K^T / sqrt(head_dim)) V of every head, concatenated and mapped by W^O."""

    def __init__(self, dim: int, heads: int, bias: bool = True, fused: bool = True) -> None:
        super().__init__()
        self.heads = _dividing(dim, heads)
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
    `side` x `side` grid; there is no class token here.  Reference: d'Ascoli et al. 2021, Eq. (7).
    """

    offsets: Tensor

    def __init__(self, dim: int, heads: int, side: int, bias: bool = False, fused: bool = True) -> None:
        super().__init__()
        self.heads = _dividing(dim, heads)
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
    """Attention with the skip inside the value space: P = (1 - mix) I + mix softmax(Q K^T / sqrt(head_dim)).

    With orthogonal W^V and W^O its linear part has the norm of P, near one while no token draws all attention. With
    `position_bias` a learned `bias`, a number for every head and pair of `tokens`, is added to the logits: where to
    look, at no cost in sensitivity, for it does not depend on the image.
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
            raise ConfigError("a position bias, and nothing else, needs the number of tokens, at least 1")
        self.heads = _dividing(dim, heads)
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
        """What is added to the logits, in the type of the queries; fused kernels take four axes only."""
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
    """The weights of one attention layer, as it stores them: gradients flow to its parameters.

    `rows` holds matrices that are stacked by output rows, such as ("qkv", W) where one map makes all three, and
    `o` is W^O. A head of q, k or v is a block of output rows of its matrix; a head of o a block of input columns.
    """

    layer: str
    heads: int
    rows: tuple[tuple[str, Float[Tensor, "_ _"]], ...]  # of sizes that need not agree
    o: Float[Tensor, "_ _"]

    def matrix(self, which: str) -> Float[Tensor, "out in"]:
        """The whole matrix q, k, v or o."""
        if which == "o":
            return self.o
        names, weight = next((names, weight) for names, weight in self.rows if which in names)
        return weight.unflatten(0, (len(names), -1))[names.index(which)]

    def per_head(self, which: str) -> Float[Tensor, "head out in"]:
        """The matrices of the heads of q, k, v or o."""
        if which == "o":
            return self.o.unflatten(1, (self.heads, -1)).transpose(0, 1)
        return self.matrix(which).unflatten(0, (self.heads, -1))


_KINDS = (Attention, GatedPositionalAttention, SkipAttention)
_ALL = (*_KINDS, CoreAttention)  # the last has no weights of its own


def attention_weights(model: nn.Module) -> tuple[AttentionWeights, ...]:
    """The q, k, v and o of every attention layer of `model`, in order."""
    return tuple(
        AttentionWeights(name, layer.heads, (("qkv", layer.qkv.weight),), layer.out.weight)
        for layer, name in _attention_layers(model, _KINDS).items()
    )


def _attention_layers(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> dict[Any, str]:
    """Every layer of these kinds with its name, in order; a subclass of one is an error, for it may be anything."""
    found: dict[Any, str] = {}
    _find_attention(model, "", kinds, found)
    return found


def _find_attention(
    module: nn.Module, name: str, kinds: tuple[type[nn.Module], ...], found: dict[Any, str]
) -> None:
    """As `named_modules`, at a quarter of its cost."""
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


def explicit(model: nn.Module) -> nn.Module:
    """A copy of `model` on the explicit path, sharing every parameter and buffer with it."""
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, memo=dict(shared))
    for layer in _attention_layers(twin, _ALL):
        layer.fused = False
    return twin


def attention_maps(model: nn.Module, images: Float[Tensor, "batch *shape"]) -> tuple[Maps, ...]:
    """The attention probabilities of every layer for these images, in order."""
    maps: list[Tensor] = []
    twin = explicit(model)
    for layer in _attention_layers(twin, _ALL):
        layer.register_forward_pre_hook(lambda layer, inputs: maps.append(layer.probabilities(*inputs)))
    twin(images)
    return tuple(maps)


def _dividing(dim: int, heads: int) -> int:
    if heads < 1 or dim % heads:
        raise ConfigError(f"dim {dim} cannot be divided among {heads} heads")
    return heads
