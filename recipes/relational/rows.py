"""The rows of the study: each a network, its images, and the balls around them."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import get_args

from torch import nn

from relational.converted import LIBRARIES, converted_vit, initial_vit
from relational.deept import deept_mnist
from relational.images import Chosen, first_correct, first_images, first_predicted
from relational.networks import (
    CERTIFIED_DIGITS,
    DIGITS,
    certified_cifar10,
    certified_digits,
    digits_vit,
    vnncomp_vit,
)
from specguard.certificates.methods import ZonotopeMethod
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


@dataclass(frozen=True)
class AddedRow:
    """A network, its data and images, the balls that are tried by all methods, and how `zonotope` is run.

    The radii of `balls` grow in each norm. Largest radii are `searched` for that many images, the first; images are
    taken in batches.
    """

    network: Callable[[Places], nn.Module]
    data: Callable[[Places], Data]
    images: int
    choose: Callable[[nn.Module, Dataset, int], Chosen]
    balls: tuple[Ball, ...]
    searched: int
    batch: int
    method: ZonotopeMethod = ZonotopeMethod()


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

_DIGITS_BALLS = (
    *(Ball("l2", radius) for radius in (0.05, 0.1, 0.15)),
    *(Ball("linf", radius) for radius in (0.005, 0.01, 0.02)),
)
_L2_BALLS = tuple(Ball("l2", radius) for radius in (0.02, 0.05, 0.1, 36 / 255, 0.25))  # of the recipe
_LINF_BALLS = tuple(Ball("linf", radius) for radius in (0.0005, 0.001, 0.002, 0.004))


def _certified_digits(name: str) -> AddedRow:
    def network(at: Places) -> nn.Module:
        return certified_digits(name, at.runs / "networks" / f"digits-{name}")

    return AddedRow(network, lambda at: digits(), 360, first_images, _DIGITS_BALLS, searched=360, batch=60)


def _certified_cifar10(balls: tuple[Ball, ...], images: int, searched: int) -> AddedRow:
    """With 256 symbols: the enclosure with all of them takes 184 GiB by the estimate."""
    method = ZonotopeMethod(symbols=256)
    return AddedRow(lambda at: certified_cifar10(), _cifar10, images, first_correct, balls, searched, 1, method)


ADDED: MappingProxyType[str, AddedRow] = MappingProxyType(
    {
        **{f"digits-{name}": _certified_digits(name) for name in CERTIFIED_DIGITS},
        "cifar10-l2": _certified_cifar10(_L2_BALLS, images=5, searched=1),
        "cifar10-linf": _certified_cifar10(_LINF_BALLS, images=20, searched=3),
    }
)
