"""The trained model of a finished run, and its initial model."""

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from specguard.errors import CheckpointError, ConfigError, RunError
from specguard.models.source import ModelSource, source_from_json
from specguard.nn import (
    CertifiableConfig,
    Classifier,
    Network,
    TextEncoder,
    ViT,
    check_architecture,
    config_from_json,
    dataclass_from_json,
    matches_fingerprint,
    materialized,
    text_config_from_json,
    text_encoder,
    weights_fingerprint,
)
from specguard.records.io import read_record
from specguard.records.store import derived_seed, read_tensors
from specguard.records.training import ModelRecord, TrainingSettings

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def from_run(run: Path | str) -> Classifier:
    """Load the trained model of a run directory.

    The architecture comes from model.json and the weights from model.safetensors. Weights of another architecture,
    or that do not match the stored fingerprint, raise a `CheckpointError`.

    Args:
        run: The directory that `train` or `specguard train` wrote.

    Returns:
        A `ViT`, a `TextEncoder` or a `Network`, in eval mode, on the CPU.

    Example:
        >>> model = from_run("runs/first")  # doctest: +SKIP
    """
    run = Path(run)
    record, path = model_record(run), run / "model.safetensors"
    model = stored_model(record.config, read_tensors(path), path, run / "model.json")
    if not matches_fingerprint(model, record.fingerprint):
        raise CheckpointError(f"{path} does not match the fingerprint in {run / 'model.json'}")
    return model


def stored_model(config: Any, tensors: dict[str, Tensor], path: Path, place: Path) -> Classifier:
    """The model of an architecture that `place` records, with the tensors of the file `path`, in eval mode."""
    source = source_of(config, place)
    model: Classifier
    if source is not None:
        model = _network(source, tensors, path)
    else:
        with torch.device("meta"):  # refuse a config that does not fit its weights before allocating memory
            check_architecture(_own(config), tensors, path)
        model = _own(config)
    dtype = tensors["head.weight"].dtype
    if dtype not in _DTYPES:
        raise CheckpointError(f"{path} holds weights of type {dtype}, in which no model can be evaluated")
    model = model.to(dtype).eval()
    model.load_state_dict(tensors)
    return model


def check_finite(model: Classifier, run: Path) -> None:
    """Refuse the model of a run whose weights are not all finite."""
    for name, tensor in model.state_dict().items():
        if not tensor.isfinite().all():
            raise CheckpointError(f"{run} holds entries that are not finite, in {name!r}")


def _own(config: Any) -> ViT | TextEncoder:
    """A ViT or text encoder of this config, with plain layers."""
    if _is_text(config):
        return TextEncoder(text_config_from_json(config))
    return ViT(config_from_json(config))


def _is_text(config: Any) -> bool:
    return isinstance(config, dict) and config.get("kind") == "text"


def untrained(run: Path | str) -> Classifier | None:
    """Rebuild the model of a run as it was before training, from the run's seed.

    Args:
        run: The directory that `train` or `specguard train` wrote.

    Returns:
        The model in eval mode; None if the run did not begin with these weights, for example with pretrained ones.

    Example:
        >>> before = untrained("runs/first")  # doctest: +SKIP
    """
    run = Path(run)
    settings: TrainingSettings = read_record(run / "run.json", TrainingSettings)
    given = settings.training.get("seed")
    if type(given) is not int or settings.initial_weights is None:
        raise RunError(f"{run / 'run.json'} does not hold the settings of a run")
    trained = model_record(run).config
    if not (settings.model == trained or _same_vit(settings.model, trained)):
        raise RunError(f"{run / 'run.json'} and {run / 'model.json'} are of different models")
    model = fresh(settings.model, run / "run.json", derived_seed(given, "weights"))
    return model if weights_fingerprint(model) == settings.initial_weights else None


def fresh(config: Any, path: Path, seed: int) -> Classifier:
    """The untrained model of an architecture that the record `path` holds, in eval mode, determined by the seed."""
    source = source_of(config, path)
    if source is not None:
        return source.fresh(seed)
    generator = torch.Generator().manual_seed(seed)
    if _is_text(config):
        return text_encoder(text_config_from_json(config), generator).eval()
    return ViT(config_from_json(config), generator).eval()


def model_record(run: Path) -> ModelRecord:
    """The record of a run's model."""
    record: ModelRecord = read_record(run / "model.json", ModelRecord)
    return record


def _same_vit(one: Any, other: Any) -> bool:
    """Whether two configs are of the same ViT: one of them may lack fields that are at their defaults."""
    if any(isinstance(config, dict) and ("source" in config or _is_text(config)) for config in (one, other)):
        return False
    return config_from_json(one) == config_from_json(other)


def source_of(config: Any, path: Path) -> ModelSource | CertifiableConfig | None:
    """The source of a network; None for a ViT."""
    if not isinstance(config, dict) or "source" not in config:
        return None
    if config["source"] is None:
        raise RunError(f"{path} does not say how its network is made; convert the original and load the weights")
    match config["source"]:
        case {"kind": "certifiable", **rest}:
            return dataclass_from_json(CertifiableConfig, rest)
    return source_from_json(config["source"])


def _network(source: ModelSource | CertifiableConfig, tensors: dict[str, Tensor], path: Path) -> Network:
    """A network of this source that the tensors fit; one that is far larger than the tensors is never allocated."""
    try:
        size = source.weights if isinstance(source, CertifiableConfig) else source.weights()
    except ConfigError:
        if isinstance(source, ModelSource) and source.arguments:
            raise
        size = 0  # some releases cannot determine it; errors of the source are raised below
    if size > 2 * sum(tensor.numel() for tensor in tensors.values()):
        name = "its config" if isinstance(source, CertifiableConfig) else source.name
        raise CheckpointError(f"{path} is of another architecture: {name} has {size:,} weights")
    network = source.fresh(0)
    if isinstance(source, CertifiableConfig):
        network = cast(Network, materialized(network))  # a run stores plain weights
    check_architecture(network, tensors, path)
    return network
