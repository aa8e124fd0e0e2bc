"""The networks that are certified. All take pixels in [0, 1], and are in float64 and eval mode."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch

from relational.converted import converted_vit, initial_vit
from relational.deept import deept_mnist
from relational.graph import Graph
from relational.onnx_layers import read_vit
from specguard.data import digits
from specguard.geometry import Ball
from specguard.models import from_run
from specguard.nn import Classifier, ViT, ViTConfig, check_architecture, preset
from specguard.penalties import SpectralNorm
from specguard.records.files import locked
from specguard.records.store import derived_seed
from specguard.train import AdamW, PGDTraining, Progress, Training, Validation, train

__all__ = [
    "CERTIFIED_DIGITS",
    "DIGITS",
    "certified_cifar10",
    "certified_digits",
    "converted_vit",
    "deept_mnist",
    "digits_vit",
    "initial_vit",
    "vnncomp_vit",
]

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
# With the settings of the recipe digits_certified.
CERTIFIED_DIGITS = MappingProxyType(
    {
        name: Training(epochs=60, batch=64, optimizer=AdamW(lr=3e-3), penalties=(SpectralNorm(strength),))
        for name, strength in {"weak": 0.03, "strong": 0.1}.items()
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
    return _trained(preset("tiny"), DIGITS[name], run, watch)


def certified_digits(name: str, run: Path, watch: Callable[[Progress], None] = lambda progress: None) -> ViT:
    """The network of the recipe digits_certified, whose spectral norms are penalized; some seconds on one core.

    Args:
        name: "weak" or "strong", the penalty.
        run: Folder that keeps the training, as for `digits_vit`.
        watch: Called after every step.
    """
    mean, std = digits().pixel_statistics()
    return _trained(replace(preset("tiny_smooth"), mean=mean, std=std), CERTIFIED_DIGITS[name], run, watch)


def _trained(config: ViTConfig, training: Training, run: Path, watch: Callable[[Progress], None]) -> ViT:
    model = ViT(config, torch.Generator().manual_seed(derived_seed(training.seed, "weights")))
    with locked(run.parent, f".{run.name}", wait=True):
        train(model, digits(), run, training, device=torch.device("cpu"), resume=True, watch=watch)
    return model.double().eval()


def certified_cifar10() -> Classifier:
    """The network with attention of the recipe cifar10_certified, whose weights are in the repository."""
    return from_run(Path(__file__).parents[1] / "cifar10_certified" / "attention").double().eval()
