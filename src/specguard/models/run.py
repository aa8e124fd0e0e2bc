"""The model a finished run has left behind, and the one it began with."""

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
    answers_to,
    check_architecture,
    config_from_json,
    dataclass_from_json,
    materialized,
    text_config_from_json,
    text_encoder,
    weights_fingerprint,
)
from specguard.records.io import read_record
from specguard.records.store import derived_seed, read_tensors
from specguard.records.training import ModelRecord, TrainingSettings

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def from_run(run: Path) -> Classifier:
    """The trained model of a run directory, in eval mode: a ViT, an encoder of text, or a network from elsewhere.

    Its architecture comes from model.json and its weights from model.safetensors; weights of another
    architecture, and weights that are not the ones the hash was taken of, are refused.
    """
    record, path = _model_record(run), run / "model.safetensors"
    source = _source(record.config, run / "model.json")
    tensors = read_tensors(path)
    model: Classifier
    if source is not None:
        model = _network(source, tensors, path)
    else:
        with torch.device("meta"):  # a config that does not fit its weights is refused before it takes memory
            check_architecture(_own(record.config), tensors, path)
        model = _own(record.config)
    dtype = tensors["head.weight"].dtype
    if dtype not in _DTYPES:
        raise CheckpointError(f"{path} holds weights of type {dtype}, in which no model can be computed")
    model = model.to(dtype).eval()
    model.load_state_dict(tensors)
    if not answers_to(model, record.fingerprint):
        raise CheckpointError(f"{path} does not match the fingerprint in {run / 'model.json'}")
    return model


def _own(config: Any) -> ViT | TextEncoder:
    """A model of our own with that config, of plain layers."""
    if _is_text(config):
        return TextEncoder(text_config_from_json(config))
    return ViT(config_from_json(config))


def _is_text(config: Any) -> bool:
    return isinstance(config, dict) and config.get("kind") == "text"


def untrained(run: Path) -> Classifier | None:
    """The model as it was before training, made again from the run's seed; None if it began in another way."""
    settings: TrainingSettings = read_record(run / "run.json", TrainingSettings)
    given = settings.training.get("seed")
    if type(given) is not int or settings.initial_weights is None:
        raise RunError(f"{run / 'run.json'} does not hold the settings of a run")
    trained, seed = _model_record(run).config, derived_seed(given, "weights")
    source = _source(settings.model, run / "run.json")
    model: Classifier
    if source is not None:
        _same(settings.model == trained, run)
        model = source.fresh(seed)
    elif _is_text(settings.model):
        _same(settings.model == trained, run)
        generator = torch.Generator().manual_seed(seed)
        model = text_encoder(text_config_from_json(settings.model), generator).eval()
    else:
        config = config_from_json(settings.model)
        _same(config == config_from_json(trained), run)
        model = ViT(config, torch.Generator().manual_seed(seed)).eval()
    return model if weights_fingerprint(model) == settings.initial_weights else None


def _model_record(run: Path) -> ModelRecord:
    record: ModelRecord = read_record(run / "model.json", ModelRecord)
    return record


def _same(same: bool, run: Path) -> None:
    if not same:
        raise RunError(f"{run / 'run.json'} and {run / 'model.json'} are of different models")


def _source(config: Any, path: Path) -> ModelSource | CertifiableConfig | None:
    """How a network is made; None for a ViT."""
    if not isinstance(config, dict) or "source" not in config:
        return None
    if config["source"] is None:
        raise RunError(f"{path} does not say how its network is made; convert the original and load the weights")
    match config["source"]:
        case {"kind": "certifiable", **rest}:
            return dataclass_from_json(CertifiableConfig, rest)
    return source_from_json(config["source"])


def _network(source: ModelSource | CertifiableConfig, tensors: dict[str, Tensor], path: Path) -> Network:
    """A network of this source into which the tensors fit; one far larger than they are is never made."""
    try:
        size = source.weights if isinstance(source, CertifiableConfig) else source.weights()
    except ConfigError:
        size = 0  # some releases cannot tell; what is wrong with the source is said below
    if size > 2 * sum(tensor.numel() for tensor in tensors.values()):
        name = "its config" if isinstance(source, CertifiableConfig) else source.name
        raise CheckpointError(f"{path} is of another architecture: {name} has {size:,} weights")
    network = source.fresh(0)
    if isinstance(source, CertifiableConfig):
        network = cast(Network, materialized(network))  # a run holds plain weights
    check_architecture(network, tensors, path)
    return network
