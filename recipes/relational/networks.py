"""The networks that are certified. All take pixels in [0, 1], and are in float64 and eval mode."""

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

import torch

from relational.converted import converted_vit, initial_vit
from relational.deept import deept_mnist
from relational.graph import Graph
from relational.onnx_layers import read_vit
from specguard.data import digits
from specguard.geometry import Ball
from specguard.nn import ViT, check_architecture, preset
from specguard.records.files import locked
from specguard.records.store import derived_seed
from specguard.train import AdamW, PGDTraining, Progress, Training, Validation, train

__all__ = ["DIGITS", "converted_vit", "deept_mnist", "digits_vit", "initial_vit", "vnncomp_vit"]

_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)  # of VNN-COMP's inputs, which are normalized
_BALL = Ball("linf", 0.1)
# Plain as in the demo; adversarial with the settings of the recipe digits_pgd.
DIGITS = MappingProxyType(
    {
        "plain": Training(epochs=30, batch=64, optimizer=AdamW(lr=1e-3)),
        "adversarial": Training(
            epochs=40,
            batch=64,
            optimizer=AdamW(lr=1e-3),
            objective=PGDTraining(_BALL, steps=5, ramp=10),
            validation=Validation(100, _BALL),
        ),
    }
)


def vnncomp_vit(file: Path, mean: tuple[float, ...] = _MEAN, std: tuple[float, ...] = _STD) -> ViT:
    """A network of VNN-COMP's ViT benchmark, behind the normalization that its inputs have passed already.

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
    return model.eval()


def digits_vit(name: str, run: Path, watch: Callable[[Progress], None] = lambda progress: None) -> ViT:
    """The tiny ViT of the demo, trained on digits; a minute on one core, and nothing where `run` has it already.

    Of several processes that ask for it at once, the first trains it and the others wait.

    Args:
        name: "plain", or "adversarial" for training on adversarial examples.
        run: Folder that keeps the training.
        watch: Called after every step.
    """
    training = DIGITS[name]
    model = ViT(preset("tiny"), torch.Generator().manual_seed(derived_seed(training.seed, "weights")))
    with locked(run.parent, f".{run.name}", wait=True):
        train(model, digits(), run, training, device=torch.device("cpu"), resume=True, watch=watch)
    return model.double().eval()
