"""Small models of every kind, sizes pairwise distinct, over which laws run."""

from dataclasses import replace
from typing import get_args

from specguard.nn import ViTConfig
from specguard.nn.vit import Activation, Norm

# image 6, patch 2: 9 patches; head_dim 7, 3 heads, hidden 11 * 2, 13 classes, 2 channels.
SMALL = ViTConfig(
    image=6, patch=2, channels=2, classes=13, dim=21, depth=2, heads=3, mlp_ratio=22 / 21,
    mean=(0.4, 0.6), std=(0.3, 0.2),
)  # fmt: skip

MODELS: dict[str, ViTConfig] = {
    **{f"norm={n}": replace(SMALL, norm=n) for n in get_args(Norm)},
    **{f"activation={a}": replace(SMALL, activation=a) for a in get_args(Activation)},
    **{
        f"pool={pool} local={local}": replace(SMALL, pool=pool, local_blocks=local)
        for pool, most in (("class", 1), ("mean", 2), ("all", 1))
        for local in range(most + 1)
    },
    "one kernel": replace(SMALL, kernels=(3,), pool="mean"),
    "three kernels": replace(SMALL, kernels=(1, 5, 3), pool="mean"),
    "resized": replace(SMALL, resize=8),
    "no qkv bias": replace(SMALL, qkv_bias=False),
    "scaled residuals": replace(SMALL, residual_scale=0.5),
    "layer scale": replace(SMALL, layer_scale=1e-2),
    "batch norm behind pooling": replace(SMALL, pool="all", norm="batchnorm", norm_after_pool=True),
    "one head": replace(SMALL, heads=1),
    "one token": replace(SMALL, patch=6, pool="mean"),
}
