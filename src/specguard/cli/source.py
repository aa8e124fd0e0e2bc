"""What a command works on: a run directory, or a model from elsewhere, with its data and a folder for results.

`timm:NAME` and `torchvision:NAME` are architectures, with weights from a file; `hf:FOLDER` is a folder as
`save_pretrained` of transformers leaves it. Nothing is ever downloaded.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec.structs import asdict
from msgspec.structs import replace as replace_options

from specguard.cli.function import imported_model
from specguard.cli.groups import DataOptions, ModelOptions
from specguard.cli.imported_run import check_named, imported_run
from specguard.cli.library_model import library_model
from specguard.cli.model_name import check_import_path, form_of, near_name
from specguard.cli.names import folder_within, run_data
from specguard.cli.own_model import file_model, preset_model
from specguard.data import AnyData, Data, Text
from specguard.errors import ConfigError, RunError
from specguard.models import Wrapped, from_run, from_zoo
from specguard.nn import Classifier, Network, TextEncoder, ViT, weights_fingerprint
from specguard.records import io
from specguard.records.files import check_below, checks_beside
from specguard.records.zoo import PREFIX, zoo_card, zoo_folder


@dataclass(frozen=True)
class Source:
    """A model, its data, the names of both, and the folder below which results go."""

    label: str
    architecture: str
    model: Classifier | Wrapped
    data: AnyData
    place: Path
    run: Path | None  # None for a model that is no run
    refusal: str | None = None  # why a model of the user's own could not be converted

    def convertible(self, verb: str) -> Classifier:
        """The model, whose layers have rules; one that could not be converted is only attacked and smoothed."""
        if isinstance(self.model, Wrapped):
            raise ConfigError(
                f"specguard {verb} takes models of known layers, and {self.label} cannot be converted: "
                f"{self.refusal}; attack and smooth take it as it is"
            )
        return self.model

    def of_images(self, verb: str) -> tuple[ViT | Network, Data]:
        """The model and its data, where they are of images; a command that does not support text says so."""
        model = self.convertible(verb)
        if isinstance(model, TextEncoder) or isinstance(self.data, Text):
            raise ConfigError(
                f"specguard {verb} takes models of images; attack and certify also take models of text"
            )
        return model, self.data

    def any_of_images(self, verb: str) -> tuple[ViT | Network | Wrapped, Data]:
        """The same, also where the model could not be converted."""
        if isinstance(self.model, Wrapped) and isinstance(self.data, Data):
            return self.model, self.data
        return self.of_images(verb)

    def folder(self, default: str, chosen: str | None, within: str = ".") -> Path:
        """Where results go: a folder within a run that no link leads out of; for any other model, any folder."""
        if chosen is None:
            return check_below(self.place, self.place / default)
        if self.run is not None:
            return check_below(self.run, self.run / within / folder_within(chosen))
        return any_folder(chosen)

    def beside(self, name: str, chosen: str | None) -> Path:
        """Where the results of a check go: beside the run, which a check leaves as it is."""
        if chosen is not None:
            return any_folder(chosen)
        place = checks_beside(self.place)
        if place is None:
            raise RunError(f"no check can be written beside {self.place}; name a folder for it with --out")
        return check_below(place.parent, place / name)


def any_folder(chosen: str) -> Path:
    """The folder of that name."""
    if not chosen:
        raise ConfigError("--out takes the name of a folder, not an empty one")
    return Path(chosen)


def load_source(name: str, options: ModelOptions, data: DataOptions) -> Source:
    """The model of a run, of the zoo or from elsewhere, in eval mode, with its data."""
    form = form_of(name)
    if form == "zoo":
        return _of_zoo(name.removeprefix(PREFIX), options, data)
    if form == "run":
        return _of_run(name, options, data)
    if form == "function" and options.weights is not None and os.path.isdir(options.weights):
        return _of_imported_run(name, options, data)
    if data.data is None:
        raise ConfigError(f"{name} does not say what data it is for; name it with --data")
    if form == "library":
        source, network, loaded = library_model(name, options, data)
        return _from_elsewhere(name, source.name, f"{source.kind}-{source.name}", network, loaded)
    if form == "function":
        found = imported_model(name, options, data)
        place = name.replace(":", ".")
        return replace(_from_elsewhere(name, name, place, found.model, found.data), refusal=found.refusal)
    if form == "preset":
        model, pictures = preset_model(name, options, data)
        return _from_elsewhere(name, name, name, model, pictures)
    architecture, model, pictures = file_model(name, options, data)
    return _from_elsewhere(name, architecture, Path(name).stem, model, pictures)


def _of_imported_run(name: str, options: ModelOptions, data: DataOptions) -> Source:
    run = Path(options.weights or ".")
    _refuse(replace_options(options, weights=None, model_arg=()), "the weights of a run")
    model = imported_run(name, run, options.model_arg)
    loaded = run_data(run, model, data.data, data.data_root, data.verify_data)
    return Source(run.resolve().name, name, model, loaded, run, run)


def _of_run(name: str, options: ModelOptions, data: DataOptions) -> Source:
    run = Path(name)
    check_import_path(name)
    _refuse(options, "a run directory")
    if not any(os.path.lexists(run / file) for file in ("model.json", "run.json", "model.safetensors")):
        raise RunError(
            f"{name} is no training run: it has no model.json; other models are named zoo:NAME, timm:NAME, "
            f"torchvision:NAME, hf:FOLDER or package.module:function{near_name(name)}"
        )
    check_named(run)
    model = from_run(run)
    loaded = run_data(run, model, data.data, data.data_root, data.verify_data)
    return Source(run.resolve().name, _trained_name(run), model, loaded, run, run)


def _of_zoo(name: str, options: ModelOptions, data: DataOptions) -> Source:
    """A model of the zoo with the data of its card, or other data."""
    card = zoo_card(name)
    _refuse(options, "a model of the zoo")
    model = from_zoo(name)
    loaded = run_data(zoo_folder(name), model, data.data or card.data, data.data_root, data.verify_data)
    return _from_elsewhere(f"{PREFIX}{name}", card.architecture, f"zoo-{name}", model, loaded)


def _from_elsewhere(name: str, architecture: str, place: str, model: Classifier | Wrapped, data: AnyData) -> Source:
    """A model that is no run: its results go to a folder that is named after it and its weights."""
    folder = Path("runs") / f"{place}-{weights_fingerprint(model)[:8]}"
    return Source(name, architecture, model, data, folder, None)


def _refuse(options: ModelOptions, what: str) -> None:
    """Refuse options where they would have no effect."""
    for name, value in asdict(options).items():
        if value not in (None, ()):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} is for models such as timm:NAME and has no effect on {what}")


def _trained_name(run: Path) -> str:
    path = run / "arguments.json"
    return str(io.read_json(path).get("model")) if path.exists() else "ViT"
