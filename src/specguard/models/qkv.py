"""The q, k, v and o matrices of attention layers, in models of several libraries."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from specguard import nn as own
from specguard.errors import ConfigError
from specguard.models import bert as text
from specguard.models import huggingface, timm
from specguard.nn import AttentionWeights

Rows = tuple[tuple[str, Tensor], ...]
Reader = Callable[[Any], tuple[int, Rows, Tensor]]


def attention_weights(model: nn.Module) -> tuple[AttentionWeights, ...]:
    """The q, k, v and o matrices of every attention layer of `model`, in order; gradients flow to its parameters.

    Layers are recognized by their exact types. A layer that appears to be attention but is not recognized raises a
    `ConfigError` rather than being left out.

    Args:
        model: A model of timm, transformers, torchvision, torch or this package.

    Returns:
        One `AttentionWeights` per layer.

    Example:
        >>> model = nn.TransformerEncoderLayer(d_model=8, nhead=2)
        >>> [(weights.layer, weights.heads) for weights in attention_weights(model)]
        [('self_attn', 2)]
    """
    found: list[AttentionWeights] = []
    _find(model, "", found, set())
    return tuple(found)


def _find(module: nn.Module, path: str, found: list[AttentionWeights], seen: set[nn.Module]) -> bool:
    """Add the attention layers below `module`; returns whether there are any. Penalties call it at every step."""
    if module in seen:
        return True
    seen.add(module)
    children = module._modules
    exact = type_before_parametrizations(module) if "parametrizations" in children else type(module)
    name = f"{exact.__module__}.{exact.__qualname__}"
    reader = _READERS.get(name)
    if reader is None and exact is nn.Sequential and type(children.get("core")) is own.CoreAttention:
        reader = _sequence
    if reader is not None:
        found.append(AttentionWeights(path, *reader(module)))
        return True
    for parent in exact.__mro__[1:-2]:  # without Module and object
        if f"{parent.__module__}.{parent.__qualname__}" in _READERS:
            raise ConfigError(f"{path or 'the model'} is a {name}, a subclass of attention, unknown here")
    inside = False
    for child_name, child in children.items():
        if child is not None:
            inside |= _find(child, f"{path}.{child_name}" if path else child_name, found, seen)
    if not inside and "attention" in exact.__name__.lower() and any(True for _ in module.parameters()):
        raise ConfigError(f"{path or 'the model'} is a {name}, an attention layer whose weights are unknown here")
    return inside


def _own(layer: Any) -> tuple[int, Rows, Tensor]:
    return layer.heads, (("qkv", layer.qkv.weight),), layer.out.weight


def _fused(layer: Any) -> tuple[int, Rows, Tensor]:
    return layer.num_heads, (("qkv", layer.qkv.weight),), layer.proj.weight


def _separate(layer: Any, names: tuple[str, str, str], out: nn.Linear, heads: int) -> tuple[int, Rows, Tensor]:
    return heads, tuple(zip("qkv", (getattr(layer, n).weight for n in names), strict=True)), out.weight


def _timm(layer: Any) -> tuple[int, Rows, Tensor]:
    if layer.qkv is not None:
        return _fused(layer)
    if getattr(layer, "num_kv_groups", 1) != 1:
        raise ConfigError("attention whose heads share keys and values has no separate heads for them")
    return _separate(layer, ("q_proj", "k_proj", "v_proj"), layer.proj, layer.num_heads)


def _timm_pool(layer: Any) -> tuple[int, Rows, Tensor]:
    if type(layer.q) is not nn.Linear or type(layer.proj) is not nn.Linear:
        raise ConfigError("attention pooling without a linear map of its queries or its output is not supported")
    k, v = layer.kv.weight.chunk(2)
    return layer.num_heads, (("q", layer.q.weight), ("k", k), ("v", v)), layer.proj.weight


def _huggingface(layer: Any) -> tuple[int, Rows, Tensor]:
    if hasattr(layer, "q_proj"):
        return _separate(layer, ("q_proj", "k_proj", "v_proj"), layer.o_proj, layer.num_attention_heads)
    return _inner(layer.attention, layer.output)


def _inner(layer: Any, output: Any) -> tuple[int, Rows, Tensor]:
    return _separate(layer, ("query", "key", "value"), output.dense, layer.num_attention_heads)


def _bert(layer: Any) -> tuple[int, Rows, Tensor]:
    return _inner(layer.self, layer.output)


def _distilbert(layer: Any) -> tuple[int, Rows, Tensor]:
    return _separate(layer, ("q_lin", "k_lin", "v_lin"), layer.out_lin, layer.n_heads)


def _torch(layer: Any) -> tuple[int, Rows, Tensor]:
    if layer.in_proj_weight is None:
        raise ConfigError("attention with queries, keys and values of inputs of different sizes is not supported")
    return layer.num_heads, (("qkv", layer.in_proj_weight),), layer.out_proj.weight


def _sequence(layer: Any) -> tuple[int, Rows, Tensor]:
    """Attention as a sequence of layers, as conversions create it."""
    return layer.core.heads, (("qkv", layer.qkv.weight),), layer.out.weight


_OWN = ("Attention", "GatedPositionalAttention", "SkipAttention")
_READERS: dict[str, Reader] = {
    **{f"specguard.nn.attention.{name}": _own for name in _OWN},
    **dict.fromkeys(timm.ATTENTIONS, _timm),
    "timm.models.beit.Attention": _fused,
    "timm.models.swin_transformer.WindowAttention": _fused,
    "timm.layers.attention_pool.AttentionPoolLatent": _timm_pool,
    **dict.fromkeys(huggingface.ATTENTIONS, _huggingface),
    **dict.fromkeys(text.ATTENTIONS, _bert),
    **dict.fromkeys(text.DISTILLED_ATTENTIONS, _distilbert),
    "torch.nn.modules.activation.MultiheadAttention": _torch,
}
