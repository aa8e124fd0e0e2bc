"""`specguard models`: what can be trained by name."""

import torch
from rich.table import Column, Table

from specguard.cli.console import out
from specguard.nn import CERTIFIABLE, PRESETS, TEXT_PRESETS, TextEncoder, ViT


def models_command() -> None:
    """List the models that can be trained by name."""
    name_column = Column("name", no_wrap=True, min_width=max(map(len, (*PRESETS, *CERTIFIABLE, *TEXT_PRESETS))))
    caption = "of text: words of a sentence, and weights without those of the words"
    table = Table(name_column, "image", "patch", "dim", "depth", "heads", "weights", caption=caption)
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
        sizes = (t.tokens, "", t.dim, t.depth, t.heads)
        table.add_row(name, *(str(v) for v in sizes), f"{count - t.words * t.dim:,}")
    out.print(table)
