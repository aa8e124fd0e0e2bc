"""Files of weights beside what they say about themselves: those of `export`, and state dicts of this package."""

from dataclasses import dataclass
from pathlib import Path

import msgspec
from torch import Tensor

from specguard.errors import CheckpointError, RunError
from specguard.models.checkpoint import load_weights
from specguard.models.run import stored_model
from specguard.nn import Classifier, matches_fingerprint
from specguard.records.base import Json, sentence
from specguard.records.export import ExportRecord
from specguard.records.files import read_file, reading
from specguard.records.store import LARGEST_WEIGHTS, tensor_note


@dataclass(frozen=True)
class WeightFile:
    """The named tensors of a file, and what `export` has written about them, if it wrote the file.

    Args:
        path: The file.
        tensors: Its tensors by name.
        record: What its metadata says; None for a file of another origin.

    Example:
        >>> WeightFile(Path("weights.pt"), {}).record is None
        True
    """

    path: Path
    tensors: dict[str, Tensor]
    record: ExportRecord | None = None


def read_weight_file(path: Path) -> WeightFile:
    """Read a file of weights, with the metadata of `export` where it has any; no code of the file is executed.

    Args:
        path: A file for `load_weights`.

    Returns:
        Its tensors, and what it says about itself.

    Example:
        >>> import torch
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     torch.save({"w": torch.ones(2)}, Path(folder) / "weights.pt")
        ...     read_weight_file(Path(folder) / "weights.pt").tensors
        {'w': tensor([1., 1.])}
    """
    path = Path(path)
    tensors = load_weights(path)
    if path.suffix != ".safetensors":
        return WeightFile(path, tensors)
    with reading(path, CheckpointError):
        note = tensor_note(read_file(path, LARGEST_WEIGHTS), path)
    if note is None:
        return WeightFile(path, tensors)
    try:
        return WeightFile(path, tensors, msgspec.json.decode(note, type=ExportRecord))
    except (msgspec.DecodeError, RecursionError, UnicodeError, OverflowError) as error:
        raise CheckpointError(f"{path} says something malformed about itself: {sentence(error)}") from error


def model_of_file(file: WeightFile, config: Json | None = None) -> Classifier:
    """The model of this package whose weights a file holds.

    A file that `export` wrote must be of the function that it says, whichever architecture is named.

    Args:
        file: The file, as `read_weight_file` returns it.
        config: The architecture, as model.json has it; by default the one that the file names.

    Returns:
        The model, in eval mode, on the CPU.

    Example:
        >>> from dataclasses import asdict
        >>> from specguard.nn import ViT, preset
        >>> weights = WeightFile(Path("tiny.pt"), ViT(preset("tiny")).state_dict())
        >>> model_of_file(weights, asdict(preset("tiny"))).classes
        10
    """
    stated = None if file.record is None else file.record.config
    if config is None and stated is None:
        raise RunError(f"{file.path} does not say of which architecture it is")
    model = stored_model(stated if config is None else config, file.tensors, file.path, file.path)
    check_fingerprint(model, file)
    return model


def check_fingerprint(model: Classifier, file: WeightFile) -> None:
    """Raise a `CheckpointError` where a file says that it is of another function."""
    if file.record is not None and not matches_fingerprint(model, file.record.fingerprint):
        raise CheckpointError(
            f"{file.path} is of another function than this architecture gives it: "
            "its metadata names the fingerprint of another model"
        )
