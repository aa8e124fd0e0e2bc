"""The weights of a run in one safetensors file, for timm or under this package's own names."""

import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor, nn

from specguard.errors import CheckpointError, ConfigError, RunError
from specguard.models.equality import compare
from specguard.models.run import check_finite, fresh, from_run, model_record, source_of
from specguard.models.source import ModelSource, drawn_from
from specguard.models.timm import timm_view
from specguard.models.timm_weights import timm_weights
from specguard.models.zoo import timm_size
from specguard.nn import Classifier, Network, Normalize, Resize, check_architecture, fingerprint, materialized
from specguard.records.base import Json, encode
from specguard.records.export import ExportRecord, Layout, TimmModel
from specguard.records.files import write_file
from specguard.records.store import parse_tensors, tensor_bytes
from specguard.records.training import ModelRecord
from specguard.version import __version__


@dataclass(frozen=True)
class Exported:
    """A file of exported weights.

    Args:
        path: The file.
        record: What its metadata says, under `specguard`: the architecture, the classes, and the normalization.

    Example:
        >>> record = ExportRecord(layout="state_dict", version="0.2", fingerprint="c0", classes=("cat", "dog"))
        >>> Exported(Path("cats.safetensors"), record).record.classes
        ('cat', 'dog')
    """

    path: Path
    record: ExportRecord


def export(run: Path | str, file: Path | str, to: Layout = "state_dict") -> Exported:
    """Write the trained weights of a run to a safetensors file, which must not exist.

    The content of the file is loaded into a new model before anything is written. A model of timm must give the
    logits of the run's model on random images, in float64, to the tolerance of `check_equal`; one of this package
    must have its fingerprint.

    Args:
        run: The directory that `train` or `specguard train` wrote.
        file: The file, whose name ends in .safetensors.
        to: "state_dict" for this package's own names; "timm" for those of timm, for a run of a model `timm:NAME`.

    Returns:
        The file, and what it says about itself.

    Example:
        >>> export(Path("runs/first"), Path("first.safetensors"), to="timm")  # doctest: +SKIP
    """
    run = Path(run)
    file = Path(file)
    if to not in get_args(Layout):
        raise ConfigError(f"weights are exported to {' or '.join(get_args(Layout))}, not to {to!r}")
    if file.suffix != ".safetensors":
        raise ConfigError(f"weights are exported to a .safetensors file, not to {str(file)!r}")
    if os.path.lexists(file):
        raise RunError(f"{file} exists, and an export replaces no file: remove it, or name another")
    model, record = from_run(run), model_record(run)
    check_finite(model, run)
    content, about = (_as_timm if to == "timm" else _as_state_dict)(run, file, model, record)
    write_file(file, content, replace=False)
    return Exported(file, about)


def _as_state_dict(run: Path, file: Path, model: Classifier, record: ModelRecord) -> tuple[bytes, ExportRecord]:
    about = _about(model, record, "state_dict", config=record.config)
    content = tensor_bytes(model.state_dict(), encode(about))
    found = materialized(fresh(record.config, run / "model.json", 0)).to(next(model.parameters()).dtype)
    _load(found, parse_tensors(content, file), file)
    if fingerprint(found) != about.fingerprint:
        raise CheckpointError(f"{file} is not written: the weights loaded from it are of another function")
    return content, about


def _as_timm(run: Path, file: Path, model: Classifier, record: ModelRecord) -> tuple[bytes, ExportRecord]:
    source = source_of(record.config, run / "model.json")
    if not isinstance(source, ModelSource) or source.kind != "timm" or not isinstance(model, Network):
        raise ConfigError(
            f"{run} is of {_described(source)}, which has no counterpart in timm: "
            "only models timm:NAME do, and the others are exported as a state_dict"
        )
    with drawn_from(0):
        theirs = source.original()
    options: Json = {"num_classes": source.classes, "in_chans": source.channels}
    if source.image != timm_size(source.name):
        options["img_size"] = source.image
    options |= source.arguments or {}
    about = _about(model, record, "timm", timm=TimmModel(name=source.name, options=options))
    content = tensor_bytes(timm_weights(model, theirs), encode(about))
    _load(theirs, parse_tensors(content, file), file)
    compare(theirs.double().eval(), _without_resize(model, source).double().eval(), timm_view(theirs))
    return content, about


def _described(source: object) -> str:
    if isinstance(source, ModelSource):
        return f"a model of {'transformers' if source.kind == 'hf' else source.kind}"
    return "a model of this package"


def _about(
    model: Classifier,
    record: ModelRecord,
    layout: Layout,
    *,
    timm: TimmModel | None = None,
    config: dict[str, object] | None = None,
) -> ExportRecord:
    layers = dict(model.named_children())
    first, resize = layers.get("normalise"), layers.get("resize")
    mean, std = (
        (shortest_numbers(first.mean), shortest_numbers(first.std)) if isinstance(first, Normalize) else ((), ())
    )
    return ExportRecord(
        layout=layout,
        version=__version__,
        fingerprint=fingerprint(model),
        classes=record.classes,
        mean=mean,
        std=std,
        resize=resize.size if isinstance(resize, Resize) else None,
        timm=timm,
        config=config,
    )


def shortest_numbers(values: Tensor) -> tuple[float, ...]:
    """The entries with the fewest digits that are rounded to them: 0.3, and not 0.30000001192."""
    return tuple(_shortest(value) for value in values.flatten())


def _shortest(value: Tensor, digits: Sequence[int] = range(1, 17)) -> float:
    short = (float(f"{value.item():.{count}g}") for count in digits)
    return next((number for number in short if bool(torch.tensor(number).to(value) == value)), value.item())


def _without_resize(network: Network, source: ModelSource) -> Network:
    """The network on images of the size that timm's model takes, with copied weights."""
    layers = OrderedDict((name, layer) for name, layer in network.named_children() if type(layer) is not Resize)
    shape = (source.channels, source.image, source.image)
    return materialized(Network(source.name, shape, network.classes, layers))  # type: ignore[return-value]


def _load(model: nn.Module, tensors: dict[str, Tensor], file: Path) -> None:
    check_architecture(model, tensors, file)
    model.load_state_dict(tensors, strict=True)
