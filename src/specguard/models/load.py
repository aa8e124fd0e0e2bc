"""Load weights from a file into a model, with a new head for other classes and positions for another image size."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from specguard.errors import CheckpointError
from specguard.models import timm, torchvision
from specguard.models.checkpoint import load_weights
from specguard.models.layers import kind
from specguard.models.library import library
from specguard.models.recognize import recognize
from specguard.nn import check_architecture

_TORCHVISION = {"first_conv": "conv_proj", "classifier": "heads.head"}


@dataclass(frozen=True)
class Fitted:
    """What was changed to make weights fit a model.

    Args:
        new_head: Whether the head is newly initialized.
        sizes: The image sizes of the positions in the file and in the model, if positions were resized.
    """

    new_head: bool = False
    sizes: tuple[int, int] | None = None


def load_into(model: Any, path: Path, *, new_head: bool = False, resize: bool = False) -> Fitted:
    """Load the weights of a file, which must be for exactly this architecture, and return what was changed in them.

    With `new_head` a file for another number of classes, or without a head, is accepted, and the head of `model` is
    kept. With `resize` positions for another image size are interpolated with the function of the model's library.
    """
    tensors, mine = load_weights(path), model.state_dict()
    settings = getattr(model, "pretrained_cfg", None) or _TORCHVISION
    _check_channels(tensors, mine, settings.get("first_conv"), path)
    heads = settings.get("classifier") or ()
    new = _heads(tensors, mine, (heads,) if isinstance(heads, str) else tuple(heads), path, new_head)
    near = recognize(tensors)
    try:
        sizes = _positions(tensors, _table(model), path, resize)
        check_architecture(model, tensors, path)
    except CheckpointError as error:
        if near is None or near.name.startswith("hf:"):
            raise
        raise CheckpointError(f"{error}; the weights look like those of {near.options}") from None
    model.load_state_dict(tensors)
    return Fitted(new, sizes)


def _check_channels(tensors: dict[str, Tensor], mine: dict[str, Tensor], first: str | None, path: Path) -> None:
    given, own = tensors.get(f"{first}.weight"), mine.get(f"{first}.weight")
    if given is not None and own is not None and given.ndim == 4 and given.shape[1] != own.shape[1]:
        raise CheckpointError(
            f"{path} is of a model for images of {given.shape[1]} channels, not {own.shape[1]}: "
            f"{first}.weight says so"
        )


def _heads(
    tensors: dict[str, Tensor], mine: dict[str, Tensor], heads: tuple[str, ...], path: Path, replace: bool
) -> bool:
    """Replace heads that are missing or for other classes by those of the model; returns whether any was."""
    keys = {f"{head}.{what}" for head in heads for what in ("weight", "bias")} & mine.keys()
    if keys and not keys & tensors.keys():
        if not replace:
            raise CheckpointError(f"{path} holds the weights of no head: {max(keys)!r} is missing")
        tensors.update({key: mine[key] for key in keys})
        return True
    fit: set[str] = set()
    for key in sorted(keys & tensors.keys()):
        given, own = tensors[key], mine[key]
        if given.ndim == own.ndim and len(given) != len(own) and given.shape[1:] == own.shape[1:]:
            if not replace:
                raise CheckpointError(
                    f"{path} is of a model with {len(given)} classes, not {len(own)}: {key} says so"
                )
            fit.add(key)
    tensors.update({key: mine[key] for key in fit})
    return bool(fit)


@dataclass(frozen=True)
class _Table:
    """Positions of a model: rows for `tokens` tokens, then for edge x edge patches of `patch` x `patch` pixels."""

    name: str
    tokens: int
    edge: int
    patch: int
    resized: Callable[[Tensor], Tensor]


def _table(model: Any) -> _Table | None:
    """The positions of a model with a square grid; other positions are never resized."""
    if kind(model) in torchvision.KINDS:
        edge = model.image_size // model.patch_size
        return _Table("encoder.pos_embedding", 1, edge, model.patch_size, partial(_as_torchvision, model))
    if kind(model) not in timm.KINDS or model.pos_embed is None:
        return None
    grid, patch = model.patch_embed.grid_size, model.patch_embed.patch_size
    if grid is None or grid[0] != grid[1] or patch[0] != patch[1]:
        return None
    tokens = 0 if model.no_embed_class else model.num_prefix_tokens
    return _Table("pos_embed", tokens, grid[0], patch[0], partial(_as_timm, list(grid), tokens))


def _as_timm(grid: list[int], tokens: int, table: Tensor) -> Tensor:
    resized: Tensor = library("timm.layers").resample_abs_pos_embed(table, grid, None, tokens)
    return resized


def _as_torchvision(model: Any, table: Tensor) -> Tensor:
    name = "encoder.pos_embedding"
    state = library("torchvision.models.vision_transformer").interpolate_embeddings(
        model.image_size, model.patch_size, {name: table}
    )
    resized: Tensor = state[name]
    return resized


def _positions(
    tensors: dict[str, Tensor], table: _Table | None, path: Path, resize: bool
) -> tuple[int, int] | None:
    """Resize positions for another grid to that of the model, and return both image sizes."""
    given = None if table is None else tensors.get(table.name)
    if table is None or given is None or given.ndim != 3 or given.shape[0] != 1:
        return None
    patches = given.shape[1] - table.tokens
    edge = math.isqrt(max(patches, 0))
    if edge < 1 or edge * edge != patches or edge == table.edge:
        return None  # a remaining mismatch is refused by check_architecture
    sizes = edge * table.patch, table.edge * table.patch
    if not resize:
        raise CheckpointError(
            f"{path} is of a model for images of size {sizes[0]}, not {sizes[1]}: {table.name} says so; "
            "positions are resized if an image size is given"
        )
    tensors[table.name] = table.resized(given)
    return sizes
