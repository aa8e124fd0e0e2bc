"""Weights from a file of anyone's, as named tensors; nothing in the file is ever executed."""

import argparse
import mmap
import os
import re
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from specguard.errors import CheckpointError
from specguard.records.files import open_file, reading
from specguard.records.store import LARGEST_WEIGHTS, check_dtypes, read_tensors

_WRAPPERS = ("state_dict", "model", "model_state_dict", "model_ema")
_PREFIXES = ("module.", "model.", "_orig_mod.")
_AVERAGES = "n_averaged"  # how many weights torch has averaged, beside their averages
# What torch's unpickler knows, no weights need, and makes large things of a number or of the same text again.
_GROWING = (b"\nbytearray\n", b"_codecs\nencode\n")
_PICKLED = (".pt", ".pth", ".bin", ".ckpt", ".tar")


def load_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file, or of a file that torch has written, by name, on the CPU.

    The latter is read with torch's restricted unpickler, which runs no code of the file. Of a training checkpoint
    the weights are taken, and what training puts before all names (`module.`, `model.`, `_orig_mod.`) is removed.
    A namespace of arguments, as training scripts store beside weights, is data and does not matter.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        tensors: dict[str, Tensor] = read_tensors(path)
    elif path.suffix in _PICKLED:
        tensors = _tensors(path, _unwrapped(_unpickled(path)))
    else:
        known = ", ".join((".safetensors", *_PICKLED))
        raise CheckpointError(f"{path} does not end like a file of weights, which is one of {known}")
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise CheckpointError(f"{path} holds numbers that are not finite, in {name!r}")
    return _without_prefixes(tensors)


def _unpickled(path: Path) -> Any:
    with reading(path, CheckpointError), open_file(path, LARGEST_WEIGHTS) as file:
        zipped = _checked_archive(path, file)
        return _loaded(path, path if zipped else file, mmap=zipped)  # mapped, it takes no memory but its own


def _checked_archive(path: Path, file: BinaryIO) -> bool:
    """Whether this is a zip archive, as torch has written since 1.6; one that would grow in memory is refused."""
    if os.fstat(file.fileno()).st_size:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if grown := [name for name in _GROWING if content.find(name) >= 0]:
                asked = grown[0].decode().strip().replace("\n", ".")
                raise CheckpointError(f"{path} asks for {asked}, of which a few bytes can make any number of them")
    if not zipfile.is_zipfile(file):
        file.seek(0)
        return False
    try:
        with zipfile.ZipFile(file) as archive:
            packed = [member for member in archive.infolist() if member.compress_type != zipfile.ZIP_STORED]
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError, EOFError, struct.error) as error:
        raise CheckpointError(f"{path} is truncated or not a file of weights that torch has written") from error
    if packed:
        raise CheckpointError(
            f"{path} is compressed, which torch never does: it may be of any size when it is read"
        )
    return True


def _loaded(path: Path, source: Path | BinaryIO, mmap: bool) -> Any:
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:
        asked = re.search(r"(?:GLOBAL|[Gg]lobal|class)\s+([\w.]+\.\w+)", str(error))
        if "Weights only load failed" in str(error) and asked:
            raise CheckpointError(
                f"{path} asks for {asked.group(1)}, which could run code: only tensors are read; save a state_dict"
            ) from error
        raise CheckpointError(f"{path} is truncated or not a file of weights that torch has written") from error


def _unwrapped(content: Any) -> Any:
    """The weights in a training checkpoint, which may lie a few dictionaries deep."""
    for _ in range(len(_WRAPPERS)):
        inner = [
            content[key] for key in _WRAPPERS if isinstance(content, Mapping) and _is_mapping(content.get(key))
        ]
        if not inner:
            break
        content = inner[0]
    return content


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


def _tensors(path: Path, content: Any) -> dict[str, Tensor]:
    if not isinstance(content, Mapping) or not content:
        raise CheckpointError(f"{path} holds no weights by name but a value of type {type(content).__name__}")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(
                f"{path} holds no tensor under {name!r} but a value of type {type(value).__name__}"
            )
        if value.layout != torch.strided or value.is_meta or value.is_quantized:
            raise CheckpointError(
                f"{path} holds a tensor under {name!r} that is sparse, quantized or empty of numbers"
            )
    check_dtypes(content, path)
    _check_storage(path, content)
    return {name: value.detach() for name, value in content.items()}


def _check_storage(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuse entries that are in no file: of tensors that say one number many times, or were never filled."""
    with reading(path, CheckpointError):
        room = path.stat().st_size
    seen: set[int] = set()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        room -= 0 if storage.data_ptr() in seen else storage.nbytes()
        seen.add(storage.data_ptr())
        if tensor.numel() * tensor.element_size() > storage.nbytes() or room < 0:
            raise CheckpointError(
                f"{path} says that {name!r} has {tensor.numel():,} entries, which it does not hold"
            )


def _without_prefixes(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    if _AVERAGES in tensors and all(name == _AVERAGES or name.startswith("module.") for name in tensors):
        tensors = {name: tensor for name, tensor in tensors.items() if name != _AVERAGES}
    while tensors:
        found = [prefix for prefix in _PREFIXES if all(name.startswith(prefix) for name in tensors)]
        if not found:
            break
        tensors = {name.removeprefix(found[0]): tensor for name, tensor in tensors.items()}
    return tensors
