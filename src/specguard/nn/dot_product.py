"""The core of dot-product attention, between its linear maps: q, k and v to probabilities and to mixed values."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

Heads = Float[Tensor, "batch head token head_dim"]
Maps = Float[Tensor, "batch head token token"]
Bias = Float[Tensor, "1 head token token"]


def queries_keys_values(qkv: Tensor, heads: int) -> tuple[Heads, Heads, Heads]:
    """Split the channels into queries, keys and values, and each into heads."""
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def mixed_values(q: Heads, k: Heads, v: Heads, fused: bool, bias: Bias | None = None) -> Heads:
    """softmax(Q K^T / sqrt(head_dim) + bias) V, with torch's fused kernel if `fused`."""
    if not fused:
        return attention_probabilities(q, k, bias) @ v
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        # On the CPU, torch's bfloat16 kernel is less accurate than its float32 kernel and, up to a few hundred
        # tokens, slower.
        with torch.autocast("cpu", enabled=False):
            mixed = scaled_dot_product_attention(
                q.float(), k.float(), v.float(), None if bias is None else bias.float()
            )
        return mixed.to(v.dtype)
    return scaled_dot_product_attention(q, k, v, bias)


def attention_probabilities(q: Heads, k: Heads, bias: Bias | None = None) -> Maps:
    """softmax(Q K^T / sqrt(head_dim) + bias); rows sum to one."""
    logits = q @ k.mT * q.shape[-1] ** -0.5
    return (logits if bias is None else logits + bias).softmax(-1)
