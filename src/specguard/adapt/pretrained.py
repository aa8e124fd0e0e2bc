"""Image classifiers of Hugging Face from a local folder, as `save_pretrained` leaves it.

Nothing is downloaded, and no code of the folder runs: weights are read from model.safetensors alone.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from specguard.adapt.checkpoint import load_weights
from specguard.adapt.create import library, square
from specguard.errors import CheckpointError, ConfigError
from specguard.runs import Json, read_json

_HEADS = ("classifier.", "cls_classifier.", "distillation_classifier.")


def huggingface_config(folder: Path) -> Json:
    """The folder's config.json, which must be that of an image classifier of transformers, as plain JSON."""
    record = read_json(folder / "config.json")
    return _plain(_config(record))


def huggingface_model(config: Json, classes: int) -> nn.Module:
    """A fresh model of this config with so many classes, drawn with torch's global generator."""
    return _made(_config(config | _labels(classes)))


def huggingface_size(config: Json) -> int:
    """The edge of the images that a model of this config is made for."""
    size = getattr(_config(config), "image_size", None)
    both = (size, size) if isinstance(size, int) else tuple(size or ())
    if not both or not all(isinstance(edge, int) and edge > 0 for edge in both):
        raise ConfigError("the config of transformers does not say the size of the images")
    return square("transformers", str(config.get("model_type")), both)


def huggingface_statistics(folder: Path) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Mean and std of the pixels in the folder's preprocessor_config.json; None where there is no such file."""
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
    raise ConfigError(f"{path} does not say how images are normalised")


def load_folder(folder: Path, config: Json, classes: int, *, new_head: bool = False) -> tuple[nn.Module, bool]:
    """The model of a folder with its weights, in float32; whether the head is a new one, for other classes.

    transformers reads the weights, for it knows how their names have changed; what it would draw at random in place
    of a weight that is missing is an error here.
    """
    weights = folder / "model.safetensors"
    load_weights(weights)  # whole, and of finite numbers
    there = _config(config).num_labels
    if there != classes and not new_head:
        raise CheckpointError(f"{folder} is of a model with {there} classes, not {classes}: config.json says so")
    transformers = library("transformers")
    with _quiet(transformers), _sentences(f"transformers cannot load {folder}"):
        model, told = _auto(transformers).from_pretrained(
            str(folder),
            config=_config(config | _labels(classes)),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    others = {entry if isinstance(entry, str) else entry[0] for entry in told["mismatched_keys"]}
    shapes = {key for key in others if there == classes or not key.startswith(_HEADS)}
    for what, keys in (
        ("it lacks {}", told["missing_keys"]),
        ("it has an unknown {}", told["unexpected_keys"]),
        ("{} has another shape", shapes),
    ):
        if keys:
            raise CheckpointError(f"{weights} is of another architecture: {what.format(repr(min(keys)))}")
    return model.float().eval(), bool(others)


def _config(record: Json) -> Any:
    transformers = library("transformers")
    kind, rest = record.get("model_type"), {k: v for k, v in record.items() if k != "model_type"}
    if "quantization_config" in record:
        raise ConfigError("a quantised model of transformers cannot be converted")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise ConfigError(f"transformers has no kind of model {kind!r}")
    with _quiet(transformers), _sentences(f"transformers cannot make a {kind} of this config"):
        config = transformers.AutoConfig.for_model(kind, **rest)
    if type(config) not in transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        raise ConfigError(f"a {kind} of transformers is no classifier of images")
    return config


def _made(config: Any) -> nn.Module:
    transformers = library("transformers")
    with _quiet(transformers), _sentences("transformers cannot make this model"):
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
def _sentences(what: str) -> Iterator[None]:
    """What transformers says against a config or a file, as one sentence."""
    try:
        yield
    except (MemoryError, ConfigError):
        raise
    except Exception as error:  # configs are anyone's, and a wrong entry fails anywhere
        reason = " ".join(line.strip() for line in str(error).strip().splitlines()[:2])
        raise ConfigError(f"{what}: {reason or type(error).__name__}") from error


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without reports and progress bars on the terminal."""
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
