"""Weights from an untrusted file, as named tensors; no code of the file is ever executed."""

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
_AVERAGES = "n_averaged"  # the counter that torch's AveragedModel stores with its weights
# Constructors that torch's unpickler allows and weights do not need; a few bytes can allocate large objects.
_GROWING = (b"\nbytearray\n", b"_codecs\nencode\n")
_PICKLED = (".pt", ".pth", ".bin", ".ckpt", ".tar")


def load_weights(path: Path | str) -> dict[str, Tensor]:
    """Load named tensors from a weight file without executing code.

    Files of torch are read with its restricted unpickler. From a training checkpoint only the weights are taken,
    and prefixes that all names share (`module.`, `model.`, `_orig_mod.`) are removed. An `argparse.Namespace`,
    which training scripts store next to their weights, is allowed and ignored.

    Args:
        path: A file ending in .safetensors, .pt, .pth, .bin, .ckpt or .tar.

    Returns:
        Tensors by name, on the CPU, all finite.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder) / "weights.pt"
        ...     torch.save({"state_dict": {"module.w": torch.ones(2)}}, path)
        ...     load_weights(path)
        {'w': tensor([1., 1.])}
    """
    path = Path(path)
    path = Path(path)
    if path.suffix == ".safetensors":
        tensors: dict[str, Tensor] = read_tensors(path)
    elif path.suffix in _PICKLED:
        tensors = _tensors(path, _unwrap(_unpickle(path)))
    else:
        known = ", ".join((".safetensors", *_PICKLED))
        raise CheckpointError(f"{path} does not have the suffix of a weight file, which is one of {known}")
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise CheckpointError(f"{path} holds entries that are not finite, in {name!r}")
    return _strip_prefixes(tensors)


def _unpickle(path: Path) -> Any:
    with reading(path, CheckpointError), open_file(path, LARGEST_WEIGHTS) as file:
        zipped = _check_archive(path, file)
        return _load(path, path if zipped else file, mmap=zipped)  # memory-mapped where possible


def _check_archive(path: Path, file: BinaryIO) -> bool:
    """Whether a file is a zip archive, as torch has written since 1.6; one that expands in memory is refused."""
    if os.fstat(file.fileno()).st_size:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if grown := [name for name in _GROWING if content.find(name) >= 0]:
                asked = grown[0].decode().strip().replace("\n", ".")
                raise CheckpointError(f"{path} asks for {asked}, with which a few bytes can fill all memory")
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
            f"{path} is compressed, which files of torch never are: its size in memory is unbounded"
        )
    return True


def _load(path: Path, source: Path | BinaryIO, mmap: bool) -> Any:
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


def _unwrap(content: Any) -> Any:
    """The weights of a training checkpoint, which may be nested in a few dictionaries."""
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
                f"{path} holds a tensor under {name!r} that is sparse, quantized or on the meta device"
            )
    check_dtypes(content, path)
    _check_storage(path, content)
    return {name: value.detach() for name, value in content.items()}


def _check_storage(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors with more entries than the file stores, as expanded or unallocated tensors have."""
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


def _strip_prefixes(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    if _AVERAGES in tensors and all(name == _AVERAGES or name.startswith("module.") for name in tensors):
        tensors = {name: tensor for name, tensor in tensors.items() if name != _AVERAGES}
    while tensors:
        found = [prefix for prefix in _PREFIXES if all(name.startswith(prefix) for name in tensors)]
        if not found:
            break
        tensors = {name.removeprefix(found[0]): tensor for name, tensor in tensors.items()}
    return tensors
