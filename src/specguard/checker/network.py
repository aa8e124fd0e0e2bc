"""Read a model for the checker: every layer's weights as NumPy arrays.

Modules are traversed by exact type; a layer that is not in the checker's table raises an error that names it.
"""

import copy

import torch
from torch import nn
from torch.nn.utils import parametrize

from specguard import nn as own
from specguard.checker.layers import affine
from specguard.checker.reading import Leaf, Reading, Skip, Step
from specguard.checker.rules import attention, pair, rule
from specguard.checker.shapes import for_shape
from specguard.checker.zonotope import rules as enclosures
from specguard.checker.zonotope.rules import IDENTITY
from specguard.errors import ConfigError
from specguard.nn import check_plain, materialized
from specguard.nn.settings import number

_ATTENTION = (own.Attention, own.GatedPositionalAttention, own.SkipAttention)
_SEQUENCES = (own.ViT, own.Block, nn.Sequential, own.Network)


def read(model: nn.Module) -> Reading:
    """Read the layers of a model, with its exact weights in float64.

    Args:
        model: a model in eval mode, without hooks or replaced functions.

    Returns:
        A `Reading`, which `Image.of` takes.

    Raises:
        ConfigError: if a layer cannot be read.

    Example:
        >>> from torch import nn
        >>> from specguard.checker import read
        >>> [step.name for step in read(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).eval()).steps]
        ['0', '1']
    """
    check_plain(model)
    plain = materialized(model).requires_grad_(False)
    parametrized = any(parametrize.is_parametrized(layer) for layer in model.modules())
    twin = copy.deepcopy(model).double().requires_grad_(False) if parametrized else plain
    types = (
        {t.dtype for t in plain.state_dict().values() if t.is_floating_point()} if parametrized else {torch.float64}
    )
    tolerance = max((torch.finfo(kind).eps for kind in types), default=0.0) ** 0.5
    for name, tensor in (*plain.named_parameters(), *plain.named_buffers()):
        if not tensor.isfinite().all():
            raise ConfigError(f"{name} has entries that are not finite")
    return Reading(_steps("", plain.double()), twin, tolerance)


def _sequence(name: str, layer: nn.Module) -> tuple[Step, ...]:
    """The children of a sequence in order; two with a joint rule are one step, named after the second."""
    children = [(_join(name, child), inner) for child, inner in layer._modules.items() if inner is not None]
    steps: list[Step] = []
    if isinstance(layer, own.ViT | own.Network):
        shape = tuple(layer.shape)
        steps.append(Leaf(_join(name, "input"), for_shape(lambda s: s == shape, affine.identity), IDENTITY))
    while children:
        (first, one), rest = children[0], children[1:]
        following = rest[0] if rest else None
        if following and (make := pair(one, following[1])):
            steps.append(Leaf(following[0], make, enclosures.pair(one, following[1])))
            children = rest[1:]
        else:
            steps += _steps(first, one)
            children = rest
    return tuple(steps)


def _join(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


def _steps(name: str, layer: nn.Module) -> tuple[Step, ...]:
    if type(layer) in _SEQUENCES:
        return _sequence(name, layer)
    if type(layer) is own.Residual:
        scale = number(f"the scale of {name}", layer.scale)
        nontrivial = [
            (n, inner)
            for n, inner in _flatten_sequence(f"{name}.branch", layer.branch)
            if type(inner) is not nn.Identity
        ]
        if len(nontrivial) == 1 and type(nontrivial[0][1]) in _ATTENTION:
            inner_name, inner = nontrivial[0]
            return (Leaf(inner_name, attention(inner, scale), enclosures.attention(inner, scale)),)
        return (Skip(name, scale, _steps(f"{name}.branch", layer.branch)),)
    return (Leaf(name, rule(name, layer), enclosures.rule(layer)),)


def _flatten_sequence(name: str, layer: nn.Module) -> list[tuple[str, nn.Module]]:
    if type(layer) is not nn.Sequential:
        return [(name, layer)]
    children = [(child, inner) for child, inner in layer._modules.items() if inner is not None]
    return [pair for child, inner in children for pair in _flatten_sequence(f"{name}.{child}", inner)]
