"""Small networks of every kind of layer that loses something, in float64, with weights of any size."""

import torch
from torch import nn

from specguard.nn import (
    SLL,
    Attention,
    ClassPool,
    CoreAttention,
    GatedUnit,
    HeadNorm,
    LayerProject,
    LayerScale,
    MaxMin,
    MeanPool,
    Residual,
    SkipAttention,
    SmoothProject,
    Squareplus,
)


def drawn(model, seed, size=1.0):
    """The model in float64, with weights and biases of about this size."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.double().parameters():
            p.copy_(size * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return model.eval()


def point(seed, *shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def shape(model):
    """Of its images: tokens where there is a pool, else numbers."""
    return (3, 4) if any(isinstance(layer, ClassPool | MeanPool) for layer in model) else (3,)


HEAD = (ClassPool(), nn.Linear(4, 3))
NETWORKS = {
    "linear": lambda: nn.Sequential(nn.Linear(3, 3)),
    "two linear maps": lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)),
    "relu": lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)),
    "tanh alone": lambda: nn.Sequential(nn.Tanh(), nn.Linear(3, 3)),
    "gelu": lambda: nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 3)),
    "sorted pairs": lambda: nn.Sequential(nn.Linear(3, 4), MaxMin(), nn.Linear(4, 3)),
    "gated": lambda: nn.Sequential(nn.Linear(3, 4), GatedUnit(), nn.Linear(2, 3)),
    "sll": lambda: nn.Sequential(SLL(3, 4), nn.Linear(3, 3)),
    "no affine end": lambda: nn.Sequential(nn.Linear(3, 3), Squareplus(0.3)),
    "attention": lambda: nn.Sequential(Residual(Attention(4, 2), 0.3), MeanPool(), nn.Linear(4, 3)),
    "skip attention": lambda: nn.Sequential(SmoothProject(1.0), SkipAttention(4, 2, 0.3), *HEAD),
    "block": lambda: nn.Sequential(
        Residual(nn.Sequential(nn.LayerNorm(4, 1e-2), nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 4)), 0.3), *HEAD
    ),
    "forks in a fork": lambda: nn.Sequential(
        Residual(nn.Sequential(LayerProject(0.7), Residual(nn.Linear(4, 4), -0.9), LayerScale(4, 0.3)), 0.7), *HEAD
    ),
    "normalized heads": lambda: nn.Sequential(
        nn.Linear(4, 12), HeadNorm(4, 2, 1e-2), CoreAttention(2, fused=False), *HEAD
    ),
}
