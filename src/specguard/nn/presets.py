"""Models by name: the backbones of the SpecFormer paper at 32 and at 224 pixels, and one for the digits."""

from dataclasses import replace
from difflib import get_close_matches
from types import MappingProxyType

from specguard.errors import ConfigError
from specguard.nn.vit import ViTConfig

# SpecFormer's ViT-S is 768 x 8 x 8 with mlp 3, not today's 384 x 12 x 6.
_BACKBONES = {
    "vit_small": ViTConfig(dim=768, depth=8, heads=8, mlp_ratio=3.0),
    "vit_base": ViTConfig(dim=768, depth=12, heads=12),
    "deit_tiny": ViTConfig(dim=192, depth=12, heads=3),
    "deit_small": ViTConfig(dim=384, depth=12, heads=6),
    "convit_tiny": ViTConfig(dim=192, depth=12, heads=4, qkv_bias=False, local_blocks=10),
}


def _cifar(config: ViTConfig) -> ViTConfig:
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    return replace(config, image=32, patch=4, classes=10, mean=mean, std=std)


def _imagenet(config: ViTConfig) -> ViTConfig:
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    return replace(config, image=224, patch=16, classes=1000, mean=mean, std=std)


PRESETS: MappingProxyType[str, ViTConfig] = MappingProxyType(
    {
        "tiny": ViTConfig(
            image=8, patch=2, channels=1, dim=48, depth=4, heads=4, mlp_ratio=2.0, mean=(0.305,), std=(0.376,)
        )
    }
    | {f"{name}_patch4_32": _cifar(c) for name, c in _BACKBONES.items()}
    | {f"{name}_patch16_224": _imagenet(c) for name, c in _BACKBONES.items()}
)


def preset(name: str, **changes: object) -> ViTConfig:
    """The config of a named model, with some of its fields changed."""
    if name not in PRESETS:
        near = get_close_matches(name, PRESETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; choose one of {', '.join(PRESETS)}"
        raise ConfigError(f"model {name!r} is unknown{hint}")
    return replace(PRESETS[name], **changes)  # type: ignore[arg-type]
