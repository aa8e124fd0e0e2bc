"""A model to train further: that of a finished run, with the constraints of its training."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils import parametrize

from specguard.errors import CheckpointError
from specguard.models.run import check_finite, fresh, from_run, model_record
from specguard.nn import Classifier, fingerprint, materialized, restore_orthogonal, weights_fingerprint
from specguard.records.io import read_record
from specguard.records.store import checkpoint_steps, read_checkpoint
from specguard.records.training import Origin, TrainingSettings

_ROUNDING = 1e-4  # by which orthogonal weights that are restored may differ, as a fraction of the largest entry


@dataclass(frozen=True)
class WarmStart:
    """What a training that goes on from an earlier run begins with.

    Args:
        model: The model, with the weights of that run.
        origin: Which run it was, for the record of the new one.

    Example:
        >>> from specguard.nn import ViT, preset
        >>> first = Origin(run="first", fingerprint="c0", weights_fingerprint="ff")
        >>> WarmStart(ViT(preset("tiny")), first).origin.run
        'first'
    """

    model: Classifier
    origin: Origin


def warm_start(run: Path | str) -> WarmStart:
    """Load the trained model of a run so that it can be trained further.

    The model is the function that the run ended with, its normalization of pixels included. A run stores plain
    weights: where the architecture keeps maps orthogonal during training, they are parametrized again, which
    changes the weights by rounding only. Weights in half precision are trained in float32.

    Args:
        run: The directory that `train` or `specguard train` wrote.

    Returns:
        The model, on the CPU, and the origin to pass to `train`.

    Example:
        >>> start, second = warm_start(Path("runs/first")), Path("runs/second")  # doctest: +SKIP
        >>> train(start.model, data, second, training, device=cpu, origin=start.origin)  # doctest: +SKIP
    """
    run = Path(run)
    trained = from_run(run)
    check_finite(trained, run)
    origin = Origin(
        run=run.resolve().name, fingerprint=fingerprint(trained), weights_fingerprint=weights_fingerprint(trained)
    )
    dtype = torch.promote_types(next(trained.parameters()).dtype, torch.float32)
    model = fresh(model_record(run).config, run / "model.json", 0).to(dtype)
    _restore(model, trained.to(dtype), run)
    return WarmStart(model, origin)


def begun_model(run: Path) -> Classifier:
    """The model of a run that has begun, untrained: its last checkpoint has the weights, in the same precision."""
    settings: TrainingSettings = read_record(run / "run.json", TrainingSettings)
    model = fresh(settings.model, run / "run.json", 0)
    tensors, _ = read_checkpoint(run, checkpoint_steps(run)[-1])
    double = any(tensor.dtype == torch.float64 for name, tensor in tensors.items() if name.startswith("model/"))
    return model.double() if double else model


def _restore(model: nn.Module, trained: nn.Module, run: Path) -> None:
    """Give `model` the weights of `trained`, whose parametrizations are folded."""
    weights = trained.state_dict()
    for name, layer in model.named_modules():
        if parametrize.is_parametrized(layer, "weight"):
            restore_orthogonal(layer, weights[f"{name}.weight"])
    model.load_state_dict({key: weights[key] for key in model.state_dict().keys() & weights.keys()}, strict=False)
    for key, found in materialized(model).state_dict().items():
        wanted = weights[key]
        if not torch.allclose(found, wanted, rtol=0, atol=_ROUNDING * float(wanted.abs().max())):
            raise CheckpointError(f"{run} cannot be trained further: its {key!r} is no longer orthogonal")
