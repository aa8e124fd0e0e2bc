"""The model a finished run has left behind, and the one it began with."""

from pathlib import Path

import torch

from specguard.errors import CheckpointError, RunError
from specguard.nn import ViT, check_architecture, config_from_json, fingerprint
from specguard.runs import derived_seed, read_json, read_tensors


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
    model = ViT(config).to(tensors["head.weight"].dtype).eval()
    model.load_state_dict(tensors)
    if fingerprint(model) != record.get("fingerprint"):
        raise CheckpointError(f"{path} does not match the fingerprint in {run / 'model.json'}")
    return model


def untrained(run: Path) -> ViT | None:
    """The model as it was before training, made again from the run's seed; None if it began in another way."""
    record = read_json(run / "run.json")
    match record:
        case {"model": dict(config), "training": {"seed": int(seed)}, "initial_weights": str(wanted)}:
            generator = torch.Generator().manual_seed(derived_seed(seed, "weights"))
            model = ViT(config_from_json(config), generator).eval()
            return model if fingerprint(model) == wanted else None
    raise RunError(f"{run / 'run.json'} does not hold the settings of a run")
