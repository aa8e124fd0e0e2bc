"""The rows of the study: each a network, its images, and the kinds of balls around them."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import get_args

from torch import nn

from relational.converted import LIBRARIES, converted_vit, initial_vit
from relational.deept import deept_mnist
from relational.images import Chosen, first_correct, first_predicted
from relational.networks import DIGITS, digits_vit, vnncomp_vit
from specguard.data import Data, Dataset, cifar10, digits, mnist
from specguard.geometry import Ball, Norm


@dataclass(frozen=True)
class Places:
    """Folders: `data` holds what was downloaded, `runs` keeps networks that are trained here."""

    data: Path
    runs: Path


@dataclass(frozen=True)
class Row:
    """A network, the data it is measured on, the number of images and how they are chosen, with and without box."""

    network: Callable[[Places], nn.Module]
    data: Callable[[Places], Data]
    images: int
    choose: Callable[[nn.Module, Dataset, int], Chosen] = first_correct
    boxes: tuple[bool, ...] = (False,)

    @property
    def balls(self) -> tuple[Ball, ...]:
        """Balls of radius 0, for their norms and boxes."""
        return tuple(Ball(norm, 0.0, box=box) for box, norm in product(self.boxes, get_args(Norm)))


def _cifar10(at: Places) -> Data:
    return cifar10(at.data)


def _mnist(at: Places) -> Data:
    return mnist(at.data / "mnist")


def _digits(name: str) -> Row:
    def network(at: Places) -> nn.Module:
        return digits_vit(name, at.runs / "networks" / f"digits-{name}")

    return Row(network, lambda at: digits(), 20, boxes=(False, True))


def _trained(name: str) -> Row:
    return Row(lambda at: converted_vit(name), _cifar10, 10)


def _initial(name: str) -> Row:
    return Row(lambda at: initial_vit(name), _cifar10, 5, first_predicted)


ROWS: MappingProxyType[str, Row] = MappingProxyType(
    {
        "pgd_2_3_16": Row(lambda at: vnncomp_vit(at.data / "pgd_2_3_16.onnx"), _cifar10, 20),
        "deept": Row(lambda at: deept_mnist(at.data / "mnist_transformer.safetensors"), _mnist, 100),
        **{f"digits-{name}": _digits(name) for name in DIGITS},
        **{f"{name}-trained": _trained(name) for name in LIBRARIES},
        **{f"{name}-initial": _initial(name) for name in LIBRARIES},
    }
)
