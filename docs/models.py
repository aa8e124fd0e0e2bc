"""Write the table that `specguard models` prints without torch; --check says whether it is current."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

from specguard.cli.models import ModelRow
from specguard.nn import CERTIFIABLE, PRESETS, TEXT_PRESETS, TextEncoder, ViT

FILE = Path(__file__).resolve().parent.parent / "src" / "specguard" / "cli" / "models.json"


def rows() -> Iterator[ModelRow]:
    for name, c in PRESETS.items():
        with torch.device("meta"):
            weights = sum(p.numel() for p in ViT(c).parameters())
        sizes = {"patch": c.patch, "dim": c.dim, "depth": c.depth, "heads": c.heads}
        yield ModelRow(name=name, kind="image", input=c.image, weights=weights, **sizes)
    for name, own in CERTIFIABLE.items():
        sizes = {"patch": own.patch, "dim": own.dim, "depth": own.depth, "heads": own.heads}
        yield ModelRow(name=name, kind="certifiable", input=own.image, weights=own.weights, **sizes)
    for name, t in TEXT_PRESETS.items():
        with torch.device("meta"):
            weights = sum(p.numel() for p in TextEncoder(t).parameters()) - t.words * t.dim
        yield ModelRow(
            name=name,
            kind="text",
            input=t.tokens,
            patch=None,
            dim=t.dim,
            depth=t.depth,
            heads=t.heads,
            weights=weights,
        )


def table() -> bytes:
    return msgspec.json.format(msgspec.json.encode(list(rows())), indent=1) + b"\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        sys.exit(0 if FILE.read_bytes() == table() else f"{FILE.name} is not current: run `make tables`")
    FILE.write_bytes(table())
