"""The cards of the zoo and its page are those of the committed results, and the weights are small."""

import json
import re
from pathlib import Path

import pytest

from helpers.documentation import module_of
from specguard.models import from_zoo
from specguard.nn import matches_fingerprint
from specguard.records.zoo import zoo_card, zoo_folder, zoo_names

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "src" / "specguard" / "zoo"


def read(name: str) -> dict:
    return json.loads((ROOT / name).read_text())


def test_cards_and_page_are_current(timm):
    assert module_of("zoo").stale() == [], "make tables"


def test_every_folder_is_a_model_and_all_are_below_ten_megabytes():
    assert {path.name for path in FOLDER.iterdir()} == set(zoo_names())
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 10e6
    for name in zoo_names():
        assert {path.name for path in zoo_folder(name).iterdir()} == {
            "card.json",
            "model.json",
            "model.safetensors",
        }


@pytest.mark.parametrize("name", zoo_names())
def test_the_numbers_of_a_card_are_those_of_committed_results(name, timm):
    """Read here from the JSON files themselves, not by the types that made the card."""
    card = zoo_card(name)
    result, certificates, checked = map(read, card.results)
    clean = result.get("test_accuracy", result.get("clean"))
    assert (card.clean.count, card.clean.n) == (clean["count"], clean["n"])
    rows = {row["radius"]: row for row in certificates["radii"]}
    assert [row.radius for row in card.radii] == list(rows)
    for row in card.radii:
        robust = rows[row.radius].get("robust", rows[row.radius].get("attacked"))
        assert (row.robust.count, row.robust.n) == (robust["count"], certificates["n"])
        assert row.certified.count == rows[row.radius]["certified"]["count"] <= robust["count"]
    assert (card.checked.n, card.checked.claims, card.checked.attacked) == tuple(
        checked[key] for key in ("n", "claims", "attacked")
    )
    model = from_zoo(name)
    for record in (certificates, checked):
        about = record.get("settings", {}).get("model") or record["study"]["about"]["model"]
        assert matches_fingerprint(model, about)


@pytest.mark.parametrize("name", zoo_names())
def test_the_recipe_of_a_card_exists(name):
    card = zoo_card(name)
    assert (ROOT / card.recipe).is_dir()
    assert (ROOT / card.training.split()[0]).exists()
    page = (ROOT / "docs" / "zoo.md").read_text()
    assert f"## {name}\n" in page
    assert re.search(rf"{100 * card.headline.certified.value:.1f}.%", page)


def test_a_card_with_another_number_is_noticed(timm, monkeypatch):
    zoo = module_of("zoo")
    true = Path.read_bytes

    def changed(path: Path) -> bytes:
        content = true(path)
        return content.replace(b"55275", b"55276") if path.name == "card.json" else content

    monkeypatch.setattr(Path, "read_bytes", changed)
    assert [path.parent.name for path in zoo.stale()] == ["cifar10-certified"]
