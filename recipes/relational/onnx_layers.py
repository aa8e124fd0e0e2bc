"""The vision transformers of VNN-COMP's ViT benchmark, as PyTorch exported them: their config and their weights.

The graph is read backward, from the head to the pixels. Every reader takes the name of a value, and returns the
tensors of the layer that makes it, under the names of this package, and the name of the value that the layer takes.

Source: Shi et al. 2023, https://github.com/shizhouxing/ViT_vnncomp2023
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from relational.graph import Graph, Sizes
from specguard.nn import ViTConfig

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Layer:
    """Tensors by name, the value that the layer takes, and settings of a `ViTConfig` that it determines."""

    tensors: Tensors
    source: str
    settings: dict[str, Any] = field(default_factory=dict)

    def below(self, name: str) -> Tensors:
        return {f"{name}.{key}": tensor for key, tensor in self.tensors.items()}


def read_vit(graph: Graph, mean: tuple[float, ...], std: tuple[float, ...]) -> tuple[ViTConfig, Tensors]:
    """The config and weights of a `ViT` that computes the graph after normalizing pixels with `mean` and `std`."""
    normalized, weight, bias = graph.inputs(graph.output, "Gemm", 3, transB=1)
    head = graph.constant(weight, None, None)
    dim = head.shape[1]
    tensors = {"head.weight": head, "head.bias": graph.constant(bias, len(head))}
    norm = _batch_norm(graph, normalized, dim)
    tensors |= norm.below("norm")
    (value,) = graph.inputs(norm.source, "ReduceMean", 1, axes=[1], keepdims=0)
    blocks: list[Layer] = []
    while not _is_embedding(graph, value):
        blocks.append(_block(graph, value, dim))
        value = blocks[-1].source
    for i, block in enumerate(reversed(blocks)):
        tensors |= block.below(f"blocks.{i}")
    embedding = _embedding(graph, value, dim)
    tensors |= embedding.tensors
    graph.finish()
    settings = embedding.settings | norm.settings
    for block in blocks:
        settings = _agreeing(graph, settings, block.settings)
    config = ViTConfig(
        **settings,
        classes=len(head),
        dim=dim,
        depth=len(blocks),
        norm="batchnorm",
        activation="relu",
        pool="all",
        norm_after_pool=True,
        mean=mean,
        std=std,
    )
    return config, tensors


def _agreeing(graph: Graph, settings: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    for name in settings.keys() & more.keys():
        if settings[name] != more[name]:
            raise graph.refused(f"its layers have different {name}, {settings[name]} and {more[name]}")
    return settings | more


def _is_embedding(graph: Graph, value: str) -> bool:
    return any(name in graph.constants for name in graph.inputs(value, "Add", 2))


def _block(graph: Graph, value: str, dim: int) -> Layer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""
    mlp_branch, middle = graph.inputs(value, "Add", 2)
    mlp = _branch(graph, _feed_forward(graph, mlp_branch, dim), middle, dim)
    attention_branch, source = graph.inputs(middle, "Add", 2)
    attention = _branch(graph, _attention(graph, attention_branch, dim), source, dim)
    tensors = attention.below("attention.branch") | mlp.below("mlp.branch")
    return Layer(tensors, source, _agreeing(graph, attention.settings, mlp.settings))


def _branch(graph: Graph, inner: Layer, skipped: str, dim: int) -> Layer:
    """A branch inner(norm(x)), whose `skipped` value must be the x that the norm takes."""
    (behind,) = graph.inputs(inner.source, "Transpose", 1, perm=[0, 2, 1])
    norm = _batch_norm(graph, behind, dim)
    (source,) = graph.inputs(norm.source, "Transpose", 1, perm=[0, 2, 1])
    if source != skipped:
        raise graph.refused(f"the branch from {source!r} is added to {skipped!r}")
    tensors = norm.below("norm") | inner.below("inner")
    return Layer(tensors, source, inner.settings | norm.settings)


def _batch_norm(graph: Graph, value: str, dim: int) -> Layer:
    eps = graph.number(value, "BatchNormalization", "epsilon")
    source, *names = graph.inputs(value, "BatchNormalization", 5, epsilon=eps)
    keys = ("weight", "bias", "running_mean", "running_var")
    tensors = {f"norm.{key}": graph.constant(name, dim) for key, name in zip(keys, names, strict=True)}
    if not (tensors["norm.running_var"] >= 0).all():
        raise graph.refused(f"the BatchNormalization of {value!r} has a negative variance")
    tensors["norm.num_batches_tracked"] = torch.tensor(0)
    return Layer(tensors, source, {"norm_eps": eps})


def _linear(graph: Graph, value: str, inputs: int | None, outputs: int | None) -> Layer:
    """x W + b, where W has one row per input, unlike that of torch."""
    product, bias = graph.with_constant(value, "Add")
    source, name = graph.inputs(product, "MatMul", 2)
    weight = graph.constant(name, inputs, outputs).mT
    return Layer({"weight": weight.contiguous(), "bias": graph.constant(bias, len(weight))}, source)


def _feed_forward(graph: Graph, value: str, dim: int) -> Layer:
    contract = _linear(graph, value, None, dim)
    hidden = contract.tensors["weight"].shape[1]
    (before,) = graph.inputs(contract.source, "Relu", 1)
    expand = _linear(graph, before, dim, hidden)
    tensors = expand.below("expand") | contract.below("contract")
    return Layer(tensors, expand.source, {"mlp_ratio": hidden / dim})


def _attention(graph: Graph, value: str, dim: int) -> Layer:
    """softmax(Q K^T / sqrt(head_dim)) V of every head, and the linear maps before and after."""
    out = _linear(graph, value, dim, dim)
    joined, joined_sizes = graph.inputs(out.source, "Reshape", 2)
    (mixed,) = graph.inputs(joined, "Transpose", 1, perm=[0, 2, 1, 3])
    probabilities, v = graph.inputs(mixed, "MatMul", 2)
    (scaled,) = graph.inputs(probabilities, "Softmax", 1, axis=3)
    logits, scale = graph.with_constant(scaled, "Mul")
    q, k = graph.inputs(logits, "MatMul", 2)
    maps, sizes = [], []
    for heads_of, order in ((q, [0, 2, 1, 3]), (k, [0, 2, 3, 1]), (v, [0, 2, 1, 3])):
        (divided,) = graph.inputs(heads_of, "Transpose", 1, perm=order)
        flat, divided_sizes = graph.inputs(divided, "Reshape", 2)
        maps.append(_linear(graph, flat, dim, dim))
        sizes.append(divided_sizes)
    source = maps[0].source
    if any(each.source != source for each in maps):
        raise graph.refused(f"the queries, keys and values of {value!r} are of different tokens")
    known: dict[str, Sizes] = {source: (None,)}
    heads = _heads(graph, {graph.sizes(each, known) for each in sizes}, dim)
    if graph.sizes(joined_sizes, known) != (None, -1, dim):
        raise graph.refused(f"the heads of {value!r} are not joined to {dim} channels")
    if graph.constant(scale).item() != torch.tensor((dim // heads) ** -0.5).item():
        raise graph.refused(f"the scale of the attention {value!r} is not one by the square root of {dim // heads}")
    tensors = {f"qkv.{key}": torch.cat([each.tensors[key] for each in maps]) for key in ("weight", "bias")}
    return Layer(tensors | out.below("out"), source, {"heads": heads})


def _heads(graph: Graph, found: set[Sizes], dim: int) -> int:
    """The number of heads into which queries, keys and values of `dim` channels are divided alike."""
    for sizes in found:
        heads = sizes[2] if len(found) == 1 and len(sizes) == 4 else None
        if heads is not None and heads > 0 and dim % heads == 0 and sizes == (None, -1, heads, dim // heads):
            return heads
    raise graph.refused(f"{dim} channels are divided into heads of shapes {sorted(map(str, found))}")


def _embedding(graph: Graph, value: str, dim: int) -> Layer:
    """The patches, each mapped linearly, behind the class token, and the positions of all."""
    tokens, table = graph.with_constant(value, "Add")
    first, patches = graph.inputs(tokens, "Concat", 2, axis=1)
    zeros, token = graph.with_constant(first, "Add")
    (grid,) = graph.inputs(patches, "Transpose", 1, perm=[0, 2, 1])
    convolved, flat_sizes = graph.inputs(grid, "Reshape", 2)
    kernel = graph.integers(convolved, "Conv", "kernel_shape")
    pixels, weight, bias = graph.inputs(convolved, "Conv", 3, kernel_shape=kernel, strides=kernel)
    if pixels != graph.input or len(graph.shape) != 4 or len(kernel) != 2:
        raise graph.refused("its patches are not cut from its input, images of three dimensions")
    _, channels, height, width = graph.shape
    patch = kernel[0]
    if patch < 1 or kernel != [patch, patch] or height != width or height < patch or height % patch:
        raise graph.refused(f"images of {height} x {width} pixels are not cut into patches of {kernel}")
    count = (height // patch) ** 2
    known: dict[str, Sizes] = {
        pixels: (None, channels, height, width),
        convolved: (None, dim, height // patch, width // patch),
    }
    tensors = {
        "patches.map.weight": graph.constant(weight, dim, channels, patch, patch),
        "patches.map.bias": graph.constant(bias, dim),
        "class_token.token": graph.constant(token, dim).view(1, 1, dim),
        "positions.table": graph.constant(table, count + 1, dim)[None],
    }
    if graph.sizes(flat_sizes, known) != (None, dim, -1):
        raise graph.refused("its patches do not become tokens in raster order")
    if graph.zeros(zeros, known) != (None, 1, dim):
        raise graph.refused("its class token is not one for every image")
    return Layer(tensors, pixels, {"image": height, "patch": patch, "channels": channels})
