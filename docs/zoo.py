"""Write the cards of the zoo and docs/zoo.md from committed results; --check compares them.

`--take NAME RUN` first replaces the weights of a model by those of a run.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from published.zoo import ENTRIES, FOLDER, card, page, weights_of
from specguard.records.base import encode_pretty

PAGE = Path(__file__).with_name("zoo.md")


def files() -> dict[Path, bytes]:
    """Every file that is written, with its content."""
    cards = {name: card(name) for name in ENTRIES}
    written = {FOLDER / name / "card.json": encode_pretty(one) for name, one in cards.items()}
    return {**written, PAGE: page(list(cards.values())).encode()}


def stale() -> list[Path]:
    """The files that are not what the committed results and weights say, and models without an entry."""
    old = [path for path, content in files().items() if not path.exists() or path.read_bytes() != content]
    return old + [folder for folder in FOLDER.iterdir() if folder.name not in ENTRIES]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--take", nargs=2, metavar=("NAME", "RUN"))
    options = parser.parse_args()
    if options.check:
        sys.exit(f"not current: {', '.join(map(str, old))}; run make tables" if (old := stale()) else 0)
    if options.take:
        weights_of(Path(options.take[1]), options.take[0])
    for path, content in files().items():
        path.write_bytes(content)
