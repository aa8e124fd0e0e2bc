"""Image classifiers of Hugging Face from a local folder written by `save_pretrained`.

Nothing is downloaded, and no code of the folder is executed: weights are read with `load_weights`.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specguard.errors import CheckpointError, ConfigError
from specguard.models.arguments import check_arguments, check_depth, check_known
from specguard.models.checkpoint import load_weights
from specguard.models.library import library, unusable
from specguard.models.zoo import square
from specguard.records.base import Json
from specguard.records.io import read_json

_HEADS = ("classifier.", "cls_classifier.", "distillation_classifier.")
_FILES = ("model.safetensors", "pytorch_model.bin")  # each may be sharded, with an index
_IGNORED = ("model_type", "dtype", "torch_dtype")  # weights keep the dtype in which they are stored
_UNUSED = ("pooler.", "mask_token")  # not used by a classifier


def huggingface_config(folder: Path, arguments: Json | None = None) -> Json:
    """The config.json of the folder as plain JSON; it must describe an image classifier of transformers.

    Some of its entries may be replaced by `arguments`.
    """
    record = read_json(folder / "config.json")
    config = _config(record)
    if arguments:
        check_arguments(arguments)
        check_known(f"the config of a {record['model_type']} of transformers", arguments, config.to_dict())
        config = _config(record | arguments)
    return _plain(config)


def huggingface_model(config: Json, classes: int) -> nn.Module:
    """A newly initialized model of this config for this many classes, drawn from torch's global generator."""
    return _create(_config(config | _labels(classes)))


def huggingface_size(config: Json) -> int:
    """The edge of the images that a model of this config takes."""
    size = getattr(_config(config), "image_size", None)
    both = (size, size) if isinstance(size, int) else tuple(size or ())
    if not both or not all(isinstance(edge, int) and edge > 0 for edge in both):
        raise ConfigError("the config of transformers does not say the size of the images")
    return square("transformers", str(config.get("model_type")), both)


def huggingface_statistics(folder: Path) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Mean and std of the pixels from the folder's preprocessor_config.json; None if there is no such file."""
    path = folder / "preprocessor_config.json"
    if not path.exists():
        return None
    match read_json(path):
        case {"do_normalize": False}:
            return (0.0,), (1.0,)
        case {"image_mean": list(mean), "image_std": list(std)} if all(
            type(number) in (int, float) for number in (*mean, *std)
        ):
            return tuple(map(float, mean)), tuple(map(float, std))
    raise ConfigError(f"{path} does not say how images are normalized")


def load_folder(folder: Path, config: Json, classes: int, *, new_head: bool = False) -> tuple[nn.Module, bool]:
    """The model of a folder with its weights, in float32, and whether its head is newly initialized.

    transformers assigns the weights, since their names depend on its version. A missing weight, which it would
    initialize at random, is an error here. With `new_head` a folder for another number of classes, or of a model
    without a head, is accepted.
    """
    tensors, place = _tensors(folder)
    stored_classes = _config(config).num_labels
    has_head = any(name.startswith(_HEADS) for name in tensors)
    if not has_head and not new_head:
        raise CheckpointError(f"{place} holds the weights of no head: a classifier is missing")
    if has_head and stored_classes != classes and not new_head:
        raise CheckpointError(
            f"{folder} is of a model with {stored_classes} classes, not {classes}: config.json says so"
        )
    transformers, wanted = library("transformers"), _config(config | _labels(classes))
    with _quiet(transformers), _as_config_error(f"transformers cannot load {folder}"):
        with torch.device("meta"):
            kind: Any = type(_auto(transformers).from_config(wanted, trust_remote_code=False))
        model, info = kind.from_pretrained(
            None, config=wanted, state_dict=tensors, ignore_mismatched_sizes=True, output_loading_info=True
        )
    others = {entry if isinstance(entry, str) else entry[0] for entry in info["mismatched_keys"]}
    shapes = {key for key in others if stored_classes == classes or not key.startswith(_HEADS)}
    missing = {key for key in info["missing_keys"] if has_head or not key.startswith(_HEADS)}
    unknown = {key for key in info["unexpected_keys"] if not any(part in key for part in _UNUSED)}
    for what, keys in (
        ("it lacks {}", missing),
        ("it has an unknown {}", unknown),
        ("{} has another shape", shapes),
    ):
        if keys:
            raise CheckpointError(f"{place} is of another architecture: {what.format(repr(min(keys)))}")
    return model.float().eval(), bool(others) or not has_head


def _tensors(folder: Path) -> tuple[dict[str, Tensor], Path]:
    """The weights of a folder, complete and finite, and the file that holds or lists them."""
    for name in _FILES:
        if (folder / name).exists():
            return load_weights(folder / name), folder / name
        index = folder / f"{name}.index.json"
        if index.exists():
            return _load_shards(index), index
    raise CheckpointError(f"{folder / _FILES[0]} does not exist")


def _load_shards(index: Path) -> dict[str, Tensor]:
    """Weights that are stored in several files of one folder."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(part, str) for part in places.values()):
        raise CheckpointError(f"{index} does not say in which files the weights are")
    tensors: dict[str, Tensor] = {}
    for part in sorted(set(places.values())):
        if Path(part).name != part:
            raise CheckpointError(f"{index} names {part!r}, which is no file beside it")
        tensors |= load_weights(index.parent / part)
    if lost := sorted(places.keys() - tensors.keys()):
        raise CheckpointError(f"{index} lists {lost[0]!r}, which is in none of its files")
    return tensors


def _config(record: Json) -> Any:
    transformers = library("transformers")
    kind, rest = record.get("model_type"), {k: v for k, v in record.items() if k not in _IGNORED}
    if "quantization_config" in record:
        raise ConfigError("a quantized model of transformers cannot be converted")
    check_depth(rest)
    with _quiet(transformers), _as_config_error(f"transformers cannot make a {kind} of this config"):
        if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
            raise ConfigError(f"transformers has no kind of model {kind!r}")
        config = transformers.AutoConfig.for_model(kind, **rest)
        if type(config) not in transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
            raise ConfigError(f"a {kind} of transformers is no classifier of images")
    return config


def _create(config: Any) -> nn.Module:
    transformers = library("transformers")
    with _quiet(transformers), _as_config_error("transformers cannot make this model"):
        model: nn.Module = _auto(transformers).from_config(config, trust_remote_code=False)
    return model.float().eval()


def _auto(transformers: Any) -> Any:
    return transformers.AutoModelForImageClassification


def _labels(classes: int) -> Json:
    names = {str(i): f"LABEL_{i}" for i in range(classes)}
    return {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}}


def _plain(config: Any) -> Json:
    return {"model_type": config.model_type, **json.loads(config.to_json_string(use_diff=True))}


@contextmanager
def _as_config_error(what: str) -> Iterator[None]:
    """Turn an error of transformers about a config or a file into a one-sentence `ConfigError`."""
    try:
        yield
    except (MemoryError, ConfigError):
        raise
    except ImportError as error:
        raise unusable("transformers", error) from error
    except Exception as error:  # configs are untrusted, and a wrong entry may fail anywhere
        reason = " ".join(line.strip() for line in str(error).strip().splitlines()[:2])
        raise ConfigError(f"{what}: {reason or type(error).__name__}") from error


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Suppress log messages and progress bars."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
