"""Small vision transformers of timm and of Hugging Face for CIFAR-10, converted to layers of this package.

Both take 3 x 32 x 32 pixels, with patches of 8: 16 tokens and the class token, 64 channels, 4 heads, GELU.
"""

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from specguard.data import Augmentation, Data
from specguard.models import convert
from specguard.nn import Network
from specguard.train import AdamW, Progress, Training, train

_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
TRAINING = Training(epochs=10, batch=128, optimizer=AdamW(lr=2e-3), augmentation=Augmentation(flip=True))


def timm_vit(seed: int = 0) -> Network:
    """timm's VisionTransformer with three blocks, with the initial weights of timm."""
    from timm.models.vision_transformer import VisionTransformer

    settings = {"img_size": 32, "patch_size": 8, "num_classes": 10, "embed_dim": 64, "depth": 3, "num_heads": 4}
    return _converted("timm_vit", VisionTransformer, seed, **settings, mlp_ratio=2)


def huggingface_vit(seed: int = 0) -> Network:
    """Hugging Face's ViTForImageClassification with two blocks, with the initial weights of transformers."""
    from transformers import ViTConfig, ViTForImageClassification

    config: Any = ViTConfig(
        image_size=32,
        patch_size=8,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_labels=10,
    )
    return _converted("huggingface_vit", ViTForImageClassification, seed, config)


def _converted(
    name: str, library_model: Callable[..., nn.Module], seed: int, *args: Any, **settings: Any
) -> Network:
    with torch.random.fork_rng(devices=[]):  # the libraries draw from the global generator
        torch.manual_seed(seed)
        return convert(library_model(*args, **settings), name=name, mean=_MEAN, std=_STD)


CONVERTED = MappingProxyType({"timm": timm_vit, "huggingface": huggingface_vit})


def trained(network: Network, cifar: Data, run: Path, watch: Callable[[Progress], None]) -> Network:
    """The network after a few minutes of training on one core; the folder `run` keeps it, and continues it."""
    train(network, cifar, run, TRAINING, device=torch.device("cpu"), resume=True, watch=watch)
    return network.eval()
