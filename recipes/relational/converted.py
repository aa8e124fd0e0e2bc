"""Small vision transformers of timm and of Hugging Face for CIFAR-10, converted to layers of this package.

Both take 3 x 32 x 32 pixels, with patches of 8: 16 tokens and the class token, 64 channels, 4 heads, GELU. The
trained weights lie beside this file, rounded to float16, and the rounded network is the one that is certified.

Usage, to train them again in some minutes on one core: python -m relational.converted DATA_ROOT RUNS
with the folder above this one on PYTHONPATH. DATA_ROOT holds cifar-10-batches-py; RUNS keeps the training.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from specguard.data import Augmentation, Data, cifar10
from specguard.models import convert, load_weights
from specguard.models.library import library
from specguard.nn import Network, check_architecture
from specguard.records.store import write_tensors
from specguard.train import AdamW, Progress, Training, train

_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
_TRAINING = Training(epochs=10, batch=128, optimizer=AdamW(lr=2e-3), augmentation=Augmentation(flip=True))
_WEIGHTS = Path(__file__).parent / "weights"


def converted_vit(name: str) -> Network:
    """The trained network of a library in `LIBRARIES`, in float64 and eval mode."""
    network, file = _initial(name), _WEIGHTS / f"{name}.safetensors"
    tensors = load_weights(file)
    check_architecture(network, tensors, file)
    network.load_state_dict(tensors)
    return network.double().eval()


def initial_vit(name: str, seed: int = 0) -> Network:
    """The network of a library in `LIBRARIES` with its initial weights, in float64 and eval mode."""
    return _initial(name, seed).double().eval()


def trained_vit(name: str, cifar: Data, run: Path, watch: Callable[[Progress], None]) -> Network:
    """The network after a few minutes of training on one core; the folder `run` keeps it, and continues it."""
    network = _initial(name)
    train(network, cifar, run, _TRAINING, device=torch.device("cpu"), resume=True, watch=watch)
    return network.eval()


def _timm() -> nn.Module:
    """timm's VisionTransformer with three blocks."""
    model: nn.Module = library("timm").models.vision_transformer.VisionTransformer(
        img_size=32, patch_size=8, num_classes=10, embed_dim=64, depth=3, num_heads=4, mlp_ratio=2
    )
    return model


def _huggingface() -> nn.Module:
    """Hugging Face's ViTForImageClassification with two blocks."""
    transformers = library("transformers")
    settings: dict[str, Any] = {"num_labels": 10, "image_size": 32, "patch_size": 8, "num_hidden_layers": 2}
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4}
    model: nn.Module = transformers.ViTForImageClassification(transformers.ViTConfig(**settings, **sizes))
    return model


LIBRARIES: MappingProxyType[str, Callable[[], nn.Module]] = MappingProxyType(
    {"timm": _timm, "huggingface": _huggingface}
)


def _initial(name: str, seed: int = 0) -> Network:
    with torch.random.fork_rng(devices=[]):  # the libraries draw from the global generator
        torch.manual_seed(seed)
        return convert(LIBRARIES[name](), name=f"{name}_vit", mean=_MEAN, std=_STD)


def _main(data: Path, runs: Path) -> None:
    cifar = cifar10(data)
    for name in LIBRARIES:
        network = trained_vit(name, cifar, runs / name, _print_epoch)
        rounded = {key: weight.half() for key, weight in network.named_parameters()}
        tensors = network.state_dict() | rounded  # the statistics of the pixels stay as they are
        write_tensors(_WEIGHTS / f"{name}.safetensors", tensors)


def _print_epoch(progress: Progress) -> None:
    if progress.record is not None:
        print(
            f"step {progress.step} of {progress.steps}, test accuracy {progress.record.test_accuracy}", flush=True
        )


if __name__ == "__main__":
    _main(*map(Path, sys.argv[1:3]))
