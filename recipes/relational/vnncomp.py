"""The networks of VNN-COMP's ViT benchmark as vision transformers of this package."""

from pathlib import Path

import numpy as np
import torch
from onnx.reference import ReferenceEvaluator

from relational.graph import Graph
from relational.onnx_layers import read_vit
from specguard.nn import ViT, check_architecture

_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)  # of the benchmark, whose inputs are normalized
_TOLERANCE = 1e-4  # of the largest logit: the reference computes in float32


def vnncomp_vit(file: Path, mean: tuple[float, ...] = _MEAN, std: tuple[float, ...] = _STD) -> ViT:
    """The network of an ONNX file, in float64 and eval mode; it normalizes pixels in [0, 1] first.

    Two random inputs are given to the network and to ONNX's own evaluation of the file.

    Args:
        file: An ONNX file of the benchmark, such as pgd_2_3_16.onnx.
        mean: Mean of the pixels, per channel.
        std: Standard deviation of the pixels, per channel.

    Raises:
        CheckpointError: If the file holds anything but such a network.
    """
    graph = Graph(file)
    config, tensors = read_vit(graph, mean, std)
    model = ViT(config, torch.Generator().manual_seed(0)).double()
    tensors |= {f"normalise.{name}": tensor for name, tensor in model.normalise.state_dict().items()}
    check_architecture(model, tensors, file)
    model.load_state_dict(tensors)
    _compare(graph, model.eval())
    return model


@torch.no_grad()
def _compare(graph: Graph, model: ViT) -> None:
    x = torch.rand(2, *model.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    normalized = model.normalise(x).float().numpy()
    expected = np.asarray(ReferenceEvaluator(graph.proto).run(None, {graph.input: normalized})[0])
    found = model(x).numpy()
    if expected.shape != found.shape or not np.abs(found - expected).max() <= _TOLERANCE * np.abs(expected).max():
        raise graph.refused("its logits differ from those of the network that was built from it")
