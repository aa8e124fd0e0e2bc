"""A network cut into the maps whose derivatives are looked at: blocks, branches, what is before and behind them.

"ViT as a Cauchy problem" reads a residual network as Euler steps of dx/dt = F(x): what its theorem speaks of is
the Jacobian of F, while a step as a whole has the Jacobian I + J_F. A residual part here is F, and `step` is what
the network does with it, so that the two cannot be confused.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from specguard.errors import ConfigError
from specguard.nn import Block, Network, Residual, ViT, unfuse_attention

Kind = Literal["map", "residual"]
Group = Literal["embedding", "block", "attention", "mlp", "head", "network"]
Function = Callable[[Tensor], Tensor]
_BRANCHES = ("attention", "mlp")  # of a block; whatever else stands in one belongs to the block alone


@dataclass(frozen=True)
class Part:
    """A map, the points `at` which these images meet it, and the map `before` that takes them there.

    A residual part takes x to x + function(x).
    """

    name: str
    group: Group
    kind: Kind
    function: Function
    before: Function
    at: Float[Tensor, "batch *shape"]

    def step(self, x: Float[Tensor, "batch *shape"]) -> Float[Tensor, "batch *out"]:
        """What the network makes of x here, the skip connection included."""
        return x + self.function(x) if self.kind == "residual" else self.function(x)


@torch.no_grad()
def parts(model: ViT | Network, images: Float[Tensor, "batch *shape"]) -> Iterator[Part]:
    """Every part of the network in order, where the given images meet it, in eval mode.

    The embedding, each block and its two branches, the head, and last the network as a whole. ConViT's class token,
    which joins between two groups of blocks, belongs to none of them, nor do norms between branches, as BERT has,
    or the maps of certifiable networks.
    """
    twin = unfuse_attention(model).eval()  # fused attention has no forward derivative
    children = list(twin.named_children())
    holders = [i for i, (_, child) in enumerate(children) if _blocks(child)]
    if not holders:
        raise ConfigError("a model without a sequence of blocks cannot be taken apart")
    stem, rest = (
        nn.Sequential(*(child for _, child in some))
        for some in (children[: holders[0]], children[holders[-1] + 1 :])
    )
    yield Part("embedding", "embedding", "map", stem, nn.Identity(), images)
    done: list[nn.Module] = [stem]
    z = stem(images)
    for name, child in children[holders[0] : holders[-1] + 1]:
        for number, block in enumerate(_blocks(child)):
            yield Part(f"{name}.{number}", "block", "residual", _change(block), nn.Sequential(*done), z)
            for inner, layer in block.named_children():
                if isinstance(layer, Residual) and inner not in _BRANCHES:
                    raise ConfigError("a block with a branch of an unknown kind cannot be taken apart")
                if inner in _BRANCHES:
                    kind, function = _branch(layer)
                    before = nn.Sequential(*done)
                    yield Part(f"{name}.{number}.{inner}", cast(Group, inner), kind, function, before, z)
                done, z = [*done, layer], layer(z)
        if not _blocks(child):
            done, z = [*done, child], child(z)
    yield Part("head", "head", "map", rest, nn.Sequential(*done), z)
    yield Part("network", "network", "map", twin, nn.Identity(), images)


def part_names(model: ViT | Network, wanted: str = "all") -> tuple[str, ...]:
    """The names of parts, in order: all of them, or those of the groups and names in a list with commas."""
    return tuple(part.name for part in blank_parts(model, wanted))


def blank_parts(model: ViT | Network, wanted: str = "all") -> tuple[Part, ...]:
    """The parts of these names or groups, in order, where one image of zeros meets them."""
    like = next(model.parameters())
    known = list(parts(model, torch.zeros(1, *model.shape, dtype=like.dtype, device=like.device)))
    asked = [word.strip() for word in wanted.split(",")]
    for word in asked:
        if word != "all" and not any(word in (part.name, part.group) for part in known):
            groups = ", ".join(dict.fromkeys(part.group for part in known))
            raise ConfigError(
                f"the model has no part {word!r}; there are {groups}, and names from {known[0].name} to "
                f"{known[-3].name}"
            )
    return tuple(part for part in known if {"all", part.name, part.group} & set(asked))


def _blocks(child: nn.Module) -> list[Block]:
    """The blocks of a sequence of blocks; anything else has none."""
    layers = list(child.children()) if type(child) is nn.Sequential else []
    blocks = [layer for layer in layers if type(layer) is Block]
    if blocks and len(blocks) != len(layers):
        raise ConfigError("a model with other layers among its blocks cannot be taken apart")
    return blocks


def _change(block: Block) -> Function:
    """F of a whole block: what it adds to its input."""
    return lambda z: block(z) - z


def _branch(layer: nn.Module) -> tuple[Kind, Function]:
    """What attention or mlp adds to its input; where it has no skip connection around it, the map that it is."""
    if not isinstance(layer, Residual):
        return "map", layer
    return "residual", lambda z: layer.scale * layer.branch(z)
