"""The model a finished run has left behind, and the one it began with."""

from pathlib import Path

import torch

from specguard.errors import CheckpointError, RunError
from specguard.nn import ViT, check_architecture, config_from_json, fingerprint
from specguard.runs import derived_seed, read_json, read_tensors

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def from_run(run: Path) -> ViT:
    """The trained model of a run directory, in eval mode.

    Its architecture comes from model.json and its weights from model.safetensors; weights of another
    architecture, and weights that are not the ones the hash was taken of, are refused.
    """
    record = read_json(run / "model.json")
    config, path = config_from_json(record.get("config")), run / "model.safetensors"
    tensors = read_tensors(path)
    with torch.device("meta"):  # so that a config which does not fit its weights is refused before it takes memory
        check_architecture(ViT(config), tensors, path)
    dtype = tensors["head.weight"].dtype
    if dtype not in _DTYPES:
        raise CheckpointError(f"{path} holds weights of type {dtype}, in which no model can be computed")
    model = ViT(config).to(dtype).eval()
    model.load_state_dict(tensors)
    if fingerprint(model) != record.get("fingerprint"):
        raise CheckpointError(f"{path} does not match the fingerprint in {run / 'model.json'}")
    return model


def untrained(run: Path) -> ViT | None:
    """The model as it was before training, made again from the run's seed; None if it began in another way."""
    record = read_json(run / "run.json")
    match record:
        case {"model": dict(model_record), "training": {"seed": int(seed)}, "initial_weights": str(wanted)}:
            config = config_from_json(model_record)
            if config != config_from_json(read_json(run / "model.json").get("config")):
                raise RunError(f"{run / 'run.json'} and {run / 'model.json'} are of different models")
            generator = torch.Generator().manual_seed(derived_seed(seed, "weights"))
            model = ViT(config, generator).eval()
            return model if fingerprint(model) == wanted else None
    raise RunError(f"{run / 'run.json'} does not hold the settings of a run")
