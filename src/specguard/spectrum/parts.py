"""A network divided into the maps whose Jacobians are studied: embedding, blocks, branches, head.

"ViT as a Cauchy problem" reads a residual network as Euler steps of dx/dt = F(x): its theorem is about the Jacobian
of F, while a step has the Jacobian I + J_F. The function of a residual part is F, and `step` is the whole step.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from specguard.errors import ConfigError
from specguard.inputs import ImagesLike, as_images
from specguard.nn import Block, Network, Residual, ViT, unfuse_attention

Kind = Literal["map", "residual"]
Group = Literal["embedding", "block", "attention", "mlp", "head", "network"]
Function = Callable[[Tensor], Tensor]
_BRANCHES = ("attention", "mlp")  # the parts of a block; its other layers belong only to the block


@dataclass(frozen=True)
class Part:
    """A map of the network, at its inputs for given images. A residual part maps x to x + function(x).

    Args:
        name: such as "blocks.0.attention"
        group: embedding, block, attention, mlp, head or network
        kind: "residual", or "map" without a skip connection
        function: the map; of a residual part, the branch without the skip connection
        before: the map from images to the input of this part
        at: the inputs of this part for the given images

    Example:
        >>> import torch
        >>> from specguard.spectrum import Part
        >>> part = Part("double", "block", "residual", lambda x: 2 * x, torch.nn.Identity(), torch.ones(1, 2))
        >>> part.step(part.at)
        tensor([[3., 3.]])
    """

    name: str
    group: Group
    kind: Kind
    function: Function
    before: Function
    at: Float[Tensor, "batch *shape"]

    def step(self, x: Float[Tensor, "batch *shape"]) -> Float[Tensor, "batch *out"]:
        """The output of the network's step at x, with the skip connection."""
        return x + self.function(x) if self.kind == "residual" else self.function(x)


@torch.no_grad()
def parts(model: ViT | Network, images: ImagesLike) -> Iterator[Part]:
    """The parts of a network in order, at their inputs for the given images, in eval mode.

    These are the embedding, each block and its two branches, the head, and last the whole network. ConViT's class
    token, added between two groups of blocks, belongs to no part, nor do norms between branches, as in BERT, or the
    maps of certifiable networks.

    Args:
        model: with a sequence of blocks
        images: at which the parts are evaluated

    Yields:
        The parts.

    Example:
        >>> import torch
        >>> from specguard import ViT, preset
        >>> from specguard.spectrum import parts
        >>> model = ViT(preset("tiny"), torch.Generator().manual_seed(0))
        >>> found = {part.name: part for part in parts(model, torch.zeros(2, 1, 8, 8))}
        >>> found["blocks.0.mlp"].at.shape
        torch.Size([2, 17, 48])
    """
    images = as_images(images, model=model, box=False)
    twin = unfuse_attention(model).eval()  # fused attention has no forward derivative
    children = list(twin.named_children())
    holders = [i for i, (_, child) in enumerate(children) if _blocks(child)]
    if not holders:
        raise ConfigError("a model without a sequence of blocks cannot be divided into parts")
    stem, rest = (
        nn.Sequential(*(child for _, child in some))
        for some in (children[: holders[0]], children[holders[-1] + 1 :])
    )
    yield Part("embedding", "embedding", "map", stem, nn.Identity(), images)
    done: list[nn.Module] = [stem]
    z = stem(images)
    for name, child in children[holders[0] : holders[-1] + 1]:
        for number, block in enumerate(_blocks(child)):
            yield Part(f"{name}.{number}", "block", "residual", _block_difference(block), nn.Sequential(*done), z)
            for inner, layer in block.named_children():
                if isinstance(layer, Residual) and inner not in _BRANCHES:
                    raise ConfigError("a block with a branch of an unknown kind cannot be divided into parts")
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
    """The names of parts, in order.

    Args:
        model: with a sequence of blocks
        wanted: names and groups of parts, separated by commas, or "all"

    Returns:
        The names.

    Example:
        >>> import torch
        >>> from specguard import ViT, preset
        >>> from specguard.spectrum import part_names
        >>> part_names(ViT(preset("tiny"), torch.Generator().manual_seed(0)), "embedding,block")
        ('embedding', 'blocks.0', 'blocks.1', 'blocks.2', 'blocks.3')
    """
    return tuple(part.name for part in blank_parts(model, wanted))


def blank_parts(model: ViT | Network, wanted: str = "all") -> tuple[Part, ...]:
    """The parts at their inputs for one image of zeros, in order.

    Args:
        model: with a sequence of blocks
        wanted: names and groups of parts, separated by commas, or "all"

    Returns:
        The parts.

    Example:
        >>> import torch
        >>> from specguard import ViT, preset
        >>> from specguard.spectrum import blank_parts
        >>> (head,) = blank_parts(ViT(preset("tiny"), torch.Generator().manual_seed(0)), "head")
        >>> head.at.shape
        torch.Size([1, 17, 48])
    """
    like = next(model.parameters())
    available = list(parts(model, torch.zeros(1, *model.shape, dtype=like.dtype, device=like.device)))
    words = [word.strip() for word in wanted.split(",")]
    for word in words:
        if word != "all" and not any(word in (part.name, part.group) for part in available):
            groups = ", ".join(dict.fromkeys(part.group for part in available))
            raise ConfigError(
                f"the model has no part {word!r}; there are {groups}, and names from "
                f"{available[0].name} to {available[-3].name}"
            )
    return tuple(part for part in available if {"all", part.name, part.group} & set(words))


def _blocks(child: nn.Module) -> list[Block]:
    """The blocks of a sequence of blocks, none of any other layer."""
    layers = list(child.children()) if type(child) is nn.Sequential else []
    blocks = [layer for layer in layers if type(layer) is Block]
    if blocks and len(blocks) != len(layers):
        raise ConfigError("a model with other layers among its blocks cannot be divided into parts")
    return blocks


def _block_difference(block: Block) -> Function:
    """F of a whole block, the difference of its output and input."""
    return lambda z: block(z) - z


def _branch(layer: nn.Module) -> tuple[Kind, Function]:
    """F of attention or mlp; without a skip connection, the layer itself."""
    if not isinstance(layer, Residual):
        return "map", layer
    return "residual", lambda z: layer.scale * layer.branch(z)
