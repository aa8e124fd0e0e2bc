"""Read a model of another library module by module, and create the corresponding layers of this package.

A module is recognized by the full name of its exact type, such as "timm.layers.mlp.Mlp": its library need not be
imported here, and a subclass, which may compute anything, is not accepted for its base class. All weights are
copied.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from specguard.errors import ConfigError
from specguard.nn import Attention, CoreAttention, GatedUnit, HeadNorm, LayerScale, Residual

_NOTHING = frozenset(
    {
        "torch.nn.modules.linear.Identity",
        "torch.nn.modules.dropout.Dropout",
        "timm.layers.drop.DropPath",
        "timm.layers.patch_dropout.PatchDropout",
        "timm.layers.patch_dropout.PatchDropoutWithIndices",
        "transformers.models.dinov2.modeling_dinov2.Dinov2DropPath",
        "transformers.models.dinov2_with_registers.modeling_dinov2_with_registers.Dinov2WithRegistersDropPath",
    }
)
_LAYER_NORMS = {"torch.nn.modules.normalization.LayerNorm", "timm.layers.norm.LayerNorm"}
_RMS_NORMS = {"torch.nn.modules.normalization.RMSNorm", "timm.layers.norm.RmsNorm"}
_GELU_ERF = {"timm.layers.activations.GELU", "transformers.activations.GELUActivation"}
_GELU_TANH = {
    "timm.layers.activations.GELUTanh",
    "transformers.activations.GELUTanh",
    "transformers.activations.PytorchGELUTanh",
    "transformers.activations.NewGELUActivation",
}
_SILU = {"torch.nn.modules.activation.SiLU", "transformers.activations.SiLUActivation"}


def kind(module: nn.Module) -> str:
    """The full name of a module's type, before parametrization."""
    exact = parametrize.type_before_parametrizations(module)
    return f"{exact.__module__}.{exact.__qualname__}"


@dataclass(frozen=True)
class Part:
    """A module of the original and its path there."""

    path: str
    module: Any

    @property
    def kind(self) -> str:
        return kind(self.module)

    @property
    def vanishes(self) -> bool:
        """Whether it is the identity in eval mode."""
        return self.kind in _NOTHING

    def child(self, name: str) -> "Part":
        module = getattr(self.module, name, None)
        path = f"{self.path}.{name}" if self.path else name
        if not isinstance(module, nn.Module):
            raise ConfigError(f"the model has no module {path}, which a {self.kind} should have")
        return Part(path, module)

    def children(self) -> list["Part"]:
        return [self.child(name) for name, _ in self.module.named_children()]

    def only(self, *names: str) -> None:
        """Refuse a child that is not among `names`, unless it is the identity."""
        for name, _ in self.module.named_children():
            part = self.child(name)
            if name not in names and not part.vanishes:
                raise part.refused()

    def refused(self, why: str = "") -> ConfigError:
        reason = why or "which has no counterpart among the layers of this package"
        return ConfigError(f"{self.path or 'the model'} is a {self.kind}, {reason}")


def copied(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach().clone())


def linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    with torch.device("meta"):  # skip the random initialization
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = copied(weight)
    if bias is not None:
        layer.bias = copied(bias)
    return layer


def linear(part: Part) -> nn.Linear:
    if part.kind != "torch.nn.modules.linear.Linear":
        raise part.refused()
    return linear_of(part.module.weight, part.module.bias)


def classifier(part: Part) -> nn.Linear:
    """The classifier of a model; a model without one is refused."""
    if part.kind == "torch.nn.modules.linear.Identity":
        raise part.refused("so that the model has no classes")
    return linear(part)


def averaged(first: Part, second: Part) -> nn.Linear:
    """The mean of the classifiers of two tokens, as one classifier of both tokens concatenated."""
    one, two = classifier(first), classifier(second)
    bias = None if one.bias is None or two.bias is None else (one.bias + two.bias) / 2
    return linear_of(torch.cat([one.weight, two.weight], 1) / 2, bias)


def stacked(parts: Sequence[Part]) -> nn.Linear:
    """Several linear maps of one input as one map, stacked by output rows; a missing bias counts as zero."""
    maps = [linear(part) for part in parts]
    biases: list[Tensor] = [m.weight.new_zeros(m.out_features) if m.bias is None else m.bias for m in maps]
    without = all(m.bias is None for m in maps)
    return linear_of(torch.cat(tuple(m.weight for m in maps)), None if without else torch.cat(biases))


def norm(part: Part) -> nn.LayerNorm | nn.RMSNorm:
    theirs = part.module
    if part.kind not in _LAYER_NORMS | _RMS_NORMS or len(theirs.normalized_shape) != 1:
        raise part.refused()
    affine, shape = theirs.weight is not None, list(theirs.normalized_shape)
    layer: nn.LayerNorm | nn.RMSNorm
    if part.kind in _RMS_NORMS:
        layer = nn.RMSNorm(shape, theirs.eps, affine)
    else:
        layer = nn.LayerNorm(shape, theirs.eps, affine, bias=theirs.bias is not None)
        if theirs.bias is not None:
            layer.bias = copied(theirs.bias)
    if affine:
        layer.weight = copied(theirs.weight)
    return layer


def activation(part: Part) -> nn.Module:
    if part.kind == "torch.nn.modules.activation.GELU":
        return nn.GELU(part.module.approximate)
    if part.kind in _GELU_ERF:
        return nn.GELU()
    if part.kind in _GELU_TANH:
        return nn.GELU("tanh")
    if part.kind == "torch.nn.modules.activation.ReLU":
        return nn.ReLU()
    if part.kind == "torch.nn.modules.activation.Tanh":
        return nn.Tanh()
    raise part.refused()


def scale_of(factors: Tensor) -> LayerScale:
    layer = LayerScale(len(factors), 1.0)
    layer.scale = copied(factors)
    return layer


def head_norm(q: Part, k: Part, heads: int) -> HeadNorm | None:
    """The norms of queries and keys as one layer; None if there are none."""
    if q.vanishes and k.vanishes:
        return None
    both = [norm(part) for part in (q, k)]
    eps = both[0].eps
    if type(both[0]) is not type(both[1]) or eps is None or eps != both[1].eps:
        raise k.refused(f"of another kind or another eps than {q.path}")
    size, like = both[0].normalized_shape[0], next(chain(q.module.parameters(), k.module.parameters()), None)
    if like is None:
        raise q.refused("without weights, which is not supported")
    layer = HeadNorm(size * heads, heads, eps, centered=type(both[0]) is nn.LayerNorm)
    zero = torch.zeros(size, dtype=like.dtype, device=like.device)
    shifts = [getattr(n, "bias", None) for n in both]
    layer.gain = copied(torch.stack([zero + 1 if n.weight is None else n.weight for n in both]))
    layer.shift = copied(torch.stack([zero if shift is None else shift for shift in shifts]))
    return layer


def attention(
    qkv: nn.Linear, out: nn.Linear, heads: int, qk: HeadNorm | None = None, inner: nn.Module | None = None
) -> nn.Module:
    """Attention as one layer if it is the plain one, and as a sequence of its components otherwise."""
    dim = qkv.in_features
    if qk is None and inner is None and qkv.out_features == 3 * dim and out.out_features == dim:
        with torch.device("meta"):
            layer = Attention(dim, heads)
        layer.qkv, layer.out = (
            qkv,
            linear_of(out.weight, out.weight.new_zeros(dim) if out.bias is None else out.bias),
        )
        return layer
    layers: OrderedDict[str, nn.Module] = OrderedDict(qkv=qkv)
    if qk is not None:
        layers["norm"] = qk
    layers["core"] = CoreAttention(heads)
    if inner is not None:
        layers["inner_norm"] = inner
    layers["out"] = out
    return nn.Sequential(layers)


def feed_forward(expand: nn.Linear, middle: nn.Module, contract: nn.Linear, inner: Part | None = None) -> nn.Module:
    """Two linear maps with the layer between them, and a norm before the second if there is one."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(expand=expand, activation=middle)
    if inner is not None and not inner.vanishes:
        layers["inner_norm"] = norm(inner)
    layers["contract"] = contract
    return nn.Sequential(layers)


def gated_unit(act: Part | None = None) -> GatedUnit:
    """The middle of SwiGLU; a gate with another activation is refused."""
    if act is not None and act.kind not in _SILU:
        raise act.refused("and only gates with SiLU are supported")
    return GatedUnit()


def branch(before: nn.Module | None, inner: nn.Module, *behind: tuple[str, nn.Module | None]) -> Residual:
    """x + behind(inner(before(x))), without the layers that are None."""
    layers = (("norm", before), ("inner", inner), *behind)
    return Residual(nn.Sequential(OrderedDict((name, layer) for name, layer in layers if layer is not None)))
