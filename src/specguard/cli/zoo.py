"""`specguard zoo`: the trained models that are part of the package, and the card of one."""

from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from specguard.cli.console import out
from specguard.records.accuracy import Accuracy
from specguard.records.zoo import PREFIX, Card, zoo_card, zoo_names


def zoo_command(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="a model of the zoo, whose card is printed")
    ] = None,
) -> None:
    """List the trained models that are part of the package, or print the card of one."""
    if name is None:
        out.print(zoo_table())
    else:
        card = zoo_card(name.removeprefix(PREFIX))
        for line in card_lines(card):
            out.print(line, soft_wrap=True)
        out.print(radii_table(card))


def zoo_table() -> Table:
    """All models, with their accuracies at one radius each."""
    heads = ("name", "data", "clean", "n", "robust", "certified", "n", "at")
    columns = [
        Column(head, no_wrap=True, justify="left" if head in ("name", "data") else "right") for head in heads
    ]
    caption = "accuracies in % of n images; specguard zoo NAME: its card; zoo:NAME: the model"
    table = Table(*columns, caption=caption, box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for card in map(zoo_card, zoo_names()):
        row = card.headline
        table.add_row(
            card.name,
            card.data,
            _percent(card.clean),
            f"{card.clean.n:,}",
            _percent(row.robust),
            _percent(row.certified),
            f"{row.certified.n:,}",
            f"{row.norm} {row.radius:.3g}",
        )
    return table


def card_lines(card: Card) -> list[str]:
    """What the card says beside its accuracies at radii."""
    checked = (
        f"the independent checker proved {card.checked.claims:,} claims of {card.checked.n:,} images again and "
        f"attacked {card.checked.attacked:,} certified images; none was misclassified"
    )
    lines = {
        "model": f"{PREFIX}{card.name}, {card.title}",
        "architecture": f"{card.architecture}, {card.parameters:,} parameters, {card.bytes / 1e6:.2f} MB",
        "data": f"{card.data} ({card.data_license}): {card.data_citation}",
        "training": card.training,
        "recipe": card.recipe,
        "clean": str(card.clean),
        "robust": card.attack,
        "certified": f"by {', '.join(card.methods)}, deterministic, in float64 with rounding included",
        "checked": checked,
        "results": ", ".join(card.results),
        "fingerprint": card.fingerprint,
        "license": card.license,
    }
    if card.needs is not None:
        lines["needs"] = card.needs
    return [f"{what}: {text}" for what, text in lines.items()]


def radii_table(card: Card) -> Table:
    """Robust and certified accuracy at every radius of the card."""
    table = Table("norm", "radius", "robust", "certified", "n", caption="with 95 % intervals")
    for row in card.radii:
        cells = (row.norm, f"{row.radius:.3g}", row.robust.brief(), row.certified.brief(), f"{row.robust.n:,}")
        table.add_row(*cells)
    return table


def _percent(accuracy: Accuracy) -> str:
    return f"{100 * accuracy.value:.1f}"
