"""Does attention do anything? The median entropy of its maps, and certificates with every map put to its mean.

A softmax whose queries are zero gives its position bias alone. So the network in which every attention map is
the mean of that map over 5,000 training images has the same layers, with the logarithm of the mean as position
bias, and is certified as the others are.
"""

import argparse
import copy
import json
import math
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from specguard.attacks import PGD
from specguard.data import Data, cifar10, digits
from specguard.models import from_run
from specguard.nn import SkipAttention, attention_maps
from specguard.records.certificate import CertifySettings
from specguard.studies import about_study, run_certify

CURVE = (0.02, 0.05, 0.1, 36 / 255, 0.25)
METHODS: Final = ("lofast", "local")


def contents(model: torch.nn.Module, images: Tensor, batch: int = 250) -> list[list[Tensor]]:
    """Per batch and layer, the softmax inside the mixed maps `(1 - mix) I + mix P`."""
    layers = [layer for layer in model.modules() if isinstance(layer, SkipAttention)]
    found = []
    with torch.no_grad():
        for part in images.split(batch):
            maps = attention_maps(model, part)
            eye = torch.eye(maps[0].shape[-1], device=maps[0].device)
            pairs = zip(maps, layers, strict=True)
            found.append([((P - (1 - layer.mix) * eye) / layer.mix).clamp(min=1e-12) for P, layer in pairs])
    return found


def main(run: Path, data: Data, out: Path, images: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = from_run(run).to(device)
    train = data.train.batch(slice(0, 5000))[0].to(device)
    parts = contents(model, train)
    counts = torch.tensor([len(part[0]) for part in parts], device=device)
    entropies = torch.cat([-(P * P.log()).sum(-1).flatten() for part in parts for P in part])
    tokens = parts[0][0].shape[-1]
    fixed = copy.deepcopy(model)
    layers = [layer for layer in fixed.modules() if isinstance(layer, SkipAttention)]
    with torch.no_grad():
        for i, layer in enumerate(layers):
            total = torch.stack([part[i].mean(0) * n for part, n in zip(parts, counts, strict=True)]).sum(0)
            assert layer.bias is not None
            layer.bias.copy_((total / counts.sum()).log())
            for tensor in (layer.qkv.weight, layer.qkv.bias):
                tensor.view(3, -1)[:2] = 0  # neither queries nor keys
    attack = PGD(steps=10, loss="margin")
    settings = CertifySettings(CURVE, "l2", METHODS, search=False, batch=100)
    split = data.test.select(slice(images))
    run_certify(fixed, split, out, settings, attack=attack, about=about_study(fixed, data, split), device=device)
    record = {
        "n": len(train),
        "median_entropy": float(entropies.median()),
        "largest_possible_entropy": math.log(tokens),
    }
    (out / "entropy.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("data_root", help="folder of cifar-10-batches-py, or `digits`")
    parser.add_argument("out", type=Path)
    parser.add_argument("--images", type=int, default=1000)
    given = parser.parse_args()
    chosen = digits() if given.data_root == "digits" else cifar10(Path(given.data_root))
    main(given.run, chosen, given.out, given.images)
