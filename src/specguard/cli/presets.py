"""`specguard models`: what can be trained by name."""

import torch
from rich.table import Table

from specguard.cli.console import out
from specguard.nn import CERTIFIABLE, PRESETS, TEXT_PRESETS, TextEncoder, ViT


def models_command() -> None:
    """List the models that can be trained by name."""
    table = Table("name", "image", "patch", "dim", "depth", "heads", "weights")
    for name, c in PRESETS.items():
        with torch.device("meta"):
            count = sum(p.numel() for p in ViT(c).parameters())
        table.add_row(name, *(str(v) for v in (c.image, c.patch, c.dim, c.depth, c.heads)), f"{count:,}")
    for name, own in CERTIFIABLE.items():
        known = (own.image, own.patch, own.dim, own.depth, own.heads)
        table.add_row(name, *(str(v) for v in known), f"{own.weights:,}")
    for name, t in TEXT_PRESETS.items():
        with torch.device("meta"):
            count = sum(p.numel() for p in TextEncoder(t).parameters())
        sizes = (f"{t.tokens} words", "", t.dim, t.depth, t.heads)
        table.add_row(name, *(str(v) for v in sizes), f"{count - t.words * t.dim:,} and words")
    out.print(table)
