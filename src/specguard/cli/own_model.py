"""Models of this package with weights from a file: a preset and `--weights`, or a file that `export` wrote."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from specguard.cli.groups import DataOptions, ModelOptions
from specguard.cli.library_model import library_model
from specguard.cli.model_args import model_arguments
from specguard.cli.names import fitting_data, named_data, used_root
from specguard.cli.normalization import layer_statistics, print_statistics
from specguard.data import Data
from specguard.errors import ConfigError, RunError
from specguard.models.arguments import check_known
from specguard.models.export import shortest_numbers
from specguard.models.recognize import recognize
from specguard.models.weight_file import WeightFile, check_fingerprint, model_of_file, read_weight_file
from specguard.nn import CERTIFIABLE, TEXT_PRESETS, Classifier, Network, TextEncoder, ViT, preset
from specguard.records.export import TimmModel

_LARGEST, _MOST_CLASSES = 2**12, 2**16  # pixels along a side, and classes, that a file may ask for
_FROM_DATA = ("classes", "channels", "mean", "std")  # fields that the file holds


def preset_model(name: str, options: ModelOptions, data: DataOptions) -> tuple[ViT | Network, Data]:
    """A model of this package by name, with weights from a file, and its data."""
    if name in TEXT_PRESETS:
        raise ConfigError(f"{name} is a model of text, whose vocabulary is in its run: name the run")
    if options.weights is None:
        raise ConfigError(f"{name} needs --weights, a file with its weights; a trained model is named by its run")
    _refuse(options, name, ("classes", "image_size", "mean", "std"))
    file = read_weight_file(options.weights)
    return _with_data(model_of_file(file, _config(name, model_arguments(options.model_arg), file)), file.path, data)


def file_model(name: str, options: ModelOptions, data: DataOptions) -> tuple[str, ViT | Network, Data]:
    """The architecture's name, the model of a file that says which one it is, and the data."""
    _refuse(options, "a file that says which model it is", ("weights", "model_arg", "classes", "image_size"))
    file = read_weight_file(Path(name))
    if file.record is None or (file.record.timm is None and file.record.config is None):
        raise ConfigError(_unnamed(file))
    _refuse(options, "a file that says which model it is", ("mean", "std"))
    if file.record.timm is not None:
        return _timm_model(file, file.record.timm, data)
    model, loaded = _with_data(model_of_file(file), file.path, data)
    architecture = model.config.name if isinstance(model, Network) else "ViT"
    return architecture, model, loaded


def _timm_model(file: WeightFile, timm: TimmModel, data: DataOptions) -> tuple[str, Network, Data]:
    """The model of timm whose weights `export` wrote, with the normalization that its metadata names."""
    record = file.record
    assert record is not None
    sizes = dict(timm.options)
    image = sizes.pop("img_size", None)
    classes, _ = sizes.pop("num_classes", None), sizes.pop("in_chans", None)
    if not all(
        size is None or (type(size) is int and 0 < size <= most)
        for size, most in ((image, _LARGEST), (classes, _MOST_CLASSES))
    ):
        raise RunError(f"{file.path} says something malformed about itself: {timm.name} of {classes!r} classes")
    options = ModelOptions(
        weights=file.path,
        classes=classes,
        image_size=image,
        mean=",".join(map(repr, record.mean)) or None,
        std=",".join(map(repr, record.std)) or None,
    )
    source, network, loaded = library_model(f"timm:{timm.name}", options, data, sizes)
    if source.pixels == record.resize is None:  # images of another size than the run's are resized in another way
        check_fingerprint(network, file)
    return source.name, network, loaded


def _config(name: str, arguments: dict[str, Any], file: WeightFile) -> dict[str, Any]:
    """The architecture of a preset, with changed fields, and what the file says of classes, channels and pixels."""
    mean, std, head = (file.tensors.get(key) for key in ("normalise.mean", "normalise.std", "head.weight"))
    if mean is None or std is None or head is None or mean.numel() != std.numel() or head.ndim != 2:
        near = recognize(file.tensors)
        advice = "" if near is None else f"; they look like those of {near.options}"
        raise RunError(f"{file.path} does not hold the weights of {name}{advice}")
    kept = {
        "channels": mean.numel(),
        "classes": len(head),
        "mean": shortest_numbers(mean),
        "std": shortest_numbers(std),
    }
    fields = asdict(CERTIFIABLE[name] if name in CERTIFIABLE else preset(name))
    check_known(name, arguments, fields.keys() - set(_FROM_DATA))
    config = fields | arguments | kept
    return {"source": {"kind": "certifiable", **config}} if name in CERTIFIABLE else config


def _with_data(model: Classifier, path: Path, data: DataOptions) -> tuple[ViT | Network, Data]:
    if isinstance(model, TextEncoder):
        raise ConfigError(f"{path} is of a model of text, whose vocabulary is in its run: name the run")
    assert data.data is not None
    root = used_root(data.data_root, data.data)
    loaded = fitting_data(named_data(data.data, root, data.verify_data, model.shape[-1]), model)
    assert isinstance(loaded, Data)
    if (statistics := layer_statistics(model)) is not None:
        print_statistics(statistics, f"as {path} holds them")
    return model, loaded


def _unnamed(file: WeightFile) -> str:
    """What to write where a file alone was named."""
    near = recognize(file.tensors)
    start = f"{file.path} holds weights, but not of which architecture they are: "
    if near is None:
        return f"{start}name it too, as in timm:NAME --weights {file.path}"
    question = f", {near.open_question}" if near.open_question else ""
    if near.name.startswith("hf:"):
        return f"{start}by their names they are of transformers: write {near.options}{question}"
    return f"{start}by their names and shapes, write {near.options} --weights {file.path}{question}"


def _refuse(options: ModelOptions, what: str, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(options, name) not in (None, ()):
            raise ConfigError(f"--{name.replace('_', '-')} has no effect on {what}, whose file of weights says it")
