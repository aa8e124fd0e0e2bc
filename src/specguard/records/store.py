"""Tensors, checkpoints and environments of runs, written so that a crash at any moment leaves them valid."""

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from specguard.errors import CheckpointError, RunError
from specguard.records.base import Environment, Json
from specguard.records.files import folder_below, open_file, read_file, reading, sync_folder, write_file, writing
from specguard.records.io import LARGEST_LINES, RecordFile, read_json, write_json
from specguard.version import __version__

if TYPE_CHECKING:  # records are read without torch; only functions on tensors import it
    import torch
    from torch import Tensor

_TENSORS, _STATE = "tensors.safetensors", "state.json"
_PACKAGES = ("torch", "numpy", "safetensors", "scikit-learn")
LARGEST_WEIGHTS = 32 * 2**30  # bytes, far beyond any real file
# Types whose entries can be computed with, compared and written again.
_DTYPES = frozenset(
    "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool".split()  # noqa: SIM905
)


def file_digest(path: Path) -> str:
    """SHA-256 of a file of records."""
    with reading(path), open_file(path, LARGEST_LINES) as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def write_tensors(path: Path, tensors: "Mapping[str, Tensor]") -> None:
    write_file(path, tensor_bytes(tensors))


def tensor_bytes(tensors: "Mapping[str, Tensor]", note: bytes | None = None) -> bytes:
    """The content of a safetensors file, with a note in its metadata under `specguard`.

    There is one entry, because safetensors writes several in a random order.
    """
    from safetensors.torch import save

    plain = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    return save(plain, None if note is None else {"specguard": note.decode().strip()})


def read_tensors(path: Path) -> "dict[str, Tensor]":
    """The tensors of a safetensors file; anything else raises one sentence. Nothing is unpickled."""
    with reading(path, CheckpointError):
        content = read_file(path, LARGEST_WEIGHTS)
    return parse_tensors(content, path)


def parse_tensors(content: bytes, path: Path) -> "dict[str, Tensor]":
    """The tensors in the content of a safetensors file."""
    from safetensors.torch import load

    try:
        tensors: dict[str, Tensor] = dict(load(content))
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError) as error:
        reason = str(error).partition("\n")[0]  # without the traceback that torch adds
        raise CheckpointError(f"{path} is truncated or not a safetensors file: {reason}") from error
    check_dtypes(tensors, path)
    return tensors


def tensor_note(content: bytes, path: Path) -> bytes | None:
    """The note of `tensor_bytes` in the content of a safetensors file; None where there is none."""
    length = int.from_bytes(content[:8], "little")
    try:
        header = json.loads(content[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is truncated or not a safetensors file") from error
    match header:
        case {"__metadata__": {"specguard": str(note)}}:
            return note.encode(errors="replace")
    return None


def check_dtypes(tensors: "Mapping[str, Tensor]", path: Path) -> None:
    """Refuse tensors of unsupported types, such as 8-bit floats or complex numbers."""
    for name, tensor in tensors.items():
        if (kind := str(tensor.dtype).removeprefix("torch.")) not in _DTYPES:
            raise CheckpointError(f"{path} holds {name!r} of type {kind}, which is not supported")


def write_checkpoint(run: Path, step: int, tensors: "Mapping[str, Tensor]", state: Json) -> None:
    """Write a checkpoint atomically: its folder is renamed only when both files are on the disk.

    Older checkpoints are removed afterwards.
    """
    folder = folder_below(run, "checkpoints")
    draft, retired, final = folder / ".draft", folder / ".retired", folder / f"{step:08d}"
    with writing(final):
        for left_over in (draft, retired):
            shutil.rmtree(left_over, ignore_errors=True)
        try:
            os.mkdir(draft)  # fails where a link of this name is
            write_tensors(draft / _TENSORS, tensors)
            write_json(draft / _STATE, state)
            os.rename(draft, final)
        except BaseException:  # including KeyboardInterrupt
            shutil.rmtree(draft, ignore_errors=True)
            raise
        sync_folder(folder)
        for old in checkpoint_steps(run):
            if old < step:
                os.rename(folder / f"{old:08d}", retired)  # half removed, it must not look complete
                shutil.rmtree(retired)


def checkpoint_steps(run: Path) -> list[int]:
    """The steps of all complete checkpoints in ascending order."""
    folder = run / "checkpoints"
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted(int(name) for name in names if re.fullmatch("[0-9]{8,12}", name))


def read_checkpoint(run: Path, step: int) -> "tuple[dict[str, Tensor], Json]":
    folder = run / "checkpoints" / f"{step:08d}"
    return read_tensors(folder / _TENSORS), read_json(folder / _STATE)


def described(value: object) -> Any:
    """A frozen dataclass as JSON: the name of its type and its fields, as settings of runs hold them."""
    if is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: described(getattr(value, f.name)) for f in fields(value)}
        return {"type": type(value).__name__, **parts}
    if isinstance(value, tuple | list):
        return [described(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise RunError(f"a {type(value).__name__} cannot be written into the settings of a run")


def derived_seed(seed: int, *purpose: object) -> int:
    """A seed for one purpose, such as (7, "crop", epoch, step), independent of all others and without state."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def environment(device: "torch.device", processes: int = 1) -> Environment:
    """The hardware, versions, commit and command of this process."""
    import torch

    versions: Json = {"specguard": __version__, "python": platform.python_version()}
    versions |= {name: v for name in _PACKAGES if (v := _version(name))}
    hardware: Json = {"cpu": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    if processes > 1:
        hardware["processes"] = processes
    if device.type == "cuda":
        hardware["gpu"] = torch.cuda.get_device_name(device)
        versions["cuda"] = torch.version.cuda
    return Environment(
        hardware=hardware,
        versions=versions,
        commit=source_commit(),
        command=shlex.join([Path(sys.argv[0]).name.replace("__main__.py", "specguard"), *sys.argv[1:]]),
    )


def record_start(folder: Path, device: "torch.device", processes: int = 1) -> None:
    """Append this start to environment.jsonl, after removing an incomplete last line."""
    starts = RecordFile(folder / "environment.jsonl", Environment)
    starts.read()
    if starts.torn:
        starts.rewrite(starts.records)
    starts.append([environment(device, processes)])


def old_version(folder: Path) -> str:
    """`; it was started by version 0.0.9, and this is 0.2.0` where the versions differ, else nothing."""
    for start in RecordFile(folder / "environment.jsonl", Environment).read()[:1]:
        version = start.versions.get("specguard")
        if isinstance(version, str) and version != __version__:
            return f"; it was started by version {version[:20]!r}, and this is {__version__}"
    return ""


def source_commit() -> str | None:
    """The commit of the source tree of this package, with a '+' if it was modified; None outside a repository."""
    here = Path(__file__).resolve().parent
    if named := os.environ.get("SPECGUARD_COMMIT"):  # for copies of the tree without its history
        return named
    options: Any = {"cwd": here, "capture_output": True, "text": True, "check": True}
    try:
        subprocess.run(["git", "ls-files", "--error-unmatch", Path(__file__).name], **options)
        commit = subprocess.run(["git", "rev-parse", "HEAD"], **options).stdout.strip()
        changed = subprocess.run(["git", "status", "--porcelain", "--", "."], **options).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changed else "")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
