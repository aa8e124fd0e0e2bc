"""`specguard models`: the models that can be trained by name, from a table that a test compares with the models."""

from pathlib import Path

import msgspec
from rich.table import Column, Table

from specguard.cli.console import out
from specguard.records.files import read_file

_LARGEST = 2**20


class ModelRow(msgspec.Struct, frozen=True, kw_only=True):
    """A model: its input, its sizes, and how many weights it has."""

    name: str
    kind: str
    input: int  # pixels along a side, or words
    patch: int | None
    dim: int
    depth: int
    heads: int
    weights: int


def models_command() -> None:
    """List the models that can be trained by name."""
    rows = model_table()
    names = Column("name", no_wrap=True, min_width=max(len(row.name) for row in rows))
    caption = "input: pixels along a side, or words of a sentence, whose own weights are not counted"
    table = Table(names, "input", "patch", "dim", "depth", "heads", "weights", caption=caption)
    for row in rows:
        sizes = ("" if size is None else str(size) for size in (row.patch, row.dim, row.depth, row.heads))
        table.add_row(row.name, str(row.input), *sizes, f"{row.weights:,}")
    out.print(table)


def model_table() -> list[ModelRow]:
    """The rows of models.json, which `make tables` writes: counting weights takes torch."""
    return msgspec.json.decode(read_file(Path(__file__).with_name("models.json"), _LARGEST), type=list[ModelRow])
