"""What a command is about: a run directory, or a model from elsewhere, with its data and a place for results.

`timm:NAME` and `torchvision:NAME` are architectures, with weights from a file; `hf:FOLDER` is a folder as
`save_pretrained` of transformers leaves it. Nothing is ever downloaded.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, cast

from specguard.cli.console import err, option
from specguard.cli.names import DataName, folder_within, named_data, number, run_data, used_root
from specguard.data import AnyData, Data, Text
from specguard.errors import ConfigError
from specguard.models import ModelSource, from_run
from specguard.models.embedding import IMAGENET_MEAN, IMAGENET_STD
from specguard.models.load import Fitted
from specguard.models.pretrained import huggingface_config, huggingface_statistics
from specguard.models.source import Kind, native_size
from specguard.models.zoo import timm_statistics
from specguard.nn import Classifier, Network, TextEncoder, ViT, weights_fingerprint
from specguard.records import io
from specguard.records.files import check_below

RUN_HELP = "directory of a finished training run, or a model: timm:NAME, torchvision:NAME, hf:FOLDER"
_PANEL = "Models from elsewhere"
_KINDS = ("timm", "torchvision", "hf")
Weights = Annotated[Path | None, option(".safetensors or .pt with the weights of timm:NAME", _PANEL)]
Classes = Annotated[int | None, option("number of classes [default: the data's]", _PANEL, min=1)]
ImageSize = Annotated[int | None, option("images the model works at [default: the architecture's]", _PANEL, min=1)]
Mean = Annotated[str | None, option("of its pixels in [0, 1], with commas [default: the library's]", _PANEL)]
Std = Annotated[str | None, option("standard deviation that goes with --mean", _PANEL)]


@dataclass(frozen=True)
class Elsewhere:
    """The options that models from elsewhere have, and runs have not."""

    weights: Path | None = None
    classes: int | None = None
    image_size: int | None = None
    mean: str | None = None
    std: str | None = None

    def refuse(self, what: str) -> None:
        """Refuse them where they would do nothing."""
        for field in fields(self):
            if getattr(self, field.name) is not None:
                flag = f"--{field.name.replace('_', '-')}"
                raise ConfigError(f"{flag} is for models such as timm:NAME and has no effect on {what}")

    def statistics(self, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """Mean and std as given; None where they are not."""
        if (self.mean is None) != (self.std is None):
            raise ConfigError("--mean and --std belong together: give both or neither")
        if self.mean is None or self.std is None:
            return None
        mean, std = (
            tuple(number(word.strip(), flag) for word in text.split(","))
            for text, flag in ((self.mean, "--mean"), (self.std, "--std"))
        )
        return _spread(mean, channels), _spread(std, channels)


@dataclass(frozen=True)
class Subject:
    """A model, its data, what both are called, and the folder below which results go."""

    label: str
    architecture: str
    model: Classifier
    data: AnyData
    place: Path
    run: Path | None  # None for a model from elsewhere

    def of_images(self, verb: str) -> tuple[ViT | Network, Data]:
        """The model and its data, if they are of images; this verb has nothing to say about text yet."""
        if isinstance(self.model, TextEncoder) or isinstance(self.data, Text):
            raise ConfigError(f"specguard {verb} looks at models of images; attack and certify take those of text")
        return self.model, self.data

    def folder(self, default: str, chosen: str | None, within: str = ".") -> Path:
        """Where results go: a folder within a run that no link leads out of; of a model from elsewhere, any."""
        if chosen is None:
            return check_below(self.place, self.place / default)
        if self.run is not None:
            return check_below(self.run, self.run / within / folder_within(chosen))
        if not chosen:
            raise ConfigError("--out takes the name of a folder, not an empty one")
        return Path(chosen)


def subject(
    name: Path, options: Elsewhere, data: DataName | None, data_root: Path | None, verify_data: bool
) -> Subject:
    """The model of a run or from elsewhere, in eval mode, with the data it is to be looked at with."""
    if source_kind(str(name)) is None:
        run = Path(name)
        options.refuse("a run directory")
        model = from_run(run)
        loaded = run_data(run, model, data, data_root, verify_data)
        return Subject(run.resolve().name, _trained_name(run), model, loaded, run, run)
    if data is None:
        raise ConfigError(f"{name} does not say what data it is for; name it with --data")
    weights = _weights(str(name), options)
    if weights is None:
        raise ConfigError(f"{name} needs --weights, a file with its weights")
    source, loaded = _source_and_data(str(name), options, data, data_root, verify_data)
    network, fitted = source.loaded(weights, resize=options.image_size is not None)
    _say(fitted, source.classes)
    where = Path("runs") / f"{source.kind}-{source.name}-{weights_fingerprint(network)[:8]}"
    return Subject(str(name), source.name, network, loaded, where, None)


def new_network(
    name: str, options: Elsewhere, data: DataName, data_root: Path | None, verify_data: bool, seed: int
) -> tuple[Network, Data]:
    """A network to train, from weights or fresh from the seed, and the data."""
    source, loaded = _source_and_data(name, options, data, data_root, verify_data, trained=True)
    weights = _weights(name, options)
    if weights is None:
        return source.fresh(seed), loaded
    network, fitted = source.loaded(weights, seed, new_head=True, resize=options.image_size is not None)
    _say(fitted, source.classes)
    return network, loaded


def source_kind(name: str) -> Kind | None:
    """The library that a name begins with, if it does."""
    prefix, colon, _ = name.partition(":")
    return cast(Kind, prefix) if colon and prefix in _KINDS else None


def _source_and_data(
    name: str,
    options: Elsewhere,
    data: DataName,
    data_root: Path | None,
    verify_data: bool,
    trained: bool = False,
) -> tuple[ModelSource, Data]:
    """Where a model comes from, made for this data: images of a fixed size are resized within the model."""
    kind, rest = cast(Kind, name.partition(":")[0]), name.partition(":")[2]
    config = huggingface_config(Path(rest)) if kind == "hf" else None
    size = options.image_size or native_size(kind, rest, config)
    loaded = named_data(data, used_root(data_root, data), verify_data, size)
    channels, pixels, width = loaded.shape
    if pixels != width:
        raise ConfigError(f"{loaded.name} has images of {pixels} x {width}, and models take square ones")
    statistics = options.statistics(channels) or _library_statistics(kind, rest, channels)
    if statistics is None and trained:
        statistics = loaded.pixel_statistics()
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
    )
    if source.classes != len(loaded.classes):
        raise ConfigError(f"{loaded.name} has {len(loaded.classes)} classes, but the model {source.classes}")
    return source, loaded


def _say(fitted: Fitted, classes: int) -> None:
    """What was changed in weights so that they fit."""
    if fitted.new_head:
        err.print(
            f"the head is new, for {classes} classes, and drawn from the seed; the weights have none for them",
            soft_wrap=True,
        )
    if fitted.sizes is not None:
        old, new = fitted.sizes
        err.print(f"positions are resized, from images of size {old} to {new}", soft_wrap=True)


def _weights(name: str, options: Elsewhere) -> Path | None:
    kind, _, folder = name.partition(":")
    if kind == "hf" and options.weights is not None:
        raise ConfigError(f"the weights of {name} are those in its folder; --weights has no effect on it")
    if kind == "hf":
        return Path(folder)
    return None if options.weights is None else Path(options.weights)


def _library_statistics(kind: Kind, name: str, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Mean and std as the library has them; None where they are for another number of channels."""
    if kind == "hf":
        found = huggingface_statistics(Path(name)) or ((0.5,), (0.5,))
    elif kind == "torchvision":
        found = IMAGENET_MEAN, IMAGENET_STD
    else:
        found = timm_statistics(name)
    both = tuple(_spread(numbers, channels) for numbers in found)
    return (both[0], both[1]) if all(len(numbers) == channels for numbers in both) else None


def _spread(numbers: tuple[float, ...], channels: int) -> tuple[float, ...]:
    """One number serves all channels."""
    return numbers * channels if len(numbers) == 1 else numbers


def _trained_name(run: Path) -> str:
    path = run / "arguments.json"
    return str(io.read_json(path).get("model")) if path.exists() else "ViT"
