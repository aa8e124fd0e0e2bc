"""`timm:NAME`, `torchvision:NAME` and `hf:FOLDER`: models of libraries, made for the data, with local weights."""

from pathlib import Path
from typing import cast

from specguard.cli.console import err
from specguard.cli.groups import DataOptions, ModelOptions
from specguard.cli.model_args import model_arguments
from specguard.cli.model_name import Kind
from specguard.cli.names import named_data, used_root
from specguard.cli.normalization import given_statistics, library_statistics, print_statistics
from specguard.data import Data
from specguard.errors import ConfigError
from specguard.models import ModelSource
from specguard.models.load import Fitted
from specguard.models.pretrained import huggingface_config
from specguard.models.source import native_size
from specguard.nn import Network
from specguard.records.base import Json


def library_model(
    name: str, options: ModelOptions, data: DataOptions, arguments: Json | None = None
) -> tuple[ModelSource, Network, Data]:
    """A model of a library with its weights, and its data; `arguments` are those of --model-arg by default."""
    weights = _weights(name, options)
    if weights is None:
        raise ConfigError(f"{name} needs --weights, a file with its weights")
    assert data.data is not None
    given = model_arguments(options.model_arg) if arguments is None else arguments
    source, loaded = _source_and_data(name, options, given, data.data, data.data_root, data.verify_data)
    network, fitted = source.loaded(weights, resize=options.image_size is not None)
    _report_changes(fitted, source.classes)
    return source, network, loaded


def new_network(
    name: str, options: ModelOptions, data: str, data_root: Path | None, verify_data: bool, seed: int
) -> tuple[Network, Data]:
    """A network to train, from weights or fresh from the seed, and the data."""
    arguments = model_arguments(options.model_arg)
    source, loaded = _source_and_data(name, options, arguments, data, data_root, verify_data, trained=True)
    weights = _weights(name, options)
    if weights is None:
        return source.fresh(seed), loaded
    network, fitted = source.loaded(weights, seed, new_head=True, resize=options.image_size is not None)
    _report_changes(fitted, source.classes)
    return network, loaded


def _source_and_data(
    name: str,
    options: ModelOptions,
    arguments: Json,
    data: str,
    data_root: Path | None,
    verify_data: bool,
    trained: bool = False,
) -> tuple[ModelSource, Data]:
    """Where a model comes from, made for this data: images of a fixed size are resized within the model."""
    kind, rest = cast(Kind, name.partition(":")[0]), name.partition(":")[2]
    config = huggingface_config(Path(rest), arguments) if kind == "hf" else None
    size = options.image_size or native_size(kind, rest, config)
    loaded = named_data(data, used_root(data_root, data), verify_data, size)
    channels, pixels, width = loaded.shape
    if pixels != width:
        raise ConfigError(f"{loaded.name} has images of {pixels} x {width}, and models take square ones")
    given = given_statistics(options, channels)
    statistics, place = (
        (given, "as given") if given is not None else library_statistics(kind, rest, channels) or (None, "")
    )
    if statistics is None and trained:
        statistics, place = loaded.pixel_statistics(), f"those of the training images of {loaded.name}"
    if statistics is None:
        raise ConfigError(
            f"{name} is normalized for another number of channels than the {channels} of {loaded.name}: "
            "give --mean and --std"
        )
    source = ModelSource(
        kind,
        rest if config is None else str(config["model_type"]),
        options.classes or len(loaded.classes),
        channels,
        size,
        *statistics,
        None if pixels == size else pixels,
        config,
        None if config is not None else arguments or None,
    )
    if source.classes != len(loaded.classes):
        raise ConfigError(f"{loaded.name} has {len(loaded.classes)} classes, but the model {source.classes}")
    print_statistics(statistics, place)
    return source, loaded


def _report_changes(fitted: Fitted, classes: int) -> None:
    """Say what was changed in the weights so that they fit."""
    if fitted.new_head:
        err.print(
            f"the head is new, for {classes} classes, and drawn from the seed; the weights have none for them",
            soft_wrap=True,
        )
    if fitted.sizes is not None:
        old, new = fitted.sizes
        err.print(f"positions are resized, from images of size {old} to {new}", soft_wrap=True)


def _weights(name: str, options: ModelOptions) -> Path | None:
    kind, _, folder = name.partition(":")
    if kind == "hf" and options.weights is not None:
        raise ConfigError(f"the weights of {name} are those in its folder; --weights has no effect on it")
    if kind == "hf":
        return Path(folder)
    return options.weights
