"""The model that is converted, in float64, and the conversion back to its own dtype.

Some weights are combined rather than copied, such as a token and its position. The network is compared with the
original before it is rounded, so that the comparison covers everything except this rounding.
"""

import copy
from collections import OrderedDict
from dataclasses import dataclass
from functools import reduce
from itertools import chain

import torch
from torch import nn
from torch.nn.utils import parametrize

from specguard.errors import ConfigError
from specguard.models.equality import View, compare
from specguard.models.layers import Part
from specguard.nn import Network, find_overrides, materialized

_LIBRARIES = ("torch", "timm", "torchvision", "transformers")
_ONLY_RECORDS = "transformers.utils.output_capturing"  # its hooks only record outputs


@dataclass(frozen=True)
class Original:
    """A copy of the original in float64 and eval mode, the same with folded parametrizations, and its own dtype."""

    model: nn.Module
    part: Part
    dtype: torch.dtype

    def network(
        self,
        name: str | None,
        shape: tuple[int, ...],
        layers: "OrderedDict[str, nn.Module]",
        view: View,
        generator: torch.Generator | None,
    ) -> Network:
        """The layers as one network in eval mode, compared with the original and rounded to its dtype."""
        head = layers["head"]
        assert isinstance(head, nn.Linear)
        result = Network(name or type(self.model).__name__, shape, head.out_features, layers).eval()
        compare(self.model, result, view, generator)
        return result.to(self.dtype)


def read_original(model: nn.Module) -> Original:
    """A copy of the model to convert; modules that may compute something other than their type are refused."""
    for name, module in model.named_modules():
        part = Part(name, module)
        if part.kind.partition(".")[0] not in _LIBRARIES:
            raise part.refused("which is of no library that is known here, and may compute anything")
    theirs, dtype = plain_copy(model), dtype_of(model)
    folded = any(parametrize.is_parametrized(module) for module in theirs.modules())
    return Original(theirs, Part("", materialized(theirs) if folded else theirs), dtype)


def plain_copy(model: nn.Module) -> nn.Module:
    """A copy in float64 and eval mode; weights that are not finite, hooks and replaced functions are refused."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise ConfigError(f"{name} is on the meta device and has no values; load the weights first")
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ConfigError(f"{name} holds entries that are not finite")
    theirs = copy.deepcopy(model).double().eval()
    for module in theirs.modules():
        for key, hook in list(module._forward_hooks.items()):
            if getattr(hook, "__module__", None) == _ONLY_RECORDS:
                del module._forward_hooks[key]
    for name, what in find_overrides(theirs):
        raise ConfigError(f"{name} has {what}; a conversion cannot see what it does")
    return theirs


def dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype of a model's weights; the most precise one if there are several."""
    types = [p.dtype for p in model.parameters()]
    if not types:
        raise Part("", model).refused("which has no weights")
    return reduce(torch.promote_types, types)
