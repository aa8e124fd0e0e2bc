"""The zoo: trained models that are part of the package, each in a folder of its own with a card.

zoo/NAME/card.json           what is known about the model, and from which committed results
zoo/NAME/model.json          its config and fingerprint, as in a run
zoo/NAME/model.safetensors   its weights
"""

import os
from pathlib import Path

from specguard.errors import ConfigError, suggestion
from specguard.records.accuracy import Accuracy
from specguard.records.base import Count, Name, Norm, Record, Size
from specguard.records.io import read_record

PREFIX = "zoo:"
_FOLDER = Path(__file__).parents[1] / "zoo"
_LARGEST = 2**20  # bytes of a card


class Checked(Record, frozen=True):
    """What the independent checker did: images, claims proved again, certified images attacked in vain."""

    n: Count
    claims: Count
    attacked: Count


class CardRadius(Record, frozen=True):
    """Robust and certified accuracy at one radius, of the same images."""

    norm: Norm
    radius: Size
    robust: Accuracy
    certified: Accuracy


class Card(Record, frozen=True, omit_defaults=True):
    """What is known about a model of the zoo.

    `data` is the name of its data set, with its license and the paper to cite. `attack` is what the robust
    accuracies withstood and `methods` are what the certified ones rest on. `results` are the files of the
    repository that hold all numbers, and `shown` is the radius that lists show. `needs` is a library that the
    model is loaded with.
    """

    name: Name
    title: Name
    architecture: Name
    parameters: Count
    bytes: Count
    data: Name
    data_license: Name
    data_citation: Name
    training: Name
    recipe: Name
    clean: Accuracy
    radii: tuple[CardRadius, ...]
    shown: Size
    attack: Name
    methods: tuple[Name, ...]
    checked: Checked
    fingerprint: Name
    license: Name
    results: tuple[Name, ...]
    needs: Name | None = None

    def __post_init__(self) -> None:
        if self.shown not in {row.radius for row in self.radii}:
            raise ConfigError(f"the radius {self.shown} is not among those of the card")

    @property
    def headline(self) -> CardRadius:
        """The accuracies at the radius that lists show."""
        return next(row for row in self.radii if row.radius == self.shown)


def zoo_name(model: object) -> str | None:
    """The name of the model of the zoo that `zoo:NAME` means; None for any other text or path."""
    text = str(model)
    return text.removeprefix(PREFIX) if text.startswith(PREFIX) else None


def zoo_names() -> tuple[str, ...]:
    """The names of all models of the zoo, in order."""
    return tuple(sorted(name for name in os.listdir(_FOLDER) if (_FOLDER / name / "card.json").is_file()))


def zoo_folder(name: str) -> Path:
    """The folder of a model of the zoo."""
    known = zoo_names()
    if name not in known:
        advice = suggestion(name, known)
        raise ConfigError(f"the zoo has no {name!r}, but {', '.join(known)}{advice}")
    return _FOLDER / name


def zoo_card(name: str) -> Card:
    """The card of a model of the zoo.

    Args:
        name: Its name, as `specguard zoo` lists it.

    Returns:
        Its data, training, accuracies with n and radius, and how they were checked.

    Example:
        >>> card = zoo_card("cifar10-certified")
        >>> card.data, card.checked.n
        ('cifar10', 1000)
    """
    card: Card = read_record(zoo_folder(name) / "card.json", Card, _LARGEST)
    return card


def run_folder(path: Path) -> Path:
    """The folder of a run: that of the zoo where `path` is `zoo:NAME`, otherwise `path` itself."""
    name = zoo_name(path)
    return path if name is None else zoo_folder(name)
