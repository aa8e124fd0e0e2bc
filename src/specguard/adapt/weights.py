"""Where the q, k, v and o of attention are, in models as their libraries have them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from specguard import nn as own
from specguard.adapt import huggingface, text, timm
from specguard.adapt.parts import kind
from specguard.errors import ConfigError
from specguard.nn import AttentionWeights

Rows = tuple[tuple[str, Tensor], ...]
Reader = Callable[[Any], tuple[int, Rows, Tensor]]


def attention_weights(model: nn.Module) -> tuple[AttentionWeights, ...]:
    """The q, k, v and o of every attention layer of `model`, in order; gradients flow to its parameters.

    `model` may be one of timm, transformers, torchvision or torch, a model of this package, or a converted one.
    A layer is known by its exact type; one that looks like attention and is not known is an error, not left out.
    """
    found: list[AttentionWeights] = []
    _find(model, "", found, set())
    return tuple(found)


def _find(module: nn.Module, path: str, found: list[AttentionWeights], seen: set[int]) -> bool:
    """Add the attention layers below `module`; whether there were any."""
    if id(module) in seen:
        return True
    seen.add(id(module))
    name = kind(module)
    if name in _OWN:
        found += [replace(weights, layer=path) for weights in own.attention_weights(module)]
        return True
    if name in _READERS or _is_sequence(module):
        heads, rows, o = _READERS.get(name, _sequence)(module)
        found.append(AttentionWeights(path, heads, rows, o))
        return True
    inner = [
        _find(child, f"{path}.{child_name}" if path else child_name, found, seen)
        for child_name, child in module.named_children()
    ]
    if not any(inner) and "attention" in name.rpartition(".")[2].lower() and len(list(module.parameters())):
        raise ConfigError(f"{path or 'the model'} is a {name}, an attention layer whose weights are unknown here")
    return any(inner)


def _fused(layer: Any) -> tuple[int, Rows, Tensor]:
    return layer.num_heads, (("qkv", layer.qkv.weight),), layer.proj.weight


def _separate(layer: Any, names: tuple[str, str, str], out: nn.Linear, heads: int) -> tuple[int, Rows, Tensor]:
    return heads, tuple(zip("qkv", (getattr(layer, n).weight for n in names), strict=True)), out.weight


def _timm(layer: Any) -> tuple[int, Rows, Tensor]:
    if layer.qkv is not None:
        return _fused(layer)
    if getattr(layer, "num_kv_groups", 1) != 1:
        raise ConfigError("attention whose heads share keys and values has no heads of its own for them")
    return _separate(layer, ("q_proj", "k_proj", "v_proj"), layer.proj, layer.num_heads)


def _timm_pool(layer: Any) -> tuple[int, Rows, Tensor]:
    if type(layer.q) is not nn.Linear or type(layer.proj) is not nn.Linear:
        raise ConfigError("attention pooling without a map of its queries or its output is unknown here")
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
        raise ConfigError("attention with queries, keys and values of inputs of different sizes is unknown here")
    return layer.num_heads, (("qkv", layer.in_proj_weight),), layer.out_proj.weight


def _is_sequence(module: nn.Module) -> bool:
    """Whether it is attention in parts, as conversion writes it."""
    return type(module) is nn.Sequential and type(getattr(module, "core", None)) is own.CoreAttention


def _sequence(layer: Any) -> tuple[int, Rows, Tensor]:
    return layer.core.heads, (("qkv", layer.qkv.weight),), layer.out.weight


_OWN = tuple(
    f"specguard.nn.attention.{name}" for name in ("Attention", "GatedPositionalAttention", "SkipAttention")
)
_READERS: dict[str, Reader] = {
    **dict.fromkeys(timm.ATTENTIONS, _timm),
    "timm.models.beit.Attention": _fused,
    "timm.models.swin_transformer.WindowAttention": _fused,
    "timm.layers.attention_pool.AttentionPoolLatent": _timm_pool,
    **dict.fromkeys(huggingface.ATTENTIONS, _huggingface),
    **dict.fromkeys(text.ATTENTIONS, _bert),
    **dict.fromkeys(text.DISTILLED_ATTENTIONS, _distilbert),
    "torch.nn.modules.activation.MultiheadAttention": _torch,
}
