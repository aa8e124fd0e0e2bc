"""SpecGuard: train vision transformers, attack them, and prove what no attack can do."""

from specguard.adapt import from_run
from specguard.geometry import Ball
from specguard.nn import ViT, ViTConfig, preset
from specguard.penalties import MSVP, SpectralNorm
from specguard.version import __version__

__all__ = ["MSVP", "Ball", "SpectralNorm", "ViT", "ViTConfig", "__version__", "from_run", "preset"]
