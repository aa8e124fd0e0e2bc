"""The model a finished run has left behind."""

from pathlib import Path

import torch
from torch import Tensor, nn

from specguard.errors import CheckpointError
from specguard.nn import ViT, config_from_json, fingerprint
from specguard.runs import read_json, read_tensors


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
    model = ViT(config).eval()
    model.load_state_dict(tensors)
    if fingerprint(model) != record.get("fingerprint"):
        raise CheckpointError(f"{path} does not match the fingerprint in {run / 'model.json'}")
    return model


def check_architecture(model: nn.Module, tensors: dict[str, Tensor], source: Path) -> None:
    """Refuse `tensors` for `model`, naming the first that is missing, unknown or of another shape."""
    wanted = model.state_dict()
    for name in sorted(wanted.keys() | tensors.keys()):
        if name not in tensors:
            raise CheckpointError(f"{source} is of another architecture: it lacks {name!r}")
        if name not in wanted:
            raise CheckpointError(f"{source} is of another architecture: it has an unknown {name!r}")
        if tensors[name].shape != wanted[name].shape:
            shapes = f"{tuple(tensors[name].shape)}, not {tuple(wanted[name].shape)}"
            raise CheckpointError(f"{source} is of another architecture: {name!r} has shape {shapes}")
