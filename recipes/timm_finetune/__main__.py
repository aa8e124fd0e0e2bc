"""What a user of timm has before the first command, and does after the last one.

Usage, with the folder above this one on PYTHONPATH: python -m timm_finetune begin DATA RUNS
writes RUNS/checkpoint.safetensors, a vision transformer under timm's own names, and RUNS/photos, a folder of images
of CIFAR-10, whose python batches are in DATA. And then: python -m timm_finetune compare RUNS FILE
loads the exported RUNS/robust.safetensors in timm, compares it with the run, and writes what was found to FILE.
"""

import sys
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn

from relational.converted import LIBRARIES, converted_vit
from specguard.data import Dataset, cifar10, image_folder
from specguard.models import from_run, load_weights, timm_weights
from specguard.nn import Normalize
from specguard.records.accuracy import Accuracy
from specguard.records.base import plain
from specguard.records.io import write_json
from specguard.records.store import write_tensors

COUNTS = {"train": 2000, "val": 500}


def begin(data: Path, runs: Path) -> None:
    """A checkpoint of timm and a folder of photos."""
    if not (runs / "checkpoint.safetensors").exists():
        runs.mkdir(parents=True, exist_ok=True)
        write_tensors(
            runs / "checkpoint.safetensors", timm_weights(converted_vit("timm").float(), LIBRARIES["timm"]())
        )
    cifar = cifar10(data)
    for split, images in (("train", cifar.train), ("val", cifar.test)):
        assert isinstance(images.images, torch.Tensor)
        for index in range(COUNTS[split]):
            folder = runs / "photos" / split / cifar.classes[int(images.labels[index])]
            folder.mkdir(parents=True, exist_ok=True)
            pixels = images.images[index].permute(1, 2, 0).contiguous()  # 0 to 255
            Image.fromarray(pixels.numpy()).save(folder / f"{index:05d}.png")


def in_timm(weights: Path) -> nn.Module:
    """The model of timm with these weights, as its user loads them."""
    model = LIBRARIES["timm"]()
    model.load_state_dict(load_weights(weights))
    return model.eval()


@torch.no_grad()
def compare(runs: Path, file: Path) -> None:
    """Clean accuracy of both checkpoints in timm itself, and how far the second is from the run in float64."""
    photos = image_folder(runs / "photos", size=32)
    assert isinstance(photos.test, Dataset)
    images, labels = photos.test.batch(slice(None))
    run = from_run(runs / "robust")
    first = next(layer for layer in run.children() if isinstance(layer, Normalize))
    mean, std = first.mean.view(1, 3, 1, 1), first.std.view(1, 3, 1, 1)
    found = {}
    for name in ("checkpoint", "robust"):
        model = in_timm(runs / f"{name}.safetensors")
        logits = model((images - mean) / std)
        found[name] = plain(Accuracy.of(_correct(logits, labels), len(labels)))
    double = images.double()
    theirs = model.double()((double - mean.double()) / std.double())
    apart = float((theirs - run.double()(double)).abs().max())
    write_json(file, {"clean_in_timm": found, "logits_apart": apart, "images": len(labels)})


def _correct(logits: Tensor, labels: Tensor) -> int:
    return int((logits.argmax(1) == labels).sum())


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["begin", data, runs]:
            begin(Path(data), Path(runs))
        case ["compare", runs, file]:
            compare(Path(runs), Path(file))
        case _:
            sys.exit(__doc__)
