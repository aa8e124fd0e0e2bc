"""Named models: SpecFormer's backbones, those of the Cauchy paper, small ones for digits, certifiable ones."""

from dataclasses import replace
from types import MappingProxyType

from specguard.errors import ConfigError, suggestion
from specguard.nn.certifiable import CertifiableConfig
from specguard.nn.vit import ViTConfig

# SpecFormer's ViT-S is 768 x 8 x 8 with mlp 3, not today's 384 x 12 x 6.
_BACKBONES = {
    "vit_small": ViTConfig(dim=768, depth=8, heads=8, mlp_ratio=3.0),
    "vit_base": ViTConfig(dim=768, depth=12, heads=12),
    "deit_tiny": ViTConfig(dim=192, depth=12, heads=3),
    "deit_small": ViTConfig(dim=384, depth=12, heads=6),
    "convit_tiny": ViTConfig(dim=192, depth=12, heads=4, qkv_bias=False, local_blocks=10),
}

# "ViT as a Cauchy problem", Tables 1 and 2: depth, heads or kernels, patch; CIFAR-10 resized to 224 pixels.
_K3, _K7 = (3,) * 4, (7,) * 4
_CAUCHY: dict[int, dict[str, tuple[int, int | tuple[int, ...], int]]] = {
    128: {
        "vit_t1": (4, 1, 16),
        "vit_t2": (4, 4, 16),
        "vit_t3": (8, 1, 16),
        "vit_t4": (8, 4, 16),
        "covit_t1": (4, (3,), 16),
        "covit_t2": (4, _K3, 16),
        "covit_t3": (8, (3,), 16),
        "covit_t4": (8, _K3, 16),
    },
    512: {
        "vit_s1": (1, 1, 16),
        "vit_s2": (1, 4, 16),
        "vit_s3": (4, 1, 16),
        "vit_s4": (4, 4, 16),
        "vit_m1": (8, 1, 16),
        "vit_m2": (8, 4, 16),
        "vit_m3": (8, 4, 32),
        "vit_l": (12, 8, 32),
        "covit_s1": (1, (3,), 16),
        "covit_s2": (1, _K3, 16),
        "covit_s3": (4, (3,), 16),
        "covit_s4": (4, _K3, 16),
        "covit_s5": (4, _K7, 16),
        "covit_m1": (8, (3,), 16),
        "covit_m2": (8, (1, 3, 5, 7), 16),
        "covit_m3": (8, _K3, 16),
        "covit_m4": (8, _K7, 16),
        "covit_m5": (8, _K3, 32),
        "covit_l1": (12, _K3 + (5,) * 4, 32),
        "covit_l2": (16, _K3 + (5,) * 4, 32),
    },
}


def _cauchy() -> dict[str, ViTConfig]:
    """Every model as in the paper, and the tiny ones also at 32 pixels with patches of 4, at a low cost."""
    found = {}
    for dim, models in _CAUCHY.items():
        for name, (depth, mixing, patch) in models.items():
            base = ViTConfig(dim=dim, depth=depth, heads=mixing if isinstance(mixing, int) else 1)
            if isinstance(mixing, tuple):
                base = replace(base, kernels=mixing, pool="mean")
            found[f"{name}_patch{patch}_224"] = replace(_cifar(base), patch=patch, resize=224)
            if dim == 128:
                found[f"{name}_patch4_32"] = _cifar(base)
    return found


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
        ),
        # One smooth block without normalization: small enough, and smooth enough, to be certified.
        "tiny_smooth": ViTConfig(
            image=8,
            patch=4,
            channels=1,
            dim=32,
            depth=1,
            heads=4,
            mlp_ratio=1.0,
            mean=(0.305,),
            std=(0.376,),
            norm="none",
            activation="squareplus",
            pool="mean",
        ),
    }
    | {f"{name}_patch4_32": _cifar(c) for name, c in _BACKBONES.items()}
    | {f"{name}_patch16_224": _imagenet(c) for name, c in _BACKBONES.items()}
    | _cauchy()
)


# LoFAST's Table 1: 128 channels, patches of 16, so four tokens, and 3, 4 or 5 blocks of residual attention.
_LOFAST = CertifiableConfig(
    patch=16,
    dim=128,
    mixing="residual",
    query_norm=1.0,
    value_norm=0.5,
    projection="layer",
    feedforward="sll",
)
# 16 tokens and 4 blocks, whose tokens exchange channels with their neighbors: by a shift, or by attention.
_SHIFTS = CertifiableConfig(
    image=8,
    patch=2,
    channels=1,
    dim=64,
    depth=4,
    mixing="shift",
    heads=8,
    token_bias=True,
    mean=(0.305,),
    std=(1.0,),
)
CERTIFIABLE: MappingProxyType[str, CertifiableConfig] = MappingProxyType(
    {
        "certifiable_digits": CertifiableConfig(image=8, patch=2, channels=1, dim=32, mean=(0.305,), std=(1.0,)),
        "digits_shift": _SHIFTS,
        # A bias of 8 gives a neighbor 99.5 % of the attention; tokens of digits are shorter than the radius.
        "digits_attention": replace(_SHIFTS, mixing="skip", mix=1.0, neighbor_bias=8.0, query_norm=0.1, radius=8.0),
        "certifiable_patch4_32": CertifiableConfig(radius=8.0, own_bias=6.0, query_norm=0.5),
        "certifiable_patch8_32": CertifiableConfig(radius=8.0, own_bias=6.0, query_norm=0.5, patch=8),
    }
    | {f"lofast_{depth}_patch16_32": replace(_LOFAST, depth=depth) for depth in (3, 4, 5)}
)


def preset(name: str, **changes: object) -> ViTConfig:
    """The config of a named ViT.

    Args:
        name: One of `PRESETS`.
        changes: Fields of `ViTConfig` to replace.

    Returns:
        The config.

    Example:
        >>> preset("tiny", depth=2).depth
        2
    """
    if name not in PRESETS:
        known = (*PRESETS, *CERTIFIABLE)
        hint = suggestion(name, known) or f"; choose one of {', '.join(known)}"
        raise ConfigError(f"model {name!r} is unknown{hint}")
    return replace(PRESETS[name], **changes)  # type: ignore[arg-type]
