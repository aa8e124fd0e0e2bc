"""Groups of options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from specguard.cli.options import Options
from specguard.records.base import setting

DATA = ("digits", "cifar10", "cifar100", "svhn", "mnist", "fashion_mnist", "folder", "sst2")
DATA_HELP = f"data set: {', '.join(DATA)}, or a folder of images itself, with `val` (and `train`, for training)"
RUN_HELP = (
    "directory of a finished training run, or a model: zoo:NAME, timm:NAME, torchvision:NAME, hf:FOLDER, a name "
    "from `specguard models` with --weights, a file that `specguard export` wrote, or package.module:function"
)
IMAGES, DEVICE, OUTPUT, ELSEWHERE = "Images", "Computation", "Output", "Models from elsewhere"

RunName = Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP)]


class DataOptions(Options, frozen=True):
    """Which data, and which images of them."""

    images: Annotated[
        int | None,
        setting("test images: the first N, or a subset of a folder of images with all classes in proportion", ge=1),
    ] = None
    first: Annotated[bool, setting("of a folder of images, too, take the first N, perhaps all of one class")] = (
        False
    )
    data: Annotated[str | None, setting(DATA_HELP)] = None
    data_root: Annotated[Path | None, setting("folder that holds the data set")] = None
    verify_data: Annotated[bool, setting("check the official checksums")] = True


class ModelOptions(Options, frozen=True):
    """What a model from elsewhere needs to be loaded."""

    weights: Annotated[Path | None, setting(".safetensors or .pt file with the weights of the model")] = None
    model_arg: Annotated[
        tuple[str, ...],
        setting("argument of the model's constructor, as patch_size=4; several with commas", "--model-arg"),
    ] = ()
    classes: Annotated[int | None, setting("number of classes", ge=1)] = None
    image_size: Annotated[int | None, setting("size of the images that the model takes, in pixels", ge=1)] = None
    mean: Annotated[str | None, setting("mean of its pixels in [0, 1], per channel, with commas")] = None
    std: Annotated[str | None, setting("standard deviation that goes with --mean")] = None


class DeviceOptions(Options, frozen=True):
    """Which device computes, and which part of the work this process does."""

    device: Annotated[str, setting("auto, cpu, cuda or cuda:N")] = "auto"
    shard: Annotated[str | None, setting("part I of N of the work, such as 0/8; the last to finish summarizes")] = (
        None
    )


class OutOptions(Options, frozen=True):
    """Where the records of a study go."""

    out: Annotated[str | None, setting("folder for the records, within a run")] = None


DATA_DEFAULTS = {"data": "that of the training", "data_root": "that of the training"}
MODEL_DEFAULTS = {
    "classes": "those of the data",
    "image_size": "that of the architecture",
    "mean": "that of the library",
    "std": "that of the library",
}
DEVICE_DEFAULTS = {"shard": "as torchrun says"}
ModelGroup = Annotated[ModelOptions, ELSEWHERE, MODEL_DEFAULTS]
DeviceGroup = Annotated[DeviceOptions, DEVICE, DEVICE_DEFAULTS]
