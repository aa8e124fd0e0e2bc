"""What an exported file of weights says about itself: the entry `specguard` in the metadata of its safetensors."""

from typing import Any, Literal

from specguard.records.base import Count, Name, Record

Layout = Literal["timm", "state_dict"]


class TimmModel(Record, frozen=True):
    """The model of timm that the weights are for: `timm.create_model(name, **options)`."""

    name: Name
    options: dict[str, Any]


class ExportRecord(Record, frozen=True, omit_defaults=True):
    """The weights of a run in a file of their own.

    `fingerprint` is that of the run's model, which takes pixels in [0, 1]. A model of timm takes images that are
    resized outside of it, bilinearly to `resize` pixels along a side, and then normalized with `mean` and `std` per
    channel. The layout `state_dict` is of a model with these layers inside, and `config` is its architecture.
    """

    layout: Layout
    version: Name
    fingerprint: Name
    classes: tuple[str, ...]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    resize: Count | None = None
    timm: TimmModel | None = None
    config: dict[str, Any] | None = None
